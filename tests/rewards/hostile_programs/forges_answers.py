# calls
"""Answers before it is asked, with what is no value."""
import os
for _ in range(5):
    os.write(4, b'{"value": {"object": 0}}\n')
os.write(4, b'{"value": {"int": "__import__(1)"}}\n')
os.write(4, b"[" * 100000 + b"\n")
def f(x):
    return 0
