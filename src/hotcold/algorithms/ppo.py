"""PPO with a critic (Schulman et al. 2017, arXiv:1707.06347), as in classic RLHF (Ziegler et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hotcold.algorithms.base import Objective, Plan, Weighting
from hotcold.algorithms.critic_free import check_gamma, check_unit
from hotcold.algorithms.kl import KLTerm, reads_of, state_of, with_kl
from hotcold.algorithms.losses import ClippedLoss, ValueLoss
from hotcold.algorithms.policy import policy_objective
from hotcold.batch import Batch, along_episodes
from hotcold.equations import gae, mean_per_token, whiten
from hotcold.errors import InputError


@dataclass(frozen=True)
class PPO:
    """A = GAE of the token rewards, whitened over the step; clipped surrogate; a critic that learns the returns.

    lam = 1 weighs the score fully at every token and needs the critic only to lower the variance; lam < 1 trusts the
    critic for what comes later. Returns are A + V before whitening, with `critic_lam` where that is given. In the first
    `critic_warmup` steps only the critic is trained, on the returns of the policy as it stands.
    """

    group_size: int = 8
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    weighting: Weighting = mean_per_token
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: KLTerm | None = None
    entropy_bonus: float = 0.0
    epochs_per_batch: int = 1
    minibatches: int = 1
    max_approx_kl: float | None = None
    value_clip: float | None = None
    critic_lam: float | None = None
    critic_warmup: int = 0

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        check_unit("lam", self.lam)
        if self.critic_lam is not None:
            check_unit("critic.lam", self.critic_lam)
        if self.critic_warmup < 0:
            raise InputError(f"critic.warmup={self.critic_warmup}: a number of steps is needed, 0 or more.")

    @property
    def plan(self) -> Plan:
        return Plan(group_size=self.group_size)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"values_old"}) | reads_of(self.kl)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        policy = policy_objective(
            ClippedLoss(self.clip_low, self.clip_high, self.dual_clip),
            self.weighting,
            self.kl,
            self.entropy_bonus,
            self.epochs_per_batch,
            self.minibatches,
            start=self.critic_warmup,
            max_approx_kl=self.max_approx_kl,
        )
        critic = Objective(
            ValueLoss(self.value_clip),
            mean_per_token,
            needs=frozenset({"values"}),
            model="critic",
            epochs=self.epochs_per_batch,
            minibatches=self.minibatches,
        )
        return policy, critic

    def state(self) -> dict[str, float]:
        return state_of(self.kl)

    def keep(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch.keep)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        batch, state = with_kl(self.kl, batch, state, self.gamma)
        assert batch.values_old is not None
        values = torch.where(batch.trained, batch.values_old, 0.0)
        advantages = self._gae(batch, values, self.lam)
        of_critic = advantages if self.critic_lam in (None, self.lam) else self._gae(batch, values, self.critic_lam)
        returns = torch.where(batch.trained, of_critic + values, 0.0)
        if self.whiten:
            advantages = whiten(advantages, batch.trained)
        metrics = {**batch.metrics, "gae/score_weight": self._score_weight(batch)}
        return batch.replace(advantages=advantages, returns=returns, metrics=metrics), state

    def _gae(self, batch: Batch, values: Tensor, lam: float | None) -> Tensor:
        assert lam is not None
        return along_episodes(batch, partial(gae, gamma=self.gamma, lam=lam), batch.token_rewards, values)

    def _score_weight(self, batch: Batch) -> float:
        """(gamma lam)^(T - 1), mean over responses: how much of the score reaches the first token."""
        lengths = batch.trained.sum(1)
        weights = (self.gamma * self.lam) ** (lengths[lengths > 0] - 1).double()
        return float(weights.mean()) if len(weights) else 1.0
