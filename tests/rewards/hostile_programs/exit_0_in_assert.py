# asserts
"""Ends with exit code 0 inside a test."""
import os
def f(x):
    os._exit(0)
