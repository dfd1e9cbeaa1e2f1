"""A batch as one row without padding: each distinct prompt once, then every response, all tokens side by side.

Everything but attention treats each token alone, so a trunk may read them in any arrangement. Attention is ours for the
length of a forward: transformers' registry of attention functions hands us queries, keys and values, and they are taken
apart into rows (a prompt by itself; a response behind its prompt), attended causally, and laid side by side again. What
a family adds to attention that is not here (soft caps, sinks, masks of its own) is an error, and the trunk is then read
in padded rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from hotcold.batch import Batch
from hotcold.models.hf import ROW_LAYERS, accepts, position_kwargs

NAME = "hotcold_packed"
LIKE = 0.6  # a row shorter than this share of its bucket's longest begins another bucket
OF_NO_EFFECT = frozenset({"position_ids", "use_cache", "cache", "past_key_values", "output_attentions"})


class NotPackable(Exception):
    """The family's attention has a part that is not here."""


@dataclass(frozen=True)
class Bucket:
    """Rows of like length. `queries` [b, L] and `keys` [b, K]: which token of the packed row; `start` [b]: how many
    tokens stand before the first query. Key j is seen by query i where j <= start + i."""

    queries: Tensor
    keys: Tensor
    start: Tensor
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """[b, 1, L, K] bool; None: plain causal, every row from its first token."""
        if window not in self.masks:
            self.masks[window] = self._mask(window)
        return self.masks[window]

    def _mask(self, window: int | None) -> Tensor | None:
        if window is None and not bool(self.start.any()):
            return None
        at = self.start[:, None] + torch.arange(self.queries.shape[1], device=self.start.device)
        key = torch.arange(self.keys.shape[1], device=self.start.device)
        seen = key <= at[:, :, None]
        return (seen if window is None else seen & (at[:, :, None] - key < window))[:, None]


@dataclass(frozen=True)
class Packed:
    """N tokens in a row. `place` [N]: where a token's output stands among those of all buckets."""

    tokens: Tensor  # [1, N]
    positions: Tensor  # [1, N]
    buckets: tuple[Bucket, ...]
    place: Tensor
    read_at: Tensor  # of each (row, at) that was asked for: the token before it


_rows_of: list[Packed] = []  # of the forward that goes on; a backward on a GPU has threads of its own
_until_backward: list[ExitStack] = []


@contextmanager
def until_backward() -> Iterator[None]:
    """Layers that are computed anew in the backward pass find attention as it was in the forward."""
    with ExitStack() as stack:
        _until_backward.append(stack)
        try:
            yield
        finally:
            _until_backward.pop()


def packed_hidden(trunk: nn.Module, batch: Batch, row: Tensor, at: Tensor) -> Tensor:
    """[n, H] the hidden states from which the tokens at (row, at) were chosen."""
    packed = pack(batch, row, at)
    with ExitStack() as forward:
        (_until_backward[-1] if _until_backward else forward).enter_context(_attending(trunk, packed))
        out = trunk(input_ids=packed.tokens, use_cache=False, **position_kwargs(trunk, packed.positions))
    return out.last_hidden_state[0].index_select(0, packed.read_at)


def may_pack(trunk: Any) -> bool:
    """What can be told without trying: positions are given, and every layer is attention over all or over a window."""
    config = getattr(trunk, "config", None)
    if config is None or not accepts(trunk, "position_ids") or getattr(trunk, "_is_stateful", False):
        return False
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    return kinds <= ROW_LAYERS and not getattr(config, "attention_chunk_size", None)


# ---- the row


def pack(batch: Batch, row: Tensor, at: Tensor) -> Packed:
    """The last token of a response is left out: nothing is chosen after it."""
    device = batch.tokens.device
    tokens, prompts, lengths = batch.tokens.tolist(), batch.prompt_lengths.tolist(), batch.lengths.tolist()
    ids: list[int] = []
    positions: list[int] = []
    rows: list[tuple[list[int], list[int]]] = []  # (queries, keys) of each prompt and each response, as places
    begins: dict[tuple[int, ...], range] = {}
    of_row: list[tuple[range, range]] = []

    def add(new: Sequence[int], first: int) -> range:
        start = len(ids)
        ids.extend(new)
        positions.extend(range(first, first + len(new)))
        return range(start, len(ids))

    for line, prompt, length in zip(tokens, prompts, lengths, strict=True):
        name = tuple(line[:prompt])
        if name not in begins:
            begins[name] = add(name, 0)
            rows.append(([*begins[name]], [*begins[name]]))
        response = add(line[prompt : length - 1], prompt) if length - 1 > prompt else range(0)
        if len(response):
            rows.append(([*response], [*begins[name], *response]))
        of_row.append((begins[name], response))
    read_at = [_before(of_row[r], prompts[r], t) for r, t in zip(row.tolist(), at.tolist(), strict=True)]
    buckets, place = _buckets(rows, len(ids), device)
    return Packed(
        torch.tensor([ids], device=device),
        torch.tensor([positions], device=device),
        buckets,
        place,
        torch.tensor(read_at, dtype=torch.long, device=device),
    )


def _before(where: tuple[range, range], prompt: int, at: int) -> int:
    """The place of the token before position `at` of a row."""
    of_prompt, of_response = where
    return of_prompt[at - 1] if at <= prompt else of_response[at - 1 - prompt]


def _buckets(
    rows: Sequence[tuple[list[int], list[int]]], num_tokens: int, device: torch.device
) -> tuple[tuple[Bucket, ...], Tensor]:
    """Rows without a prompt before them and rows with one apart, each by length."""
    order = sorted(range(len(rows)), key=lambda i: (_is_behind(rows[i]), -len(rows[i][0]), -len(rows[i][1])))
    parts: list[list[int]] = []
    for i in order:
        first = rows[parts[-1][0]] if parts else None
        alike = first is not None and _is_behind(first) == _is_behind(rows[i])
        if first is not None and alike and min(_shares(rows[i], first)) >= LIKE:
            parts[-1].append(i)
        else:
            parts.append([i])
    place, offset, buckets = [0] * num_tokens, 0, []
    for part in parts:
        width, depth = (max(len(rows[i][side]) for i in part) for side in (0, 1))
        for n, i in enumerate(part):
            for k, token in enumerate(rows[i][0]):
                place[token] = offset + n * width + k
        offset += len(part) * width
        queries, keys = (
            torch.tensor([rows[i][side] + [0] * (wide - len(rows[i][side])) for i in part], device=device)
            for side, wide in ((0, width), (1, depth))
        )
        start = torch.tensor([len(rows[i][1]) - len(rows[i][0]) for i in part], device=device)
        buckets.append(Bucket(queries, keys, start))
    return tuple(buckets), torch.tensor(place, device=device)


def _is_behind(row: tuple[list[int], list[int]]) -> bool:
    return len(row[1]) > len(row[0])


def _shares(row: tuple[list[int], list[int]], longest: tuple[list[int], list[int]]) -> tuple[float, float]:
    lengths = [(len(a), len(b)) for a, b in zip(row, longest, strict=True)]
    return lengths[0][0] / lengths[0][1], min(lengths[1]) / max(lengths[1])


# ---- attention


@contextmanager
def _attending(trunk: Any, packed: Packed) -> Iterator[None]:
    """The trunk's layers attend by `_attention`."""
    configs = {id(part.config): part.config for part in trunk.modules() if hasattr(part, "config")}.values()
    before = [(config, config._attn_implementation) for config in configs]
    _rows_of.append(packed)
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name
        _rows_of.pop()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[1, N, heads, size] from query [1, heads, N, size], key and value [1, key heads, N, size]."""
    packed = _rows_of[-1] if _rows_of else None
    given = {name for name, value in others.items() if value is not None and value is not False}
    odd = sorted(given - OF_NO_EFFECT)
    if packed is None or attention_mask is not None or dropout or is_causal is False or odd:
        raise NotPackable(f"{type(module).__name__}: {odd or 'a mask or dropout'}")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _attend(packed, query, key, value, scaling, sliding_window)

    if not torch.is_grad_enabled():
        return attend(query, key, value), None
    # the rows are taken apart anew in the backward pass: kept are queries, keys and values, each token's once
    kept = checkpoint(attend, query, key, value, use_reentrant=False, preserve_rng_state=False)
    return kept, None


def _attend(
    packed: Packed, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    found = []
    for bucket in packed.buckets:
        mask = bucket.mask(window)
        out = scaled_dot_product_attention(
            _rows(queries, bucket.queries),
            _rows(keys, bucket.keys),
            _rows(values, bucket.keys),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        found.append(out.transpose(1, 2).flatten(0, 1).flatten(1))
    return embedding(packed.place, torch.cat(found)).view(1, len(packed.place), query.shape[1], -1)


def _rows(states: Tensor, index: Tensor) -> Tensor:
    """[b, heads, L, size] of states [N, heads, size]. As an embedding: its gradient is a sum over equal places."""
    return embedding(index, states.flatten(1)).unflatten(-1, states.shape[1:]).transpose(1, 2)


AttentionInterface.register(NAME, _attention)
