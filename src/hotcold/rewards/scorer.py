"""Reward functions with weights as one scorer. What is not a score is never a 0."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hotcold.errors import InputError, RewardError
from hotcold.rewards.base import LARGEST, Scorable, Score, Service, runs_in_worker
from hotcold.rewards.calls import note_of, parts_here
from hotcold.rewards.failures import Limits
from hotcold.rewards.functions import Reward, RewardFunction, load_reward
from hotcold.rewards.rounds import WorkerFunction
from hotcold.rewards.scores import Part
from hotcold.rewards.workers import Workers


class FunctionScorer:
    """The weighted sum of reward functions; a weight of 0 makes a function a metric only.

    A None from a function with another weight leaves the response without a score. Functions that return an awaitable
    (`async def`) are awaited together, in a running event loop (a notebook) from a thread of their own. A function that
    lives in `workers` is called there, and its failures are settled there; a failure of one that lives here is raised.
    """

    def __init__(self, functions: Sequence[Reward], weights: Sequence[float], workers: Workers | None = None) -> None:
        if len(functions) != len(weights):
            raise InputError(
                f"{len(weights)} reward weights for {len(functions)} reward functions: give one weight for each."
            )
        if not all(math.isfinite(weight) for weight in weights):
            raise InputError(f"reward_weights={list(weights)}: finite numbers are needed.")
        self.functions = tuple(functions)
        self.weights = tuple(float(weight) for weight in weights)
        self.names = unique([function.name for function in functions])
        self._workers = workers
        here = [function.function for function in functions if isinstance(function, RewardFunction)]
        self._services = [function for function in here if isinstance(function, Service)]

    def score(self, items: Sequence[Scorable]) -> list[Score]:
        """One score for each item, in order."""
        if not items:
            return []
        parts = self._parts(items)
        return [self._total([of_function[i] for of_function in parts], items[i]) for i in range(len(items))]

    def take_counts(self) -> dict[str, int]:
        counts = Counter({} if self._workers is None else self._workers.ledger.take_counts())
        for service in self._services:
            counts.update(service.take_counts())  # two judges are counted together
        return dict(counts)

    def listen(
        self,
        tell: Callable[[str], None],
        log: Callable[[str], None],
        beat: Callable[[str], None] = lambda stage: None,
        folder: Path | None = None,
    ) -> None:
        """`tell` hears of failures, once for each kind; `log` what the functions print; `beat` that it goes on.

        `folder`: of the run.
        """
        for note in dict.fromkeys(map(note_of, self.functions)):
            if note:
                tell(note)
        for service in self._services:
            service.listen(tell, beat, folder)
        if self._workers is not None:
            self._workers.ledger.tell, self._workers.log, self._workers.beat = tell, log, beat

    def close(self) -> None:
        """Ends the workers; scoring again starts new ones."""
        for service in self._services:
            service.close()
        if self._workers is not None:
            self._workers.close()

    def _parts(self, items: Sequence[Scorable]) -> list[list[Part]]:
        """By function what it says of each item."""
        named = list(zip(self.functions, self.names, strict=True))
        here = [(f, name) for f, name in named if isinstance(f, RewardFunction)]
        there = [(f, name) for f, name in named if isinstance(f, WorkerFunction)]
        names = [name for _, name in [*here, *there]]
        parts = parts_here([f for f, _ in here], names[: len(here)], items)
        if self._workers is not None:
            parts += self._workers.parts(there, items)
        return [parts[names.index(name)] for name in self.names]

    def _total(self, parts: Sequence[Part], item: Scorable) -> Score:
        by_name = {name: part.score for name, part in zip(self.names, parts, strict=True)}
        counted = [(weight, part) for weight, part in zip(self.weights, parts, strict=True) if weight != 0]
        if any(part.score is None for _, part in counted):
            return Score(None, by_name)
        total = math.fsum(weight * part.score for weight, part in counted if part.score is not None)
        steps = tuple((position, weight * value) for weight, part in counted for position, value in part.steps)
        largest = max([abs(total), abs(total + math.fsum(v for _, v in steps)), *(abs(v) for _, v in steps)])
        if not largest <= LARGEST:
            raise RewardError(
                f"row {item.row}: the weighted sum of {by_name}, with its steps, reaches {largest}: "
                "use smaller weights or scores."
            )
        return Score(total, by_name, steps)


def load_scorer(
    rewards: Sequence[Any], weights: Sequence[float], limits: Limits, dialect: str = "auto"
) -> FunctionScorer:
    """Functions in files go to worker processes; with `limits.workers` 0 all are called in this one.

    `dialect`: the form of the functions that are the user's own.
    """
    in_files = [reward for reward in rewards if runs_in_worker(reward)] if limits.workers else []
    workers = Workers(in_files, limits, dialect) if in_files else None
    there = iter(workers.functions if workers else ())
    functions: list[Reward] = []
    for reward in rewards:
        functions.append(next(there) if workers and runs_in_worker(reward) else load_reward(reward, dialect))
    return FunctionScorer(functions, weights, workers)


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names; a repeated one gets the suffix _2, _3, ..."""
    found: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in found:
            number += 1
            candidate = f"{name}_{number}"
        found.append(candidate)
    return tuple(found)
