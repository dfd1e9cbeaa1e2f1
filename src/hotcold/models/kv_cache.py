"""A key-value cache with room for the tokens to come."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """Keys and values [B, heads, T, size] at the start of longer buffers.

    transformers' own layer concatenates, and so copies the whole cache for each new token.
    """

    def __init__(self, layer: DynamicLayer, rows: Tensor, room: int) -> None:
        super().__init__()
        assert layer.keys is not None and layer.values is not None
        self.lazy_initialization(layer.keys, layer.values)
        self.key_buffer = _with_room(layer.keys, rows, room)
        self.value_buffer = _with_room(layer.values, rows, room)
        self.length = layer.keys.shape[-2]
        self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self.key_buffer[:, :, : self.length], self.value_buffer[:, :, : self.length]
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, self.length = self.length, self.length + key_states.shape[-2]
        self.key_buffer[:, :, start : self.length] = key_states
        self.value_buffer[:, :, start : self.length] = value_states
        return self._show()

    def batch_select_indices(self, indices: Tensor) -> None:
        self.key_buffer, self.value_buffer = self.key_buffer[indices], self.value_buffer[indices]
        self._show()


def _with_room(states: Tensor, rows: Tensor, room: int) -> Tensor:
    num_heads, length, size = states.shape[1:]
    out = states.new_empty((len(rows), num_heads, length + room, size))
    out[:, :, :length] = states[rows]
    return out


def select_rows(cache: Any, rows: Tensor, room: int = 0) -> None:
    """The cache of these rows, in this order, possibly repeated; with room for so many more tokens in plain layers."""
    for i, layer in enumerate(cache.layers):
        if room and type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[i] = RoomyLayer(layer, rows, room)
        else:
            layer.batch_select_indices(rows)
