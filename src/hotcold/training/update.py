"""The update: from a scored batch to optimiser steps. It names no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Objective
from hotcold.batch import Batch
from hotcold.engines.base import Engine
from hotcold.training.batching import Minibatch, layout, skippable
from hotcold.training.metrics import UpdateRecord


@dataclass(frozen=True)
class UpdateSettings:
    tokens_per_microbatch: int
    max_grad_norm: float | None
    seed: int


def update(
    batch: Batch,
    algorithm: Algorithm,
    state: dict[str, float],
    engine: Engine,
    settings: UpdateSettings,
    step: int,
    rate: Callable[[str], float],
) -> tuple[Batch, dict[str, float], UpdateRecord]:
    """Credit, then every objective's epochs and minibatches. `batch` holds only the rows that take part."""
    record = UpdateRecord()
    if not len(batch):
        record.num_empty_steps += len(algorithm.objectives)
        return batch, state, record
    early = "logp_old" in algorithm.reads
    if early:
        batch = recompute_old(batch, _policy_objective(algorithm), _none(batch), engine, settings, step)
    with torch.no_grad():
        batch, state = algorithm.credit(batch, state)
    for objective in algorithm.objectives:
        if step <= objective.start:
            continue
        skipped = _none(batch) if early else skippable(batch, objective)
        if batch.logp_old is None and objective.epochs * objective.minibatches > 1:
            batch = recompute_old(batch, objective, skipped, engine, settings, step)
        apply(batch, objective, skipped, engine, settings, step, rate(objective.model), record)
    return batch, state, record


def apply(
    batch: Batch,
    objective: Objective,
    skipped: Tensor,
    engine: Engine,
    settings: UpdateSettings,
    step: int,
    rate: float,
    record: UpdateRecord,
) -> None:
    """The optimiser steps of one objective."""
    if objective.restart:
        engine.restart(objective.model)
    record.num_rows, record.num_skipped_rows = len(batch), int(skipped.sum())
    for minibatch in layout(batch, objective, skipped, settings.tokens_per_microbatch, _seed(settings, step)):
        if not minibatch.micro_batches:
            record.num_empty_steps += 1
            continue
        weights = objective.weighting(batch.trained[minibatch.rows])
        place = {row: i for i, row in enumerate(minibatch.rows)}
        for rows in minibatch.micro_batches:
            part = batch.select(rows)
            share = weights[[place[row] for row in rows], : part.tokens.shape[1]]
            done = engine.backward(part, share, objective)
            record.add_pass(part, done, batch.logp_old is not None, objective.restart)
        record.add_step(engine.step(objective.model, rate, settings.max_grad_norm))


def recompute_old(
    batch: Batch, objective: Objective, skipped: Tensor, engine: Engine, settings: UpdateSettings, step: int
) -> Batch:
    """log pi_old of the rows that will be trained, in the micro-batches of the first epoch: the same arithmetic, so
    that the ratio before the first update is exactly 1."""
    old = torch.zeros(batch.tokens.shape, dtype=batch.token_rewards.dtype)
    for minibatch in _first_epoch(batch, objective, skipped, settings, step):
        for rows in minibatch.micro_batches:
            part = batch.select(rows)
            old[rows, : part.tokens.shape[1]] = engine.logp(part).to(old.dtype)
    return batch.replace(logp_old=old)


def _first_epoch(
    batch: Batch, objective: Objective, skipped: Tensor, settings: UpdateSettings, step: int
) -> list[Minibatch]:
    steps = layout(batch, objective, skipped, settings.tokens_per_microbatch, _seed(settings, step))
    return list(islice(steps, objective.minibatches))


def _seed(settings: UpdateSettings, step: int) -> Sequence[int]:
    return (settings.seed, step)


def _none(batch: Batch) -> Tensor:
    """No row is skipped but those without a trained token."""
    return ~batch.trained.any(1)


def _policy_objective(algorithm: Algorithm) -> Objective:
    return next(o for o in algorithm.objectives if o.model == "policy")
