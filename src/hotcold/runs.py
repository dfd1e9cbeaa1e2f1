"""The run folder: what a run leaves behind, and the lock that keeps a second writer out."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hotcold.batch import Rollout
from hotcold.checkpoint import sweep, write_folder
from hotcold.errors import InputError
from hotcold.files import OF_THE_DISK, append_line, write_text
from hotcold.sampling.rollout_files import read_about, read_rollouts, write_rollouts

CONFIG = "config.yaml"
START = {"lock", f".{CONFIG}.partial"}  # all there is of a run that was killed before it had a config
RESULT = "result.json"
PACKAGES = ("hotcold", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow")


class RunFolder:
    """`runs/<name>/`, open for writing: config.yaml, env.json, metrics.jsonl, log.txt, rollouts/, eval/, checkpoints/,
    model/, README.md. Only the owner may read it: prompts and responses may be private."""

    def __init__(self, path: Path, attempt: int, lock: int):
        self.path = path
        self.attempt = attempt  # how often the run was started; the last attempt of a step wins
        self._lock = lock  # open descriptor

    @classmethod
    def open(cls, path: Path, config_yaml: str, resumed: bool, environment: dict[str, Any]) -> RunFolder:
        """Create the folder, or continue in it. A folder with a run in it is never written over."""
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file: choose another name with run=NAME.")
        if not resumed and path.is_dir() and any(entry.name not in START for entry in path.iterdir()):
            raise InputError(
                f"{path} holds a run already. Continue it with resume=auto, or choose another name with run=NAME."
            )
        _make_private(path)
        lock = _lock(path / "lock")
        try:
            return cls._prepared(path, config_yaml, resumed, environment, lock)
        except BaseException:
            _unlock(path / "lock", lock)
            raise

    @classmethod
    def _prepared(cls, path: Path, config_yaml: str, resumed: bool, given: dict[str, Any], lock: int) -> RunFolder:
        if not resumed:
            write_text(path / CONFIG, config_yaml)  # before all else: with it the folder holds a run
        for name in ("rollouts", "eval", "checkpoints"):
            (path / name).mkdir(exist_ok=True)
        sweep(path)
        sweep(path / "checkpoints")
        _mend_last_line(path / "metrics.jsonl")
        earlier = _attempts(path / "env.json")  # a run may be killed before its first row of metrics
        before = [row.get("attempt", 0) for row in [*cls._read(path), *earlier]]
        attempt = 1 + max(before, default=0)
        _write_json(path / "env.json", {"attempts": [*earlier, {"attempt": attempt, **versions(), **given}]})
        return cls(path, attempt, lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _unlock(self.path / "lock", self._lock)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_config(self, config_yaml: str) -> None:
        """A continued run may have other steps, machine or intervals than it began with."""
        write_text(self.path / CONFIG, config_yaml)

    def log(self, text: str) -> None:
        """What was said. A disk that takes no more must not keep a run from saying so."""
        with (
            contextlib.suppress(OSError),
            open(self.path / "log.txt", "a", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def append_metrics(self, row: dict[str, Any]) -> None:
        """One line, on the disk before the step's checkpoint. A number that is not finite is written as null, which
        every reader of JSON understands."""
        append_line(self.path / "metrics.jsonl", json.dumps(_finite(row), allow_nan=False))

    def write_rollouts(self, step: int, rollouts: Sequence[Rollout], about: dict[str, Any]) -> None:
        write_rollouts(self._rollouts(step), step, rollouts, about)

    def read_rollouts(self, step: int, key: str) -> tuple[list[Rollout], dict[str, Any]] | None:
        """The scored rows that an earlier attempt left, with what was said about them, if they belong to `key`."""
        path = self._rollouts(step)
        about = read_about(path)
        if about is None or about.get("key") != key:
            return None
        try:
            return read_rollouts(path)[step], about
        except (InputError, KeyError):
            return None

    def _rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step:06d}.parquet"

    def write_eval(self, name: str, content: Any) -> None:
        _write_json(self.path / "eval" / f"{name}.json", content)

    def write_model(self, export: Callable[[Path], None]) -> Path:
        write_folder(self.path / "model", export)
        return self.path / "model"

    def write_result(self, content: dict[str, Any]) -> None:
        _write_json(self.path / RESULT, content)

    def write_card(self, text: str) -> None:
        """The model card, beside the run and inside the model folder, which travels alone."""
        write_text(self.path / "README.md", text)
        write_text(self.path / "model" / "README.md", text)

    @classmethod
    def read_metrics(cls, path: Path) -> list[dict[str, Any]]:
        """One row a step, in order: the last attempt's."""
        rows = {row["step"]: row for row in cls._read(path)}
        return [rows[step] for step in sorted(rows)]

    @staticmethod
    def _read(path: Path) -> list[dict[str, Any]]:
        file = path / "metrics.jsonl"
        if os.path.lexists(file) and not file.is_file():
            raise InputError(f"{file} is a folder, a pipe, a device or a broken link. Move it away.")
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            return []
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):  # the last line of a killed run may be half written
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict) and _is_count(row.get("step"), row.get("attempt", 0))]


def _is_count(*values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def versions() -> dict[str, Any]:
    """What decides the bits of a run beside its config. No variable of the environment: they hold secrets."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None  # used from its source folder


def default_run_name(algorithm: str, model: str) -> str:
    words = [Path(algorithm.split(":")[-1]).stem, Path(model).stem or "model", time.strftime("%Y%m%d-%H%M%S")]
    return "-".join(re.sub(r"[^A-Za-z0-9_.]+", "_", word) for word in words)


def _make_private(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{path} cannot be a folder: a part of it is a file. Choose another name.") from None
    except OSError as error:
        if error.errno in OF_THE_DISK:
            raise
        raise InputError(f"{path} cannot be made ({error.strerror}). Choose another place with run=FOLDER.") from None


def writer_of(folder: Path) -> str | None:
    """Who is at work in a run folder now; the lock is not touched."""
    holder = _holder(folder / "lock")
    if holder is None or (_is_of_this_machine(holder) and not _is_alive(holder)):
        return None
    return f"process {holder['pid']} on {holder['host']}"


_held: set[int] = set()


def _let_go_in_child() -> None:
    """A forked child (a reward worker) that outlives its killed parent must not hold the lock on."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _lock(path: Path) -> int:
    """The descriptor of the lock file, which is locked as long as it is open: a killed process lets go by dying.

    The file says who holds it: pid, host, boot id. Where files cannot be locked, the pid alone decides.
    """
    for _ in range(3):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _refuse_if_held(path, descriptor)
            is_ours = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
        except BaseException:
            os.close(descriptor)
            raise
        if is_ours:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(_me()).encode())
            _held.add(descriptor)
            return descriptor
        os.close(descriptor)  # its holder removed the file between the opening and the locking
    raise InputError(f"{path.parent} was taken by another process at this moment. Choose another name with run=NAME.")


def _unlock(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    if descriptor in _held:
        _held.remove(descriptor)
        os.close(descriptor)


def _refuse_if_held(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = True
    except BlockingIOError:
        raise _in_use(path, _holder(path)) from None
    except OSError:
        is_locked = False
    holder = _holder(path)
    if holder is None:
        return
    if not _is_of_this_machine(holder):  # a lock of another machine is not seen on every file system
        raise _in_use(path, holder)
    if not is_locked and _is_alive(holder):
        raise _in_use(path, holder)


def _in_use(path: Path, holder: dict[str, Any] | None) -> InputError:
    who = "another process" if holder is None else f"process {holder['pid']} on {holder['host']}"
    text = f"{path.parent} is in use by {who}.\nWait for it, stop it, or choose another name with run=NAME."
    if holder is not None and not _is_of_this_machine(holder):
        text += f"\nIf that machine no longer runs it, delete {path}."
    return InputError(text)


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot_id()}


def _holder(path: Path) -> dict[str, Any] | None:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return holder if {"pid", "host", "boot"} <= set(holder) else None
    except (OSError, ValueError, TypeError):
        return None


def _is_of_this_machine(holder: dict[str, Any]) -> bool:
    """The same name, or the same kernel under another name (a container)."""
    return holder["host"] == socket.gethostname() or (holder["boot"] != "" and holder["boot"] == _boot_id())


def _is_alive(holder: dict[str, Any]) -> bool:
    if holder["boot"] != _boot_id():
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _mend_last_line(path: Path) -> None:
    """A killed run may have left half a line: end it, so that the next row is a line of its own."""
    if path.is_file() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with open(path, "ab") as file:
            file.write(b"\n")


def _attempts(path: Path) -> list[dict[str, Any]]:
    try:
        attempts = json.loads(path.read_text(encoding="utf-8"))["attempts"]
        return [a for a in attempts if isinstance(a, dict) and _is_count(a.get("attempt"))]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(_finite(content), ensure_ascii=False, allow_nan=False, indent=1) + "\n")


def _finite(value: Any) -> Any:
    """`value` with null for every number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
