"""A baseline that is learnt from the policy's own log-probability, and through which the gradient flows."""

from dataclasses import dataclass

import torch

from hotcold.algorithms.base import Objective, TokenLoss
from hotcold.algorithms.rloo import RLOO
from hotcold.equations import sum_per_response


def with_baseline(forward, batch):
    baseline = 0.5 * forward.logp  # .detach() is missing
    return TokenLoss(-(batch.advantages - torch.where(batch.trained, baseline, 0.0)) * forward.logp)


@dataclass(frozen=True)
class UndetachedBaseline(RLOO):
    group_size: int = 2

    @property
    def objectives(self):
        return (Objective(with_baseline, sum_per_response),)
