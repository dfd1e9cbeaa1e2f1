# calls
"""A value that is nested without end."""
def f(x):
    a = []
    a.append(a)
    return a
