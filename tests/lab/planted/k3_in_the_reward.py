"""k3 as a cost in the reward. Its value is right, its gradient is no KL's."""

from dataclasses import dataclass

import torch

from hotcold.algorithms.base import Objective, Plan
from hotcold.algorithms.baselines import leave_one_out_baseline
from hotcold.algorithms.critic_free import keep_where_baseline_exists, returns_minus
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.equations import kl_k3, sum_per_response


@dataclass(frozen=True)
class K3InTheReward:
    group_size: int = 2
    beta: float = 0.5

    reads = frozenset({"logp_old", "logp_ref"})
    objectives = (Objective(policy_gradient_loss, sum_per_response),)

    @property
    def plan(self):
        return Plan(group_size=self.group_size)

    def state(self):
        return {}

    def keep(self, batch):
        return keep_where_baseline_exists(batch, leave_one_out_baseline)

    def credit(self, batch, state):
        cost = torch.where(batch.trained, kl_k3(batch.logp_old, batch.logp_ref), 0.0)
        rewards = torch.where(batch.trained, batch.token_rewards - self.beta * cost, batch.token_rewards)
        batch = batch.replace(token_rewards=rewards)
        return returns_minus(batch, leave_one_out_baseline.rows(batch), gamma=1.0), state
