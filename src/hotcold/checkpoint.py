"""Checkpoints that are whole or do not count: written aside, made durable, and renamed when complete.

`step_000010/` is a Hugging Face model at its root and `trainer/` with state.json and one safetensors file for each set
of tensors. `MANIFEST.json` (path, bytes, SHA-256 of every file) is written last; a folder whose manifest does not
verify is skipped and named.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

MANIFEST = "MANIFEST.json"
STEP = re.compile(r"step_(\d+)")


def write_checkpoint(
    folder: Path,
    export_model: Callable[[Path], None],
    tensors: dict[str, dict[str, Tensor]],
    state: dict[str, Any],
) -> str:
    """Write `folder` at once or not at all; returns the SHA-256 of its manifest."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        export_model(partial)
        (partial / "trainer").mkdir()
        for stem, group in tensors.items():
            save_file(group, partial / "trainer" / f"{stem}.safetensors")
        (partial / "trainer" / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        digest = _write_manifest(partial)
        _replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return digest


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Any folder (the final model) by the same road: aside, durable, renamed."""
    partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        fill(partial)
        for path in _files(partial):
            _sync(path)
        _replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def verify(folder: Path) -> str | None:
    """Why the checkpoint is not whole, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        entries = {entry["path"]: entry for entry in manifest["files"]}
    except FileNotFoundError:
        return "no manifest"
    except (OSError, ValueError, KeyError, TypeError):
        return "unreadable manifest"
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
        if file_sha256(path) != entry["sha256"]:
            return f"{name} has changed"
    return None


def newest_checkpoint(checkpoints: Path) -> tuple[Path | None, list[tuple[str, str]]]:
    """The newest whole checkpoint, and the newer ones that were skipped with the reason."""
    skipped: list[tuple[str, str]] = []
    for folder in sorted(_steps(checkpoints), key=_step, reverse=True):
        reason = verify(folder)
        if reason is None:
            return folder, skipped
        skipped.append((folder.name, reason))
    return None, skipped


def prune(checkpoints: Path, keep: int, always: set[str]) -> None:
    """Delete all but the newest `keep` and those named in `always`, once a newest one verifies."""
    newest, _ = newest_checkpoint(checkpoints)
    if newest is None:
        return
    old = sorted((f for f in _steps(checkpoints) if _step(f) <= _step(newest)), key=_step, reverse=True)[keep:]
    for folder in old:
        if folder.name not in always:
            # renamed first, so that a kill in between never leaves half a checkpoint under its name
            doomed = folder.parent / f".{folder.name}.partial-old"
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            shutil.rmtree(doomed)


def sweep(checkpoints: Path) -> None:
    """Remove what a killed run left half written. Only one run writes here at a time (the run folder's lock)."""
    for partial in checkpoints.glob(".*.partial-*"):
        shutil.rmtree(partial, ignore_errors=True)


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "trainer" / "state.json").read_text(encoding="utf-8"))


def read_tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    return load_file(folder / "trainer" / f"{stem}.safetensors")


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(folder: Path) -> str:
    entries = []
    for path in _files(folder):
        _sync(path)
        name = path.relative_to(folder).as_posix()
        entries.append({"path": name, "bytes": path.stat().st_size, "sha256": file_sha256(path)})
    text = json.dumps({"files": entries}, indent=1) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    _sync(folder / MANIFEST)
    for inner in [p for p in folder.rglob("*") if p.is_dir()]:
        _sync(inner)
    _sync(folder)
    return hashlib.sha256(text.encode()).hexdigest()


def _replace(partial: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.parent / f".{folder.name}.partial-old"
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _steps(checkpoints: Path) -> list[Path]:
    if not checkpoints.is_dir():
        return []
    return [path for path in checkpoints.iterdir() if path.is_dir() and STEP.fullmatch(path.name)]


def _step(folder: Path) -> int:
    match = STEP.fullmatch(folder.name)
    assert match is not None
    return int(match.group(1))
