"""Takes the rows of a prompt to stand together. They stand in any order."""

from dataclasses import dataclass

import torch

from hotcold.algorithms.base import Objective, Plan
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.equations import sum_per_response


@dataclass(frozen=True)
class GroupByLayout:
    group_size: int = 2

    reads = frozenset()
    objectives = (Objective(policy_gradient_loss, sum_per_response),)

    @property
    def plan(self):
        return Plan(group_size=self.group_size)

    def state(self):
        return {}

    def keep(self, batch):
        return torch.ones_like(batch.keep)

    def credit(self, batch, state):
        n = self.group_size
        rewards = torch.where(batch.response_mask, batch.token_rewards, 0.0)
        totals = rewards.sum(1)
        usable = totals[: len(totals) // n * n].view(-1, n)
        baseline = ((usable.sum(1, keepdim=True) - usable) / (n - 1)).flatten()
        baseline = torch.cat([baseline, totals.new_zeros(len(totals) - len(baseline))])
        to_go = rewards.flip(1).cumsum(1).flip(1)
        return batch.replace(advantages=torch.where(batch.response_mask, to_go - baseline[:, None], 0.0)), state
