"""What is refused, with the reason, and an algorithm that does it anyway: its certificate shows why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Forward, Objective
from hotcold.algorithms.build import build_algorithm
from hotcold.algorithms.checks import check_algorithm
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.kl import Adaptive, KLTerm
from hotcold.algorithms.losses import SequenceClippedLoss
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Batch
from hotcold.equations import kl_k1, kl_k2, kl_k3, mean_per_token
from hotcold.lab.certificate import Certificate
from hotcold.lab.own import Own, certify_own

Estimate = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Refusal:
    """`label` cannot be built, for `reason`; `anyway` is what it would do."""

    label: str
    reason: str
    anyway: Certificate | None  # None: there is nothing to compute
    shows: str  # what the certificate must say; else the refusal is without ground

    @property
    def holds(self) -> bool:
        return self.anyway is None or (self.anyway.scale is None and self.shows in self.anyway.verdict)

    def as_json(self) -> dict[str, Any]:
        return {
            "algorithm": self.label,
            "refused": self.reason,
            "anyway": None if self.anyway is None else self.anyway.verdict,
            "agrees": self.holds,
        }


@dataclass(frozen=True)
class Anywhere:
    """A KL term without a check: any estimate, in the reward or in the loss."""

    beta: float
    estimate: Estimate | None  # None: exact
    in_reward: bool
    adaptive: Adaptive | None = None

    @property
    def reads(self) -> frozenset[str]:
        own = {"kl_old"} if self.estimate is None else {"logp_ref", "logp_old"}
        return frozenset(own if self.in_reward else own - {"logp_old", "kl_old"})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.in_reward or self.estimate is not None else frozenset({"kl"})

    def cost(self, batch: Batch, gamma: float) -> Tensor | None:
        if not self.in_reward:
            return None
        if self.estimate is None:
            return batch.kl_old
        assert batch.logp_old is not None and batch.logp_ref is not None
        return torch.where(batch.trained, self.estimate(batch.logp_old, batch.logp_ref), 0.0)

    def loss(self, forward: Forward, batch: Batch) -> Tensor | None:
        if self.in_reward:
            return None
        if self.estimate is None:
            return forward.kl
        assert forward.logp is not None and batch.logp_ref is not None
        return self.estimate(forward.logp, batch.logp_ref)

    def measured(self, batch: Batch) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Unchecked:
    """An algorithm whose objective is replaced after it has been checked."""

    inner: Algorithm
    change: Callable[[Objective], Objective]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return tuple(self.change(objective) for objective in self.inner.objectives)


def _leash(estimate: Estimate | None, in_reward: bool) -> Algorithm:
    term: KLTerm = Anywhere(0.5, estimate, in_reward)
    return RLOO(group_size=2, kl=term)


WORLD = "fixed"  # where a response's length is no reason
Refused = tuple[str, dict[str, Any], Callable[[], Algorithm] | None, str]
REFUSED: tuple[Refused, ...] = (
    ("rloo", {"beta": 0.5, "kl.placement": "loss", "kl.estimator": "k1"}, partial(_leash, kl_k1, False), "no gradient"),
    ("rloo", {"beta": 0.5, "kl.placement": "reward", "kl.estimator": "k2"}, partial(_leash, kl_k2, True), "no KL"),
    ("rloo", {"beta": 0.5, "kl.placement": "reward", "kl.estimator": "k3"}, partial(_leash, kl_k3, True), "no KL"),
    (
        "rloo",
        {"beta": 0.5, "kl.placement": "reward", "kl.estimator": "exact"},
        partial(_leash, None, True),
        "later states' share of KL(pi || ref) alone",
    ),
    (
        "rloo",
        {"beta": 0.5, "kl.placement": "loss", "kl.estimator": "exact"},
        partial(_leash, None, False),
        "later states' share missing",
    ),
    ("expert_iteration", {"beta": 0.5, "kl.placement": "reward", "kl.estimator": "k1"}, None, ""),
    (
        "rloo",
        {"epochs_per_batch": 2},
        lambda: Unchecked(RLOO(group_size=2), lambda o: replace(o, epochs=2)),
        "2 steps on a batch",
    ),
    (
        "gspo",
        {"weighting": "mean_per_token"},
        lambda: Unchecked(
            GRPO(group_size=2, scale_by_std=False, objective=SequenceClippedLoss),
            lambda o: replace(o, weighting=mean_per_token),
        ),
        "how tokens are averaged",
    ),
    ("rloo", {"group_size": 1}, None, ""),
    ("grpo", {"group_size": 1}, None, ""),
    ("reinforce", {"baseline": "leave_one_out", "group_size": 1}, None, ""),
    ("grpo", {"objective": "policy_gradient"}, None, ""),
    ("dapo", {"drop_zero_variance": False}, None, ""),
)


def refusals() -> list[Refusal]:
    """Each is tried; the reason is the error's own words."""
    return [refusal(*row) for row in REFUSED]


def refusal(name: str, options: dict[str, Any], anyway: Callable[[], Algorithm] | None, shows: str) -> Refusal:
    given = options if "group_size" in options else {"group_size": 2, **options}
    own = None if anyway is None else Own(name, anyway(), given, "elsewhere")
    label = " ".join([name, *(f"{key}={str(value).lower()}" for key, value in options.items())])
    return Refusal(
        label,
        reason_of(name, given),
        None if own is None else certify_own(own, "variable" if "weighting" in options else WORLD),
        shows,
    )


def reason_of(name: str, options: dict[str, Any]) -> str:
    try:
        check_algorithm(build_algorithm(name, options, 3), 1)
    except ValueError as error:
        return " ".join(str(error).split())
    raise AssertionError(f"{name} {options} is refused in the documentation and was built")
