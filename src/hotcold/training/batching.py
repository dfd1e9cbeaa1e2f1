"""How a step's rows are cut: minibatches (one optimiser step each), then micro-batches (one forward each).

A cut takes rows, never tokens, and weights come from the whole minibatch, so micro-batches cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotcold.algorithms.base import Forward, Objective
from hotcold.batch import Batch


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimiser step."""

    epoch: int
    rows: list[int]  # all that count in the denominators
    micro_batches: list[list[int]]  # those that are computed


def layout(
    batch: Batch, objective: Objective, skipped: Tensor, tokens_per_microbatch: int, seed: Sequence[int]
) -> Iterator[Minibatch]:
    """Every optimiser step that `objective` takes on the batch, in order; shuffled anew each epoch."""
    for epoch in range(objective.epochs):
        for rows in minibatch_rows(batch, objective.minibatches, [*seed, epoch]):
            computed = [row for row in rows if not skipped[row]]
            yield Minibatch(epoch, rows, micro_batches(batch, computed, tokens_per_microbatch))


def minibatch_rows(batch: Batch, num_minibatches: int, seed: Sequence[int]) -> list[list[int]]:
    """The batch's rows in `num_minibatches` nearly equal parts; rows of a unit stay together."""
    if num_minibatches == 1:
        return [list(range(len(batch)))]
    units = _by_unit(batch, range(len(batch)))
    order = np.random.default_rng(list(seed)).permutation(len(units))
    parts = np.array_split(order, num_minibatches)
    return [sorted(row for unit in part for row in units[unit]) for part in parts]


def micro_batches(batch: Batch, rows: Sequence[int], tokens_per_microbatch: int) -> list[list[int]]:
    """Rows of like length together, as many as fit in rows x longest row <= tokens_per_microbatch (at least a unit)."""
    lengths = batch.lengths.tolist()
    units = sorted(_by_unit(batch, rows), key=lambda unit: (-max(lengths[r] for r in unit), unit[0]))
    out: list[list[int]] = []
    width = 0
    for unit in units:
        longest = max(lengths[r] for r in unit)
        if out and (len(out[-1]) + len(unit)) * max(width, longest) <= tokens_per_microbatch:
            out[-1] += unit
        else:
            out.append(list(unit))
            width = longest
    return out


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
