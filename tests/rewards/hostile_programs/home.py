# io
"""Reads files of the user and of the machine."""
import os
for path in ("/root", "/home", "/etc/passwd", "/etc/shadow", "/var/log", os.path.expanduser("~/.ssh"), "/tmp/hotcold_canary/secret"):
    try:
        found = os.listdir(path) if os.path.isdir(path) else open(path).read()
        if found and found != [".pyenv"]:
            print("ESCAPE: read", path)
    except OSError:
        pass
