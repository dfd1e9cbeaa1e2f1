# calls
"""A value of a hundred million characters."""
def f(x):
    return "4" * 10**8
