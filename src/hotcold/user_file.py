"""Files that a user names: found or not, Python imported from them, their errors told with file and line."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from hotcold.errors import InputError, did_you_mean

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of the machine, in bytes
PACKAGE = str(Path(__file__).parent)
ENDINGS = frozenset({".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".py"})


def existing(path: Path) -> Path:
    """The path of a file that can be read to its end."""
    try:
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"there is no file {path}.{did_you_mean(path.name, siblings(path))}") from None
    except (OSError, ValueError) as error:  # a link to itself, a name that is too long or has a NUL in it
        raise InputError(f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if stat.S_ISDIR(about.st_mode):
        raise InputError(f"{path} is a folder. Give a file in it: {', '.join(siblings(path / 'x')[:5]) or 'none'}.")
    if not stat.S_ISREG(about.st_mode):
        raise InputError(f"{path} is a pipe or a device, which may never end. Give a file.")
    if about.st_size > MEMORY:
        raise InputError(f"{path} has {about.st_size} bytes, more than this machine has memory. Give a smaller file.")
    return path


def siblings(path: Path) -> list[str]:
    if not path.parent.is_dir():
        return []
    return sorted(p.name for p in path.parent.iterdir() if p.suffix.lower() in ENDINGS)


def import_file(path: Path) -> ModuleType:
    """The module of a file, run once for each state of it; its folder can be imported from, after everything else."""
    existing(path)
    stat = path.stat()
    state = f"{path.resolve()}|{stat.st_mtime_ns}|{stat.st_size}"
    name = f"_hotcold_{path.stem}_{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        del sys.modules[name]
        raise
    except BaseException as error:  # exit() and whatever the file itself derives from BaseException
        del sys.modules[name]
        raise InputError(f"{path} could not be imported: {describe_error(error, str(path))}") from error
    return module


def pick_function(module: ModuleType, path: Path, name: str | None, default: str) -> Any:
    """The function `name`; without a name the one called `default`, or the only public one."""
    own = {n: v for n, v in vars(module).items() if not n.startswith("_") and _is_own_callable(v, module)}
    if name is None:
        if default in own or len(own) == 1:
            return own.get(default) or next(iter(own.values()))
        raise InputError(
            f"{path} has {'several' if own else 'no'} public functions{': ' if own else ''}{', '.join(own)}.\n"
            f"Name one as {path}:{next(iter(own), default)}, or call it `{default}`."
        )
    found = getattr(module, name, None)
    if not callable(found):
        what = "nothing called" if found is None else "no function"
        raise InputError(f"{path} has {what} {name!r}.{did_you_mean(name, list(own))} It has: {', '.join(own) or '-'}.")
    return found


def _is_own_callable(value: Any, module: ModuleType) -> bool:
    if inspect.isclass(value) or not callable(value):
        return False
    return isinstance(value, partial) or getattr(value, "__module__", None) == module.__name__


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """InputError after so many seconds. Signals reach the main thread only: in another one there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise InputError(f"{what} ({seconds:g} seconds).")

    before, (left, interval) = signal.signal(signal.SIGALRM, late), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, before)


def describe_error(error: BaseException, file: str | None) -> str:
    """'ValueError: no number (reward.py:8)': the deepest line in the user's own file, else outside this package."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith((PACKAGE, "<frozen"))]
    own = [f for f in outside if file and Path(f.filename).resolve() == Path(file).resolve()] or outside
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else ""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {one_line(error)}" + (f" ({place})" if place else "")


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
