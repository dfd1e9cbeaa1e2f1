"""RLOO: REINFORCE with the leave-one-out baseline (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hotcold.algorithms.base import Objective, Plan, Weighting
from hotcold.algorithms.baselines import leave_one_out_baseline
from hotcold.algorithms.critic_free import check_gamma, check_group, keep_where_baseline_exists, returns_minus
from hotcold.algorithms.kl import KLTerm, reads_of, state_of, with_kl
from hotcold.algorithms.losses import Loss, policy_gradient_loss
from hotcold.algorithms.policy import policy_objective
from hotcold.batch import Batch
from hotcold.equations import sum_per_response


@dataclass(frozen=True)
class RLOO:
    """A_t = reward-to-go - mean score of the other responses to the same prompt; unbiased with sum per response."""

    group_size: int = 8
    objective: Loss = policy_gradient_loss
    weighting: Weighting = sum_per_response
    gamma: float = 1.0
    kl: KLTerm | None = None
    entropy_bonus: float = 0.0
    epochs_per_batch: int = 1
    minibatches: int = 1
    max_approx_kl: float | None = None

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        check_group("rloo", "leave_one_out", 2, self.group_size)

    @property
    def plan(self) -> Plan:
        return Plan(group_size=self.group_size)

    @property
    def reads(self) -> frozenset[str]:
        return reads_of(self.kl)

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
        return keep_where_baseline_exists(batch, leave_one_out_baseline)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        batch, state = with_kl(self.kl, batch, state, self.gamma)
        return returns_minus(batch, leave_one_out_baseline.rows(batch), self.gamma), state
