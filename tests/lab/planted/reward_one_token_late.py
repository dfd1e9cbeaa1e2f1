"""Rewards stand one token late, as after a shift that logits need and rewards do not: the score is on no token."""

from dataclasses import dataclass

import torch

from hotcold.algorithms.rloo import RLOO


@dataclass(frozen=True)
class RewardOneTokenLate(RLOO):
    group_size: int = 2

    def credit(self, batch, state):
        late = torch.zeros_like(batch.token_rewards)
        late[:, 1:] = batch.token_rewards[:, :-1]
        return RLOO.credit(self, batch.replace(token_rewards=late), state)
