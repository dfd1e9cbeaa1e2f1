# io
"""Stops every process that it can see."""
import os
import signal
for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
    if name.isdigit() and int(name) != os.getpid() and os.getuid() != 0:
        try:
            os.kill(int(name), 0)
            if b"launch" in open(f"/proc/{name}/cmdline", "rb").read() or int(name) == os.getppid():
                print("ESCAPE: could signal process", name)
        except OSError:
            pass
