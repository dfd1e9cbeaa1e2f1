"""What a step did, seen from outside: stand-ins for sampler, engine and record that note what is asked of them.

Times are the loop's own (`time/*`). What is noted here is only counted after a step's time has been taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hotcold.algorithms.base import Objective
from hotcold.batch import Batch, Rollout
from hotcold.bench.work import Row, Size, Tokens, forward, tokens_of, training
from hotcold.engines.base import Engine, Pass, StepResult
from hotcold.sampling.base import Request, Response, Sampler, SamplingOptions
from hotcold.training.loop import Record

STAGES = ("sampling", "log-probs", "update")


@dataclass
class Seen:
    """Of one step, by stage: necessary operations, tokens that are needed, tokens that went through a model."""

    metrics: dict[str, Any]
    work: dict[str, float]
    needed: dict[str, int]
    computed: dict[str, int]
    models_read: tuple[str, ...] = ()  # before the update


class Watch:
    """Collects what the stand-ins note during a step; `close` turns it into counts."""

    def __init__(self, sizes: Mapping[str, Size]) -> None:
        self.sizes = sizes  # by model
        self.stage: str | None = None
        self.computed = dict.fromkeys(STAGES, 0)
        self.sampled: list[tuple[Sequence[Request], Sequence[Response]]] = []
        self.read: dict[str, list[Batch]] = {}  # by model, of all calls before the update
        self.open: dict[str, list[Batch]] = {}  # by model, since its last optimiser step
        self.trained: list[tuple[Objective, list[Batch]]] = []  # one for each optimiser step
        self._objectives: dict[str, Objective] = {}

    @contextmanager
    def at(self, stage: str) -> Iterator[None]:
        self.stage = stage
        try:
            yield
        finally:
            self.stage = None

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before each forward of a trunk: every token that goes in, padding included."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        if self.stage is not None and isinstance(ids, Tensor):
            self.computed[self.stage] += ids.numel()

    def add_backward(self, batch: Batch, objective: Objective) -> None:
        self._objectives[objective.model] = objective
        self.open.setdefault(objective.model, []).append(batch)

    def forget(self, model: str) -> None:
        """A pass that ended in an error is computed again, if at all."""
        self.open.pop(model, None)

    def end_step(self, model: str) -> None:
        if batches := self.open.pop(model, None):
            self.trained.append((self._objectives[model], batches))

    def close(self, metrics: dict[str, Any]) -> Seen:
        passes: dict[str, list[tuple[Callable[[Size, Tokens], float], str, Tokens]]] = {
            "sampling": [(forward, "policy", self._tokens_sampled())],
            "log-probs": [(forward, model, tokens_in(batches)) for model, batches in self.read.items()],
            "update": [],
        }
        for objective, batches in self.trained:
            tokens = tokens_in(batches)
            passes["update"].append((training, objective.model, tokens))
            if "kl" in objective.needs:
                passes["update"].append((forward, "reference", tokens))
        work = {stage: sum(of(self.sizes[model], t) for of, model, t in done) for stage, done in passes.items()}
        needed = {stage: sum(t.num for *_, t in done) for stage, done in passes.items()}
        seen = Seen(metrics, work, needed, self.computed, tuple(self.read))
        self.computed = dict.fromkeys(STAGES, 0)
        self.sampled, self.read, self.open, self.trained = [], {}, {}, []
        return seen

    def _tokens_sampled(self) -> Tokens:
        """Of all calls of the step: a greedy response shares the prompt of its group."""
        pairs = [pair for requests, responses in self.sampled for pair in zip(requests, responses, strict=True)]
        rows = (Row(q.prompt_ids, max(len(r.ids) - 1, 0), len(r.ids)) for q, r in pairs)
        return tokens_of(rows, reads_start_once=True)


def tokens_in(batches: Sequence[Batch]) -> Tokens:
    """Of one pass that was cut into these micro-batches."""
    return tokens_of(row for batch in batches for row in rows_of(batch))


def rows_of(batch: Batch) -> Iterator[Row]:
    columns = (batch.tokens.tolist(), batch.prompt_lengths.tolist(), batch.trained)
    for tokens, start, trained in zip(*columns, strict=True):
        if len(places := trained.nonzero().flatten()):
            yield Row(tuple(tokens[:start]), max(int(places[-1]) - start, 0), len(places))


@dataclass
class WatchedSampler:
    sampler: Sampler
    watch: Watch

    def sample(
        self,
        requests: Sequence[Request],
        options: SamplingOptions,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Response]:
        with self.watch.at("sampling"):
            responses = self.sampler.sample(requests, options, progress)
        self.watch.sampled.append((requests, responses))
        return responses

    def refresh(self, version: int) -> None:
        self.sampler.refresh(version)


MODELS_OF = {
    "logp_old": ("policy",),
    "kl_old": ("policy", "reference"),
    "logp_ref": ("reference",),
    "values_old": ("critic",),
}


@dataclass
class WatchedEngine:
    engine: Engine
    watch: Watch

    def read(self, batch: Batch, names: frozenset[str]) -> dict[str, Tensor]:
        models = dict.fromkeys(model for name in sorted(names) for model in MODELS_OF[name])
        try:
            with self.watch.at("log-probs"):
                found = self.engine.read(batch, names)
        except BaseException:
            for model in models:
                self.watch.read.pop(model, None)
            raise
        for model in models:
            self.watch.read.setdefault(model, []).append(batch)
        return found

    def backward(self, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
        try:
            with self.watch.at("update"):
                done = self.engine.backward(batch, weights, objective)
        except BaseException:
            self.watch.forget(objective.model)
            raise
        self.watch.add_backward(batch, objective)
        return done

    def step(self, model: str, rate: float, max_norm: float | None) -> StepResult:
        self.watch.end_step(model)
        return self.engine.step(model, rate, max_norm)

    def discard(self, model: str) -> None:
        self.watch.end_step(model)
        self.engine.discard(model)

    def restart(self, model: str) -> None:
        self.engine.restart(model)


@dataclass
class WatchedRecord:
    """Writes as a run does, and keeps what was seen of each step."""

    record: Record
    watch: Watch
    steps: list[Seen] = field(default_factory=list)

    @property
    def attempt(self) -> int:
        return self.record.attempt

    @attempt.setter
    def attempt(self, value: int) -> None:
        self.record.attempt = value

    def append_metrics(self, row: dict[str, Any]) -> None:
        self.record.append_metrics(row)
        self.steps.append(self.watch.close(row))

    def write_rollouts(self, step: int, rollouts: Sequence[Rollout], about: dict[str, Any]) -> None:
        self.record.write_rollouts(step, rollouts, about)

    def read_rollouts(self, step: int, key: str) -> None:
        """Every step is measured whole."""

    def write_eval(self, name: str, content: Any) -> None:
        self.record.write_eval(name, content)
