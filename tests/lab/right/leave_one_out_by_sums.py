"""n/(n - 1) times the distance to the mean of all is the distance to the mean of the others."""

from dataclasses import dataclass

import torch

from hotcold.algorithms.base import Objective, Plan
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.batch import episode_totals
from hotcold.equations import sum_per_response


@dataclass(frozen=True)
class LeaveOneOut:
    group_size: int = 3

    reads = frozenset()
    objectives = (Objective(policy_gradient_loss, sum_per_response),)
    expects = "unbiased"

    @property
    def plan(self):
        return Plan(group_size=self.group_size)

    def state(self):
        return {"steps": 0.0}

    def keep(self, batch):
        same = (batch.group[:, None] == batch.group[None, :]) & batch.keep[None, :]
        return same.sum(1) >= 2

    def credit(self, batch, state):
        totals = episode_totals(batch)
        same = (batch.group[:, None] == batch.group[None, :]).to(totals.dtype)
        n = same.sum(1)
        baseline = (same @ totals - totals) / (n - 1)
        rewards = torch.where(batch.response_mask, batch.token_rewards, 0.0)
        to_go = rewards.sum(1, keepdim=True) - rewards.cumsum(1) + rewards
        advantages = torch.where(batch.response_mask, to_go - baseline[:, None], 0.0)
        return batch.replace(advantages=advantages), {"steps": state["steps"] + 1}
