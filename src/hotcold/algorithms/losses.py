"""Per-token losses of the policy and the critic as objects that fit `Objective.loss`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hotcold.algorithms.base import Forward, TokenLoss
from hotcold.algorithms.kl import KLTerm
from hotcold.batch import Batch
from hotcold.equations import (
    clip_selected,
    clipped_surrogate,
    clipped_value_loss,
    importance_weighted,
    policy_gradient,
    sequence_log_ratio,
    truncated_is_policy_gradient,
    value_loss,
)
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
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        check_clips(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise InputError(f"dual_clip={self.dual_clip}: a number above 1 is needed (3 is usual), or off.")

    def __call__(self, forward: Forward, batch: Batch) -> TokenLoss:
        logp, advantages = _operands(forward, batch)
        return self.of_ratio(log_ratio(logp, batch), advantages)

    def of_ratio(self, log_ratio: Tensor, advantages: Tensor) -> TokenLoss:
        clipped = clip_selected(log_ratio, advantages, self.clip_low, self.clip_high)
        loss = clipped_surrogate(log_ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)
        return TokenLoss(loss, {"clip_fraction": clipped.to(loss.dtype)})


@dataclass(frozen=True)
class SequenceClippedLoss:
    """GSPO: the clipped surrogate of the response's mean log-ratio, for one advantage per response."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        check_clips(self.clip_low, self.clip_high)

    def __call__(self, forward: Forward, batch: Batch) -> TokenLoss:
        logp, advantages = _operands(forward, batch)
        mean = sequence_log_ratio(log_ratio(logp, batch), batch.trained)
        return ClippedLoss(self.clip_low, self.clip_high).of_ratio(mean, advantages)


@dataclass(frozen=True)
class TruncatedISLoss:
    """CISPO: -A log pi, weighted by the ratio, which is truncated and constant. `clip_fraction`: truncated ratios."""

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        check_clips(self.clip_low, self.clip_high)

    def __call__(self, forward: Forward, batch: Batch) -> TokenLoss:
        logp, advantages = _operands(forward, batch)
        ratio = log_ratio(logp, batch)
        loss = truncated_is_policy_gradient(logp, ratio, advantages, self.clip_low, self.clip_high)
        r = ratio.detach().exp()
        truncated = (r < 1 - self.clip_low) | (r > 1 + self.clip_high)
        return TokenLoss(loss, {"clip_fraction": truncated.to(loss.dtype)})


@dataclass(frozen=True)
class WithTerms:
    """A surrogate plus beta KL minus the entropy bonus, token by token."""

    surrogate: Loss
    kl: KLTerm | None = None
    entropy_bonus: float = 0.0  # reward per nat

    def __call__(self, forward: Forward, batch: Batch) -> TokenLoss:
        result = self.surrogate(forward, batch)
        loss = result.loss
        kl = None if self.kl is None else self.kl.loss(forward, batch)
        if kl is not None:
            loss = loss + batch.extras["beta"].to(loss.dtype)[:, None] * kl
        if self.entropy_bonus:
            assert forward.entropy is not None
            loss = loss - self.entropy_bonus * forward.entropy
        return TokenLoss(loss, result.metrics)


@dataclass(frozen=True)
class ValueLoss:
    """(V - return)^2 / 2; with `clip` no gain from moving V further than that from its value at rollout."""

    clip: float | None = None

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"value_clip={self.clip}: a number above 0 is needed, in the unit of the score, or off.")

    def __call__(self, forward: Forward, batch: Batch) -> TokenLoss:
        assert forward.values is not None and batch.returns is not None
        returns = batch.returns.to(forward.values.dtype)
        if self.clip is None:
            return TokenLoss(value_loss(forward.values, returns))
        assert batch.values_old is not None
        old = batch.values_old.to(forward.values.dtype)
        return TokenLoss(clipped_value_loss(forward.values, old, returns, self.clip))


def surrogate_of(loss: Loss) -> Loss:
    """The loss without the terms that were added to it."""
    return loss.surrogate if isinstance(loss, WithTerms) else loss


def log_ratio(logp: Tensor, batch: Batch) -> Tensor:
    """[B, T] log pi - log pi_old on trained tokens, 0 elsewhere."""
    assert batch.logp_old is not None
    return torch.where(batch.trained, logp - batch.logp_old, 0.0)


def check_clips(clip_low: float, clip_high: float) -> None:
    if not 0 <= clip_low <= 1:
        raise InputError(f"clip_low={clip_low} is outside 0 to 1: the ratio is kept above 1 - clip_low.")
    if not clip_high >= 0:
        raise InputError(f"clip_high={clip_high} is negative: the ratio is kept below 1 + clip_high.")


def _operands(forward: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
    assert forward.logp is not None and batch.advantages is not None
    return forward.logp, batch.advantages.to(forward.logp.dtype)
