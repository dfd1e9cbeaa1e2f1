"""Supervised fine-tuning: imitate the responses of a data set. The stage before most reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotcold.algorithms.base import Objective, Plan, Weighting
from hotcold.algorithms.expert_iteration import check_imitation, imitate
from hotcold.algorithms.kl import KLTerm
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.algorithms.policy import policy_objective
from hotcold.batch import Batch
from hotcold.equations import mean_per_token


@dataclass(frozen=True)
class SFT:
    """A = 1, loss -log pi, mean over the step's trained tokens: expert iteration with somebody else's responses."""

    weighting: Weighting = mean_per_token
    kl: KLTerm | None = None  # ExactKL(beta, in_reward=False): nothing was sampled from the policy
    entropy_bonus: float = 0.0
    minibatches: int = 1

    def __post_init__(self) -> None:
        check_imitation("sft", self.kl)

    @property
    def plan(self) -> Plan | None:
        return None

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
                minibatches=self.minibatches,
                on_policy=False,
            ),
        )

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch.keep)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        return imitate(self.kl, batch, state)
