# io
"""Uses the library that judges it."""
import sys
sys.path[:0] = ["@SOURCES@", "/tmp", ".", ".."]
try:
    import hotcold
    print("ESCAPE: hotcold", hotcold.__file__)
except ImportError:
    pass
try:
    import torch
    print("ESCAPE: torch")
except ImportError:
    pass
