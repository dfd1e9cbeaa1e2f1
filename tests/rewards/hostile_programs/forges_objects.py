# asserts
"""Answers with references where only values may come."""
import os
def f(x):
    os.write(4, b'{"value": {"object": 0}}\n{"value": [{"object": 0}]}\n')
    return 0
