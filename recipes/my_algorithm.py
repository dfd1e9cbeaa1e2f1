"""An algorithm of one's own: REINFORCE against the median of the other responses to the same prompt.

hotcold train recipes/my_algorithm.py:MyAlgorithm model=... data=... reward=... group_size=8
"""

from dataclasses import dataclass

import torch

from hotcold.algorithms.base import Objective, Plan
from hotcold.algorithms.baselines import Baseline
from hotcold.algorithms.critic_free import check_group, keep_where_baseline_exists, returns_minus
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.equations import sum_per_response


def median_of_the_others(totals, group):
    """[E] -> [E]. It does not depend on the response's own score, so the expected gradient stays exact."""
    same = group[:, None] == group[None, :]
    same.fill_diagonal_(False)
    return torch.stack([totals[others].quantile(0.5) for others in same])


MEDIAN = Baseline(median_of_the_others, least_group=2)


@dataclass(frozen=True)
class MyAlgorithm:
    group_size: int = 8  # a field is an option on the command line

    reads = frozenset()
    objectives = (Objective(policy_gradient_loss, sum_per_response),)

    def __post_init__(self):
        check_group("MyAlgorithm", "median of the others", MEDIAN.least_group, self.group_size)

    @property
    def plan(self):
        return Plan(group_size=self.group_size)

    def state(self):
        return {}

    def keep(self, batch):
        return keep_where_baseline_exists(batch, MEDIAN)

    def credit(self, batch, state):
        return returns_minus(batch, MEDIAN.rows(batch), gamma=1.0), state
