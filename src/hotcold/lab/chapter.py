"""The course chapter's numbers beside ours: its worked examples and the answers to its questions.

A place is a number of docs/chapter.md, which lists the chapter's formulas and examples in order. What the chapter
leaves as letters (R, b) or as code to be run is evaluated at numbers that the line names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor

from hotcold.equations import (
    clip_selected,
    clipped_surrogate,
    gae,
    importance_weighted,
    kl_shaped_rewards,
    policy_gradient,
    reward_to_go,
    terminal_rewards,
    token_logp,
    truncated_is_policy_gradient,
)

EXACT = 1e-12  # for what is printed as a fraction or is exact as a decimal
WORDS = {"no": 0.0, "yes": 1.0}


@dataclass(frozen=True)
class Number:
    """`printed`: a fraction or an exact decimal; with ~ before it a rounded one; yes or no."""

    place: int  # in docs/chapter.md
    what: str
    printed: str
    ours: float

    @property
    def value(self) -> float:
        text = self.printed.removeprefix("~")
        return WORDS[text] if text in WORDS else float(Fraction(text))

    @property
    def tolerance(self) -> float:
        """Half a unit of the last printed digit where the chapter rounds."""
        if not self.printed.startswith("~"):
            return EXACT
        return 0.5 * 10.0 ** -len(self.printed.partition(".")[2]) + EXACT

    @property
    def passed(self) -> bool:
        return abs(self.ours - self.value) <= self.tolerance  # False for NaN

    @property
    def text(self) -> str:
        shown = f"{self.ours + 0.0:.6g}" if self.printed not in WORDS else ("yes" if self.ours else "no")
        verdict = "agrees" if self.passed else "DIFFERS"
        return f"{self.place:>2}  {self.what:<68} {self.printed.replace('~', '≈ '):>9}  {shown:>10}  {verdict}"

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "chapter": self.value, "tolerance": self.tolerance, "passed": self.passed}


def chapter_numbers() -> list[Number]:
    """Every number, in the chapter's order."""
    parts = (_reinforce_by_hand(), _clipping_by_hand(), _toy(), _shaped_rewards_and_gae(), _questions())
    return [number for part in parts for number in part]


def _f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _row(place: int, what: str, printed: Sequence[str], ours: Tensor) -> Iterator[Number]:
    """One line for each entry."""
    for i, (text, value) in enumerate(zip(printed, ours.flatten().tolist(), strict=True), start=1):
        yield Number(place, f"{what}, entry {i}", text, value)


# ---- one-token responses A, B, C; reward 1 for A

TOKENS = torch.tensor([[0, 0], [0, 1], [0, 2]])  # a prompt token, then A, B or C
MASK = torch.tensor([[False, True]]).expand(3, 2)
REWARDS = _f64([1.0, 0.0, 0.0])


def _gradients(z: Tensor, rewards: Tensor, baseline: float) -> Tensor:
    """[3, 3] of (R - b) log p with respect to the logits, if the sample is A, B, C."""
    z = z.detach().requires_grad_()
    logp = token_logp(z.expand(3, 2, 3), TOKENS)
    advantages = terminal_rewards(rewards - baseline, MASK)
    loss = torch.where(MASK, policy_gradient(logp, advantages), 0.0).sum(1)
    return torch.stack([-torch.autograd.grad(one, z, retain_graph=True)[0] for one in loss])


def _reinforce_by_hand() -> Iterator[Number]:
    z = torch.zeros(3, dtype=torch.float64)
    score = _gradients(z, torch.ones(3, dtype=torch.float64), 0.0)
    yield from _row(39, "e_A - p", ("2/3", "-1/3", "-1/3"), score[0])
    variances = []
    for place, baseline, samples, squares, variance in (
        (40, 0.0, (("2/3", "-1/3", "-1/3"), ("0",) * 3, ("0",) * 3), "4/27", "8/81"),
        (41, 1 / 3, (("4/9", "-2/9", "-2/9"), ("1/9", "-2/9", "1/9"), ("1/9", "1/9", "-2/9")), "6/81", "2/81"),
    ):
        found = _gradients(z, REWARDS, baseline)
        name = "with b = 1/3" if baseline else "no baseline"
        for token, gradient, printed in zip("ABC", found, samples, strict=True):
            yield from _row(place, f"{name}: gradient if the sample is {token}", printed, gradient)
        yield from _row(place, f"{name}: expected gradient", ("2/9", "-1/9", "-1/9"), found.mean(0))
        yield Number(place, f"{name}: mean square of the first entry", squares, float((found[:, 0] ** 2).mean()))
        variances.append(float(found[:, 0].var(correction=0)))
        yield Number(place, f"{name}: variance of the first entry", variance, variances[-1])
        rounded = "~0.025" if baseline else "~0.099"
        yield Number(place, f"{name}: the same, as a decimal", rounded, variances[-1])
    yield Number(41, "the baseline cuts this variance by", "4", variances[0] / variances[1])


def _clipping_by_hand() -> Iterator[Number]:
    table = (
        (2.0, 1.1, "2.2", "2.2", "2.2", "yes"),
        (2.0, 1.5, "3.0", "2.4", "2.4", "no"),
        (-1.0, 0.6, "-0.6", "-0.8", "-0.8", "no"),
        (-1.0, 1.5, "-1.5", "-1.2", "-1.5", "yes"),
    )
    for advantage, ratio, unclipped, clipped, objective, flows in table:
        name, A = f"A = {advantage:g}, ratio {ratio:g}", _f64([[advantage]])
        loss, slope = _clipped(ratio, advantage)
        yield Number(42, f"{name}: ratio A", unclipped, float(-importance_weighted(_f64([[ratio]]).log(), A)))
        band = truncated_is_policy_gradient(_f64([[-1.0]]), _f64([[ratio]]).log(), A, clip_low=0.2, clip_high=0.2)
        yield Number(42, f"{name}: clip(ratio) A", clipped, float(band))  # times -log pi, which is 1 here
        yield Number(42, f"{name}: the smaller", objective, -loss)
        yield Number(42, f"{name}: does the gradient flow", flows, float(slope != 0))
        chosen = clip_selected(_f64([[ratio]]).log(), A)
        yield Number(42, f"{name}: is the clipped branch chosen", "no" if flows == "yes" else "yes", float(chosen))


def _clipped(ratio: float, advantage: float) -> tuple[float, float]:
    """The clipped loss at eps = 0.2, and its slope in the log-ratio."""
    log_ratio = _f64([[ratio]]).log().requires_grad_()
    loss = clipped_surrogate(log_ratio, _f64([[advantage]]), clip_low=0.2, clip_high=0.2)
    (slope,) = torch.autograd.grad(loss.sum(), log_ratio)
    return float(loss.detach()), float(slope)


def _toy() -> Iterator[Number]:
    """The one-token toy with the expected update in place of 16 samples, as the seed of a generator is no equation."""
    z, climbs = torch.zeros(3, dtype=torch.float64), []
    for _ in range(101):
        p = z.softmax(0)
        climbs.append(float(p[0]))
        z = z + 0.5 * (p[:, None] * _gradients(z, REWARDS, float((p * REWARDS).sum()))).sum(0)
    rises = all(later > earlier for earlier, later in pairwise(climbs))
    yield Number(43, "P(A) at the start", "~0.333", climbs[0])
    yield Number(43, "P(A) climbs at every expected step", "yes", float(rises))
    yield Number(43, "P(A) after 100 expected steps", "~1.0", climbs[-1])


def _shaped_rewards_and_gae() -> Iterator[Number]:
    """What the code of the chapter prints, to its four digits."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    logp, reference = _f64([[-1.0, -0.5, -0.2]]), _f64([[-1.2, -0.5, -0.4]])
    rewards = kl_shaped_rewards(_f64([1.0]), logp, reference, mask, beta=0.05)
    values = _f64([[0.5, 0.6, 0.8]])
    advantages = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    yield from _row(44, "token rewards, beta 0.05", ("~-0.0100", "~0.0000", "~0.9900"), rewards)
    yield from _row(44, "advantages, lam 0.95", ("~0.4515", "~0.3805", "~0.1900"), advantages)
    yield from _row(44, "returns", ("~0.9515", "~0.9805", "~0.9900"), advantages + values)


def _questions() -> Iterator[Number]:
    mask = torch.ones(1, 3, dtype=torch.bool)
    z = _f64([0.3, -1.0, 2.0])
    term = (z.softmax(0)[:, None] * _gradients(z, torch.zeros(3, dtype=torch.float64), -7.0)).sum(0)
    yield from _row(49, "question 1: E[b grad log pi] for b = 7, logits (0.3, -1, 2)", ("0",) * 3, term)
    advantages = reward_to_go(terminal_rewards(_f64([2.0]), mask), mask) - 0.5
    yield from _row(50, "question 2: R - b at each token, for R = 2, b = 0.5", ("1.5",) * 3, advantages)
    loss, slope = _clipped(1.3, 1.0)
    yield Number(51, "question 3: the objective at A = 1, ratio 1.3", "1.2", -loss)
    yield Number(51, "question 3: its gradient", "0", abs(slope))
    rewards, values = _f64([[-0.01, 0.0, 0.99]]), _f64([[0.5, 0.6, 0.8]])
    name = "question 4: gamma = lam = 1, A - (sum of later rewards - V)"
    to_come = _f64([[math.fsum(rewards[0, t:].tolist()) for t in range(3)]])
    yield from _row(52, name, ("0",) * 3, gae(rewards, values, mask, lam=1.0) - (to_come - values))
