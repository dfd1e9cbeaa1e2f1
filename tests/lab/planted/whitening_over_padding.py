"""Mean and standard deviation over the whole tensor: prompts and padding count as advantages of 0."""

from dataclasses import dataclass

import torch

from hotcold.algorithms.rloo import RLOO


@dataclass(frozen=True)
class WhiteningOverPadding(RLOO):
    group_size: int = 2
    expects = "elsewhere"  # whitening is on purpose

    def credit(self, batch, state):
        batch, state = RLOO.credit(self, batch, state)
        a = batch.advantages
        a = (a - a.mean()) / (a.std() + 1e-6)
        return batch.replace(advantages=torch.where(batch.response_mask, a, 0.0)), state
