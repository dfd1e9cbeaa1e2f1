"""Checkpoints that are whole or do not count: written aside, made durable, and renamed when complete.

`step_000010/` is a Hugging Face model at its root and `trainer/` with state.json and one safetensors file for each set
of tensors. `MANIFEST.json` (path, bytes, SHA-256 of every file) is written last; a folder whose manifest does not
verify is skipped and named. The manifest carries its own SHA-256, so a changed byte of it is found too.

Hidden names beside `step_000010` say what a kill interrupted: `.step_000010.partial-<pid>` was being written,
`.step_000010.replaced` was being replaced, `.step_000010.doomed` was being deleted. `sweep` clears them up.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hotcold.errors import InputError
from hotcold.files import operation, rename, sync

T = TypeVar("T")
S = TypeVar("S")
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
    with _written_aside(folder) as partial:
        export_model(partial)
        trainer = partial / "trainer"
        trainer.mkdir()
        for stem, group in tensors.items():
            operation("write", trainer / f"{stem}.safetensors")
            save_file(group, trainer / f"{stem}.safetensors")
        _write(trainer / "state.json", json.dumps(state, indent=1) + "\n")
        text = _manifest_text(_beside_each_other(lambda path: _entry(partial, path), _files(partial)))
        _write(partial / MANIFEST, text)
    return hashlib.sha256(text.encode()).hexdigest()


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Any folder (the final model) by the same road: aside, durable, renamed."""
    with _written_aside(folder) as partial:
        fill(partial)


def verify(folder: Path) -> str | None:
    """Why the checkpoint is not whole, or None."""
    try:
        written = (folder / MANIFEST).read_bytes()
        entries = json.loads(written)["files"]
        # every byte counts: the hash guards what it says, the comparison how it is written
        if written != _manifest_text(entries).encode():
            return f"{MANIFEST} has changed"
        if outside := [entry["path"] for entry in entries if not _is_inside(entry["path"])]:
            return f"{MANIFEST} names {outside[0]!r}, which is not in the folder"
    except FileNotFoundError:
        return "no manifest"
    except (OSError, ValueError, KeyError, TypeError):
        return "unreadable manifest"
    reasons = _beside_each_other(lambda entry: _what_is_wrong(folder / entry["path"], entry), entries)
    return next((f"{e['path']} {reason}" for e, reason in zip(entries, reasons, strict=True) if reason), None)


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
    """Delete all but the newest `keep` whole ones and those named in `always`, once a newest one verifies.

    Of the older ones only the sizes are looked at: a cut one does not take the place of a whole one.
    """
    newest, _ = newest_checkpoint(checkpoints)
    if newest is None:
        return
    older = sorted((f for f in _steps(checkpoints) if _step(f) < _step(newest)), key=_step, reverse=True)
    kept = {newest, *[folder for folder in older if _looks_whole(folder)][: max(keep, 1) - 1]}
    for folder in older:
        if folder not in kept and folder.name not in always:
            # renamed first, so that a kill in between never leaves half a checkpoint under its name
            doomed = _hidden(folder, "doomed")
            shutil.rmtree(doomed, ignore_errors=True)
            rename(folder, doomed)
            if doomed.is_symlink():  # the checkpoint was moved away by hand, and is not ours to delete
                doomed.unlink()
            else:
                shutil.rmtree(doomed)


def sweep(parent: Path) -> None:
    """Finish or remove what a killed run left beside its folders. Only one run writes here (the run folder's lock).

    A folder that was whole when the kill came, and whose place is empty, takes its place.
    """
    for left in sorted(parent.glob(".*.partial-*")):
        _settle(left, is_whole=verify(left) is None)
    for left in sorted(parent.glob(".*.replaced")):
        _settle(left, is_whole=True)
    for left in parent.glob(".*.doomed"):
        shutil.rmtree(left, ignore_errors=True)


def read_state(folder: Path) -> dict[str, Any]:
    path = folder / "trainer" / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(state, dict):
        raise _unreadable(path, "no JSON object")
    return state


def read_tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    path = folder / "trainer" / f"{stem}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError, KeyError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, why: object) -> InputError:
    """Of a file whose hash is right: somebody else has written the checkpoint."""
    step = path.parent.parent
    return InputError(f"{path} cannot be read ({why}).\nDelete {step} to go on from the checkpoint before it.")


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Of names, types, shapes and bytes; the order does not matter."""

    def of(name: str) -> str:
        tensor = tensors[name].detach().cpu().contiguous()
        head = f"{name} {tensor.dtype} {list(tensor.shape)} "
        return head + hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().data).hexdigest()

    return hashlib.sha256("\n".join(_beside_each_other(of, sorted(tensors))).encode()).hexdigest()


def _beside_each_other(of: Callable[[T], S], values: Iterable[T]) -> list[S]:
    """Hashing lets other threads run."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(of, values))


@contextmanager
def _written_aside(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder`; what is in it at the end is made durable and takes the place of `folder`."""
    partial = _hidden(folder, f"partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        operation("write", partial)
        with _as_os_errors(partial):
            yield partial
        for path in [*_files(partial), *[p for p in partial.rglob("*") if p.is_dir()], partial]:
            sync(path)
        _replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _as_os_errors(folder: Path) -> Iterator[None]:
    """safetensors reports a full disk as its own error; callers tell a full disk from a bug by OSError and errno."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error


def _replace(partial: Path, folder: Path) -> None:
    old = _hidden(folder, "replaced")
    is_replaced = folder.exists()
    if is_replaced:
        shutil.rmtree(old, ignore_errors=True)
        rename(folder, old)
    try:
        rename(partial, folder)
    except BaseException:
        if is_replaced:
            old.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _hidden(folder: Path, suffix: str) -> Path:
    return folder.parent / f".{folder.name}.{suffix}"


def _settle(left: Path, is_whole: bool) -> None:
    target = left.parent / left.name[1:].rpartition(".")[0]
    if is_whole and not target.exists():
        left.rename(target)
    else:
        shutil.rmtree(left, ignore_errors=True)


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    return {"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _manifest_text(entries: list[dict[str, Any]]) -> str:
    own = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    return json.dumps({"files": entries, "sha256": own}, indent=1) + "\n"


def _is_inside(path: str) -> bool:
    """A name below the folder. Anybody can write a manifest: one of /dev/zero would be read for ever."""
    return not Path(path).is_absolute() and ".." not in Path(path).parts


def _what_is_wrong(path: Path, entry: dict[str, Any]) -> str | None:
    try:
        if path.exists() and not path.is_file():
            return "is a folder, a pipe or a device"
        if path.stat().st_size != entry["bytes"]:
            return f"has {path.stat().st_size} bytes, not {entry['bytes']}"
        return None if file_sha256(path) == entry["sha256"] else "has changed"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _looks_whole(folder: Path) -> bool:
    """The manifest and every size; not the bytes, which take as long to read as to write."""
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((folder / entry["path"]).stat().st_size == entry["bytes"] for entry in entries)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(path: Path, text: str) -> None:
    operation("write", path)
    path.write_text(text, encoding="utf-8")


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
