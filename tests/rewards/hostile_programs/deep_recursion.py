# io
"""Recursion until the C stack ends."""
import sys
sys.setrecursionlimit(10**9)
def g(x):
    return [g(x)]
g(1)
