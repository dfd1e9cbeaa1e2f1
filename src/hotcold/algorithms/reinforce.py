"""REINFORCE (Williams 1992) with a choice of baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotcold.algorithms.base import Objective, Plan, Weighting
from hotcold.algorithms.baselines import Baseline, batch_mean_baseline
from hotcold.algorithms.critic_free import check_gamma, check_group, keep_where_baseline_exists, returns_minus
from hotcold.algorithms.losses import Loss, policy_gradient_loss
from hotcold.batch import Batch
from hotcold.equations import sum_per_response


@dataclass(frozen=True)
class REINFORCE:
    """A_t = reward-to-go - b, loss -A log pi, summed over a response and averaged over responses: grad J exactly.

    b none, the greedy response's score or leave-one-out leave grad J unbiased; the batch mean scales it by (B-1)/B.
    """

    group_size: int = 8
    baseline: Baseline = batch_mean_baseline
    objective: Loss = policy_gradient_loss
    weighting: Weighting = sum_per_response
    gamma: float = 1.0
    epochs_per_batch: int = 1
    minibatches: int = 1

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        check_group("reinforce", "leave_one_out", self.baseline.least_group, self.group_size)

    @property
    def plan(self) -> Plan:
        return Plan(group_size=self.group_size, greedy="greedy_rewards" in self.baseline.reads)

    @property
    def reads(self) -> frozenset[str]:
        return self.baseline.reads

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return (Objective(self.objective, self.weighting, epochs=self.epochs_per_batch, minibatches=self.minibatches),)

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        keep = keep_where_baseline_exists(batch, self.baseline)
        if "greedy_rewards" not in self.reads:
            return keep
        return torch.zeros_like(keep) if batch.greedy_rewards is None else keep & ~batch.greedy_rewards.isnan()

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        return returns_minus(batch, self.baseline.rows(batch), self.gamma), state
