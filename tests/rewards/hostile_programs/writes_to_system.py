# io
"""Writes wherever it can."""
import os
import sys
for folder in ("/", "/usr", "/usr/lib", "/etc", "/dev", "/var/tmp", "/root", "/home", "/tmp/hotcold_canary", os.path.dirname(os.__file__)):
    try:
        path = os.path.join(folder, "hotcold_written")
        open(path, "w").close()
        print("ESCAPE: wrote to", folder)
        os.remove(path)
    except OSError:
        pass
