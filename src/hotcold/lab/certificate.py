"""What a case's real update expects, beside what it should: bias, direction, scale, variance, a verdict in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hotcold.lab.case import Case, setting_of
from hotcold.lab.expectation import expected_update
from hotcold.lab.numbers import Array, plain_rewards, policy_of, to_go, visited
from hotcold.lab.predicted import Predicted, predicted
from hotcold.lab.stated import World, critic_values, stated_update
from hotcold.lab.tiny import Tiny
from hotcold.lab.truth import truth

EXACT = 1e-9  # relative: two float64 sums of the same terms differ by less


@dataclass(frozen=True)
class Certificate:
    """All numbers are of the step's update, uphill."""

    case: Case
    bias: float  # |E g - target| / |target|
    cosine: float  # of E g and the target; NaN where one is 0
    scale: float | None  # E g = scale * target, where there is one
    variance: float  # E|g|^2 - |E g|^2
    noise: float  # variance for the same length of E g, relative to REINFORCE without baseline, as many responses
    noise_to_best: float  # the same, relative to the best constant baseline
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    predicted: str | None  # in words; None: nothing is stated of this algorithm
    off_stated: float | None  # of mean and variance to the stated sums, relative; None: nothing is stated
    agrees: bool
    gradient: tuple[tuple[float, ...], ...]
    target: tuple[tuple[float, ...], ...]

    @property
    def verdict(self) -> str:
        """In words."""
        if not any(any(row) for row in self.gradient):
            return "zero: nothing is learnt"
        if self.scale is None:
            because = f", because {'; '.join(self.reasons)}" if self.reasons else ""
            return f"points elsewhere: cosine {near_one(self.cosine)}{because}"
        if self.scale < 0:
            return f"points the other way: {self.scale:.4g} times the target"
        return "unbiased" if abs(self.scale - 1) <= EXACT else f"unbiased up to {self.scale:.4g}"

    def as_json(self) -> dict[str, Any]:
        return {
            "algorithm": self.case.algorithm,
            "options": dict(self.case.options),
            "where": self.case.where,
            "verdict": self.verdict,
            "stated": self.predicted,
            "agrees": self.agrees,
            "bias": self.bias,
            "cosine": None if math.isnan(self.cosine) else self.cosine,
            "scale": self.scale,
            "variance": self.variance,
            "variance_to_reinforce": None if math.isnan(self.noise) else self.noise,
            "variance_to_best_baseline": None if math.isnan(self.noise_to_best) else self.noise_to_best,
            "difference_to_stated": self.off_stated,
            "notes": list(self.notes),
            "gradient": self.gradient,
            "target": self.target,
        }


def certify(case: Case) -> Certificate:
    """Measure the case and compare it with what is stated. Raise InputError where it cannot be built."""
    values = critic_values(case) if case.has_critic else None
    measured = expected_update(case.build(), case.tiny, setting_of(case, values))
    gradient, target = measured.gradient.numpy(), target_of(World(case))
    stated, theory = stated_update(case), predicted(case)
    off = None if stated is None else off_stated(gradient, measured.variance, *stated)
    scale = exact_scale(gradient, target)
    agrees = (off is None or off <= EXACT) and agrees_with(theory, scale)
    return certificate(case, gradient, target, measured.variance, theory, off, agrees)


def certificate(
    case: Case,
    gradient: Array,
    target: Array,
    variance: float,
    theory: Predicted | None,
    off: float | None,
    agrees: bool,
    beta: float | None = None,
    num_rows: int | None = None,
) -> Certificate:
    world = World(case)
    beta = world.beta if beta is None else beta
    num_rows = world.group_size * case.situation.groups if num_rows is None else num_rows
    plain, best = reference_variance(case.tiny, beta)
    noise = math.nan if case.sampled_by == "a data set" else relative_noise(variance, gradient, target)
    return Certificate(
        case=case,
        bias=float(np.linalg.norm(gradient - target) / np.linalg.norm(target)),
        cosine=cosine(gradient, target),
        scale=exact_scale(gradient, target),
        variance=variance,
        noise=noise / (plain / num_rows),
        noise_to_best=noise / (best / num_rows),
        reasons=() if theory is None else theory.reasons,
        notes=() if theory is None else theory.notes,
        predicted=None if theory is None else theory.words,
        off_stated=off,
        agrees=agrees,
        gradient=tuple(tuple(row) for row in gradient.tolist()),
        target=tuple(tuple(row) for row in target.tolist()),
    )


def agrees_with(theory: Predicted, scale: float | None) -> bool:
    if theory.factor is None or scale is None:
        return theory.factor is None and scale is None
    return abs(scale - theory.factor) <= EXACT * abs(theory.factor)


def target_of(world: World) -> Array:
    """grad J - beta grad KL(pi || ref), plus the bonus times the gradient of each visited state's entropy.

    Of given rows: the gradient of their log-likelihood, with KL and entropy of each of their states.
    """
    tiny = world.tiny
    if world.case.sampled_by != "a data set":
        charged = replace(tiny, reward={y: tiny.reward[y] - world.penalty(y) for y in tiny.responses})
        return target_with(charged, world.beta, world.bonus)
    policy, rows = world.policy, world.sampler
    kl = visited(policy, rows, lambda row: policy.grad_kl(world.reference, row))
    entropy = visited(policy, rows, policy.grad_entropy)
    return likelihood_gradient(tiny) - world.beta * kl + world.bonus * entropy


def target_with(tiny: Tiny, beta: float, bonus: float) -> Array:
    known, policy = truth(tiny), policy_of(tiny, tiny.logits)
    target = np.asarray((known.grad_J - beta * known.grad_reverse_kl).numpy())
    return target + bonus * visited(policy, policy, policy.grad_entropy)


def likelihood_gradient(tiny: Tiny) -> Array:
    """Of log pi of the rows that the world's other policy wrote."""
    policy, rows = policy_of(tiny, tiny.logits), policy_of(tiny, tiny.sampler)
    return np.sum([rows.of_response(y) * policy.scores(y) for y in tiny.responses], axis=0)


def exact_scale(gradient: Array, target: Array) -> float | None:
    """c with gradient = c target, to 1e-9 relative; None where there is none."""
    norm = float(np.linalg.norm(gradient))
    if norm == 0 or not np.any(target):
        return None
    c = float((gradient * target).sum() / (target * target).sum())
    return c if float(np.linalg.norm(gradient - c * target)) <= EXACT * norm else None


def off_stated(gradient: Array, variance: float, mean: Array, stated_variance: float) -> float:
    """Of the mean, and of the variance, which shows what averages out."""
    of_variance = abs(variance - stated_variance) / max(1.0, stated_variance)
    return max(largest_difference(gradient, mean), of_variance)


def largest_difference(a: Array, b: Array) -> float:
    """Relative to the larger of 1 and the largest entry."""
    return float(np.abs(a - b).max() / max(1.0, np.abs(b).max()))


def cosine(a: Array, b: Array) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum()) / norms if norms else math.nan


def near_one(cos: float) -> str:
    """With the digits that tell it from 1."""
    return f"{cos:.3f}" if cos < 0.9995 else f"{cos:.6f}" if cos < 0.9999995 else "1 within 1e-6"


def relative_noise(variance: float, gradient: Array, target: Array) -> float:
    """The variance if the expected gradient were as long as the target."""
    norm = float((gradient**2).sum())
    return variance * float((target**2).sum()) / norm if norm else math.nan


def reference_variance(tiny: Tiny, beta: float) -> tuple[float, float]:
    """Of REINFORCE from one response, with the KL in the reward: without a baseline, with the best constant one."""
    policy, reference = policy_of(tiny, tiny.logits), policy_of(tiny, tiny.reference)
    moments = np.zeros(3)  # of |g|^2, <g, S>, |S|^2 with S = grad log pi(y)
    mean = np.zeros_like(policy.probability)
    for y in tiny.responses:
        p, s = policy.of_response(y), policy.scores(y)
        kl = [a - b for a, b in zip(policy.logp(y), reference.logp(y), strict=True)]
        rewards = plain_rewards(tiny, y)
        g = np.zeros_like(mean)
        for row, token, earned in zip(
            policy.rows(y), y, to_go([r - beta * k for r, k in zip(rewards, kl, strict=True)]), strict=True
        ):
            g[row] += earned * policy.score(row, token)
        moments += p * np.array([(g * g).sum(), (g * s).sum(), (s * s).sum()])
        mean += p * g
    square = float((mean**2).sum())
    return float(moments[0]) - square, float(moments[0] - moments[1] ** 2 / moments[2]) - square
