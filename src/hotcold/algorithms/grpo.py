"""GRPO (Shao et al. 2024, arXiv:2402.03300) without the KL term; without the std it is Dr. GRPO's credit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotcold.algorithms.base import Objective, Plan, Weighting
from hotcold.algorithms.baselines import group_mean_baseline, per_episode
from hotcold.algorithms.critic_free import check_group, on_trained
from hotcold.algorithms.losses import ClippedLoss
from hotcold.batch import Batch, episode_totals
from hotcold.equations import group_std, mean_per_response


@dataclass(frozen=True)
class GRPO:
    """A = (score - group mean) / group std at every token, clipped surrogate, mean over each response's tokens.

    The group mean includes the response itself: without the std the expected gradient is (G-1)/G of grad J. The std
    is no uniform scale, and the mean per response weighs short responses more: both are biased, as in the paper.
    """

    group_size: int = 8
    scale_by_std: bool = True
    weighting: Weighting = mean_per_response
    clip_low: float = 0.2
    clip_high: float = 0.2
    epochs_per_batch: int = 1
    minibatches: int = 1

    def __post_init__(self) -> None:
        check_group("grpo", "group_mean", 2, self.group_size)
        ClippedLoss(self.clip_low, self.clip_high)

    @property
    def plan(self) -> Plan:
        return Plan(group_size=self.group_size)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset()

    @property
    def objectives(self) -> tuple[Objective, ...]:
        loss = ClippedLoss(self.clip_low, self.clip_high)
        return (Objective(loss, self.weighting, epochs=self.epochs_per_batch, minibatches=self.minibatches),)

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch.keep)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        advantage = episode_totals(batch) - group_mean_baseline.rows(batch)
        if self.scale_by_std:
            std = per_episode(batch, group_std)
            # A group whose scores are all equal says nothing; its std is exactly 0 and its advantage is 0.
            safe = torch.where(std > 0, std, torch.ones_like(std))
            advantage = torch.where(std > 0, advantage / safe, torch.zeros_like(std))
        return batch.replace(advantages=on_trained(batch, advantage)), state
