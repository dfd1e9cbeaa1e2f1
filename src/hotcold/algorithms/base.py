"""The interface that every algorithm fits: what to sample, credit, objectives. It knows no model, engine or rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from hotcold.batch import Batch

QUANTITIES = frozenset({"logp", "entropy", "kl", "values"})  # what an objective may need of the trained model
READS = frozenset({"logp_old", "logp_ref", "kl_old", "values_old", "greedy_rewards"})  # what credit may read

Weighting = Callable[[Tensor], Tensor]
"""From the trained tokens [B, T] of a whole optimiser step to each token's share in the loss [B, T]."""


@dataclass(frozen=True)
class Plan:
    """What to sample for each prompt."""

    group_size: int = 1
    greedy: bool = False  # also the greedy response, scored, as a baseline
    refill: int = 0  # rejected groups are replaced by new prompts at most this many times


@dataclass(frozen=True)
class Forward:
    """What a model says of a batch's tokens: each [B, T] float32 (or wider), with gradient, or None if not needed."""

    logp: Tensor | None = None
    entropy: Tensor | None = None
    kl: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token, not reduced, and per-token metrics that are averaged over the trained tokens."""

    loss: Tensor  # [B, T]
    metrics: dict[str, Tensor] = field(default_factory=dict)  # each [B, T]


@dataclass(frozen=True)
class Objective:
    """One trained model: its loss, how it is averaged, how often it is applied to a batch."""

    loss: Callable[[Forward, Batch], TokenLoss]
    weighting: Weighting
    needs: frozenset[str] = frozenset({"logp"})
    model: Literal["policy", "critic", "reward"] = "policy"
    epochs: int = 1
    minibatches: int = 1
    start: int = 0  # steps that pass before it is trained (a critic's warm-up delays the policy)
    restart: bool = False  # parameters and optimiser are reset to the starting ones before the batch's first step
    on_policy: bool = True  # False: a loss that no advantage weights, free to take many steps on a batch
    max_approx_kl: float | None = None  # the epochs end before a step whose minibatch lies further from pi_old (nats)


class Algorithm(Protocol):
    """Credit (what multiplies log pi), objective (the per-token surrogate), weighting (how tokens are averaged)."""

    @property
    def plan(self) -> Plan | None:
        """None: rows come from a dataset."""

    @property
    def reads(self) -> frozenset[str]:
        """Which of READS are filled before `credit`."""

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """Trained one after the other; they share no trainable parameter."""

    def state(self) -> dict[str, float]:
        """The starting state (adaptive beta, running statistics): JSON in the checkpoint."""

    def keep(self, batch: Batch) -> Tensor:
        """[B] bool, after scoring: rows to train on. Rows without a score are already False in `batch.keep`."""

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        """The whole step's batch with `advantages` (and `returns`) filled. Only kept rows are in it."""
