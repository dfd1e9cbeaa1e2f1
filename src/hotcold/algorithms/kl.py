"""The leash to a frozen reference: where the KL enters, how it is estimated, how strong it is.

Each class is a row of the table in docs/algorithms.md and says what its expected gradient is. What would be wrong (k1
as a loss, k2 or k3 as a reward) cannot be built; `kl_from_names` says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hotcold.algorithms.base import Forward
from hotcold.batch import Batch, along_episodes
from hotcold.equations import adaptive_beta, kl_k1, kl_k2, kl_k3, td_errors
from hotcold.equations.checks import exp
from hotcold.errors import InputError

Estimator = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Adaptive:
    """Moves beta so that the KL per response stays near `target` (Ziegler et al. 2019)."""

    target: float  # nats per response
    horizon: float = 10_000.0  # responses

    def __post_init__(self) -> None:
        if not 0 < self.target < math.inf:
            raise InputError(f"kl.target={self.target}: a number of nats per response above 0 is needed.")
        if not 0 < self.horizon < math.inf:
            raise InputError(f"kl.horizon={self.horizon}: a number of responses above 0 is needed.")


class KLTerm(Protocol):
    @property
    def beta(self) -> float: ...
    @property
    def adaptive(self) -> Adaptive | None: ...
    @property
    def reads(self) -> frozenset[str]:
        """What must be filled before credit."""

    @property
    def needs(self) -> frozenset[str]:
        """What the policy's objective needs beside log-probabilities."""

    def cost(self, batch: Batch, gamma: float) -> Tensor | None:
        """[B, T] nats that each token is charged as a negative reward; None: the KL is not in the reward."""

    def loss(self, forward: Forward, batch: Batch) -> Tensor | None:
        """[B, T] nats that are added to each token's loss; None: the KL is not in the loss."""

    def measured(self, batch: Batch) -> Tensor | None:
        """[B, T] the KL of the sampled tokens at rollout, where credit can know it."""


@dataclass(frozen=True)
class KLInReward:
    """-beta (log pi_old - log pi_ref) at every token, credited as reward-to-go: the gradient of KL(pi || ref)."""

    beta: float
    adaptive: Adaptive | None = None

    def __post_init__(self) -> None:
        check_beta(self.beta)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"logp_old", "logp_ref"})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def cost(self, batch: Batch, gamma: float) -> Tensor | None:
        return self.measured(batch)

    def loss(self, forward: Forward, batch: Batch) -> Tensor | None:
        return None

    def measured(self, batch: Batch) -> Tensor | None:
        assert batch.logp_old is not None and batch.logp_ref is not None
        return _where_trained(batch, kl_k1(batch.logp_old, batch.logp_ref))


@dataclass(frozen=True)
class KLInLoss:
    """beta k2 or k3 of the sampled token, in the loss of its state; what the token does to later states is missing.

    k2: the gradient of KL(pi || ref) of each visited state. k3: that of KL(ref || pi), the other direction (GRPO).
    k3 times the ratio: as k2 at pi = pi_old, and still an estimate of the KL after the first optimiser step.
    """

    beta: float
    estimator: Estimator = kl_k2
    times_ratio: bool = False
    adaptive: Adaptive | None = None

    def __post_init__(self) -> None:
        check_beta(self.beta)
        if self.times_ratio and self.estimator is not kl_k3:
            raise InputError("kl.placement=loss_times_ratio takes kl.estimator=k3.")
        if self.estimator is kl_k1:
            raise InputError(K1_IN_LOSS)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"logp_ref", "logp_old"} if self.adaptive else {"logp_ref"})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def cost(self, batch: Batch, gamma: float) -> Tensor | None:
        return None

    def loss(self, forward: Forward, batch: Batch) -> Tensor | None:
        assert forward.logp is not None and batch.logp_ref is not None
        kl = self.estimator(forward.logp, batch.logp_ref.to(forward.logp.dtype))
        if not self.times_ratio:
            return kl
        assert batch.logp_old is not None
        return exp(torch.where(batch.trained, forward.logp - batch.logp_old, 0.0)) * kl

    def measured(self, batch: Batch) -> Tensor | None:
        if batch.logp_old is None or batch.logp_ref is None:
            return None
        return _where_trained(batch, kl_k1(batch.logp_old, batch.logp_ref))


@dataclass(frozen=True)
class ExactKL:
    """The full-vocabulary KL of each visited state in the loss, and that of the later states in the reward.

    Together the gradient of KL(pi || ref), exact, with the least variance. With `in_reward=False` the later states'
    share is left out: for losses that no reward weights (expert iteration, sft).
    """

    beta: float
    adaptive: Adaptive | None = None
    in_reward: bool = True

    def __post_init__(self) -> None:
        check_beta(self.beta)
        if self.adaptive and not self.in_reward:
            raise InputError("kl.target has no effect here: the KL is measured on responses that a reward weights.")

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"kl_old"}) if self.in_reward else frozenset()

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"kl"})

    def cost(self, batch: Batch, gamma: float) -> Tensor | None:
        """A token pays for the state that it leads to: gamma KL of the next state."""
        if not self.in_reward:
            return None
        kl = self.measured(batch)
        assert kl is not None
        # td_errors without rewards is gamma V_next - V
        return along_episodes(batch, lambda kl, mask: td_errors(torch.zeros_like(kl), kl, mask, gamma) + kl, kl)

    def loss(self, forward: Forward, batch: Batch) -> Tensor | None:
        assert forward.kl is not None
        return forward.kl

    def measured(self, batch: Batch) -> Tensor | None:
        return None if batch.kl_old is None else _where_trained(batch, batch.kl_old)


def reads_of(kl: KLTerm | None) -> frozenset[str]:
    return frozenset() if kl is None else kl.reads


def state_of(kl: KLTerm | None) -> dict[str, float]:
    """The starting state: beta, where it moves."""
    return {} if kl is None or kl.adaptive is None else {"beta": kl.beta}


def with_kl(
    kl: KLTerm | None, batch: Batch, state: dict[str, float], gamma: float = 1.0
) -> tuple[Batch, dict[str, float]]:
    """The batch with the KL in its token rewards (where it belongs there) and this step's beta in `extras`; next state.

    Beta is that of the state, the same for the whole step; the KL measured in this step sets that of the next one.
    """
    if kl is None:
        return batch, state
    beta = state.get("beta", kl.beta)
    rewards, cost, measured = batch.token_rewards, kl.cost(batch, gamma), kl.measured(batch)
    if cost is not None:
        rewards = torch.where(batch.trained, rewards - beta * cost, rewards)
    metrics = {**batch.metrics, "beta": beta}
    if measured is not None:
        num_responses = len(batch.episode.unique())
        metrics["kl/response"] = float(measured.sum()) / max(num_responses, 1)
        if kl.adaptive is not None:
            metrics["kl/target"] = kl.adaptive.target
            control = (kl.adaptive.target, kl.adaptive.horizon, num_responses)
            state = {**state, "beta": adaptive_beta(beta, metrics["kl/response"], *control)}
    column = torch.full((len(batch),), beta, dtype=torch.float64, device=batch.tokens.device)
    return batch.replace(token_rewards=rewards, extras={**batch.extras, "beta": column}, metrics=metrics), state


def check_beta(beta: float) -> None:
    if not 0 <= beta < math.inf:
        raise InputError(f"beta={beta}: a number of at least 0 is needed, reward per nat of KL.")


def _where_trained(batch: Batch, values: Tensor) -> Tensor:
    return torch.where(batch.trained, values, torch.zeros((), dtype=values.dtype, device=values.device)).detach()


# ---- from names

PLACEMENTS = ("reward", "loss", "loss_times_ratio")
ESTIMATORS = ("k1", "k2", "k3", "exact")
K1_IN_LOSS = (
    "kl.placement=loss with kl.estimator=k1: its expected gradient is 0 (E[grad log pi] = 0), so it would do nothing "
    "but add noise.\nUse kl.placement=reward, or kl.estimator=k2 in the loss."
)


Names = tuple[str | None, str]  # placement, estimator


def kl_from_names(
    beta: float, placement: str | None, estimator: str | None, adaptive: Adaptive | None, default: Names
) -> KLTerm:
    """The term that the names stand for; what points elsewhere is refused with the reason. `default`: the preset's."""
    placement, estimator = complete_names(placement, estimator, default)
    if estimator == "exact":
        if placement is not None:
            raise InputError(
                f"kl.placement={placement} with kl.estimator=exact: the exact KL has its place in both, each state's\n"
                "in the loss and later states' in the reward; one alone is another gradient. Leave kl.placement out."
            )
        return ExactKL(beta, adaptive, in_reward=default[1] != "exact")
    if default[1] == "exact":
        raise InputError(
            f"kl.estimator={estimator} does not fit an algorithm that imitates: it estimates a KL from the policy's\n"
            "own samples, and the rows here are chosen. Use kl.estimator=exact, the KL of each state."
        )
    if placement == "reward":
        if estimator != "k1":
            raise InputError(
                f"kl.placement=reward with kl.estimator={estimator}: its expected gradient points against the KL's.\n"
                "In the reward only k1 is right (the default). k2 and k3 belong into the loss: kl.placement=loss."
            )
        return KLInReward(beta, adaptive)
    if estimator == "k1" and placement == "loss":
        raise InputError(K1_IN_LOSS)
    chosen = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}[estimator]
    return KLInLoss(beta, chosen, placement == "loss_times_ratio", adaptive)


def complete_names(placement: str | None, estimator: str | None, default: Names) -> Names:
    """Both names, where one or none was given."""
    if placement is not None and placement not in PLACEMENTS:
        raise InputError(f"kl.placement={placement!r} is unknown. There are: {', '.join(PLACEMENTS)}.")
    if estimator is not None and estimator not in ESTIMATORS:
        raise InputError(f"kl.estimator={estimator!r} is unknown. There are: {', '.join(ESTIMATORS)}.")
    if placement is None and estimator is None:
        return default
    if placement is None:
        return {"k1": "reward", "k2": "loss", "k3": "loss"}.get(str(estimator)), str(estimator)
    if estimator is None:
        in_loss = default[1] if default[0] == "loss" else "k2"
        return placement, {"reward": "k1", "loss": in_loss}.get(placement, "k3")
    return placement, estimator
