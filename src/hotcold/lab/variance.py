"""From the gradients of single prompts to the variance that a step's gradient has under each baseline.

A step's gradient is a mean over its prompts, g = (1/P) sum_p g_p, and prompts are drawn independently, so its variance
(the trace of the covariance) is that of g_p over P. It holds both what the choice of prompts and what the sampled
responses bring. The squared length of the mean gradient is the mean of g_p . g_q over pairs of different prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from hotcold.lab.sketch import Array

NUM_RESAMPLES = 1000
NONE, BATCH, GROUP, LEAVE_ONE_OUT = "none", "batch mean", "group mean", "leave-one-out"
GREEDY, CRITIC, OWN = "greedy response", "critic", "the run's own"


@dataclass(frozen=True)
class Contributions:
    """Of one step: by prompt, sums over its responses of grad log pi of each token, times something. P of them [P, k].

    Each is multiplied by the number of the step's prompts: the step's gradient is their mean.
    """

    num_prompts: int  # of the step; P of them are here
    to_go: Array  # times the reward still to come
    totals: Array  # times the response's total reward
    score: Array  # times 1
    group_mean: Array  # [P] mean of the totals
    group_size: Array  # [P] responses with a score
    batch_mean: float  # of all totals of the step
    num_responses: int  # of the step
    greedy: Array | None = None  # [P] total of the greedy response
    values: Array | None = None  # [P, k] times the critic's value
    own: Array | None = None  # [P, k] the gradient that the run's own loss has
    is_exact: bool = False  # not projected

    def of(self, baseline: str) -> Array | None:
        """[P, k] the prompts' gradients under a baseline, on the scale of grad J; None where it does not exist.

        A mean that holds the response's own reward shrinks the expected gradient; it is scaled back, as the learning
        rate would do it: a smaller gradient is no smaller variance.
        """
        n, B = self.group_size[:, None], self.num_responses
        if baseline == NONE:
            return self.to_go
        if baseline == BATCH:
            return (self.to_go - self.batch_mean * self.score) * (B / (B - 1)) if B > 1 else None
        if baseline == GREEDY:
            return None if self.greedy is None else self.to_go - self.greedy[:, None] * self.score
        if baseline == CRITIC:
            return None if self.values is None else self.to_go - self.values
        if baseline == OWN:
            return self.own
        if not bool((self.group_size > 1).all()):
            return None
        mean = self.group_mean[:, None]
        if baseline == GROUP:
            return (self.to_go - mean * self.score) * n / (n - 1)
        assert baseline == LEAVE_ONE_OUT, baseline
        # R_to_go - b_i with b_i = mean - (R_i - mean) / (n - 1)
        return self.to_go + self.totals / (n - 1) - mean * self.score * n / (n - 1)


@dataclass(frozen=True)
class BaselineVariance:
    baseline: str
    variance: float | None  # of the step's gradient, mean over the steps; None where the baseline does not exist
    projection_error: float | None  # standard error of `variance` that the projection brings, relative; 0: none
    change: float | None  # against no baseline: -0.38 is 38 % less
    low: float | None  # 95 % interval of the change
    high: float | None
    signal_to_noise: float | None  # |mean gradient|^2 / variance
    signal_to_noise_error: float | None  # standard error, by leaving out one prompt after the other

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def compare(steps: Sequence[Contributions], seed: int = 0, resamples: int = NUM_RESAMPLES) -> list[BaselineVariance]:
    """Every baseline beside none. Intervals: prompts are drawn anew, with replacement, within each step; so are the
    coordinates of the projection, where there is one."""
    weights = _resamples(steps, seed, resamples)
    spread_of_none = _variances(_all(steps, NONE) or [], steps, weights)
    found = []
    for name in (NONE, BATCH, GROUP, LEAVE_ONE_OUT, GREEDY, CRITIC, OWN):
        gradients = _all(steps, name)
        if gradients is None:
            if name in (BATCH, GROUP, LEAVE_ONE_OUT):
                found.append(BaselineVariance(name, *[None] * 7))
            continue
        found.append(_row(name, gradients, steps, weights, spread_of_none))
    return found


def _row(
    name: str,
    gradients: list[Array],
    steps: Sequence[Contributions],
    weights: list[tuple[Array, Array]],
    spread_of_none: Array,
) -> BaselineVariance:
    variance = mean_variance(gradients, steps)
    ratio, error = signal_to_noise(gradients, steps)
    change = low = high = None
    if name not in (NONE, OWN):  # the run's own loss has a scale of its own
        none = mean_variance(_all(steps, NONE) or [], steps)
        change = variance / none - 1 if none > 0 else None
        drawn = _variances(gradients, steps, weights)
        with np.errstate(invalid="ignore", divide="ignore"):
            quotients = drawn / spread_of_none - 1
        quotients = quotients[np.isfinite(quotients)]
        if change is not None and len(quotients):
            low, high = (float(q) for q in np.quantile(quotients, [0.025, 0.975]))
    return BaselineVariance(name, variance, projection_error(gradients, steps), change, low, high, ratio, error)


def _all(steps: Sequence[Contributions], baseline: str) -> list[Array] | None:
    found = [step.of(baseline) for step in steps]
    return None if any(g is None for g in found) else [g for g in found if g is not None]


def by_coordinate(gradients: Array, step: Contributions) -> Array:
    """[k] what each coordinate adds to the variance of the step's gradient."""
    return gradients.var(0, ddof=1) / step.num_prompts


def mean_variance(gradients: Sequence[Array], steps: Sequence[Contributions]) -> float:
    return math.fsum(by_coordinate(g, s).sum() for g, s in zip(gradients, steps, strict=True)) / len(steps)


def projection_error(gradients: Sequence[Array], steps: Sequence[Contributions]) -> float:
    """The coordinates of a count sketch are alike: how far they differ says how far their sum may be off."""
    squares, total = 0.0, 0.0
    for g, step in zip(gradients, steps, strict=True):
        parts = by_coordinate(g, step)
        squares += 0.0 if step.is_exact else len(parts) * float(parts.var(ddof=1))
        total += float(parts.sum())
    return math.sqrt(squares) / total if total > 0 else 0.0


def signal_to_noise(gradients: Sequence[Array], steps: Sequence[Contributions]) -> tuple[float | None, float | None]:
    """|mean gradient|^2 over the variance, both summed over the steps; and its standard error (jackknife)."""
    whole = _signal(gradients, steps)
    if whole is None:
        return None, None
    left_out = []
    for i, g in enumerate(gradients):
        if len(g) > 2:
            for p in range(len(g)):
                one = _signal([*gradients[:i], np.delete(g, p, 0), *gradients[i + 1 :]], steps)
                left_out.append(math.nan if one is None else one)
    n = len(left_out)
    spread = math.sqrt((n - 1) * float(np.var(left_out))) if n > 1 else math.nan
    return whole, spread if math.isfinite(spread) else None


def _signal(gradients: Sequence[Array], steps: Sequence[Contributions]) -> float | None:
    noise = mean_variance(gradients, steps) * len(steps)
    return math.fsum(squared_mean(g) for g in gradients) / noise if noise > 0 else None


def squared_mean(gradients: Array) -> float:
    """|E g|^2 without bias: products of different prompts only."""
    n = len(gradients)
    return float((gradients.sum(0) ** 2).sum() - (gradients**2).sum()) / (n * (n - 1))


# ---- drawing anew


def _resamples(steps: Sequence[Contributions], seed: int, number: int) -> list[tuple[Array, Array]]:
    """For each step: how often each prompt [number, P] and each coordinate [number, k] is drawn."""
    random = np.random.default_rng(seed)
    num_coordinates = steps[0].score.shape[1]
    coordinates = np.ones((number, num_coordinates))
    if not all(step.is_exact for step in steps):
        drawn = random.multinomial(num_coordinates, np.full(num_coordinates, 1 / num_coordinates), number)
        coordinates = drawn.astype(np.float64)
    prompts = [random.multinomial(len(s.score), np.full(len(s.score), 1 / len(s.score)), number) for s in steps]
    return [(counts.astype(np.float64), coordinates) for counts in prompts]


def _variances(
    gradients: Sequence[Array], steps: Sequence[Contributions], weights: Sequence[tuple[Array, Array]]
) -> Array:
    """[number] the mean variance of each resample."""
    total: Array = np.zeros(len(weights[0][0]))
    for g, step, (prompts, coordinates) in zip(gradients, steps, weights, strict=True):
        n = len(g)
        spread = prompts @ g**2 - (prompts @ g) ** 2 / n
        total += (spread * coordinates).sum(1) / (n - 1) / step.num_prompts
    return total / len(steps)


def effective_size(log_ratios: Array) -> float:
    """(sum w)^2 / (n sum w^2) of w = exp(log ratio): the share of samples that would do as well, all weighing alike."""
    if not len(log_ratios):
        return math.nan
    w = np.exp(log_ratios - log_ratios.max())
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))
