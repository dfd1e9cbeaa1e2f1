"""The gradient that an algorithm expects: its real batch, credit, loss, weighting and update, summed over every choice.

Responses of a group have no order, so a group is a multiset with its multinomial probability; nor have the groups of a
step, which are those of one prompt. Rows of the groups stand
interleaved, as no code may rely on where a row stands.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Objective
from hotcold.batch import Batch, Rollout, collate
from hotcold.engines.base import Pass, StepResult
from hotcold.engines.local import LocalEngine, Trainee
from hotcold.lab.tiny import Response, Table, TablePolicy, Tiny, log_probability, probabilities, table_critic
from hotcold.models.reference import FrozenReference
from hotcold.training.collect import kept
from hotcold.training.mismatch import Mismatch
from hotcold.training.record import UpdateRecord
from hotcold.training.truncation import KEEP, Truncation
from hotcold.training.update import UpdateSettings, update


@dataclass(frozen=True)
class Setting:
    """How an algorithm is put to work on a tiny world."""

    num_groups: int = 1  # prompts of the step
    old: Table | None = None  # pi_old where it is not the policy: responses come from it, and log pi_old is its own
    sampler: Table | None = None  # a sampling engine that differs from pi_old and reports its own log-probabilities
    mismatch: Mismatch | None = None
    truncation: Truncation = KEEP
    values: Sequence[float] | None = None  # the critic's, by prefix; None: 0 everywhere
    rate: float = 0.0  # of plain steps between several optimiser steps on a batch
    tokens_per_microbatch: int = 10**6
    seed: int = 0


@dataclass(frozen=True)
class Expected:
    """Of the step's update, uphill: minus the gradient of the loss, summed over the optimiser steps."""

    gradient: Tensor  # [prefixes, V]
    variance: float  # E|g|^2 - |E g|^2
    value_gradient: Tensor | None = None  # of the critic's values, by prefix
    metrics: dict[str, float] = field(default_factory=dict)


class Recorder:
    """The local engine; `step` keeps the gradient, and with a rate takes the plain step."""

    def __init__(self, tiny: Tiny, setting: Setting, has_critic: bool):
        self.policy = TablePolicy(tiny.logits, tiny.prefixes)
        models: dict[str, torch.nn.Module] = {"policy": self.policy}
        if has_critic:
            models["critic"] = table_critic(tiny, setting.values or [0.0] * len(tiny.prefixes))
        reference = FrozenReference(TablePolicy(tiny.reference, tiny.prefixes), "")
        self.engine = LocalEngine({name: _trainee(module) for name, module in models.items()}, 1.0, reference)
        old = self.policy if setting.old is None else TablePolicy(setting.old, tiny.prefixes)
        self.old = LocalEngine({"policy": _trainee(old)}, 1.0, reference)
        self.rate = setting.rate
        self.start = {name: [p.detach().clone() for p in t.parameters] for name, t in self.engine.models.items()}
        self.update: dict[str, list[Tensor]] = {}
        self.reset()

    def reset(self) -> None:
        for name, trainee in self.engine.models.items():
            trainee.clear()
            with torch.no_grad():
                for parameter, start in zip(trainee.parameters, self.start[name], strict=True):
                    parameter.copy_(start)
            self.update[name] = [torch.zeros_like(p) for p in trainee.parameters]

    def read(self, batch: Batch, names: frozenset[str]) -> dict[str, Tensor]:
        of_old = names & {"logp_old", "kl_old"}
        return {**self.old.read(batch, of_old), **self.engine.read(batch, names - of_old)}

    def backward(self, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
        return self.engine.backward(batch, weights, objective)

    def step(self, model: str, rate: float, max_norm: float | None) -> StepResult:
        trainee = self.engine.models[model]
        if trainee.fault:  # a NaN in the loss: the step is not taken
            trainee.clear()
            return StepResult(math.nan, False, trainee.fault)
        for total, parameter in zip(self.update[model], trainee.parameters, strict=True):
            if parameter.grad is not None:
                total -= parameter.grad
        if self.rate:
            return trainee.step(self.rate, None)
        trainee.clear()
        return StepResult(0.0, True)

    def discard(self, model: str) -> None:
        self.engine.discard(model)

    def restart(self, model: str) -> None:
        with torch.no_grad():
            for parameter, start in zip(self.engine.models[model].parameters, self.start[model], strict=True):
                parameter.copy_(start)


def _trainee(module: torch.nn.Module) -> Trainee:
    return Trainee(module, torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0))


T = TypeVar("T")
Watch = Callable[[Batch, UpdateRecord], None]


def expected_update(
    algorithm: Algorithm, tiny: Tiny, setting: Setting = Setting(), watch: Watch | None = None
) -> Expected:
    """The mean and the variance of the step's update. `watch` sees every batch as it comes from credit."""
    has_critic = any(objective.model == "critic" for objective in algorithm.objectives)
    recorder = Recorder(tiny, setting, has_critic)
    settings = UpdateSettings(setting.tokens_per_microbatch, {}, setting.seed, setting.mismatch)
    step = 1 + max(objective.start for objective in algorithm.objectives)
    shape = (len(tiny.prefixes), tiny.vocabulary)
    mean, square = torch.zeros(shape, dtype=torch.float64), 0.0
    of_values = torch.zeros(len(tiny.prefixes), dtype=torch.float64)
    for rollouts, probability in batches(algorithm, tiny, setting):
        batch = prepared(rollouts, algorithm, setting.truncation)
        recorder.reset()
        batch, _, record = update(batch, algorithm, algorithm.state(), recorder, settings, step, lambda _: setting.rate)
        if watch is not None:
            watch(batch, record)
        (gradient,) = recorder.update["policy"]
        mean += probability * gradient
        square += probability * float((gradient**2).sum())
        if has_critic:
            of_values += probability * recorder.update["critic"][0][0]
    return Expected(mean, square - float((mean**2).sum()), of_values if has_critic else None)


def prepared(rollouts: Sequence[Rollout], algorithm: Algorithm, truncation: Truncation) -> Batch:
    """As the loop does it, in float64."""
    batch = truncation.apply(collate64(rollouts))
    return batch.select(kept(batch, algorithm))


def collate64(rollouts: Sequence[Rollout]) -> Batch:
    return collate(rollouts, dtype=torch.float64)


def batches(algorithm: Algorithm, tiny: Tiny, setting: Setting) -> Iterator[tuple[list[Rollout], float]]:
    """Every step's rows that can come, with their probability; rejected groups are replaced as the loop does it."""
    size = algorithm.plan.group_size if algorithm.plan else 1
    sampled = setting.sampler if setting.sampler is not None else setting.old
    probability = probabilities(tiny, tiny.logits if sampled is None else sampled)
    groups = list(multisets(tiny.responses, probability, size))
    reported = sampler_report(tiny, setting)
    refill = algorithm.plan.refill if algorithm.plan else 0
    if refill and setting.num_groups == 1:
        groups = _with_refill(groups, algorithm, tiny, setting, refill, reported)
    for members, weight in without_order(groups, setting.num_groups):
        yield interleaved(tiny, members, reported, algorithm.plan is None), weight


def multisets(
    responses: Sequence[Response], probability: dict[Response, float], size: int
) -> Iterator[tuple[tuple[Response, ...], float]]:
    """Groups without order, each with the probability of all its orders together."""
    yield from without_order([(y, probability[y]) for y in responses], size)


def without_order(choices: Sequence[tuple[T, float]], size: int) -> Iterator[tuple[tuple[T, ...], float]]:
    """Every way to draw `size` of them, order aside, with its probability."""
    for drawn in itertools.combinations_with_replacement(range(len(choices)), size):
        orders = math.factorial(size) // math.prod(math.factorial(n) for n in Counter(drawn).values())
        yield tuple(choices[i][0] for i in drawn), orders * math.prod(choices[i][1] for i in drawn)


def _with_refill(
    groups: list[tuple[tuple[Response, ...], float]],
    algorithm: Algorithm,
    tiny: Tiny,
    setting: Setting,
    refill: int,
    reported: dict[Response, list[float]] | None,
) -> list[tuple[tuple[Response, ...], float]]:
    """One prompt: a rejected group is drawn anew at most `refill` times. P(g) (1 + q + ... + q^refill), q: rejected."""
    accepted = []
    for members, _ in groups:
        batch = setting.truncation.apply(collate64(interleaved(tiny, [members], reported, False)))
        accepted.append(bool(kept(batch, algorithm).any()))
    q = math.fsum(p for (_, p), fine in zip(groups, accepted, strict=True) if not fine)
    more = math.fsum(q**n for n in range(refill + 1))
    return [(members, p * more if fine else p * q**refill) for (members, p), fine in zip(groups, accepted, strict=True)]


def sampler_report(tiny: Tiny, setting: Setting) -> dict[Response, list[float]] | None:
    """log-probabilities that the sampling engine reports, by response."""
    table = setting.sampler if setting.sampler is not None else setting.old
    logits = torch.tensor(tiny.logits if table is None else table, dtype=torch.float64)
    return {y: log_probability(logits, tiny, y).tolist() for y in tiny.responses}


def interleaved(
    tiny: Tiny, members: Sequence[Sequence[Response]], reported: dict[Response, list[float]] | None, imitated: bool
) -> list[Rollout]:
    """The rows of the groups in turn: first responses, second responses, ..."""
    num_groups, rows = len(members), []
    for place, turn in enumerate(zip(*members, strict=True)):
        for group, response in enumerate(turn):
            logp = None if reported is None else reported[response]
            row = tiny.rollout(response, group, place * num_groups + group, logp)
            rows.append(replace(row, demonstration=True) if imitated else row)
    return rows
