"""GRPO (Shao et al. 2024, arXiv:2402.03300) and what differs from it in one choice: Dr. GRPO, DAPO, GSPO, CISPO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hotcold.algorithms.base import Objective, Plan, Weighting
from hotcold.algorithms.baselines import group_mean_baseline, per_episode
from hotcold.algorithms.critic_free import check_group, on_trained, to_go
from hotcold.algorithms.kl import KLTerm, reads_of, state_of, with_kl
from hotcold.algorithms.losses import ClippedLoss, Loss, SequenceClippedLoss
from hotcold.algorithms.policy import policy_objective
from hotcold.batch import Batch, episode_totals
from hotcold.equations import group_std, mean_per_response
from hotcold.errors import InputError


@dataclass(frozen=True)
class GRPO:
    """A_t = (reward-to-go - group mean of the totals) / group std, clipped surrogate, mean over a response's tokens.

    With one score at the end A is the same at every token. The group mean includes the response itself: without the
    std the expected gradient is (G-1)/G of grad J. The std is no uniform scale, and the mean per response weighs short
    responses more: both are biased, as in the paper.

    `objective` makes the loss from the two clips. With SequenceClippedLoss (GSPO) A is the total at every token, since
    that loss has one ratio per response. `drop_zero_variance` rejects groups whose scores are all equal (DAPO) instead
    of leaving them in the denominators; the loop replaces them by new prompts at most `refill` times.
    """

    group_size: int = 8
    scale_by_std: bool = True
    objective: Callable[[float, float], Loss] = ClippedLoss
    weighting: Weighting = mean_per_response
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    drop_zero_variance: bool = False
    refill: int = 0
    kl: KLTerm | None = None
    entropy_bonus: float = 0.0
    epochs_per_batch: int = 1
    minibatches: int = 1
    max_approx_kl: float | None = None

    def __post_init__(self) -> None:
        check_group("grpo", "group_mean", 2, self.group_size)
        if self.of_sequences and self.weighting is not mean_per_response:
            raise InputError(
                "the sequence ratio has one value per response, so only weighting=mean_per_response fits it."
            )
        if self.refill and not self.drop_zero_variance:
            raise InputError(f"refill={self.refill} has no effect: no group is rejected. Set drop_zero_variance=true.")

    @property
    def loss(self) -> Loss:
        if self.dual_clip is None:
            return self.objective(self.clip_low, self.clip_high)
        if self.objective is not ClippedLoss:
            raise InputError(f"dual_clip={self.dual_clip} bounds the clipped surrogate, not this objective.")
        return ClippedLoss(self.clip_low, self.clip_high, self.dual_clip)

    @property
    def of_sequences(self) -> bool:
        return isinstance(self.loss, SequenceClippedLoss)

    @property
    def plan(self) -> Plan:
        return Plan(group_size=self.group_size, refill=self.refill)

    @property
    def reads(self) -> frozenset[str]:
        return reads_of(self.kl)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return (
            policy_objective(
                self.loss,
                self.weighting,
                self.kl,
                self.entropy_bonus,
                self.epochs_per_batch,
                self.minibatches,
                max_approx_kl=self.max_approx_kl,
            ),
        )

    def state(self) -> dict[str, float]:
        return state_of(self.kl)

    def keep(self, batch: Batch) -> Tensor:
        if not self.drop_zero_variance:
            return torch.ones_like(batch.keep)
        return varies_in_group(batch)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        batch, state = with_kl(self.kl, batch, state)
        baseline = group_mean_baseline.rows(batch)
        returns = episode_totals(batch)[:, None] if self.of_sequences else to_go(batch, gamma=1.0)
        advantages = on_trained(batch, returns - baseline[:, None])
        if self.scale_by_std:
            std = per_episode(batch, group_std)[:, None]
            # A group whose scores are all equal says nothing; its std is exactly 0 and its advantage is 0.
            advantages = torch.where(std > 0, advantages / std, torch.zeros_like(advantages))
        return batch.replace(advantages=advantages), state


def varies_in_group(batch: Batch) -> Tensor:
    """[B] bool: the row's prompt has scores that differ, as the reward gave them (a length penalty does not count)."""
    scored = batch.keep & ~batch.rewards.isnan()
    same = (batch.group[:, None] == batch.group[None, :]) & scored[None, :]
    scores = raw_totals(batch)
    highest = torch.where(same, scores[None, :], -torch.inf).amax(1)
    lowest = torch.where(same, scores[None, :], torch.inf).amin(1)
    return highest > lowest


def raw_totals(batch: Batch) -> Tensor:
    """[B] an episode's score before any penalty for its length, to the bit: equal scores stay equal."""
    return episode_totals(batch if batch.uncharged is None else batch.replace(token_rewards=batch.uncharged))
