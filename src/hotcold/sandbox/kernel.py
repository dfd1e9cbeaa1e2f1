"""The system calls that Python has no names for: namespaces, mounts, seccomp, Landlock. Linux on x86-64 and aarch64."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = 0x10000000, 0x20000000, 0x40000000, 0x02000000
ALL_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446  # the same on both machines


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _checked(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def unmount(target: str) -> None:
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    number = {"x86_64": 155, "aarch64": 41}[platform.machine()]
    _checked(_libc.syscall(ctypes.c_long(number), new.encode(), old.encode()), "pivot_root")


def protect(path: str, recursive: bool = True) -> None:
    """Nothing at or below the path can be written to, is a device, or gives rights."""
    attributes = struct.pack("QQQQ", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    _checked(
        _libc.syscall(
            ctypes.c_long(MOUNT_SETATTR), AT_FDCWD, path.encode(), flags, attributes, ctypes.c_size_t(len(attributes))
        ),
        f"mount_setattr {path}",
    )


def drop_capabilities() -> None:
    """All of them, and those that a program could give back."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # the kernel knows no more
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _checked(_libc.capset(header, nothing), "capset")


# ---- seccomp: a list of calls that no ordinary program makes

_X86 = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438,
    "process_madvise": 440, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
    "unshare": 272, "setns": 308,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "mount_setattr": 442, "open_by_handle_at": 304, "name_to_handle_at": 303, "quotactl": 179, "swapon": 167,
    "swapoff": 168, "acct": 163, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248,
    "request_key": 249, "keyctl": 250, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "reboot": 169, "sethostname": 170, "setdomainname": 171, "settimeofday": 164, "clock_settime": 227,
    "clock_adjtime": 305, "adjtimex": 159, "iopl": 172, "ioperm": 173, "modify_ldt": 154, "uselib": 134,
    "personality": 135, "syslog": 103, "vhangup": 153, "fanotify_init": 300, "move_pages": 279, "migrate_pages": 256,
    "mbind": 237, "set_mempolicy": 238, "socket": 41, "memfd_create": 319, "memfd_secret": 447, "shmget": 29,
    "msgget": 68, "semget": 64, "mq_open": 240,
}  # fmt: skip
_ARM = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "pidfd_getfd": 438,
    "process_madvise": 440, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "mount_setattr": 442, "open_by_handle_at": 265, "name_to_handle_at": 264, "quotactl": 60, "swapon": 224,
    "swapoff": 225, "acct": 89, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "add_key": 217,
    "request_key": 218, "keyctl": 219, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273, "delete_module": 106,
    "reboot": 142, "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "clock_settime": 112,
    "clock_adjtime": 266, "adjtimex": 171, "personality": 92, "syslog": 116, "vhangup": 58, "fanotify_init": 262,
    "move_pages": 239, "migrate_pages": 238, "mbind": 235, "set_mempolicy": 237, "socket": 198, "memfd_create": 279,
    "memfd_secret": 447, "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180,
}  # fmt: skip
_MACHINES = {"x86_64": (0xC000003E, _X86, 56), "aarch64": (0xC00000B7, _ARM, 220)}
_CLONE3 = 435
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of classic BPF
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38


def has_seccomp() -> bool:
    return platform.machine() in _MACHINES and os.path.exists("/proc/sys/kernel/seccomp/actions_avail")


def _filter() -> bytes:
    architecture, denied, clone = _MACHINES[platform.machine()]
    one = struct.Struct("HBBI").pack
    code = [one(_LOAD, 0, 0, 4), one(_EQUAL, 1, 0, architecture), one(_RETURN, 0, 0, _KILL), one(_LOAD, 0, 0, 0)]
    code += [one(_AT_LEAST, 0, 1, 0x40000000), one(_RETURN, 0, 0, _KILL)]  # the x32 numbers of the same calls
    for number in sorted(denied.values()):
        code += [one(_EQUAL, 0, 1, number), one(_RETURN, 0, 0, _EPERM)]
    code += [one(_EQUAL, 0, 1, _CLONE3), one(_RETURN, 0, 0, _ENOSYS)]  # its flags cannot be read; libc takes clone
    namespaces = ALL_NAMESPACES | CLONE_NEWUSER | CLONE_NEWCGROUP
    code += [one(_EQUAL, 0, 3, clone), one(_LOAD, 0, 0, 16), one(_ANY_BIT, 0, 1, namespaces)]
    return b"".join([*code, one(_RETURN, 0, 0, _EPERM), one(_RETURN, 0, 0, _ALLOW)])


def deny_calls() -> None:
    """From now on, for this process and what it starts. Needs no privilege after PR_SET_NO_NEW_PRIVS."""
    code = _filter()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), program, 0, 0), "seccomp")


# ---- Landlock: files by path, TCP, signals to outside

_READ = 1 | 4 | 8  # execute, read files, list folders
_FILE_ONLY = 1 | 2 | 4 | 1 << 14 | 1 << 15


def landlock_version() -> int:
    return int(_libc.syscall(ctypes.c_long(LANDLOCK_CREATE), None, ctypes.c_size_t(0), 1))


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    version = landlock_version()
    known = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = struct.pack("QQQ", known, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _checked(
        _libc.syscall(ctypes.c_long(LANDLOCK_CREATE), rules, ctypes.c_size_t(len(rules)), 0), "landlock_create_ruleset"
    )
    for paths, access in ((readable, _READ), (writable, known)):
        for path in filter(os.path.exists, paths):
            _allow(ruleset, path, access & known if os.path.isdir(path) else access & known & _FILE_ONLY)
    _checked(_libc.syscall(ctypes.c_long(LANDLOCK_RESTRICT), ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    folder = os.open(path, os.O_PATH)
    rule = struct.pack("=Qi", access, folder)
    _checked(_libc.syscall(ctypes.c_long(LANDLOCK_ADD), ruleset, 1, rule, 0), "landlock_add_rule")
    os.close(folder)
