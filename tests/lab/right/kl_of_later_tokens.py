"""KL in the reward, written as a loss: the KL still to come, as a constant, times log pi."""

from dataclasses import dataclass

import torch

from hotcold.algorithms.base import Objective, TokenLoss
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.algorithms.rloo import RLOO
from hotcold.equations import sum_per_response


@dataclass(frozen=True)
class Leash:
    beta: float

    def __call__(self, forward, batch):
        d = torch.where(batch.trained, forward.logp - batch.logp_ref, 0.0).detach()
        to_go = d.flip(1).cumsum(1).flip(1)
        return TokenLoss(policy_gradient_loss(forward, batch).loss + self.beta * to_go * forward.logp)


@dataclass(frozen=True)
class KLOfLaterTokens(RLOO):
    group_size: int = 2
    beta: float = 0.5
    expects = "unbiased"

    @property
    def reads(self):
        return frozenset({"logp_ref"})

    @property
    def objectives(self):
        return (Objective(Leash(self.beta), sum_per_response),)
