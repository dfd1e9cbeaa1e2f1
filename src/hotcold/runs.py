"""The run folder: what a run leaves behind, and the lock that keeps a second writer out."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import transformers

from hotcold.batch import Rollout
from hotcold.checkpoint import write_folder
from hotcold.errors import InputError
from hotcold.sampling.rollout_files import write_rollouts


class RunFolder:
    """`runs/<name>/`, open for writing: config.yaml, env.json, metrics.jsonl, log.txt, rollouts/, eval/, checkpoints/,
    model/, README.md. Only the owner may read it: prompts and responses may be private."""

    def __init__(self, path: Path, attempt: int):
        self.path = path
        self.attempt = attempt  # how often the run was started; the last attempt of a step wins

    @classmethod
    def open(cls, path: Path, config_yaml: str, resumed: bool, environment: dict[str, Any]) -> RunFolder:
        """Create the folder, or continue in it. A folder with a run in it is never written over."""
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file: choose another name with run=NAME.")
        if not resumed and path.is_dir() and any(path.iterdir()):
            raise InputError(
                f"{path} holds a run already. Continue it with resume=auto, or choose another name with run=NAME."
            )
        _make_private(path)
        _lock(path / "lock")
        folder = cls(path, 1 + max((row["attempt"] for row in cls._read(path)), default=0))
        for name in ("rollouts", "eval", "checkpoints"):
            (path / name).mkdir(exist_ok=True)
        if not resumed:
            _write(path / "config.yaml", config_yaml)
        _mend_last_line(path / "metrics.jsonl")
        folder._append_environment(environment)
        return folder

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            (self.path / "lock").unlink()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log(self, text: str) -> None:
        with open(self.path / "log.txt", "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def append_metrics(self, row: dict[str, Any]) -> None:
        """One line; a number that is not finite is written as null, which every reader of JSON understands."""
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n")

    def write_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        write_rollouts(self.path / "rollouts" / f"step_{step:06d}.parquet", step, rollouts)

    def write_eval(self, name: str, content: Any) -> None:
        _write(self.path / "eval" / f"{name}.json", json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    def write_model(self, export: Callable[[Path], None]) -> Path:
        write_folder(self.path / "model", export)
        return self.path / "model"

    def write_card(self, text: str) -> None:
        """The model card, beside the run and inside the model folder, which travels alone."""
        _write(self.path / "README.md", text)
        _write(self.path / "model" / "README.md", text)

    @classmethod
    def read_metrics(cls, path: Path) -> list[dict[str, Any]]:
        """One row a step, in order: the last attempt's."""
        rows = {row["step"]: row for row in cls._read(path)}
        return [rows[step] for step in sorted(rows)]

    @staticmethod
    def _read(path: Path) -> list[dict[str, Any]]:
        try:
            lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line of a killed run may be half written
                rows.append(json.loads(line))
        return rows

    def _append_environment(self, given: dict[str, Any]) -> None:
        """env.json: one entry for each attempt. Versions and hardware; no variable of the environment."""
        file = self.path / "env.json"
        earlier = json.loads(file.read_text(encoding="utf-8"))["attempts"] if file.is_file() else []
        now = {"attempt": self.attempt, **versions(), **given}
        _write(file, json.dumps({"attempts": [*earlier, now]}, indent=1) + "\n")


def versions() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def default_run_name(algorithm: str, model: str) -> str:
    words = [Path(algorithm.split(":")[-1]).stem, Path(model).stem or "model", time.strftime("%Y%m%d-%H%M%S")]
    return "-".join(re.sub(r"[^A-Za-z0-9_.]+", "_", word) for word in words)


def _make_private(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{path} cannot be a folder: a part of it is a file. Choose another name.") from None
    except PermissionError:
        raise InputError(f"{path} cannot be written: no permission. Choose another place with run=FOLDER.") from None


def _lock(path: Path) -> None:
    """pid, host and boot id of the writer. A lock whose process is gone (a kill, a reboot) is taken over."""
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot_id()}
    for _ in range(2):
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            holder = _holder(path)
            if holder is not None and _is_alive(holder, mine):
                raise InputError(
                    f"{path.parent} is in use by process {holder['pid']} on {holder['host']}.\n"
                    "Wait for it, stop it, or choose another name with run=NAME."
                ) from None
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            continue
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(mine))
        return
    raise InputError(f"{path.parent} was taken by another process at this moment. Choose another name.")


def _holder(path: Path) -> dict[str, Any] | None:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return holder if {"pid", "host", "boot"} <= set(holder) else None
    except (OSError, ValueError, TypeError):
        return None


def _is_alive(holder: dict[str, Any], mine: dict[str, Any]) -> bool:
    if holder["host"] != mine["host"]:
        return True  # another machine's process cannot be asked
    if holder["boot"] != mine["boot"]:
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


def _write(path: Path, text: str) -> None:
    """At once or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
