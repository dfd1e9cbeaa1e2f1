"""How many states the head computes at once."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK_ELEMENTS = 2**24  # logits at once: 64 MB in float32


def rows_at_once(width: int) -> int:
    """States of `width` logits in one product."""
    return max(1, CHUNK_ELEMENTS // width)


def parts(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
