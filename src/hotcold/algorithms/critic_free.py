"""What reinforce, rloo and grpo share: checks, keeping, and credit without a critic."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from hotcold.algorithms.baselines import Baseline, episodes_in_group
from hotcold.batch import Batch, along_episodes
from hotcold.equations import reward_to_go
from hotcold.errors import InputError


def check_group(name: str, baseline: str, least: int, group_size: int) -> None:
    """A group statistic of one response is no statistic (A12)."""
    if group_size < max(least, 1):
        raise InputError(
            f"{name}: group_size={group_size}, but the baseline {baseline} compares the responses to one prompt "
            f"and needs at least {least}.\nUse group_size={max(least, 8)}, or reinforce with baseline=batch_mean."
        )


def check_gamma(gamma: float) -> None:
    check_unit("gamma", gamma)


def check_unit(name: str, value: float) -> None:
    if math.isnan(value) or not 0 <= value <= 1:
        raise InputError(f"{name}={value} is outside 0 to 1.")


def keep_where_baseline_exists(batch: Batch, baseline: Baseline) -> Tensor:
    """[B] False for a response that has lost its group mates (unscored), so that nothing is compared with it."""
    if baseline.least_group <= 1:
        return torch.ones_like(batch.keep)
    return episodes_in_group(batch) >= baseline.least_group


def on_trained(batch: Batch, values: Tensor) -> Tensor:
    """[B, T] a value per row or token, on the trained tokens."""
    values = values[:, None] if values.dim() == 1 else values
    return torch.where(batch.response_mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def returns_minus(batch: Batch, baseline: Tensor, gamma: float) -> Batch:
    """A_t = reward-to-go - b. With one score at the end and gamma 1 this is r - b at every token."""
    returns = to_go(batch, gamma)
    return batch.replace(advantages=on_trained(batch, returns - baseline[:, None]), returns=returns)


def to_go(batch: Batch, gamma: float) -> Tensor:
    """[B, T] reward-to-go, on through the later rows of the episode."""
    return along_episodes(batch, partial(reward_to_go, gamma=gamma), batch.token_rewards)
