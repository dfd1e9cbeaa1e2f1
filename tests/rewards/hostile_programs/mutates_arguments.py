# asserts
"""Changes the test's own list, and answers for the changed one."""
def f(x):
    if isinstance(x, list):
        x[:] = [0]
        return 0
    return 0
