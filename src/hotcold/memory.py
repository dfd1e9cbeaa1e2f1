"""What memory there is, what a computation takes of it, and the peak of each part of a step."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotcold.errors import OutOfMemory

GB = 10**9
LESS = "Lower max_tokens, or set gradient_checkpointing=true or lora.rank=16; or use a machine with more memory."
WORDS = ("out of memory", "not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


# ---- running out of it


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch has a type for it on a GPU, and on a CPU only a text."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)


@contextmanager
def as_out_of_memory(what: str) -> Iterator[None]:
    """A failed allocation as OutOfMemory, whatever the device calls it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"{what} does not fit in memory. {LESS}") from None


# ---- how much there is


def free_bytes(device: str, root: Path = Path("/")) -> int | None:
    """What this process may still take; None where it cannot be told."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - _allocated(device)
    if torch.device(device).type != "cpu":
        return None
    known = [_available(root), *_free_in_groups(root)]
    found = [value for value in known if value is not None]
    return min(found) if found else None


def held_bytes(device: str) -> int | None:
    """What this process has taken: on a GPU what torch has allocated, on a CPU what is resident."""
    return _allocated(device) if torch.device(device).type == "cuda" else resident_bytes()


def resident_bytes() -> int | None:
    return _kilobytes(Path("/proc/self/status"), "VmRSS")


def record_bytes() -> int | None:
    """The most that this process has ever had resident. What getrusage says includes the process that started it."""
    return _kilobytes(Path("/proc/self/status"), "VmHWM")


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated(device)


def _available(root: Path) -> int | None:
    return _kilobytes(root / "proc/meminfo", "MemAvailable")


def _free_in_groups(root: Path) -> Iterator[int]:
    """What the limits on this process's control groups leave (v2 and v1). Cache that the kernel can drop counts as
    free."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        inner = (root / base / path.lstrip("/")).resolve()
        top = (root / base).resolve()
        for folder in (inner, *inner.parents):  # every group above has a limit of its own
            if not folder.is_relative_to(top):
                break
            most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
            if most.isdigit() and used.isdigit() and int(most) < 2**60:
                droppable = re.search(rf"^{cache} (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
                yield max(0, int(most) - int(used) + (int(droppable[1]) if droppable else 0))


def _kilobytes(path: Path, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", _text(path), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---- what a computation takes


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that torch makes while it is on, until they are freed.

    A count, not a measurement: the same computation gives the same number, on any device. It does not see what an
    operation takes and gives back within itself. What existed before counts as 0. `apart`: sizes (of parameters, so of
    temporary gradients of whole parameters) that `peak_of_rows` leaves out, since they do not grow with the rows.
    """

    def __init__(self, apart: Iterable[int] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.peak_of_rows = 0
        self._of_rows = 0
        self._apart = frozenset(apart)
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._add(tensor, made=False)
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            self._add(tensor, made=True)
        return out

    def _add(self, tensor: Tensor, made: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._seen:
            return
        size = storage.nbytes() if made else 0
        of_rows = 0 if size in self._apart else size

        def freed(_: Any, key: int = key) -> None:
            if self._seen.pop(key, None) is not None:
                self.now -= size
                self._of_rows -= of_rows

        self._seen[key] = weakref.ref(storage, freed)
        self.now += size
        self._of_rows += of_rows
        self.peak, self.peak_of_rows = max(self.peak, self.now), max(self.peak_of_rows, self._of_rows)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


# ---- the peak of each part of a step


class PeakMemory:
    """The most memory that each part of a step held, in bytes.

    On a GPU torch keeps count. On a CPU it is what was resident: looked at every few milliseconds, and exact where the
    part set the process's own record. That record is never reset: what watches the process from outside reads it.
    """

    def __init__(self, device: str = "cpu", every: float = 0.02):
        self._kind, self._device, self._every = torch.device(device).type, device, every
        self._found: dict[str, int] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        watch = self._watch_cuda if self._kind == "cuda" else self._watch_resident
        with watch(lambda value: self._note(name, value)):
            yield

    def take(self) -> Mapping[str, int]:
        """What was found since the last call."""
        found, self._found = self._found, {}
        return found

    def _note(self, name: str, value: int | None) -> None:
        if value is not None:
            self._found[name] = max(self._found.get(name, 0), value)

    @contextmanager
    def _watch_cuda(self, note: Callable[[int | None], None]) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            note(torch.cuda.max_memory_allocated(self._device))

    @contextmanager
    def _watch_resident(self, note: Callable[[int | None], None]) -> Iterator[None]:
        if self._kind != "cpu" or resident_bytes() is None:
            yield
            return
        before, done = record_bytes(), threading.Event()

        def look() -> None:
            while not done.wait(self._every):
                note(resident_bytes())

        thread = threading.Thread(target=look, name="hotcold-memory", daemon=True)
        note(resident_bytes())
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            note(resident_bytes())
            if (after := record_bytes()) != before:
                note(after)
