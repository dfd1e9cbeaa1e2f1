"""REINFORCE (Williams 1992) with a choice of baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotcold.algorithms.base import Objective, Plan, Weighting
from hotcold.algorithms.baselines import Baseline, batch_mean_baseline
from hotcold.algorithms.critic_free import check_gamma, check_group, keep_where_baseline_exists, returns_minus
from hotcold.algorithms.kl import KLTerm, reads_of, state_of, with_kl
from hotcold.algorithms.losses import Loss, policy_gradient_loss
from hotcold.algorithms.policy import policy_objective
from hotcold.batch import Batch
from hotcold.equations import sum_per_response, whiten


@dataclass(frozen=True)
class REINFORCE:
    """A_t = reward-to-go - b, loss -A log pi, summed over a response and averaged over responses: grad J exactly.

    b none, the greedy response's score or leave-one-out leave grad J unbiased; the batch mean scales it by (B-1)/B.
    `whiten` gives the step's advantages mean 0 and std 1 over all trained tokens (REINFORCE++, Hu 2025,
    arXiv:2501.03262): a step size that does not depend on the scale of the scores, and no longer grad J exactly.
    """

    group_size: int = 8
    baseline: Baseline = batch_mean_baseline
    objective: Loss = policy_gradient_loss
    weighting: Weighting = sum_per_response
    gamma: float = 1.0
    whiten: bool = False
    kl: KLTerm | None = None
    entropy_bonus: float = 0.0
    epochs_per_batch: int = 1
    minibatches: int = 1
    max_approx_kl: float | None = None

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        check_group("reinforce", "leave_one_out", self.baseline.least_group, self.group_size)

    @property
    def plan(self) -> Plan:
        return Plan(group_size=self.group_size, greedy="greedy_rewards" in self.baseline.reads)

    @property
    def reads(self) -> frozenset[str]:
        return self.baseline.reads | reads_of(self.kl)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return (
            policy_objective(
                self.objective,
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
        keep = keep_where_baseline_exists(batch, self.baseline)
        if "greedy_rewards" not in self.reads:
            return keep
        return torch.zeros_like(keep) if batch.greedy_rewards is None else keep & ~batch.greedy_rewards.isnan()

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        batch, state = with_kl(self.kl, batch, state, self.gamma)
        batch = returns_minus(batch, self.baseline.rows(batch), self.gamma)
        if self.whiten:
            assert batch.advantages is not None
            batch = batch.replace(advantages=whiten(batch.advantages, batch.trained))
        return batch, state
