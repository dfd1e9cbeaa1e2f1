"""Runs programs that nobody has read: in namespaces of their own, or with what less the machine allows.

`box.py` is the side of the caller. `launch.py`, `kernel.py` and `programs.py` run in the process that becomes the
sandbox; they import the standard library and `values.py` alone. Nothing here needs torch.
"""
