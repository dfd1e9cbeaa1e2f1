"""Against the best of the other responses: a baseline that does not depend on the response itself."""

from dataclasses import dataclass

import torch

from hotcold.algorithms.base import Objective, Plan
from hotcold.algorithms.losses import ClippedLoss
from hotcold.batch import episode_totals
from hotcold.equations import reward_to_go, sum_per_response


@dataclass(frozen=True)
class BestOfTheOthers:
    group_size: int = 2

    reads = frozenset()
    objectives = (Objective(ClippedLoss(0.1, 0.3), sum_per_response),)
    expects = "unbiased"

    @property
    def plan(self):
        return Plan(group_size=self.group_size)

    def state(self):
        return {}

    def keep(self, batch):
        return torch.ones_like(batch.keep)

    def credit(self, batch, state):
        totals = episode_totals(batch)
        others = batch.group[:, None] == batch.group[None, :]
        others.fill_diagonal_(False)
        best = torch.where(others, totals[None, :], -torch.inf).amax(1)
        best = torch.where(others.any(1), best, totals)  # alone: advantage 0
        to_go = reward_to_go(batch.token_rewards, batch.response_mask)
        return batch.replace(advantages=torch.where(batch.response_mask, to_go - best[:, None], 0.0)), state
