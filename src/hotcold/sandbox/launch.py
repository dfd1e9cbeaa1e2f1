"""The process that becomes a sandbox. It starts programs, each in a fresh child, and says how each ended.

Messages are lines of JSON: from the caller on standard input, to the caller on standard output. In namespaces this
process is their first one (pid 1): the kernel lets nothing inside signal it, and all inside ends with it.
"""

from __future__ import annotations

import builtins
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hotcold.sandbox import kernel, programs
from hotcold.sandbox.layout import DEVICES, NAMESPACES, SYSTEM

FIRST_UID = 1_900_000_000  # nobody's: each sandbox of root's gets its own
SHOWN = 4000  # characters of standard error that are told
LOOK = 0.05  # seconds between looks at memory
LINE = 4 * 2**20  # bytes of a line
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


def main() -> None:
    setup = json.loads(sys.stdin.buffer.readline())
    parent = os.getppid()
    try:
        box = enter(setup)
        die_with_parent(parent if box.pid_of_first != 1 else 0)
        box.clean()
    except OSError as error:
        say({"refused": str(error)})
        return
    say({"ready": setup["level"], "folder": box.folder})
    box.serve()


def say(message: dict[str, Any]) -> None:
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(1, data) :]


def die_with_parent(parent: int) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)


# ---- becoming a sandbox


def enter(setup: dict[str, Any]) -> Box:
    """Returns in the process that serves. With namespaces that is a child, and this one waits for its end."""
    uid = FIRST_UID + os.getpid() if os.geteuid() == 0 else None
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    if setup["level"] not in NAMESPACES:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        return Box(setup, uid, tempfile.mkdtemp(prefix="hotcold-sandbox-"))
    if setup["is_wrapped"]:  # by bubblewrap, which has done the rest
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        return Box(setup, None, "/tmp")
    uid = _new_namespaces(uid)
    if child := os.fork():
        die_with_parent(0)
        os.closerange(0, 3)
        os.waitpid(child, 0)
        os._exit(0)
    new_root(setup["readable"], setup["disk"])
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    return Box(setup, uid, "/tmp")


def _new_namespaces(uid: int | None) -> int | None:
    """As root without a user namespace, so that another uid can be taken; where that is refused, with one."""
    if uid is not None:
        with suppress(OSError):
            kernel.unshare(kernel.ALL_NAMESPACES)
            return uid
    outer, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.ALL_NAMESPACES | kernel.CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {outer} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return None


def new_root(readable: list[str], disk: int) -> None:
    """A root that holds the system and Python, read-only, and nothing else of this machine."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    kernel.mount("tmpfs", "/new", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    for path in [*SYSTEM, *readable]:
        _show(path)
    for path in DEVICES:
        _bind(path)
    for folder in ("/new/tmp", "/new/proc"):
        os.mkdir(folder)
    os.chdir("/new")
    kernel.mount("proc", "/new/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"mode=1777,size={disk},nr_inodes=2000")
    kernel.protect("/", recursive=False)


def _show(path: str) -> None:
    old, new = f"/old{path}", f"/new{path}"
    if os.path.lexists(new) or not os.path.lexists(old):
        return
    if os.path.islink(old):
        os.makedirs(os.path.dirname(new), exist_ok=True)
        os.symlink(os.readlink(old), new)
    else:
        _bind(path)
        kernel.protect(new)


def _bind(path: str) -> None:
    old, new = f"/old{path}", f"/new{path}"
    if os.path.isdir(old):
        os.makedirs(new, exist_ok=True)
    elif os.path.exists(old):
        os.makedirs(os.path.dirname(new), exist_ok=True)
        os.close(os.open(new, os.O_CREAT | os.O_WRONLY))
    else:
        return
    kernel.mount(old, new, None, kernel.MS_BIND | kernel.MS_REC)


# ---- serving


class Box:
    def __init__(self, setup: dict[str, Any], uid: int | None, folder: str) -> None:
        self.setup, self.uid, self.folder = setup, uid, folder
        self.has_namespaces = setup["level"] in NAMESPACES
        self.pid_of_first = os.getpid()
        self._proc = -1
        self._unread = bytearray()
        if self.has_namespaces:
            assert self.pid_of_first == 1
            self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
            kernel.unmount("/proc")

    def serve(self) -> None:
        while (job := self._next()) is not None:
            if "kind" in job:
                self.run(job)
        if not self.has_namespaces:
            shutil.rmtree(self.folder, ignore_errors=True)

    def clean(self) -> None:
        """An empty folder for the next program."""
        if self.has_namespaces:
            if os.listdir("/tmp"):
                options = f"mode=1777,size={self.setup['disk']},nr_inodes=2000"
                kernel.unmount("/tmp")
                kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        if self.uid is not None:
            os.chown(self.folder, self.uid, self.uid)

    def _next(self) -> dict[str, Any] | None:
        while b"\n" not in self._unread:
            if not self._fill():
                return None
        return self._line()

    def _fill(self) -> bool:
        data = os.read(0, 2**16)
        self._unread += data
        return bool(data)

    def _line(self) -> dict[str, Any]:
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def run(self, job: dict[str, Any]) -> None:
        running = Running(self, job)
        try:
            how = running.watch()
        finally:
            self.end_all()
        running.drain()
        self.clean()
        say({"ended": how, "out": running.text(1), "err": running.text(2)[-SHOWN:]})

    def message(self) -> dict[str, Any] | None:
        """One that came while a program runs; None: the caller is gone."""
        return self._next()

    @property
    def has_message(self) -> bool:
        return b"\n" in self._unread

    # -- the end of everything that a program started

    def end_all(self) -> None:
        if self.has_namespaces:
            assert os.getpid() == 1  # or this would end the machine
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        elif self.uid is not None:
            self._as_its_user(lambda: os.kill(-1, signal.SIGKILL))
        end = time.monotonic() + 2
        while time.monotonic() < end:
            if not self.has_namespaces and self.uid is None:
                self._kill_children()
            try:
                os.waitpid(-1, os.WNOHANG if not self.has_namespaces else 0)
            except ChildProcessError:
                return
            if not self.has_namespaces:
                time.sleep(0.002)

    def _as_its_user(self, work: Callable[[], None]) -> None:
        """Root may signal everybody; that user only what it started."""
        assert self.uid is not None and self.uid >= FIRST_UID
        if child := os.fork():
            os.waitpid(child, 0)
            return
        try:
            os.setresuid(self.uid, self.uid, self.uid)
            if os.getresuid() == (self.uid, self.uid, self.uid):
                work()
        finally:
            os._exit(0)

    def _kill_children(self) -> None:
        """What is orphaned becomes a child of this process, and is ended at the next look."""
        own = str(os.getpid())
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError, IndexError):
                with open(f"/proc/{name}/stat") as file:
                    parent = file.read().rpartition(")")[2].split()[1]
                if parent == own:
                    os.kill(int(name), signal.SIGKILL)

    def memory(self) -> int:
        """Bytes that all processes inside hold, files apart; where it cannot be seen, 0."""
        if self._proc < 0:
            return 0
        return sum(self._held(name) for name in os.listdir(self._proc) if name.isdigit() and name != "1")

    def _held(self, name: str) -> int:
        try:
            with open(os.open(f"{name}/status", os.O_RDONLY, dir_fd=self._proc), "rb") as file:
                words = [line.split() for line in file if line.startswith((b"RssAnon:", b"RssShmem:"))]
        except OSError:  # it has just ended
            return 0
        return sum(int(kilobytes) * 1024 for _, kilobytes, _ in words)


class Running:
    """One program: its pipes, and what it did with its time."""

    def __init__(self, box: Box, job: dict[str, Any]) -> None:
        self._box, self._job = box, job
        self.end = time.monotonic() + job["seconds"]
        ask, self._to = os.pipe()
        self._from, answer = os.pipe()
        self._streams: dict[int, int] = {}
        self._texts: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
        out, its_out = os.pipe()
        err, its_err = os.pipe()
        self._streams = {out: 1, err: 2}
        its_in = os.memfd_create("input")
        os.write(its_in, job.get("input", "").encode("utf-8", "surrogatepass"))
        os.lseek(its_in, 0, os.SEEK_SET)
        os.set_blocking(self._to, False)
        self._unsent, self._lines = bytearray(), bytearray()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                become(box, job, (its_in, its_out, its_err, ask, answer))
            finally:
                os._exit(1)
        for descriptor in (its_in, its_out, its_err, ask, answer):
            os.close(descriptor)
        self._gone = os.pidfd_open(self.pid)

    def watch(self) -> str:
        """How it ended."""
        while True:
            now = time.monotonic()
            if now >= self.end:
                return "deadline"
            if self._box.memory() > self._box.setup["memory"]:
                return "memory"
            for descriptor in self._ready(min(LOOK, self.end - now)):
                if descriptor == self._gone:
                    return self._code()
                if (how := self._serve(descriptor)) is not None:
                    return how

    def _ready(self, seconds: float) -> list[int]:
        poll = select.poll()
        for descriptor in (0, self._from, *self._streams, self._gone):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        if self._unsent and self._to >= 0:
            poll.register(self._to, select.POLLOUT)
        found = [descriptor for descriptor, _ in poll.poll(seconds * 1000)]
        return sorted(found, key=lambda descriptor: descriptor == self._gone)

    def _serve(self, descriptor: int) -> str | None:
        if descriptor == 0:
            return self._from_caller()
        if descriptor == self._to:
            self._flush()
            return None
        data = os.read(descriptor, 2**16)
        if not data:
            self._close(descriptor)
            return None
        if descriptor == self._from:
            return self._told(data)
        text = self._texts[self._streams[descriptor]]
        text += data
        if len(text) <= self._box.setup["output"]:
            return None
        del text[self._box.setup["output"] :]
        return "output"

    def _close(self, descriptor: int) -> None:
        os.close(descriptor)
        if descriptor == self._from:
            self._from = -1
        else:
            del self._streams[descriptor]

    def _from_caller(self) -> str | None:
        if not self._box._fill():
            os._exit(0)  # the caller is gone, and all in here goes with this process
        while self._box.has_message:
            message = self._box._line()
            if message.get("end"):
                return "ended by the caller"
            self._unsent += message["line"].encode() + b"\n"
            self.end = time.monotonic() + message["seconds"]
        self._flush()
        return None

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._to, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # it closed its end; its end is seen elsewhere

    def _told(self, data: bytes) -> str | None:
        self._lines += data
        if len(self._lines) > LINE:
            return "output"
        *whole, rest = self._lines.split(b"\n")
        self._lines = bytearray(rest)
        for line in whole:
            say({"line": line.decode("utf-8", "replace")})
        return None

    def _code(self) -> str:
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return f"signal {-code}" if code < 0 else f"exit {code}"

    def drain(self) -> None:
        """What it wrote and nobody has read yet; then its pipes are closed."""
        for descriptor, number in self._streams.items():
            os.set_blocking(descriptor, False)
            with suppress(BlockingIOError):
                while len(self._texts[number]) < self._box.setup["output"]:
                    data = os.read(descriptor, 2**16)
                    if not data:
                        break
                    self._texts[number] += data
        for descriptor in (*self._streams, self._from, self._to, self._gone):
            if descriptor >= 0:
                os.close(descriptor)

    def text(self, number: int) -> str:
        return self._texts[number].decode("utf-8", "replace")


# ---- the child


def become(box: Box, job: dict[str, Any], descriptors: tuple[int, ...]) -> None:
    """From here on nothing is ours: the program runs, and this process ends with it."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number + 20)
    for number in range(len(descriptors)):
        os.dup2(number + 20, number)
    os.closerange(len(descriptors), 256)
    os.setsid()
    os.chdir(box.folder)
    if not box.has_namespaces:
        os.environ.update({"HOME": box.folder, "TMPDIR": box.folder})
    limit(box.setup, job)
    drop(box)
    restore()
    programs.run(job)


def limit(setup: dict[str, Any], job: dict[str, Any]) -> None:
    seconds = int(job.get("in_all", job["seconds"])) + 1
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, setup["memory"]),
        (resource.RLIMIT_FSIZE, setup["disk"]),
        (resource.RLIMIT_NPROC, setup["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def drop(box: Box) -> None:
    """Rights, then calls. What fails here ends the child before a line of the program has run."""
    level = box.setup["level"]
    if box.uid is not None:
        os.setgroups([])
        os.setresgid(box.uid, box.uid, box.uid)
        os.setresuid(box.uid, box.uid, box.uid)
    else:
        if box.has_namespaces:
            kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if level == "landlock":
        kernel.restrict_files([*SYSTEM, *box.setup["readable"], *DEVICES], [box.folder, "/dev/null"])
    if level in ("landlock", "strong"):
        kernel.deny_calls()
    if box.uid is not None and os.getresuid() != (box.uid,) * 3:
        os._exit(1)


def restore() -> None:
    """The interpreter as a program expects it; modules of ours are not in it."""
    for name in [name for name in sys.modules if name.split(".")[0] == "hotcold"]:
        del sys.modules[name]
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]


if __name__ == "__main__":
    main()
