# io
"""Secrets of the environment, its own and that of others."""
import os
if "HOTCOLD_CANARY" in os.environ:
    print("ESCAPE: the environment")
for pid in [p for p in (os.listdir("/proc") if os.path.isdir("/proc") else []) if p.isdigit()]:
    try:
        if b"HOTCOLD_CANARY" in open(f"/proc/{pid}/environ", "rb").read():
            print("ESCAPE: the environment of a process")
    except OSError:
        pass
