"""k3 in the loss with the log-ratio upside down: exp(d) - 1 - d instead of exp(-d) - 1 + d."""

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
        d = torch.where(batch.trained, forward.logp - batch.logp_ref, 0.0)
        return TokenLoss(policy_gradient_loss(forward, batch).loss + self.beta * (d.exp() - 1 - d))


@dataclass(frozen=True)
class K3Reversed(RLOO):
    group_size: int = 2
    beta: float = 0.5

    @property
    def reads(self):
        return frozenset({"logp_ref"})

    @property
    def objectives(self):
        return (Objective(Leash(self.beta), sum_per_response),)
