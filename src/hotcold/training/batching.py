"""How a step's rows are cut: minibatches (one optimiser step each), then micro-batches (one forward each).

A cut takes rows, never tokens, and weights come from the whole minibatch, so micro-batches cannot change the gradient.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hotcold.algorithms.base import Forward, Objective
from hotcold.batch import Batch
from hotcold.errors import OutOfMemory
from hotcold.memory import LESS
from hotcold.models.reading import Laying

T = TypeVar("T")


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimiser step."""

    epoch: int
    rows: list[int]  # all that count in the denominators
    micro_batches: list[list[int]]  # those that are computed


@dataclass(frozen=True)
class Cut:
    """How large a micro-batch may be, and how its tokens go through a model."""

    tokens_per_microbatch: int
    laying: Laying = Laying.ROWS


@dataclass
class Room:
    """How large micro-batches are from here on: the cut is halved where memory does not suffice."""

    cut: Cut
    num_halved: int = 0

    def run(
        self,
        batch: Batch,
        micro: list[list[int]],
        work: Callable[[list[list[int]]], T],
        undo: Callable[[], None] = lambda: None,
    ) -> T:
        """`work` on these micro-batches of `batch`; out of memory, `undo` and all of it again on smaller ones."""
        if self.num_halved:  # they may have been laid before
            micro = micro_batches(batch, _rows(micro), self.cut)
        while True:
            try:
                return work(micro)
            except OutOfMemory:
                pass  # what the interrupted work held is let go with its traceback
            undo()
            gc.collect()
            micro = self._smaller(batch, micro)

    def _smaller(self, batch: Batch, micro: list[list[int]]) -> list[list[int]]:
        """The same rows, cut by the first half, quarter, ... of the tokens that cuts them further."""
        rows = _rows(micro)
        if len(micro) == len(_by_unit(batch, rows)):
            longest = int(batch.lengths[rows].max())
            raise OutOfMemory(f"a single row of {longest} tokens, prompt and response, does not fit in memory.\n{LESS}")
        smaller = micro
        while len(smaller) <= len(micro):
            self.cut = replace(self.cut, tokens_per_microbatch=max(1, self.cut.tokens_per_microbatch // 2))
            self.num_halved += 1
            smaller = micro_batches(batch, rows, self.cut)
        return smaller


def _rows(micro: list[list[int]]) -> list[int]:
    return sorted(row for rows in micro for row in rows)


def layout(batch: Batch, objective: Objective, skipped: Tensor, cut: Cut, seed: Sequence[int]) -> Iterator[Minibatch]:
    """Every optimiser step that `objective` takes on the batch, in order; shuffled anew each epoch."""
    for epoch in range(objective.epochs):
        for rows in minibatch_rows(batch, objective.minibatches, [*seed, epoch]):
            computed = [row for row in rows if not skipped[row]]
            yield Minibatch(epoch, rows, micro_batches(batch, computed, cut))


def minibatch_rows(batch: Batch, num_minibatches: int, seed: Sequence[int]) -> list[list[int]]:
    """The batch's rows in `num_minibatches` nearly equal parts; rows of a unit stay together."""
    if num_minibatches == 1:
        return [list(range(len(batch)))]
    units = _by_unit(batch, range(len(batch)))
    order = np.random.default_rng(list(seed)).permutation(len(units))
    parts = np.array_split(order, num_minibatches)
    return [sorted(row for unit in part for row in units[unit]) for part in parts]


def micro_batches(batch: Batch, rows: Sequence[int], cut: Cut) -> list[list[int]]:
    """Rows of like length together, as many as fit (at least a unit); rows of one prompt where prompts are shared."""
    laid = {Laying.ROWS: _by_length, Laying.PROMPTS: _by_prompt, Laying.PACKED: _packed}
    return laid[cut.laying](batch, rows, cut.tokens_per_microbatch)


def _by_length(batch: Batch, rows: Sequence[int], tokens_per_microbatch: int) -> list[list[int]]:
    """rows x longest row <= tokens_per_microbatch, with little padding: the longest row stands first."""
    lengths = batch.lengths.tolist()
    units = sorted(_by_unit(batch, rows), key=lambda unit: (-max(lengths[r] for r in unit), unit[0]))
    out: list[list[int]] = []
    for unit in units:
        together = [*(out[-1] if out else []), *unit]
        columns = len(together) * max(lengths[r] for r in together)
        padding = columns - sum(lengths[r] for r in together)
        if out and columns <= tokens_per_microbatch and padding <= max(PADDING * columns, CHEAP):
            out[-1] = together
        else:
            out.append(list(unit))
    return out


def _by_prompt(batch: Batch, rows: Sequence[int], tokens_per_microbatch: int) -> list[list[int]]:
    """prompts x longest prompt + rows x longest response <= tokens_per_microbatch.

    Prompts of like length stand together, and within a prompt responses of like length. Where the padding that a row
    would bring is more than its prompt, a new micro-batch is cheaper.
    """
    prompts = batch.prompt_lengths.tolist()
    responses = (batch.lengths - batch.prompt_lengths).tolist()
    name = {r: tuple(batch.tokens[r, : prompts[r]].tolist()) for r in rows}
    units = _by_unit(batch, rows)
    units.sort(key=lambda u: (-prompts[u[0]], name[u[0]], -max(responses[r] for r in u), u[0]))
    out: list[list[int]] = []
    for unit in units:
        together = [*(out[-1] if out else []), *unit]
        prompt_width = max(prompts[r] for r in together)
        columns = len(together) * max(responses[r] for r in together)
        padding = columns - sum(responses[r] for r in together)
        fits = len({name[r] for r in together}) * prompt_width + columns <= tokens_per_microbatch
        if out and fits and padding <= max(PADDING * columns, prompt_width, CHEAP):
            out[-1] = together
        else:
            out.append(list(unit))
    return out


def _packed(batch: Batch, rows: Sequence[int], tokens_per_microbatch: int) -> list[list[int]]:
    """Distinct prompts + responses <= tokens_per_microbatch, in the fewest parts, as even as that allows."""
    if not rows:
        return []
    prompts = batch.prompt_lengths.tolist()
    responses = (batch.lengths - batch.prompt_lengths).tolist()
    name = {r: tuple(batch.tokens[r, : prompts[r]].tolist()) for r in rows}
    units = sorted(_by_unit(batch, rows), key=lambda unit: (name[unit[0]], unit[0]))

    def filled(limit: int) -> list[list[int]]:
        out: list[list[int]] = []
        size = 0
        there: set[tuple[int, ...]] = set()
        for unit in units:
            new = {name[r] for r in unit} - there
            more = sum(map(len, new)) + sum(responses[r] for r in unit)
            if out and size + more <= limit:
                out[-1] = out[-1] + unit
                size, there = size + more, there | new
            else:
                out.append(list(unit))
                there = {name[r] for r in unit}
                size = sum(map(len, there)) + sum(responses[r] for r in unit)
        return out

    fewest = len(filled(tokens_per_microbatch))
    low, high = 1, tokens_per_microbatch  # the least limit that needs no further part
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(filled(middle)) <= fewest else (middle + 1, high)
    return filled(high)


PADDING = 0.1  # share of the columns that may be padding before rows are cut apart
CHEAP = 64  # tokens of padding: less than what another pass over the parameters costs


def _by_unit(batch: Batch, rows: Sequence[int]) -> list[list[int]]:
    units: dict[int, list[int]] = {}
    names = batch.unit.tolist()
    for row in rows:
        units.setdefault(names[row], []).append(row)
    return list(units.values())


def skippable(batch: Batch, objective: Objective) -> Tensor:
    """[B] bool: rows whose loss is identically 0, so that computing them would add nothing to the gradient.

    Candidates have advantage 0 at every trained token and a loss of log-probabilities alone. Whether the loss really
    vanishes there is asked of the loss itself, at many log-probabilities: it and its gradient must be exactly 0.
    """
    nothing = ~batch.trained.any(1)
    if batch.advantages is None or objective.needs - {"logp"}:
        return nothing
    candidates = ~nothing & (torch.where(batch.trained, batch.advantages, 0.0) == 0).all(1)
    rows = candidates.nonzero().flatten()
    if not len(rows):
        return nothing
    part, zero = batch.select(rows), torch.ones(len(rows), dtype=torch.bool)
    for probes in _together(list(_probes(part)), part.tokens.numel()):
        copies = part.select(torch.arange(len(rows)).repeat(len(probes)))
        logp, old = (torch.cat(side) for side in zip(*probes, strict=True))
        zero &= _vanishes(copies, objective, logp, old).view(len(probes), len(rows)).all(0)
    skipped = nothing.clone()
    skipped[rows[zero]] = True
    return skipped


PROBES = (-0.003, -0.1, -1.0, -5.0, -25.0)  # nats
MOST_AT_ONCE = 2**18  # tokens that are probed in one call of the loss


def _together(probes: list[tuple[Tensor, Tensor]], num_tokens: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """In parts of as many probes as may be asked at once: small batches are asked everything in one call."""
    size = max(1, MOST_AT_ONCE // num_tokens)
    for start in range(0, len(probes), size):
        yield probes[start : start + size]


def _probes(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of log pi, log pi_old [B, T]: every pair of levels, so that chance misses no hinge, then random ones."""
    shape, dtype = batch.tokens.shape, batch.token_rewards.dtype
    for logp in PROBES:
        for old in PROBES:
            yield torch.full(shape, logp, dtype=dtype), torch.full(shape, old, dtype=dtype)
    random = torch.Generator().manual_seed(0)
    for _ in range(3):
        yield (
            -5 * torch.rand(shape, generator=random, dtype=dtype),
            -5 * torch.rand(shape, generator=random, dtype=dtype),
        )


def _vanishes(batch: Batch, objective: Objective, logp: Tensor, old: Tensor) -> Tensor:
    """[B] bool: the loss and its gradient are exactly 0 at these log-probabilities."""
    trained = batch.trained
    logp = torch.where(trained, logp, 0.0).requires_grad_()
    with torch.enable_grad():
        loss = objective.loss(Forward(logp=logp), batch.replace(logp_old=torch.where(trained, old, 0.0))).loss
        loss = torch.where(trained, loss, 0.0)
        gradient = torch.zeros_like(loss)
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss.sum(), logp, allow_unused=True, materialize_grads=True)
    return ((loss == 0) & (torch.where(trained, gradient, 0.0) == 0)).all(1)
