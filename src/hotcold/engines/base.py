"""What the loop asks of an engine: measure, go backward, step. Only engines know ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from hotcold.algorithms.base import Objective
from hotcold.batch import Batch


@dataclass(frozen=True)
class Pass:
    """One micro-batch gone through, without gradient."""

    logp: Tensor  # [b, T]
    entropy: Tensor  # [b, T]
    logp_old: Tensor  # [b, T]; equal to `logp` where it was not recomputed
    loss: float  # this micro-batch's share of the step's loss
    metrics: dict[str, Tensor] = field(default_factory=dict)  # each [b, T]


@dataclass(frozen=True)
class StepResult:
    grad_norm: float  # L2, before clipping
    applied: bool  # False: not finite, parameters and moments untouched


class Engine(Protocol):
    def logp(self, batch: Batch) -> Tensor:
        """[b, T] log-probabilities of the trained tokens under the current policy, without gradient."""

    def backward(self, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
        """Add the gradient of sum(loss * weights) of these rows to the model's gradients."""

    def step(self, model: str, rate: float, max_norm: float | None) -> StepResult:
        """One optimiser step of `model` with the gradients at hand, which are then cleared."""

    def restart(self, model: str) -> None:
        """Parameters and optimiser as they were at the start of the run."""
