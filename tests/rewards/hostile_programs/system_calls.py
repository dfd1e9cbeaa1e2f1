# io
"""Namespaces, mounts and other calls that widen what a process may do."""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000) == 0:
    print("ESCAPE: a user namespace")
if libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == 0:
    print("ESCAPE: a mount")
if libc.chroot(b"/tmp") == 0:
    print("ESCAPE: chroot")
for name, number in (("bpf", 321), ("perf", 298), ("userfaultfd", 323), ("io_uring", 425), ("keyctl", 250)):
    if libc.syscall(number, 0, 0, 0, 0, 0) >= 0:
        print("ESCAPE:", name)
