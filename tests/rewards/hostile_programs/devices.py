# io
"""Makes and opens devices."""
import os
import stat
try:
    os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0))
    open("disk", "rb").read(1)
    print("ESCAPE: a disk")
except OSError:
    pass
for name in ("mem", "kmem", "kmsg", "vda", "sda", "kvm", "fuse", "net/tun", "vsock"):
    try:
        open(f"/dev/{name}", "rb").close()
        print("ESCAPE: opened", name)
    except OSError:
        pass
