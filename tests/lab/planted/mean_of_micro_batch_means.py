"""Averages inside the loss, which sees a micro-batch: the result depends on how the rows are cut."""

from dataclasses import dataclass

from hotcold.algorithms.base import Objective, TokenLoss
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.algorithms.rloo import RLOO
from hotcold.equations import sum_per_response


def averaged(forward, batch):
    return TokenLoss(policy_gradient_loss(forward, batch).loss / batch.trained.sum())


@dataclass(frozen=True)
class MeanOfMeans(RLOO):
    group_size: int = 2

    @property
    def objectives(self):
        return (Objective(averaged, sum_per_response),)
