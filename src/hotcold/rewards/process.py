"""One worker process as its run sees it: its pipes, which never block, and its end with all that it started."""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotcold.errors import InputError
from hotcold.rewards.wire import line_of
from hotcold.user_file import PACKAGE

MARK = "HOTCOLD_REWARD_WORKER"
START = (
    "import sys; sys.path[:] = sys.argv[4:]; from hotcold.rewards.worker import main; main(*map(int, sys.argv[1:4]))"
)
LOOK = 0.1  # seconds between looks at whether a process still lives
LONGEST = 64 * 2**20  # bytes of a line
ENVIRONMENT = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED"}
    | {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUTF8"}
    | {"VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"}
    | {"XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "CUDA_VISIBLE_DEVICES"}
)


class Garbage(Exception):
    """Something else than an answer came through the pipe."""


def environment(asked: Collection[str], given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a worker sees of the run's environment: where things are and how text is written, and what was asked for."""
    for name in asked:
        if name not in given:
            raise InputError(f"reward_env={name}: the environment has no such variable. Set it, or leave it out.")
    kept = {name: given[name] for name in given if name in ENVIRONMENT or name.startswith("LC_") or name in asked}
    return {"OMP_NUM_THREADS": "1", **kept}


class Worker:
    """Nothing here waits, but for `ended`."""

    def __init__(self, variables: Mapping[str, str], folder: str) -> None:
        self.mark = secrets.token_hex(16)
        self.owner = os.getpid()
        theirs, self._to = os.pipe()
        self._from, theirs_too = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        arguments = [str(self.owner), str(theirs), str(theirs_too), *(path or os.getcwd() for path in sys.path)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(theirs, theirs_too),
                env={**variables, MARK: self.mark},
                cwd=folder,
                start_new_session=True,
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(theirs)
            os.close(theirs_too)
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._unsent, self._unread = bytearray(), bytearray()
        self.is_silent = False  # its end of the pipe is closed

    def fileno(self) -> int:
        return self._from

    @property
    def is_gone(self) -> bool:
        return self.is_silent or self.process.poll() is not None

    def send(self, message: dict[str, Any]) -> None:
        self._unsent += line_of(message)
        self.flush()

    def flush(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # a broken pipe is the end of the process, seen elsewhere
            while self._unsent:
                del self._unsent[: os.write(self._to, self._unsent)]

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have come, up to what is none."""
        try:
            while data := os.read(self._from, 2**16):
                self._unread += data
                if len(self._unread) > LONGEST:
                    raise Garbage
            self.is_silent = True
        except BlockingIOError:
            pass
        whole, newline, rest = self._unread.rpartition(b"\n")
        self._unread = rest if newline else self._unread
        yield from map(_message, whole.split(b"\n") if newline else [])

    def place(self, file: str | None) -> str:
        """' (reward.py:4)': where it is now, in the user's file if that is on the stack."""
        with suppress(OSError):
            seen = self._errors.seek(0, os.SEEK_END)
            self.process.send_signal(signal.SIGUSR1)
            for _ in range(20):
                time.sleep(0.01)
                self._errors.seek(seen)
                if frames := re.findall(r'File "(.+)", line (\d+)', self._errors.read().decode(errors="replace")):
                    outside = [f for f in frames if not f[0].startswith((PACKAGE, "<frozen"))]
                    own = [f for f in outside if file and f[0] == file] or outside
                    return f" ({own[0][0]}:{own[0][1]})" if own else ""
        return ""

    def errors(self) -> str:
        """The last line that Python wrote before the worker took over its output."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def ended(self, patience: float = 0.0) -> int | None:
        """Its exit code, after the end of it and of all that it started. With patience it may go by itself first."""
        if os.getpid() != self.owner:  # a fork of the run: the worker is not its own
            return None
        with suppress(OSError):
            os.close(self._to)
        self._to = -1
        try:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        finally:
            kill_all(self.process.pid, self.mark)
            self._close()
        return self.process.wait()

    def _close(self) -> None:
        for descriptor in (self._to, self._from):
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)
        self._to = self._from = -1
        self._errors.close()


def _message(line: bytes | bytearray) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        raise Garbage from None
    if not isinstance(message, dict):
        raise Garbage
    return message


def readable(workers: Collection[Worker], seconds: float) -> list[Worker]:
    """Those from which something came within that time; what is unsent goes on being sent."""
    poll = select.poll()
    by_descriptor = {worker.fileno(): worker for worker in workers}
    for worker in workers:
        worker.flush()
        poll.register(worker.fileno(), select.POLLIN)
        if worker._unsent:
            poll.register(worker._to, select.POLLOUT)
    found = [by_descriptor.get(descriptor) for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)]
    return [worker for worker in found if worker is not None]


# ---- the end of a process and of all that it started


def kill_all(session: int, mark: str, seconds: float = 2.0) -> None:
    """SIGKILL for the session, and for what left it: such a process still has the mark in its environment."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    end = time.monotonic() + seconds
    while (found := list(members(session, mark))) and time.monotonic() < end:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def members(session: int, mark: str, root: Path = Path("/proc")) -> Iterator[int]:
    """Living processes of the session or with the mark; none where there is no /proc."""
    wanted = f"{MARK}={mark}".encode()
    for entry in root.iterdir() if root.is_dir() else ():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, IndexError, ValueError):
            state, _, _, of_session = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            if state in "ZX":
                continue
            if int(of_session) == session or wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
