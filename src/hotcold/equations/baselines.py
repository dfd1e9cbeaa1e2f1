"""What a reward is compared with. Each returns the baseline [B], not the advantage: advantage = rewards - baseline.

Groups may have any integer ids, any sizes, and their rows may stand in any order. A NaN reward makes its own group NaN
and no other. Where all rewards of a group are equal the mean is exactly that reward, so that the advantage is exactly 0
and a constant reward moves no parameter, in float32 too.
"""

import torch
from torch import Tensor

from hotcold.equations.checks import as_float, as_ids


class _Groups:
    """Sums over the groups of a batch of rewards."""

    def __init__(self, rewards: Tensor, group: Tensor) -> None:
        self.rewards, group = as_float("rewards", rewards), as_ids("group", group)
        if self.rewards.dim() != 1 or self.rewards.shape != group.shape:
            raise ValueError(
                f"rewards has shape {list(self.rewards.shape)}, group {list(group.shape)}. "
                "Needed: both [B], one reward and one group id for each row."
            )
        self.ids, self.index = torch.unique(group, return_inverse=True)
        self.size = torch.bincount(self.index, minlength=len(self.ids))

    def sum(self, x: Tensor) -> Tensor:
        return torch.zeros(len(self.ids), dtype=x.dtype, device=x.device).index_add(0, self.index, x)

    def _extreme(self, reduce: str) -> Tensor:
        start = torch.zeros(len(self.ids), dtype=self.rewards.dtype, device=self.rewards.device)
        return start.scatter_reduce(0, self.index, self.rewards, reduce, include_self=False)

    def constant(self) -> Tensor:
        """Which groups have one reward only; a NaN is not equal to itself."""
        return self._extreme("amax") == self._extreme("amin")

    def mean(self) -> Tensor:
        return torch.where(self.constant(), self._extreme("amax"), self.sum(self.rewards) / self.size)


def batch_mean(rewards: Tensor) -> Tensor:
    """The mean reward of the batch, for each row.

    b = (1/B) sum_j R_j

    rewards R: [B]; result [B]. It includes the row's own reward, which shrinks the expected gradient by (B - 1)/B and
    leaves its direction.

    >>> batch_mean(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    rewards = as_float("rewards", rewards)
    return group_mean(rewards, torch.zeros(rewards.shape, dtype=torch.long, device=rewards.device))


def group_mean(rewards: Tensor, group: Tensor) -> Tensor:
    """The mean reward of the row's group: of all responses to the same prompt.

    b_i = (1/G) sum_(j in group of i) R_j

    rewards R: [B]; group: [B] int; result [B]. It includes the row's own reward: the expected gradient is (G - 1)/G
    of the true one. Source: Shao et al. 2024 (GRPO).

    >>> group_mean(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([7, 3, 7]))
    tensor([0.5000, 0.0000, 0.5000])
    """
    groups = _Groups(rewards, group)
    return groups.mean()[groups.index]


def group_std(rewards: Tensor, group: Tensor, correction: int = 1) -> Tensor:
    """The standard deviation of the rewards of the row's group.

    s_i = sqrt(sum_(j in group of i) (R_j - mean)^2 / (G - correction))

    rewards R: [B]; group: [B] int; result [B]. correction 1 is the sample, 0 the population standard deviation.
    Exactly 0 where all rewards of the group are equal, and for a group of one: the advantage is then to be 0, not a
    rounding error divided by a rounding error. Dividing by s is no uniform scale: easy and hard prompts gain weight.
    Source: Shao et al. 2024; the bias: Liu et al. 2025 (Dr. GRPO).

    >>> group_std(torch.tensor([1.0, 0.0, 0.1, 0.1, 0.1]), torch.tensor([0, 0, 1, 1, 1]))
    tensor([0.7071, 0.7071, 0.0000, 0.0000, 0.0000])
    """
    if correction not in (0, 1):
        raise ValueError(f"correction is {correction!r}; needed 0 (population) or 1 (sample).")
    groups = _Groups(rewards, group)
    constant = groups.constant()
    deviation = groups.rewards - groups.mean()[groups.index]
    variance = groups.sum(deviation**2) / (groups.size - correction).clamp(min=1)
    return torch.where(constant, 0.0, torch.where(constant, 1.0, variance).sqrt())[groups.index]


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """The mean reward of the other responses of the row's group.

    b_i = (1/(G - 1)) sum_(j in group of i, j != i) R_j = mean - (R_i - mean)/(G - 1)

    rewards R: [B]; group: [B] int; result [B]. It does not depend on the row's own response, so the expected gradient
    is exact for any G. A group of one has no others: ValueError. Source: Kool et al. 2019; Ahmadian et al. 2024 (RLOO).

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([5, 5, 5, 5]))
    tensor([0.3333, 0.6667, 0.6667, 0.3333])
    """
    groups = _Groups(rewards, group)
    alone = groups.ids[groups.size < 2]
    if len(alone):
        raise ValueError(
            f"{len(alone)} of {len(groups.ids)} groups have group size 1 (first: group {int(alone[0])}). "
            "leave_one_out needs at least 2 responses in each group: raise group_size, or use another baseline."
        )
    mean, size = groups.mean()[groups.index], groups.size[groups.index]
    return mean - (groups.rewards - mean) / (size - 1)
