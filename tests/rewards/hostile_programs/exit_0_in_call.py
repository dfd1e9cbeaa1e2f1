# calls
"""Ends with exit code 0 while it is asked."""
import os
def f(x):
    os._exit(0)
