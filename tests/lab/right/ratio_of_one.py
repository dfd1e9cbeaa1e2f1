"""The score function as the gradient of a ratio to a stopped copy, with a weighting of its own."""

from dataclasses import dataclass

import torch

from hotcold.algorithms.base import Objective, TokenLoss
from hotcold.algorithms.rloo import RLOO


def ratio_loss(forward, batch):
    ratio = torch.where(batch.trained, forward.logp - forward.logp.detach(), 0.0).exp()
    return TokenLoss(-ratio * batch.advantages)


def tenth(mask):
    """A constant scale: a tenth of the sum of each response, averaged over responses."""
    return 0.1 * mask.double() / mask.any(1).sum().clamp(min=1)


@dataclass(frozen=True)
class RatioOfOne(RLOO):
    group_size: int = 2

    @property
    def objectives(self):
        return (Objective(ratio_loss, tenth),)
