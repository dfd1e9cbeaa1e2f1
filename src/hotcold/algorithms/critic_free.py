"""What reinforce, rloo and grpo share: checks, keeping, and credit without a critic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hotcold.algorithms.baselines import Baseline, episodes_in_group
from hotcold.batch import Batch
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
    if math.isnan(gamma) or not 0 <= gamma <= 1:
        raise InputError(f"gamma={gamma} is outside 0 to 1.")


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
    to_go = episode_to_go(batch, gamma)
    return batch.replace(advantages=on_trained(batch, to_go - baseline[:, None]), returns=to_go)


def episode_to_go(batch: Batch, gamma: float) -> Tensor:
    """[B, T] reward-to-go, on through the later rows of the episode. The rows of an episode stand in time order."""
    to_go = reward_to_go(batch.token_rewards, batch.response_mask, gamma)
    if len(batch.episode.unique()) == len(batch):
        return to_go
    left = batch.response_mask.flip(1).cumsum(1).flip(1)  # trained tokens from here to the end of the row
    later: dict[int, Tensor] = {}  # by episode: reward-to-go at the first trained token of the row that comes next
    for row, episode in reversed(list(enumerate(batch.episode.tolist()))):
        trained = batch.response_mask[row]
        if episode in later:
            to_go[row] += torch.where(trained, gamma ** left[row] * later[episode], 0.0)
        if trained.any():
            later[episode] = to_go[row, trained][0]
    return to_go
