"""Per-token surrogates as objects that fit `Objective.loss`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hotcold.algorithms.base import Forward, TokenLoss
from hotcold.batch import Batch
from hotcold.equations import clip_selected, clipped_surrogate, importance_weighted, policy_gradient
from hotcold.errors import InputError

Loss = Callable[[Forward, Batch], TokenLoss]


def policy_gradient_loss(forward: Forward, batch: Batch) -> TokenLoss:
    """-A log pi. Right for one optimiser step on a batch."""
    logp, advantages = _operands(forward, batch)
    return TokenLoss(policy_gradient(logp, advantages))


def importance_weighted_loss(forward: Forward, batch: Batch) -> TokenLoss:
    """-ratio A, unclipped."""
    logp, advantages = _operands(forward, batch)
    return TokenLoss(importance_weighted(log_ratio(logp, batch), advantages))


@dataclass(frozen=True)
class ClippedLoss:
    """PPO's clipped surrogate; `clip_fraction` counts tokens whose clipped branch was strictly chosen."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise InputError(f"clip_low={self.clip_low} is outside 0 to 1: the ratio is kept above 1 - clip_low.")
        if not self.clip_high >= 0:
            raise InputError(f"clip_high={self.clip_high} is negative: the ratio is kept below 1 + clip_high.")

    def __call__(self, forward: Forward, batch: Batch) -> TokenLoss:
        logp, advantages = _operands(forward, batch)
        ratio = log_ratio(logp, batch)
        clipped = clip_selected(ratio.detach(), advantages, self.clip_low, self.clip_high)
        loss = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        return TokenLoss(loss, {"clip_fraction": clipped.to(loss.dtype)})


def log_ratio(logp: Tensor, batch: Batch) -> Tensor:
    """[B, T] log pi - log pi_old on trained tokens, 0 elsewhere."""
    assert batch.logp_old is not None
    return torch.where(batch.trained, logp - batch.logp_old, 0.0)


def _operands(forward: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
    assert forward.logp is not None and batch.advantages is not None
    return forward.logp, batch.advantages.to(forward.logp.dtype)
