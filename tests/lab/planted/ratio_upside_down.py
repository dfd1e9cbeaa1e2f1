"""pi_old over pi."""

from dataclasses import dataclass

import torch

from hotcold.algorithms.base import Objective, TokenLoss
from hotcold.algorithms.rloo import RLOO
from hotcold.equations import importance_weighted, sum_per_response


def upside_down(forward, batch):
    return TokenLoss(
        importance_weighted(torch.where(batch.trained, batch.logp_old - forward.logp, 0.0), batch.advantages)
    )


@dataclass(frozen=True)
class RatioUpsideDown(RLOO):
    group_size: int = 2

    @property
    def objectives(self):
        return (Objective(upside_down, sum_per_response),)
