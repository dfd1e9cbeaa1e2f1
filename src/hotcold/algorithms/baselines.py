"""Baselines as objects: what is subtracted from a response's return. All are taken over episodes, not rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hotcold.batch import Batch, episode_totals
from hotcold.equations import batch_mean, group_mean, leave_one_out


@dataclass(frozen=True)
class Baseline:
    """`of(totals, group)` on episodes [E] gives the baseline of each episode [E]; None reads the greedy response."""

    of: Callable[[Tensor, Tensor], Tensor] | None
    least_group: int = 1  # fewest scored responses of a prompt for which it exists

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"greedy_rewards"}) if self.of is None else frozenset()

    def rows(self, batch: Batch) -> Tensor:
        """[B] the baseline of each row's episode."""
        if self.of is None:
            assert batch.greedy_rewards is not None
            return batch.greedy_rewards.to(batch.token_rewards.dtype)
        return per_episode(batch, self.of)


def per_episode(batch: Batch, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[B] a statistic of episodes, computed once for each episode and handed to all of its rows."""
    totals = episode_totals(batch)
    _, index = torch.unique(batch.episode, return_inverse=True)
    num_episodes = int(index.max()) + 1 if len(index) else 0
    rows = torch.arange(len(index), device=index.device)
    first = torch.full((num_episodes,), len(index), device=index.device).scatter_reduce(0, index, rows, "amin")
    return of(totals[first], batch.group[first])[index]


def episodes_in_group(batch: Batch) -> Tensor:
    """[B] how many scored episodes the row's prompt has (rows with `keep` False do not count)."""
    pairs = torch.stack([batch.group, batch.episode], dim=1)[batch.keep]
    groups = torch.unique(pairs, dim=0)[:, 0] if len(pairs) else pairs.new_zeros(0)
    return (batch.group[:, None] == groups[None, :]).sum(1)


def _zero(totals: Tensor, group: Tensor) -> Tensor:
    return torch.zeros_like(totals)


def _batch_mean(totals: Tensor, group: Tensor) -> Tensor:
    return batch_mean(totals)


no_baseline = Baseline(_zero)
batch_mean_baseline = Baseline(_batch_mean)
group_mean_baseline = Baseline(group_mean, least_group=2)
leave_one_out_baseline = Baseline(leave_one_out, least_group=2)
greedy_baseline = Baseline(None)
