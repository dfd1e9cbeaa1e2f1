# io
"""Takes another user's rights."""
import os
for call in (os.setuid, os.seteuid, os.setgid):
    try:
        call(0)
        if os.getuid() == 0 or os.geteuid() == 0:
            print("ESCAPE: root")
    except OSError:
        pass
os.system("su -c id root </dev/null 2>/dev/null | grep -q uid=0 && echo ESCAPE: su")
