# asserts
"""Text that would be code where somebody evaluates it."""
def f(x):
    return "4) or (True"
