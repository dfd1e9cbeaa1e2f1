"""What the loop asks of an engine: read, go backward, step. Only engines know ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from hotcold.algorithms.base import Objective
from hotcold.batch import Batch


@dataclass(frozen=True)
class Pass:
    """One micro-batch gone through, without gradient. What the trained model does not have is None."""

    loss: float  # this micro-batch's share of the step's loss
    metrics: dict[str, Tensor] = field(default_factory=dict)  # each [b, T]
    logp: Tensor | None = None  # [b, T]
    logp_old: Tensor | None = None  # [b, T]; equal to `logp` where it was not recomputed
    entropy: Tensor | None = None  # [b, T]
    kl: Tensor | None = None  # [b, T], the exact one


@dataclass(frozen=True)
class StepResult:
    grad_norm: float  # L2, before clipping
    applied: bool  # False: not finite, parameters and moments untouched
    fault: str = ""  # then: the first tensor that was not finite, and whose it was


class Engine(Protocol):
    """What does not fit in memory raises OutOfMemory; after it, `discard` clears what a backward had begun."""

    def read(self, batch: Batch, names: frozenset[str]) -> dict[str, Tensor]:
        """Each [b, T], without gradient, of the models as they are now: logp_old, logp_ref, kl_old, values_old."""

    def backward(self, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
        """Add the gradient of sum(loss * weights) of these rows to the gradients of the objective's model."""

    def step(self, model: str, rate: float, max_norm: float | None) -> StepResult:
        """One optimiser step of `model` with the gradients at hand, which are then cleared."""

    def discard(self, model: str) -> None:
        """Clear the gradients without a step."""

    def restart(self, model: str) -> None:
        """Parameters and optimiser as they were at the start of the run."""
