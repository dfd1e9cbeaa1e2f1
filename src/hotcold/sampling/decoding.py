"""Batched decoding of a causal LM: finished rows leave the batch at once, waiting ones take their places.

Each distinct prompt is read once for all of its rows, and what all prompts begin with is read once for all prompts.
Every row ends at the last column of the batch, so a step writes one column for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from hotcold.models.hf import cache_of, forward_kwargs, has_row_cache, position_kwargs, supports_logits_to_keep
from hotcold.models.kv_cache import Slots, bears_gaps, repeated, whole_cache

PREFILL_TOKENS = 8192  # of prompts, padding included, in one forward
SHARED_PREFIX = 16  # tokens that all prompts begin with: fewer are not worth a forward of their own
FREE_SLOTS = 1 / 8  # of the batch, before waiting rows enter: reading one prompt at a time is slow
SPARE_COLUMNS = 1 / 4  # of the batch's width that no row uses, before rows are moved to the left

Prompt = tuple[int, ...]
Choose = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # logits, rows, tokens before -> ids, log-probs
Ends = Callable[[Tensor, Tensor, Tensor], Tensor]  # ids of all rows, rows, tokens so far -> [n] bool


@dataclass(frozen=True)
class Budget:
    rows: int
    cache_tokens: int  # rows x columns


@dataclass(frozen=True)
class Decoded:
    ids: Tensor  # [B, tokens]
    logp: Tensor  # [B, tokens]
    lengths: Tensor  # [B]
    stopped: Tensor  # [B] bool


@dataclass
class _Batch:
    """The rows that are being decoded, in the order of the cache."""

    rows: Tensor  # [n] index into the requests
    done: Tensor  # [n] tokens sampled
    pad: Tensor  # [n] columns before the first token
    logits: Tensor  # [n, V] of the next token
    token: Tensor  # [n] the newest
    width: int = 0  # columns in use

    def select(self, index: Tensor) -> None:
        self.rows, self.done, self.pad = self.rows[index], self.done[index], self.pad[index]
        self.logits, self.token = self.logits[index], self.token[index]

    def append(self, rows: Tensor, pad: Tensor, logits: Tensor) -> None:
        self.rows, self.pad = torch.cat([self.rows, rows]), torch.cat([self.pad, pad])
        self.done = torch.cat([self.done, torch.zeros_like(rows)])
        self.token = torch.cat([self.token, torch.zeros_like(rows)])
        self.logits = torch.cat([self.logits, logits]) if len(self.logits) else logits


@dataclass
class Decoder:
    """Decodes `prompts[i]` up to `limits[i]` tokens for each i. One call of `run`, then it is used up."""

    module: nn.Module
    prompts: Sequence[Prompt]
    limits: Sequence[int]
    budget: Budget
    choose: Choose
    ends: Ends
    pad_id: int = 0  # only fills
    notify: Callable[[int], None] = field(default=lambda _: None)  # rows finished

    def __post_init__(self) -> None:
        self.device = next(self.module.parameters()).device
        self.lengths = [len(p) for p in self.prompts]
        self.limit_of = torch.tensor(self.limits, device=self.device)
        self.length_of = torch.tensor(self.lengths, device=self.device)
        self.joins = has_row_cache(self.module) and whole_cache(self.module) is not None

    def run(self) -> Decoded:
        num, most = len(self.prompts), max(self.limits)
        self.out = Decoded(
            torch.full((num, most), self.pad_id, dtype=torch.long, device=self.device),
            torch.zeros((num, most), device=self.device),
            torch.zeros_like(self.length_of),
            torch.zeros(num, dtype=torch.bool, device=self.device),
        )
        self.finished = 0
        if self.joins:
            for group in self._by_width():
                self._decode_group(group)
        else:
            for rows in self._of_equal_length():
                self._decode_together(rows)
        return self.out

    # ---- rows that come and go

    def _by_width(self) -> list[list[int]]:
        """Requests that fit one cache: those of like width, so that short ones do not pay for the longest."""
        order = sorted(range(len(self.prompts)), key=lambda i: (-self.lengths[i], self.prompts[i], i))
        return [list(g) for _, g in groupby(order, key=lambda i: (self.lengths[i] + self.limits[i] - 1).bit_length())]

    def _decode_group(self, waiting: list[int]) -> None:
        columns = max(self.lengths[i] + self.limits[i] for i in waiting)
        slots = min(len(waiting), self.budget.rows, max(1, self.budget.cache_tokens // columns))
        cache, prefix = Slots(slots, columns), self._read_prefix(waiting)
        nothing = torch.zeros(0, dtype=torch.long, device=self.device)
        batch = _Batch(nothing, nothing, nothing, torch.zeros(0, device=self.device), nothing)
        while waiting or len(batch.rows):
            free = slots - len(batch.rows)
            if waiting and (not len(batch.rows) or free >= FREE_SLOTS * slots):
                for entering in self._entering(waiting, free, empty=not len(batch.rows)):
                    self._enter(batch, cache, prefix, entering)
            running = self._sample(batch)
            if not bool(running.all()):
                batch.select(cache.leave(running))
            if len(batch.rows):
                self._make_room(batch, cache)
                self._advance(batch, cache.cache, mask=True)

    def _entering(self, waiting: list[int], free: int, empty: bool) -> Iterator[list[int]]:
        """Rows that enter now, taken off `waiting`, in parts of one forward: whole groups of a prompt if they fit."""
        part: list[int] = []
        read: set[Prompt] = set()
        while waiting and free:
            prompt = self.prompts[waiting[0]]
            group = len(list(takewhile(self._has(prompt), waiting)))
            if group > free and not (empty and not part):
                break
            group = min(group, free)
            if part and (len(read) + 1) * self.lengths[part[0]] > PREFILL_TOKENS:
                yield part
                part, read = [], set()
            read.add(prompt)
            part += waiting[:group]
            del waiting[:group]
            free -= group
        if part:
            yield part

    def _has(self, prompt: Prompt) -> Callable[[int], bool]:
        return lambda i: self.prompts[i] == prompt

    def _enter(self, batch: _Batch, cache: Slots, prefix: tuple[Prompt, Any], rows: list[int]) -> None:
        prompts = list(dict.fromkeys(self.prompts[i] for i in rows))
        filled, logits = self._read_prompts(prompts, prefix)
        place = {prompt: n for n, prompt in enumerate(prompts)}
        source = torch.tensor([place[self.prompts[i]] for i in rows], device=self.device)
        lengths = [self.lengths[i] for i in rows]
        longest = max([*lengths, *(batch.width - batch.pad).tolist()])
        self._shift(batch, cache, batch.width - longest)
        cache.enter(filled, source, lengths, len(prefix[0]))
        index = torch.tensor(rows, device=self.device)
        batch.append(index, batch.width - self.length_of[index], logits[source])

    def _make_room(self, batch: _Batch, cache: Slots) -> None:
        """Another column, and no more unused ones than are cheaper than moving the rows."""
        spare = int(batch.pad.min())
        if batch.width == cache.columns or spare > SPARE_COLUMNS * batch.width:
            assert spare > 0, "a row of full width has finished"
            self._shift(batch, cache, spare)

    def _shift(self, batch: _Batch, cache: Slots, by: int) -> None:
        cache.shift(by)
        batch.pad, batch.width = batch.pad - by, batch.width - by

    # ---- prompts

    def _read_prefix(self, rows: list[int]) -> tuple[Prompt, Any]:
        """What all of these prompts begin with, and the cache of one row that has read it; nothing if it is short."""
        prompts = {self.prompts[i] for i in rows}
        first, last = min(prompts), max(prompts)
        most = min(map(len, prompts)) - 1  # a token is left to be read, for the logits
        shared = next((n for n in range(most) if first[n] != last[n]), most)
        if len(prompts) < 2 or shared < SHARED_PREFIX or not bears_gaps(self.module):
            return (), None
        tokens = torch.tensor([first[:shared]], device=self.device)
        cache = whole_cache(self.module)
        self._forward(tokens, torch.ones_like(tokens), torch.arange(shared, device=self.device)[None], cache)
        return first[:shared], cache

    def _read_prompts(self, prompts: list[Prompt], prefix: tuple[Prompt, Any]) -> tuple[Any, Tensor]:
        """The cache of the prompts (the prefix, padding, the rest of each) and the logits [P, V] after each."""
        start, read = len(prefix[0]), prefix[1]
        cache = whole_cache(self.module) if read is None else repeated(read, len(prompts))
        width = max(len(p) for p in prompts) - start
        rests = torch.tensor([len(p) - start for p in prompts], device=self.device)
        tokens = torch.tensor([[self.pad_id] * (width + start - len(p)) + list(p[start:]) for p in prompts])
        inside = (torch.arange(width, device=self.device)[None, :] >= width - rests[:, None]).long()
        positions = start + (inside.cumsum(1) - 1).clamp(min=0)
        mask = torch.cat([inside.new_ones(len(prompts), start), inside], 1)
        logits, cache = self._forward(tokens.to(self.device), mask, positions, cache)
        return cache, logits

    # ---- rows that stay together: caches that cannot take or drop rows, and have read their padding

    def _of_equal_length(self) -> Iterator[list[int]]:
        order = sorted(range(len(self.prompts)), key=lambda i: (self.lengths[i], self.prompts[i], i))
        for _, equal in groupby(order, key=lambda i: self.lengths[i]):
            rows = list(equal)
            columns = max(self.lengths[i] + self.limits[i] for i in rows)
            size = min(self.budget.rows, max(1, self.budget.cache_tokens // columns))
            yield from (rows[start : start + size] for start in range(0, len(rows), size))

    def _decode_together(self, rows: list[int]) -> None:
        tokens = torch.tensor([self.prompts[i] for i in rows], device=self.device)
        positions = torch.arange(tokens.shape[1], device=self.device)[None].expand_as(tokens)
        logits, cache = self._forward(tokens, None, positions, None)
        index = torch.tensor(rows, device=self.device)
        zeros = torch.zeros_like(index)
        batch = _Batch(index, zeros, zeros, logits, zeros, tokens.shape[1])
        alive = torch.ones_like(index, dtype=torch.bool)
        while True:
            alive = self._sample(batch, alive)
            if not bool(alive.any()):
                return
            self._advance(batch, cache, mask=False)

    # ---- a step

    def _sample(self, batch: _Batch, alive: Tensor | None = None) -> Tensor:
        """The next token of each row, written down; which of the rows go on. Those not `alive` only fill."""
        ids, logp = self.choose(batch.logits, batch.rows, batch.done)
        batch.token = ids
        rows, done = batch.rows, batch.done
        if alive is not None:
            ids, logp, rows, done = ids[alive], logp[alive], rows[alive], done[alive]
        out = self.out
        out.ids[rows, done], out.logp[rows, done] = ids, logp
        out.lengths[rows] = done + 1
        out.stopped[rows] = self.ends(out.ids, rows, done + 1)
        batch.done = (batch.done + 1).minimum(self.limit_of[batch.rows] - 1) if alive is not None else batch.done + 1
        going = ~out.stopped[batch.rows] & (out.lengths[batch.rows] < self.limit_of[batch.rows])
        self.finished += len(rows) - int((going if alive is None else going & alive).sum())
        self.notify(self.finished)
        return going if alive is None else going & alive

    def _advance(self, batch: _Batch, cache: Any, mask: bool) -> None:
        """Reads the tokens just sampled; `mask` False: there is no padding, and a recurrent model is given no mask."""
        batch.width += 1
        positions = self.length_of[batch.rows] + batch.done - 1
        shown: Tensor | None = None
        if mask:
            columns = torch.arange(batch.width, device=self.device)
            shown = (columns[None, :] >= batch.pad[:, None]).long()
        batch.logits, _ = self._forward(batch.token[:, None], shown, positions[:, None], cache)

    def _forward(self, tokens: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """[n, V] logits after the last token, and the cache."""
        extra: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
        if supports_logits_to_keep(self.module):
            extra["logits_to_keep"] = 1
        out = self.module(
            input_ids=tokens,
            **position_kwargs(self.module, positions),
            **forward_kwargs(self.module, cache),
            **extra,
        )
        return out.logits[:, -1], cache_of(out)
