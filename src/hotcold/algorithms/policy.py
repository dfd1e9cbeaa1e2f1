"""The policy's objective: a surrogate with its terms, averaged in one way. Shared by all algorithms that have one."""

from __future__ import annotations

import math

from hotcold.algorithms.base import Objective, Weighting
from hotcold.algorithms.kl import KLTerm
from hotcold.algorithms.losses import Loss, WithTerms
from hotcold.errors import InputError


def policy_objective(
    surrogate: Loss,
    weighting: Weighting,
    kl: KLTerm | None = None,
    entropy_bonus: float = 0.0,
    epochs: int = 1,
    minibatches: int = 1,
    start: int = 0,
    restart: bool = False,
    on_policy: bool = True,
    max_approx_kl: float | None = None,
) -> Objective:
    if not math.isfinite(entropy_bonus):
        raise InputError(f"entropy_bonus={entropy_bonus}: a finite number is needed.")
    if max_approx_kl is not None and not max_approx_kl > 0:
        raise InputError(f"max_approx_kl={max_approx_kl}: a number of nats per token above 0 is needed, or off.")
    needs = {"logp"} | (kl.needs if kl else set()) | ({"entropy"} if entropy_bonus else set())
    return Objective(
        loss=WithTerms(surrogate, kl, entropy_bonus) if kl or entropy_bonus else surrogate,
        weighting=weighting,
        needs=frozenset(needs),
        epochs=epochs,
        minibatches=minibatches,
        start=start,
        restart=restart,
        on_policy=on_policy,
        max_approx_kl=max_approx_kl,
    )
