"""One update of a real model in which the gradient is kept and nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotcold.algorithms.base import Algorithm, Objective, Plan
from hotcold.batch import Batch, Rollout, collate
from hotcold.engines.base import Engine, Pass, StepResult
from hotcold.engines.local import LocalEngine, Trainee
from hotcold.models.reading import Laying, Reading, laying_of
from hotcold.models.reference import Reference
from hotcold.training.collect import kept
from hotcold.training.mismatch import Mismatch
from hotcold.training.update import UpdateSettings, update

AT_ONCE = 10**9  # tokens of a micro-batch: all rows together
Gradients = dict[str, list[Tensor]]  # by model, by trained parameter


@dataclass(frozen=True)
class Parts:
    """What an engine is made of."""

    modules: Mapping[str, Any]  # the policy, and where the algorithm has one the critic
    reference: Reference | None = None
    temperature: float = 1.0
    compute: Callable[[], AbstractContextManager[Any]] = nullcontext
    recompute: bool = False  # activations in the backward pass
    reading: Mapping[str, Reading] = field(default_factory=dict)  # by model: what may be shared and left out

    @property
    def laying(self) -> Laying:
        return laying_of(self.reading, self.recompute)

    def parameters(self, model: str) -> list[nn.Parameter]:
        return [p for p in self.modules[model].parameters() if p.requires_grad]


MakeEngine = Callable[[Parts], Engine]


def local_engine(parts: Parts) -> Engine:
    """As a run makes it; its optimisers never step."""
    trainees = {
        name: Trainee(module, torch.optim.SGD(parts.parameters(name), lr=0.0)) for name, module in parts.modules.items()
    }
    return LocalEngine(trainees, parts.temperature, parts.reference, parts.compute, parts.recompute, parts.reading)


@dataclass(frozen=True)
class OneStep:
    """The algorithm with one optimiser step of each model on the whole batch, from the first step on."""

    inner: Algorithm
    epochs: int = 1  # more: log pi_old is read before the first step, which is the only one that is looked at
    keep_minibatches: bool = False

    @property
    def plan(self) -> Plan | None:
        plan = self.inner.plan
        return None if plan is None else replace(plan, refill=0)

    @property
    def reads(self) -> frozenset[str]:
        return self.inner.reads

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return tuple(
            replace(
                o,
                epochs=self.epochs,
                minibatches=o.minibatches if self.keep_minibatches else 1,
                start=0,
                restart=False,
                max_approx_kl=None,
            )
            for o in self.inner.objectives
        )

    def state(self) -> dict[str, float]:
        return self.inner.state()

    def keep(self, batch: Batch) -> Tensor:
        return self.inner.keep(batch)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        return self.inner.credit(batch, state)


@dataclass
class Probe:
    """An engine around another one. `columns` of padding are added to every batch before the other one sees it."""

    engine: Engine
    parts: Parts
    columns: int = 0
    pad_id: int = 0
    gradients: Gradients = field(default_factory=dict)  # of each model's first step
    passes: list[tuple[Batch, Tensor, Objective]] = field(default_factory=list)  # of the first step of each model
    drift: float | None = None  # largest |ratio - 1| before the policy's first step
    measures_parts: bool = False
    squares: dict[str, float] = field(default_factory=dict)  # by model: the sum of |gradient of a micro-batch|^2

    def read(self, batch: Batch, names: frozenset[str]) -> dict[str, Tensor]:
        width = batch.tokens.shape[1]
        return {name: value[:, :width] for name, value in self.engine.read(self._widened(batch), names).items()}

    def backward(self, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
        with self._measured(objective.model):
            done = self.engine.backward(self._widened(batch), F.pad(weights, (0, self.columns)), objective)
        done = narrowed(done, batch.tokens.shape[1])
        if objective.model not in self.gradients:
            self.passes.append((batch, weights, objective))
            if done.logp is not None and done.logp_old is not None:
                off = (done.logp.double() - done.logp_old.double())[batch.trained].exp() - 1
                largest = float(off.abs().max()) if len(off) else 0.0
                self.drift = largest if self.drift is None or math.isnan(largest) else max(self.drift, largest)
        return done

    @contextmanager
    def _measured(self, model: str) -> Iterator[None]:
        """The gradient of what is done inside, apart from what was there before; then both."""
        if not self.measures_parts or model in self.gradients:
            yield
            return
        parameters = self.parts.parameters(model)
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        yield
        self.squares[model] = (
            self.squares.get(model, 0.0) + norm([p.grad for p in parameters if p.grad is not None]) ** 2
        )
        for p, old in zip(parameters, before, strict=True):
            if old is not None:
                p.grad = old if p.grad is None else p.grad.add_(old)

    def step(self, model: str, rate: float, max_norm: float | None) -> StepResult:
        if model not in self.gradients:
            self.gradients[model] = [
                torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in self.parts.parameters(model)
            ]
        self.engine.discard(model)
        return StepResult(0.0, True)

    def discard(self, model: str) -> None:
        self.engine.discard(model)

    def restart(self, model: str) -> None:
        """The models stand at the start."""

    def _widened(self, batch: Batch) -> Batch:
        return widened(batch, self.columns, self.pad_id) if self.columns else batch


def widened(batch: Batch, columns: int, pad_id: int) -> Batch:
    """The batch with more padding on the right."""
    width = batch.tokens.shape[1]

    def wide(value: Any, fill: int = 0) -> Any:
        if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[1] != width:
            return value
        return F.pad(value, (0, columns), value=fill)

    changes = {f.name: wide(getattr(batch, f.name)) for f in fields(batch) if f.name not in ("extras", "metrics")}
    changes["tokens"] = wide(batch.tokens, pad_id)
    return replace(batch, **changes, extras={name: wide(value) for name, value in batch.extras.items()})


def narrowed(done: Pass, width: int) -> Pass:
    """What was said of the first `width` columns."""

    def cut(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[:, :width]

    metrics = {name: value[:, :width] for name, value in done.metrics.items()}
    return Pass(done.loss, metrics, cut(done.logp), cut(done.logp_old), cut(done.entropy), cut(done.kl))


def run(
    algorithm: OneStep,
    rollouts: Sequence[Rollout],
    probe: Probe,
    tokens_per_microbatch: int = AT_ONCE,
    mismatch: Mismatch | None = None,
    pad_id: int = 0,
    dtype: torch.dtype = torch.float32,
    laying: Laying | None = None,
) -> Probe:
    """One step of the loop on these rows: collate, keep, update. `laying`: None is as the policy is read."""
    batch = collate(rollouts, pad_id, dtype)
    batch = batch.select(kept(batch, algorithm))
    laid = probe.parts.laying if laying is None else laying
    settings = UpdateSettings(tokens_per_microbatch, {}, 0, mismatch, laid)
    update(batch, algorithm, algorithm.state(), probe, settings, 1, lambda _: 0.0)
    return probe


def norm(gradient: Sequence[Tensor]) -> float:
    return math.sqrt(math.fsum(float((g.detach().double() ** 2).sum()) for g in gradient))


def relative_gap(a: Sequence[Tensor], b: Sequence[Tensor], least: float = 0.0) -> float:
    """|a - b| / |b| over all parameters, L2; 0 / 0 is 0. `least`: what |b| counts at least."""
    gap = math.sqrt(math.fsum(float(((x.double() - y.double()) ** 2).sum()) for x, y in zip(a, b, strict=True)))
    size = max(norm(b), least)
    return gap / size if size > 0 else (0.0 if gap == 0 else math.inf)
