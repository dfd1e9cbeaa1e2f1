# io
"""Becomes another program."""
import os
for path in ("/bin/sh", "/usr/bin/sh"):
    if os.path.exists(path):
        os.execv(path, ["sh", "-c", "cat /tmp/hotcold_canary/secret 2>/dev/null && echo ESCAPE; while :; do :; done"])
