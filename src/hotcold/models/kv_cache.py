"""Key-value caches whose rows come and go, with room for the tokens to come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hotcold.models.hf import accepts


def whole_cache(module: nn.Module) -> DynamicCache | None:
    """An empty cache that keeps every position, for models that cache keys and values alone; else None.

    Layers with a sliding window keep all positions as well: the mask has the window.
    """
    kinds = _kinds_of_layers(module)
    return DynamicCache() if kinds is not None and kinds <= {DynamicLayer, DynamicSlidingWindowLayer} else None


def bears_gaps(module: nn.Module) -> bool:
    """Whether padding may stand between the tokens of a row: positions are given, and no window counts columns."""
    kinds = _kinds_of_layers(module)
    return accepts(module, "position_ids") and kinds is not None and kinds <= {DynamicLayer}


def _kinds_of_layers(module: nn.Module) -> set[type] | None:
    """Of the cache that the model's family would make; None where it makes another kind of cache."""
    try:
        return {type(layer) for layer in DynamicCache(config=cast(Any, module.config)).layers}
    except Exception:  # whatever a family's config lacks
        return None


def select_rows(cache: Any, rows: Tensor) -> None:
    """The cache of these rows, in this order, possibly repeated."""
    for layer in cache.layers:
        layer.batch_select_indices(rows)


def repeated(cache: DynamicCache, times: int) -> DynamicCache:
    """A cache of so many equal rows, made of a cache of one row, which stays as it is."""
    out, layers = DynamicCache(), cast(list[DynamicLayer], cache.layers)
    for i, layer in enumerate(layers):
        if layer.keys is not None and layer.values is not None:
            out.update(layer.keys.expand(times, -1, -1, -1), layer.values.expand(times, -1, -1, -1), i)
    return out


class SlotLayer(DynamicLayer):
    """Keys and values [slots, heads, columns, size], of which the first rows and columns are in use.

    Every row ends at the last used column; what stands before its first token is 0 and masked. transformers' own layer
    concatenates, and so copies the whole cache for each new token.
    """

    def __init__(self, like: DynamicLayer, slots: int, columns: int) -> None:
        super().__init__()
        assert like.keys is not None and like.values is not None
        self.lazy_initialization(like.keys, like.values)
        self.buffers = [
            states.new_empty((slots, states.shape[1], columns, states.shape[3])) for states in (like.keys, like.values)
        ]
        self.show(0, 0)

    def show(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        self.rows, self.length = rows, length
        keys, values = (buffer[:rows, :, :length] for buffer in self.buffers)
        self.keys, self.values = keys, values
        return keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, end = self.length, self.length + key_states.shape[-2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, :, start:end] = states
        return self.show(self.rows, end)

    def enter(self, layer: DynamicLayer, source: Tensor, lengths: Sequence[int], prefix: int) -> None:
        """Rows `source` of a layer, behind the rows in use. Their tokens are its first `prefix` and last columns."""
        assert layer.keys is not None and layer.values is not None
        first, length = self.rows, self.length
        for buffer, states in zip(self.buffers, (layer.keys, layer.values), strict=True):
            for start, end, number in _runs(lengths):
                row, filled = buffer[first + start : first + end], states[source[start:end]]
                begin, rest = length - number, number - prefix
                row[:, :, :begin] = 0.0
                row[:, :, begin : begin + prefix] = filled[:, :, :prefix]
                row[:, :, length - rest : length] = filled[:, :, filled.shape[2] - rest :]
        self.show(first + len(lengths), length)

    def move(self, source: Tensor, target: Tensor, rows: int) -> None:
        for buffer in self.buffers:
            buffer[target, :, : self.length] = buffer[source, :, : self.length]
        self.show(rows, self.length)

    def shift(self, by: int) -> None:
        """By so many columns to the left, or to the right below 0."""
        for buffer in self.buffers:
            kept = buffer[: self.rows, :, max(by, 0) : self.length].clone()
            buffer[: self.rows, :, : max(-by, 0)] = 0.0
            buffer[: self.rows, :, max(-by, 0) : self.length - by] = kept
        self.show(self.rows, self.length - by)


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, end, value) of each run of equal numbers."""
    start = 0
    for number, run in groupby(lengths):
        end = start + sum(1 for _ in run)
        yield start, end, number
        start = end


class Slots:
    """A cache for so many rows at once, of so many columns; the cache of a forward is `cache`."""

    def __init__(self, slots: int, columns: int) -> None:
        self.slots, self.columns = slots, columns
        self.cache: DynamicCache | None = None

    @property
    def layers(self) -> list[SlotLayer]:
        return [] if self.cache is None else [x for x in self.cache.layers if isinstance(x, SlotLayer)]

    def enter(self, filled: DynamicCache, source: Tensor, lengths: Sequence[int], prefix: int = 0) -> None:
        """Rows `source` of a cache that has read prompts of these lengths: its first columns are the prefix of all."""
        others = cast(list[DynamicLayer], filled.layers)
        if self.cache is None:
            self.cache = DynamicCache()
            self.cache.layers = [
                SlotLayer(other, self.slots, self.columns) if other.is_initialized else other for other in others
            ]
        for layer, other in zip(self.cache.layers, others, strict=True):
            if isinstance(layer, SlotLayer):
                if not layer.rows:
                    layer.show(0, max(lengths))
                layer.enter(other, source, lengths, prefix)

    def leave(self, running: Tensor) -> Tensor:
        """Keeps the rows that are running [rows] bool; the last ones move into the gaps. -> [kept] where each stood."""
        num = int(running.sum())
        order = torch.arange(num, device=running.device)
        gaps = (~running[:num]).nonzero().flatten()
        movers = running[num:].nonzero().flatten() + num
        order[gaps] = movers
        for layer in self.layers:
            layer.move(movers, gaps, num)
        return order

    def shift(self, by: int) -> None:
        """Rows in use move by so many columns to the left, or to the right below 0."""
        for layer in self.layers:
            if by and layer.rows:
                layer.shift(by)
