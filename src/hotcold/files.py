"""Where a run writes: whole files that are there at once or not at all, durable before anybody relies on them.

Every write, fsync and rename is announced to `before`; a test replaces it to let any one of them fail.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # never of the name that was given
FAULTS = (  # of the disk or of the folder, not of what is written: a run can go on once they are repaired
    *OF_THE_DISK,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.ENODEV,
    errno.ESTALE,
)


def _nothing(kind: str, path: Path) -> None:
    """What a run does beside writing."""


before: Callable[[str, Path], None] = _nothing


def operation(kind: str, path: Path) -> None:
    """About to write, sync or rename `path`."""
    before(kind, path)


def write_text(path: Path, text: str) -> None:
    write_file(path, lambda file: file.write(text.encode("utf-8", errors="backslashreplace")))


def write_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """At once or not at all: written beside its place, durable, renamed."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        operation("write", path)
        with open(partial, "wb") as file:
            fill(file)
        sync(partial)
        rename(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def append_line(path: Path, text: str) -> None:
    """One line, on the disk when this returns."""
    operation("write", path)
    with open(path, "a", encoding="utf-8") as file:
        file.write(text + "\n")
    sync(path)


def sync(path: Path) -> None:
    """A file, or a folder with what is named in it."""
    operation("sync", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    operation("rename", source)
    source.rename(target)
