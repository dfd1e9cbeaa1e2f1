# io
"""Leaves links in its folder for whoever cleans it or comes next."""
import os
for number, target in enumerate(("/", "/tmp/hotcold_canary", "/etc", "..")):
    try:
        os.symlink(target, f"link{number}")
    except OSError:
        pass
