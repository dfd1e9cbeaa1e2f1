"""The update: from a scored batch to optimiser steps. It names no algorithm."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Objective
from hotcold.batch import Batch
from hotcold.engines.base import Engine, Pass
from hotcold.equations import approx_kl
from hotcold.memory import PeakMemory
from hotcold.models.reading import Laying
from hotcold.training.batching import Cut, Minibatch, Room, layout, skippable
from hotcold.training.mismatch import Mismatch
from hotcold.training.record import UpdateRecord

READ_BY_ENGINE = frozenset({"logp_old", "logp_ref", "kl_old", "values_old"})


@dataclass(frozen=True)
class UpdateSettings:
    tokens_per_microbatch: int
    max_grad_norm: Mapping[str, float | None] = field(default_factory=dict)  # by model; None: no limit
    seed: int = 0
    mismatch: Mismatch | None = None  # correction for tokens that another distribution sampled
    laying: Laying = Laying.ROWS  # how the engine reads the policy


def update(
    batch: Batch,
    algorithm: Algorithm,
    state: dict[str, float],
    engine: Engine,
    settings: UpdateSettings,
    step: int,
    rate: Callable[[Objective], float],
    memory: PeakMemory | None = None,
    before_change: Callable[[], None] = lambda: None,
) -> tuple[Batch, dict[str, float], UpdateRecord]:
    """Credit, then every objective's epochs and minibatches. `batch` holds only the rows that take part.

    `before_change` is called each time before parameters change.
    """
    room = Room(cut_of(settings))
    record = UpdateRecord(room=room)

    def part(name: str) -> AbstractContextManager[None]:
        return nullcontext() if memory is None else memory.part(name)

    if not len(batch):
        record.num_empty_steps += len(algorithm.objectives)
        return batch, state, record
    mark = time.perf_counter()
    with part("reads"):
        batch = fill_reads(batch, algorithm, engine, settings, step, room)
    record.seconds_reading += time.perf_counter() - mark
    early = batch.logp_old is not None
    correction = None if settings.mismatch is None else settings.mismatch.weights(batch)
    with torch.no_grad():
        batch, state = algorithm.credit(batch, state)
    record.add_credit(batch, correction)
    for objective in algorithm.objectives:
        if step <= objective.start:
            record.waiting.add(objective.model)
            continue
        of_policy = objective.model == "policy"
        skipped = _none(batch) if early else skippable(batch, objective)
        if of_policy and batch.logp_old is None and objective.epochs * objective.minibatches > 1:
            mark = time.perf_counter()
            with part("reads"):
                batch = filled(batch, frozenset({"logp_old"}), objective, skipped, engine, settings, step, room)
            record.seconds_reading += time.perf_counter() - mark
        weigh = correction if of_policy else None
        with part("update"):
            apply(batch, objective, skipped, weigh, engine, settings, step, rate(objective), record, before_change)
    return batch, state, record


def fill_reads(
    batch: Batch,
    algorithm: Algorithm,
    engine: Engine,
    settings: UpdateSettings,
    step: int,
    room: Room | None = None,
) -> Batch:
    """What credit reads, of every row, in the micro-batches in which the model that answers is trained."""
    room = Room(cut_of(settings)) if room is None else room
    names = set(algorithm.reads & READ_BY_ENGINE) | ({"logp_old"} if settings.mismatch is not None else set())
    if "values_old" in names:
        critic = objective_of(algorithm, "critic")
        batch = filled(batch, frozenset({"values_old"}), critic, _none(batch), engine, settings, step, room)
    if of_policy := frozenset(names - {"values_old"}):
        policy = objective_of(algorithm, "policy")
        batch = filled(batch, of_policy, policy, _none(batch), engine, settings, step, room)
    return batch


def apply(
    batch: Batch,
    objective: Objective,
    skipped: Tensor,
    correction: Tensor | None,
    engine: Engine,
    settings: UpdateSettings,
    step: int,
    rate: float,
    record: UpdateRecord,
    before_change: Callable[[], None] = lambda: None,
) -> None:
    """The optimiser steps of one objective. `correction` [B, T] multiplies the loss of each token."""
    if objective.restart:
        before_change()
        engine.restart(objective.model)
    limit = settings.max_grad_norm.get(objective.model)
    part_record = record.of(objective.model)
    part_record.begin(len(batch), int(skipped.sum()), limit)
    room = record.room
    for minibatch in layout(batch, objective, skipped, room.cut, _seed(settings, step)):
        if not minibatch.micro_batches:
            part_record.num_empty_steps += 1
            continue
        weights = objective.weighting(batch.trained[minibatch.rows])
        if correction is not None:
            weights = weights * correction[minibatch.rows].to(weights.dtype)
        backward = partial(_backward, batch, weights, minibatch.rows, objective, engine)
        passes = room.run(batch, minibatch.micro_batches, backward, partial(engine.discard, objective.model))
        drift, num_tokens = 0.0, 0
        for part, done in passes:
            part_record.add_pass(part, done, batch.logp_old is not None, objective.restart)
            if done.logp is not None and done.logp_old is not None:
                drift += float(approx_kl((done.logp - done.logp_old)[part.trained][None]).sum())
                num_tokens += int(part.trained.sum())
        if objective.max_approx_kl is not None and drift > objective.max_approx_kl * num_tokens:
            engine.discard(objective.model)
            part_record.stop()
            break
        before_change()
        part_record.add_step(engine.step(objective.model, rate, limit))


def _backward(
    batch: Batch, weights: Tensor, rows: list[int], objective: Objective, engine: Engine, micro: list[list[int]]
) -> list[tuple[Batch, Pass]]:
    """The gradient of one optimiser step. `weights` [rows, T] of the rows that it averages over."""
    place = {row: i for i, row in enumerate(rows)}
    passes = []
    for computed in micro:
        part = batch.select(computed)
        share = weights[[place[row] for row in computed], : part.tokens.shape[1]]
        passes.append((part, engine.backward(part, share, objective)))
    return passes


def filled(
    batch: Batch,
    names: frozenset[str],
    objective: Objective,
    skipped: Tensor,
    engine: Engine,
    settings: UpdateSettings,
    step: int,
    room: Room,
) -> Batch:
    """`names` of the rows that will be trained, in the micro-batches of the objective's first epoch: the same
    arithmetic, so that the ratio before the first update is exactly 1."""
    columns = {name: torch.zeros(batch.tokens.shape, dtype=batch.token_rewards.dtype) for name in names}

    def read(micro: list[list[int]]) -> None:
        for rows in micro:
            part = batch.select(rows)
            for name, value in engine.read(part, names).items():
                columns[name][rows, : part.tokens.shape[1]] = value.to(columns[name].dtype)

    for minibatch in _first_epoch(batch, objective, skipped, room.cut, _seed(settings, step)):
        room.run(batch, minibatch.micro_batches, read)
    return batch.replace(**columns)


def _first_epoch(batch: Batch, objective: Objective, skipped: Tensor, cut: Cut, seed: Sequence[int]) -> list[Minibatch]:
    return list(islice(layout(batch, objective, skipped, cut, seed), objective.minibatches))


def cut_of(settings: UpdateSettings) -> Cut:
    return Cut(settings.tokens_per_microbatch, settings.laying)


def _seed(settings: UpdateSettings, step: int) -> Sequence[int]:
    return (settings.seed, step)


def _none(batch: Batch) -> Tensor:
    """No row is skipped but those without a trained token."""
    return ~batch.trained.any(1)


def objective_of(algorithm: Algorithm, model: str) -> Objective:
    return next(o for o in algorithm.objectives if o.model == model)
