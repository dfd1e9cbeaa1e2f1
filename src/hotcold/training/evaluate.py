"""Evaluation on held-out prompts: greedy and sampled scores with 95 % intervals, and pass@k."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hotcold.equations import pass_at_k
from hotcold.prompts import Prompt
from hotcold.rewards.base import Score, Scorer
from hotcold.sampling.base import Request, Response, Sampler, SamplingOptions
from hotcold.training.collect import as_text, scorable

CORRECT = 1.0  # a response whose score is at least this counts as correct in pass@k
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float
    count: int  # prompts

    def __str__(self) -> str:
        return f"{self.mean:.3f} (95 % interval {self.low:.3f} to {self.high:.3f}, {self.count} prompts)"


@dataclass(frozen=True)
class Evaluation:
    greedy: Interval | None
    sampled: Interval | None
    pass_at: dict[int, float] = field(default_factory=dict)
    num_unscored: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)  # one for each prompt, with its responses

    def summary(self) -> dict[str, Any]:
        out: dict[str, Any] = {"eval/unscored": self.num_unscored}
        for name, interval in (("greedy", self.greedy), ("sampled", self.sampled)):
            if interval is not None:
                out[f"eval/{name}"] = interval.mean
                out[f"eval/{name}_low"], out[f"eval/{name}_high"] = interval.low, interval.high
                out["eval/prompts"] = interval.count
        return {**out, **{f"eval/pass_at_{k}": value for k, value in self.pass_at.items()}}


def interval(values: Sequence[float]) -> Interval | None:
    """Mean of one value per prompt with its 95 % interval: Wilson's where every value is 0 or 1, else normal.

    Wilson (1927): (p + z^2/2n ± z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), never of width 0.
    """
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    if set(values) <= {0.0, 1.0}:
        centre, scale = mean + Z95**2 / (2 * n), 1 + Z95**2 / n
        half = Z95 * math.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n * n))
        # at 0 and 1 the bound is the mean itself, up to rounding
        return Interval(mean, min(mean, (centre - half) / scale), max(mean, (centre + half) / scale), n)
    if n == 1:
        return Interval(mean, -math.inf, math.inf, n)
    half = Z95 * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return Interval(mean, mean - half, mean + half, n)


@dataclass(frozen=True)
class Evaluator:
    prompts: Sequence[Prompt]
    prompt_ids: Sequence[tuple[int, ...]]
    sampler: Sampler
    scorer: Scorer
    options: SamplingOptions
    num_samples: int = 1  # sampled responses per prompt, next to the greedy one

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
            interval([s.total for s in greedy_scores if s.total is not None]),
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
            totals = [[s.total for s in group if s.total is not None] for group in by_prompt]
            values = [pass_at_k(len(t), sum(v >= CORRECT for v in t), k) for t in totals if len(t) >= k]
            if values:
                out[k] = math.fsum(values) / len(values)
        return out

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
                "greedy_score": greedy_scores[i].total,
                "sampled": [r.text for r in sampled[i * n : (i + 1) * n]],
                "sampled_scores": [s.total for s in by_prompt[i]],
            }
            for i, prompt in enumerate(self.prompts)
        ]


def _mean_score(scores: Sequence[Score]) -> float | None:
    totals = [s.total for s in scores if s.total is not None]
    return math.fsum(totals) / len(totals) if totals else None


def timed(evaluator: Evaluator, notify: Callable[[str, int, int], None]) -> tuple[Evaluation, float]:
    start = time.perf_counter()
    return evaluator.run(notify), time.perf_counter() - start
