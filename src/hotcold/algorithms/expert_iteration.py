"""Expert iteration: train on the model's own best responses (Anthony et al. 2017; STaR, Zelikman et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotcold.algorithms.base import Objective, Plan, Weighting
from hotcold.algorithms.kl import KLTerm, with_kl
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.algorithms.policy import policy_objective
from hotcold.batch import Batch, episode_totals
from hotcold.equations import mean_per_token
from hotcold.errors import InputError

KeepRule = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Threshold:
    """Keep a response whose score is at least `threshold`."""

    threshold: float = 1.0

    def __post_init__(self) -> None:
        if math.isnan(self.threshold):
            raise InputError("threshold is NaN: no score would be kept.")

    def __call__(self, batch: Batch) -> Tensor:
        return episode_totals(batch) >= self.threshold


@dataclass(frozen=True)
class BestOfGroup:
    """Keep the responses with their prompt's highest score, ties included; where all scores are equal, none is best."""

    def __call__(self, batch: Batch) -> Tensor:
        totals = torch.where(batch.keep, episode_totals(batch), math.nan)
        same = (batch.group[:, None] == batch.group[None, :]) & batch.keep[None, :]
        best = torch.where(same, totals[None, :], -math.inf).amax(1)
        worst = torch.where(same, totals[None, :], math.inf).amin(1)
        return (totals == best) & (best > worst)


@dataclass(frozen=True)
class TopFraction:
    """Keep the best `fraction` of the step's responses, rounded up; ties with the last one are kept."""

    fraction: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise InputError(f"fraction={self.fraction} is outside 0 to 1: it is the share of responses to keep.")

    def __call__(self, batch: Batch) -> Tensor:
        totals = episode_totals(batch)
        scored = totals[batch.keep].sort(descending=True).values
        if not len(scored):
            return torch.zeros_like(batch.keep)
        return totals >= scored[math.ceil(self.fraction * len(scored)) - 1]


@dataclass(frozen=True)
class ExpertIteration:
    """Keep good responses and imitate them: A = 1, loss -log pi, mean over the kept tokens.

    With scores 0 or 1 and threshold 1 it is REINFORCE without a baseline, up to the averaging. `from_starting` trains
    the starting model anew on each step's responses.
    """

    group_size: int = 8
    keep_rule: KeepRule = field(default_factory=Threshold)
    from_starting: bool = False
    weighting: Weighting = mean_per_token
    kl: KLTerm | None = None  # ExactKL(beta, in_reward=False): the kept responses are no fair sample of the policy
    entropy_bonus: float = 0.0
    epochs_per_batch: int = 1
    minibatches: int = 1

    def __post_init__(self) -> None:
        check_imitation("expert_iteration", self.kl)
        if isinstance(self.keep_rule, BestOfGroup) and self.group_size < 2:
            raise InputError("expert_iteration: best_of_group with group_size=1 has nothing to choose; use at least 2.")

    @property
    def plan(self) -> Plan:
        return Plan(group_size=self.group_size)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset()

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return (
            policy_objective(
                policy_gradient_loss,
                self.weighting,
                self.kl,
                self.entropy_bonus,
                self.epochs_per_batch,
                self.minibatches,
                restart=self.from_starting,
                on_policy=False,
            ),
        )

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        return self.keep_rule(batch)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        return imitate(self.kl, batch, state)


def imitate(kl: KLTerm | None, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
    """A = 1 at every trained token."""
    batch, state = with_kl(kl, batch, state)
    ones = torch.ones_like(batch.token_rewards)
    return batch.replace(advantages=torch.where(batch.response_mask, ones, 0.0)), state


def check_imitation(name: str, kl: KLTerm | None) -> None:
    """No reward weights the loss, and the rows are no fair samples: of the KL only each state's own is left."""
    if kl is not None and kl.reads:
        raise InputError(f"{name}: its rows are chosen, not sampled as they come: use ExactKL(beta, in_reward=False).")
