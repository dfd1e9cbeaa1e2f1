"""The caller's side of a sandbox: it starts one, gives it programs, and never waits longer than it said."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hotcold.errors import InputError
from hotcold.sandbox.layout import DEVICES, NAMESPACES, SYSTEM

LEVELS = ("rlimits", "landlock", "namespaces", "strong")  # from weak to strong
FIND = "find"  # the wrapper that a level needs here
GRACE = 0.6  # seconds beyond a deadline in which the sandbox may end the program itself
GRACE_WITHOUT = 3.0  # the same without namespaces, where it must look for what to end, and delete files
START = 10.0  # seconds that a sandbox may take to start
SOURCES = str(Path(__file__).parents[2])
COMMAND = (
    "import sys; sys.path.insert(0, sys.argv[1]); from hotcold.sandbox.launch import main; del sys.path[0]; main()"
)
LONGEST = 16 * 2**20  # bytes of a message
OURS = ("hotcold/__init__.py", "hotcold/sandbox")  # gone before a program starts, as /tmp is mounted anew
WRAPPED = (
    *("--unshare-user", "--unshare-all", "--uid", "1000", "--gid", "1000", "--cap-add", "ALL", "--as-pid-1"),
    *("--die-with-parent", "--new-session", "--proc", "/proc", "--tmpfs", "/tmp"),
)


@dataclass(frozen=True)
class Limits:
    seconds: float = 6.0  # of a program with one input, of one call, of one text of asserts
    memory: int = 512 * 10**6  # bytes: of each process; in namespaces also of all together
    disk: int = 16 * 10**6  # bytes in /tmp, and of a file
    output: int = 10**6  # bytes of standard output, and of standard error
    processes: int = 32  # threads count


@dataclass(frozen=True)
class Ended:
    how: str  # "exit 0", "exit 1", "signal 9", "deadline", "memory", "output", "lost"
    out: str = ""
    err: str = ""

    @property
    def is_well(self) -> bool:
        return self.how == "exit 0"


class CannotStart(InputError):
    """This machine refuses what a level needs."""


class Lost(Exception):
    """The sandbox does not answer any more."""


class Box:
    """One sandbox. Programs run in it one after another; what one leaves behind is gone before the next."""

    def __init__(
        self,
        level: str | None = None,
        limits: Limits | None = None,
        python: str | None = None,
        wrapper: str | None = FIND,
    ) -> None:
        """`wrapper`: bubblewrap's program, which then makes the namespaces; None: we make them."""
        self.level, self.limits = level or best_level(), limits or Limits()
        self._python = python or interpreter()
        self.has_namespaces = self.level in NAMESPACES
        self._wrapper = builder(self.level)[0] if wrapper == FIND else wrapper
        self.grace = GRACE if self.has_namespaces else GRACE_WITHOUT
        self._folder: str | None = None
        self._unread = bytearray()
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0"},  # the same program prints the same set in the same order
            cwd="/",
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._unread.clear()
        sizes = {name: getattr(self.limits, name) for name in ("memory", "disk", "output", "processes")}
        try:
            setup = {"level": self.level, "readable": readable(self._python), "is_wrapped": self._wrapper is not None}
            self._send({**setup, **sizes}, START)
            answer = self._receive(START)
        except Lost:
            answer = {"refused": "it ended or did not answer"}
        self._folder = None if self.has_namespaces else answer.get("folder")
        if "ready" not in answer:
            self.close()
            raise CannotStart(f"a sandbox of level {self.level} cannot be started here: {answer.get('refused')}.")

    def _command(self) -> list[str]:
        python = [self._python, "-P", "-s", "-S", "-c", COMMAND]
        if self._wrapper is None:
            return [*python, SOURCES]
        shown = [path for path in (*SYSTEM, *readable(self._python)) if os.path.exists(path)]
        binds = [word for path in shown for word in ("--ro-bind", path, path)]
        devices = [word for path in DEVICES for word in ("--dev-bind", path, path)]
        ours = [word for name in OURS for word in ("--ro-bind", f"{SOURCES}/{name}", f"/tmp/src/{name}")]
        return [self._wrapper, *WRAPPED, *binds, *devices, *ours, "--remount-ro", "/", *python, "/tmp/src"]

    def close(self) -> None:
        """With all that is in it. In namespaces the kernel does it; else the sandbox itself, and then we."""
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        if not self.has_namespaces:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def script(self, source: str, given: str = "") -> Ended:
        """The program run as a script with this standard input."""
        try:
            self._send({"kind": "script", "source": source, "input": given, "seconds": self.limits.seconds})
            return self._ended(self.limits.seconds)
        except Lost:
            return self._replaced()

    @contextmanager
    def session(self, kind: str, source: str, in_all: float, **more: Any) -> Iterator[Session]:
        """A program with which lines are exchanged; it is ended when the block is left."""
        session = Session(self)
        job = {"kind": kind, "source": source, "seconds": self.limits.seconds, "in_all": in_all, **more}
        try:
            self._send(job)
        except Lost:
            session.ended = self._replaced()
        try:
            yield session
        except Lost:
            session.ended = self._replaced()
        finally:
            session.end()

    def _replaced(self) -> Ended:
        self.close()
        self._start()
        return Ended("lost")

    def _ended(self, seconds: float) -> Ended:
        end = time.monotonic() + seconds + self.grace
        while "ended" not in (message := self._receive(end - time.monotonic())):
            pass  # a script that writes where only functions answer
        return Ended(str(message["ended"]), str(message["out"]), str(message["err"]))

    def _send(self, message: dict[str, Any], seconds: float = 5.0) -> None:
        rest = memoryview(json.dumps(message).encode() + b"\n")
        end = time.monotonic() + seconds
        while rest:
            try:
                rest = rest[os.write(self._to, rest) :]
            except BlockingIOError:
                if not select.select([], [self._to], [], max(0.0, end - time.monotonic()))[1]:
                    raise Lost from None
            except OSError:
                raise Lost from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\n" not in self._unread:
            poll = select.poll()
            poll.register(self._from, select.POLLIN)
            if len(self._unread) > LONGEST or not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise Lost
            data = os.read(self._from, 2**16)
            if not data:
                raise Lost
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return parsed(line)


def parsed(line: bytes | bytearray | str) -> dict[str, Any]:
    """A message; whatever else comes is as good as silence."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise Lost from None
    if not isinstance(message, dict):
        raise Lost
    return message


class Session:
    def __init__(self, box: Box) -> None:
        self._box = box
        self.ended: Ended | None = None

    @property
    def is_lost(self) -> bool:
        return self.ended is not None and self.ended.how == "lost"

    def tell(self, line: str, seconds: float) -> None:
        if self.ended is None:
            self._box._send({"line": line, "seconds": seconds})

    def listen(self, seconds: float) -> str | None:
        """The next line that the program says; None: it has ended, see `ended`."""
        if self.ended is not None:
            return None
        message = self._box._receive(seconds + self._box.grace)
        if "ended" in message:
            self.ended = Ended(str(message["ended"]), str(message["out"]), str(message["err"]))
            return None
        return str(message["line"])

    def end(self) -> None:
        if self.ended is not None:
            return
        try:
            self._box._send({"end": True})
            while "ended" not in (message := self._box._receive(2.0 + self._box.grace)):
                pass
            self.ended = Ended(str(message["ended"]), str(message["out"]), str(message["err"]))
        except Lost:
            self.ended = self._box._replaced()


# ---- what this machine can do


def interpreter() -> str:
    """The Python that made a virtual environment, without what is installed in that."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def readable(python: str) -> list[str]:
    """What an interpreter needs to be seen, beside the system."""
    if python == interpreter():
        return sorted(
            map(os.path.realpath, {sys.base_prefix, sys.base_exec_prefix, sysconfig.get_path("stdlib"), python})
        )
    return [str(Path(python).parents[1])]


@cache
def best_level() -> str:
    """The strongest level at which a program really ran here. Tried once in a process."""
    for level in reversed(LEVELS):
        if refusal(level) is None:
            return level
    raise InputError(
        "model-written code cannot be run here: not even a limited process of another user works.\n"
        f"{refusal('rlimits')}\nIf Python lies in a folder of root's, install it where every user can read it."
    )


def refusal(level: str) -> str | None:
    """Why the level is not there; None: it is."""
    return builder(level)[1]


@cache
def builder(level: str) -> tuple[str | None, str | None]:
    """bubblewrap, where that may make namespaces and we may not; and why there is neither."""
    refused = _tried(level, None)
    wrapper = shutil.which("bwrap")
    if refused is None or level not in NAMESPACES or wrapper is None:
        return None, refused
    refused_too = _tried(level, wrapper)
    return (wrapper, None) if refused_too is None else (None, f"{refused} With bubblewrap: {refused_too}")


def _tried(level: str, wrapper: str | None) -> str | None:
    try:
        with Box(level, wrapper=wrapper) as box:
            ended = box.script("import colorsys\nprint('runs')")
    except (CannotStart, OSError) as error:
        return str(error)
    return None if ended.out == "runs\n" else f"a program ended with {ended.how}: {ended.err.strip()[-200:]}"


def check_level(required: str) -> str:
    """The level of this machine, if it is at least what is required."""
    level = best_level()
    if required != "any" and LEVELS.index(level) < LEVELS.index(required):
        stronger = LEVELS[LEVELS.index(level) + 1]
        raise InputError(
            f"sandbox.require={required}, and this machine offers {level}: {refusal(stronger)}\n"
            "Allow namespaces (unprivileged user namespaces, or run as root), or require less."
        )
    return level
