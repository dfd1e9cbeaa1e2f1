"""Engines for tests: the local one, watched, or with its gradients kept instead of used."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hotcold.algorithms.base import Objective
from hotcold.batch import Batch
from hotcold.engines.base import Pass, StepResult
from hotcold.engines.local import LocalEngine, Trainee
from hotcold.models.reference import FrozenReference
from hotcold.training.mismatch import Mismatch
from hotcold.training.update import UpdateSettings


class RecordingEngine:
    """The local engine, but `step` keeps the gradients instead of using them.

    `old` answers for the policy and `old_critic` for the critic before the update, the reference for itself.
    """

    def __init__(
        self,
        policy: nn.Module,
        old: nn.Module | None = None,
        reference: nn.Module | None = None,
        critic: nn.Module | None = None,
        old_critic: nn.Module | None = None,
    ):
        self.engine = local_engine(policy, reference, critic)
        self.old = self.engine
        if old is not None or old_critic is not None:
            self.old = local_engine(old or policy, reference, old_critic or critic)
        self.gradients: list[list[Tensor]] = []  # the policy's, by optimiser step, by parameter
        self.of_critic: list[list[Tensor]] = []
        self.episodes: list[list[int]] = []  # by optimiser step, what was computed for it
        self._open: list[int] = []

    @property
    def rows_computed(self) -> int:
        return sum(map(len, self.episodes)) + len(self._open)

    def read(self, batch: Batch, names: frozenset[str]) -> dict[str, Tensor]:
        return self.old.read(batch, names)

    def backward(self, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
        self._open += batch.episode.tolist()
        return self.engine.backward(batch, weights, objective)

    def step(self, model: str, rate: float, max_norm: float | None) -> StepResult:
        trainee = self.engine.models[model]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in trainee.parameters]
        (self.gradients if model == "policy" else self.of_critic).append(grads)
        self.episodes.append(self._open)
        self._open = []
        trainee.clear()
        return StepResult(float(torch.cat([g.flatten() for g in grads]).norm()), True)

    def discard(self, model: str) -> None:
        self._open = []
        self.engine.discard(model)

    def restart(self, model: str) -> None:
        raise AssertionError("nothing was changed")


def local_engine(
    policy: nn.Module,
    reference: nn.Module | None = None,
    critic: nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> LocalEngine:
    modules = {"policy": policy} if critic is None else {"policy": policy, "critic": critic}
    models = {name: Trainee(module, optimizer(module.parameters(), lr=0.0)) for name, module in modules.items()}
    return LocalEngine(models, 1.0, None if reference is None else FrozenReference(reference, ""))


class Watched:
    """A local engine that trains, and notes what each pass of the policy saw."""

    def __init__(self, engine: LocalEngine):
        self.engine = engine
        self.num_steps = {"policy": 0, "critic": 0}
        self.passes: list[tuple[int, Batch, Pass]] = []  # (policy steps before it, rows, what was seen)
        self.after = [self.parameters()]  # the policy's, before the first step and after each

    def read(self, batch: Batch, names: frozenset[str]) -> dict[str, Tensor]:
        return self.engine.read(batch, names)

    def backward(self, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
        done = self.engine.backward(batch, weights, objective)
        if objective.model == "policy":
            self.passes.append((self.num_steps["policy"], batch, done))
        return done

    def step(self, model: str, rate: float, max_norm: float | None) -> StepResult:
        self.num_steps[model] += 1
        result = self.engine.step(model, rate, max_norm)
        if model == "policy":
            self.after.append(self.parameters())
        return result

    def discard(self, model: str) -> None:
        self.engine.discard(model)

    def restart(self, model: str) -> None:
        self.engine.restart(model)

    def parameters(self, model: str = "policy") -> list[Tensor]:
        return [p.detach().clone() for p in self.engine.models[model].parameters]


def settings(
    tokens_per_microbatch: int = 10**6,
    max_grad_norm: float | None = None,
    seed: int = 0,
    mismatch: Mismatch | None = None,
) -> UpdateSettings:
    return UpdateSettings(tokens_per_microbatch, {"policy": max_grad_norm}, seed, mismatch)
