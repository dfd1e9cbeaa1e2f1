# calls
"""A generator that never ends."""
import itertools
def f(x):
    return itertools.repeat(4)
