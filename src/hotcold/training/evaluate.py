"""Evaluation on held-out prompts: greedy and sampled scores with 95 % intervals, and pass@k."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hotcold.equations import pass_at_k
from hotcold.prompts import Prompt
from hotcold.rewards.base import Score, Scorer
from hotcold.sampling.base import Request, Response, Sampler, SamplingOptions
from hotcold.training.collect import as_text, scorable

Z95 = 1.959963984540054
ROUNDING = 1e-9  # .7 + .2 + .1 is a hair below 1


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float | None  # None: nothing is known of the spread
    high: float | None
    count: int  # prompts

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3f} (no spread seen: no interval, {self.count} prompts)"
        return f"{self.mean:.3f} (95 % interval {self.low:.3f} to {self.high:.3f}, {self.count} prompts)"


@dataclass(frozen=True)
class Evaluation:
    greedy: Interval | None
    sampled: Interval | None
    pass_at: dict[int, float] = field(default_factory=dict)
    num_unscored: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)  # one for each prompt, with its responses
    loss: float | None = None  # nats per token of held-out responses; None: there are none

    def __str__(self) -> str:
        parts = [] if self.greedy is None else [f"greedy {self.greedy}"]
        return ", ".join([*parts, *([] if self.loss is None else [f"loss {self.loss:.4f} nats per token"])])

    def summary(self) -> dict[str, Any]:
        out: dict[str, Any] = {"eval/unscored": self.num_unscored} if self.rows or self.loss is None else {}
        if self.loss is not None:
            out["eval/loss"] = self.loss
        for name, interval in (("greedy", self.greedy), ("sampled", self.sampled)):
            if interval is not None:
                out[f"eval/{name}"] = interval.mean
                out[f"eval/{name}_low"], out[f"eval/{name}_high"] = interval.low, interval.high
                out["eval/prompts"] = interval.count
        return {**out, **{f"eval/pass_at_{k}": value for k, value in self.pass_at.items()}}


def interval(values: Sequence[float]) -> Interval | None:
    """Mean of one value per prompt with its 95 % interval: Wilson's where every value is 0 or 1, else Student's.

    Equal values have no spread to estimate from. In [0, 1] Wilson's interval of their mean stands for it, which is
    wide enough for any spread that such values can have; elsewhere there is no interval.
    """
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    is_constant = max(values) - min(values) <= ROUNDING * max(1.0, abs(mean))
    if set(values) <= {0.0, 1.0} or (is_constant and 0 <= values[0] <= 1):
        return _wilson(mean, n)
    if is_constant:
        return Interval(mean, None, None, n)
    half = t975(n - 1) * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return Interval(mean, mean - half, mean + half, n)


def _wilson(mean: float, n: int) -> Interval:
    """Wilson (1927): (p + z^2/2n ± z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), never of width 0."""
    centre, scale = mean + Z95**2 / (2 * n), 1 + Z95**2 / n
    half = Z95 * math.sqrt(max(0.0, mean * (1 - mean)) / n + Z95**2 / (4 * n * n))
    # at 0 and 1 the bound is the mean itself, up to rounding
    return Interval(mean, min(mean, (centre - half) / scale), max(mean, (centre + half) / scale), n)


def t975(freedom: int) -> float:
    """The number that Student's t stays below with probability .975, by bisection."""
    low, high = Z95, 13.0  # 12.7 with one degree of freedom
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _t_within(middle, freedom) > 0.95 else (middle, high)
    return (low + high) / 2


def _t_within(t: float, freedom: int) -> float:
    """P(|T| < t) for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    cosine2 = math.cos(angle) ** 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for j in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine2 * (j - 1) / j
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def interval_text(summary: Mapping[str, Any], name: str = "greedy") -> str:
    """'0.900 (95 % interval ...)' of a summary, as it stands in a record."""
    ends = summary[f"eval/{name}_low"], summary[f"eval/{name}_high"]
    return str(Interval(summary[f"eval/{name}"], *ends, summary["eval/prompts"]))


@dataclass(frozen=True)
class Evaluator:
    prompts: Sequence[Prompt]
    prompt_ids: Sequence[tuple[int, ...]]
    sampler: Sampler
    scorer: Scorer
    options: SamplingOptions
    num_samples: int = 1  # sampled responses per prompt, next to the greedy one
    correct: float = 1.0  # a response whose score is at least this counts as correct in pass@k

    def run(self, notify: Callable[[str, int, int], None] = lambda *_: None) -> Evaluation:
        """The same prompts and random numbers at every call, so that two evaluations differ by the model alone."""
        greedy_requests = [Request(ids, draw) for draw, ids in enumerate(self.prompt_ids)]
        requests = [replace(r, sample=sample) for r in greedy_requests for sample in range(self.num_samples)]

        def progress(done: int, of: int) -> None:
            notify("evaluating", done, of)

        greedy = self.sampler.sample(greedy_requests, replace(self.options, greedy=True), progress)
        sampled = self.sampler.sample(requests, self.options, progress) if requests else []
        greedy_scores, scores = self._score(greedy_requests, greedy), self._score(requests, sampled)
        by_prompt = [scores[i * self.num_samples : (i + 1) * self.num_samples] for i in range(len(greedy))]
        return Evaluation(
            interval(_totals(greedy_scores)),
            interval([mean for group in by_prompt if (mean := _mean_score(group)) is not None]),
            self._pass_at(by_prompt),
            sum(s.total is None for s in [*greedy_scores, *scores]),
            self._rows(greedy, greedy_scores, sampled, by_prompt),
        )

    def _score(self, requests: Sequence[Request], responses: Sequence[Response]) -> list[Score]:
        rows = zip(requests, responses, strict=True)
        return self.scorer.score([scorable(self.prompts[q.draw], q, r) for q, r in rows]) if requests else []

    def _pass_at(self, by_prompt: list[list[Score]]) -> dict[int, float]:
        """For k = 1, 2, 4, ... up to the number of samples; unscored responses do not count as samples."""
        out = {}
        for k in [2**i for i in range(self.num_samples.bit_length()) if 2**i <= self.num_samples]:
            totals = [_totals(group) for group in by_prompt]
            values = [pass_at_k(len(t), sum(map(self._is_correct, t)), k) for t in totals if len(t) >= k]
            if values:
                out[k] = math.fsum(values) / len(values)
        return out

    def _is_correct(self, score: float) -> bool:
        return score >= self.correct - ROUNDING * max(1.0, abs(self.correct))

    def _rows(
        self,
        greedy: Sequence[Response],
        greedy_scores: Sequence[Score],
        sampled: Sequence[Response],
        by_prompt: Sequence[Sequence[Score]],
    ) -> list[dict[str, Any]]:
        n = self.num_samples
        return [
            {
                "prompt_index": prompt.index,
                "prompt": as_text(prompt.content),
                "greedy": greedy[i].text,
                "greedy_score": greedy_scores[i].with_steps,
                "sampled": [r.text for r in sampled[i * n : (i + 1) * n]],
                "sampled_scores": [s.with_steps for s in by_prompt[i]],
            }
            for i, prompt in enumerate(self.prompts)
        ]


def _mean_score(scores: Sequence[Score]) -> float | None:
    totals = _totals(scores)
    return math.fsum(totals) / len(totals) if totals else None


def _totals(scores: Sequence[Score]) -> list[float]:
    return [total for s in scores if (total := s.with_steps) is not None]


class Evaluates(Protocol):
    def run(self, notify: Callable[[str, int, int], None] = lambda *_: None) -> Evaluation: ...


@dataclass(frozen=True)
class WithLoss:
    """An evaluation of responses, where there is one, and the loss on held-out responses of a data set."""

    evaluator: Evaluator | None
    loss: Callable[[], float]

    def run(self, notify: Callable[[str, int, int], None] = lambda *_: None) -> Evaluation:
        notify("evaluating", 0, 0)
        evaluation = Evaluation(None, None) if self.evaluator is None else self.evaluator.run(notify)
        return replace(evaluation, loss=self.loss())


def timed(evaluator: Evaluates, notify: Callable[[str, int, int], None]) -> tuple[Evaluation, float]:
    start = time.perf_counter()
    return evaluator.run(notify), time.perf_counter() - start
