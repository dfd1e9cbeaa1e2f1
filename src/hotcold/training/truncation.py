"""Responses that hit the length limit: kept like any other, left out, or charged for their length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hotcold.batch import Batch
from hotcold.equations import soft_overlong_penalty, terminal_rewards


@dataclass(frozen=True)
class Truncation:
    """`mask`: a truncated response takes no part, as one without a score. `penalty`: DAPO's soft overlong penalty.

    The penalty grows over the last `buffer` tokens before `max_tokens`, whether or not the response was cut there. It
    is part of what the response earned, not of its score: `batch.rewards` stay as the reward gave them.
    """

    rule: Literal["keep", "mask", "penalty"] = "keep"
    max_tokens: int = 0
    buffer: int = 1
    penalty: float = 1.0  # at the limit, in the unit of the score

    def apply(self, batch: Batch) -> Batch:
        if self.rule == "mask":
            return batch.replace(keep=batch.keep & ~batch.truncated)
        if self.rule == "keep":
            return batch
        lengths = batch.lengths - batch.prompt_lengths
        share = soft_overlong_penalty(lengths, self.max_tokens, self.buffer).to(batch.token_rewards.dtype)
        charged = terminal_rewards(-self.penalty * share, batch.response_mask)
        charged = torch.where(batch.rewards.isnan()[:, None], 0.0, charged)
        rewards = batch.token_rewards
        return batch.replace(token_rewards=rewards - charged, penalties=charged, uncharged=rewards)


KEEP = Truncation()
