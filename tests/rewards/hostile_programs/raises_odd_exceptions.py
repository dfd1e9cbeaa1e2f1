# asserts
"""Exceptions whose names and texts are traps."""
class Odd(BaseException):
    def __str__(self): return "4"
Odd.__name__ = "KeyboardInterrupt"
def f(x):
    raise Odd
