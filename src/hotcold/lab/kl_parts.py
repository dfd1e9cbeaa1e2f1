"""Whose gradient an algorithm's KL is: what a reference adds to the expected update, compared with known quantities."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hotcold.lab.numbers import Array, Policy, policy_of, to_go, visited
from hotcold.lab.tiny import Tiny
from hotcold.lab.truth import truth

NEAR = 1e-9


def without_reference(tiny: Tiny) -> Tiny:
    """The same world with a reference that is the policy itself: every KL is 0 there, and so is its gradient."""
    return replace(tiny, reference=tiny.logits)


def candidates(tiny: Tiny) -> dict[str, Array]:
    """Uphill gradients of what a KL term may turn out to be."""
    policy, reference = policy_of(tiny, tiny.logits), policy_of(tiny, tiny.reference)
    known = truth(tiny)
    return {
        "KL(pi || ref)": np.asarray(known.grad_reverse_kl.numpy()),
        "the KL(pi || ref) of each visited state, later states' share missing": visited(
            policy, policy, lambda row: policy.grad_kl(reference, row)
        ),
        "KL(ref || pi), the other direction": np.asarray(known.grad_forward_kl.numpy()),
        "the KL(ref || pi) of each visited state, the other direction": visited(
            policy, policy, lambda row: policy.probability[row] - reference.probability[row]
        ),
        "half the chi-square divergence of each visited state: k3 upside down": _of_tokens(
            policy, reference, lambda d: [math.exp(x) - 1 for x in d]
        ),
        IN_REWARD.format("k2"): _of_tokens(policy, reference, lambda d: to_go([x * x / 2 for x in d])),
        IN_REWARD.format("k3"): _of_tokens(policy, reference, lambda d: to_go([math.exp(-x) - 1 + x for x in d])),
        "the later states' share of KL(pi || ref) alone": np.asarray(known.grad_reverse_kl.numpy())
        - visited(policy, policy, lambda row: policy.grad_kl(reference, row)),
    }


IN_REWARD = "{} as a cost in the reward, which is no KL"
RIGHT = "the KL term lowers KL(pi || ref)"


def name_of(part: Array, tiny: Tiny) -> str | None:
    """In words: whose gradient `part`, the KL's share of the update (uphill), is minus a multiple of; None: none's."""
    if float(np.abs(part).max()) <= NEAR:
        return "the KL has no gradient at all"
    for name, gradient in candidates(tiny).items():
        c = -float((part * gradient).sum() / (gradient * gradient).sum())
        if float(np.linalg.norm(part + c * gradient)) <= NEAR * float(np.linalg.norm(part)):
            return f"the KL term {'lowers' if c > 0 else 'raises'} {name}{_angle(name, part, tiny)}"
    return None


def _angle(name: str, part: Array, tiny: Tiny) -> str:
    """How far what is no KL points against lowering one."""
    if "no KL" not in name:
        return ""
    lower = -np.asarray(truth(tiny).grad_reverse_kl.numpy())
    cosine = float((part * lower).sum() / (np.linalg.norm(part) * np.linalg.norm(lower)))
    return f": cosine {cosine:.3f} with what lowers the KL"


def _of_tokens(policy: Policy, reference: Policy, coefficients: Callable[[list[float]], list[float]]) -> Array:
    """sum_y pi(y) sum_t coefficient_t grad log pi_t, from the log-ratios of the response's tokens."""
    out = np.zeros_like(policy.probability)
    for y in policy.tiny.responses:
        d = [p - q for p, q in zip(policy.logp(y), reference.logp(y), strict=True)]
        for row, token, c in zip(policy.rows(y), y, coefficients(d), strict=True):
            out[row] += policy.of_response(y) * c * policy.score(row, token)
    return out
