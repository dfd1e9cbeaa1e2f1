# calls
"""Fills the way back with an endless line."""
import os
def f(x):
    while True:
        os.write(4, b"x" * 65536)
