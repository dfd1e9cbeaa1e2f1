# io
"""Links that lead outside, changed while they may be followed."""
import os
import threading
def swap():
    while True:
        for target in ("/tmp/hotcold_canary/secret", "/etc/passwd"):
            try:
                os.symlink(target, "link_new")
                os.replace("link_new", "link")
            except OSError:
                pass
threading.Thread(target=swap, daemon=True).start()
for _ in range(2000):
    try:
        if "canary" in open("link").read():
            print("ESCAPE: followed a link out")
            break
    except OSError:
        pass
os._exit(0)
