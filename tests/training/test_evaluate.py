"""Evaluation: intervals and pass@k by hand numbers, the same questions every time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hotcold.prompts import Prompt

from hotcold.rewards.base import Scorable, Score
from hotcold.sampling.base import Request, Response, SamplingOptions
from hotcold.training.evaluate import Evaluation, Evaluator, interval


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [
        (0, 10, 0.0, 0.277532799862889),  # z^2/(n + z^2), z^2 = 3.841459
        (10, 10, 0.722467200137111, 1.0),
        (9, 10, 0.595850, 0.982124),
        (50, 100, 0.403832, 0.596168),
        (1, 1, 0.206549, 1.0),
    ],
)
def test_wilsons_interval_of_shares(right: int, of: int, low: float, high: float) -> None:
    result = interval([1.0] * right + [0.0] * (of - right))
    assert result is not None and result.count == of
    assert result.mean == pytest.approx(right / of)
    assert result.low == pytest.approx(low, abs=1e-6) and result.high == pytest.approx(high, abs=1e-6)


def test_the_interval_of_graded_scores_is_the_normal_one() -> None:
    """.5, .7, .9: mean .7, sample std .2, half width 1.959964 x .2 / sqrt 3 = .226317."""
    result = interval([0.5, 0.7, 0.9])
    assert result is not None
    assert result.mean == pytest.approx(0.7)
    assert result.high - result.mean == pytest.approx(0.226317, abs=1e-6)
    assert result.mean - result.low == pytest.approx(0.226317, abs=1e-6)


def test_intervals_of_nothing_and_of_one_graded_score() -> None:
    assert interval([]) is None
    one = interval([0.5])
    assert one is not None and (one.mean, one.low, one.high) == (0.5, -math.inf, math.inf)


@dataclass
class Answers:
    """The sampler: sample s to prompt i is the number i * 10 + s, the greedy one -i."""

    calls: list[tuple[list[Request], SamplingOptions]] = field(default_factory=list)

    def sample(self, requests: Sequence[Request], options: SamplingOptions, progress: Any = None) -> list[Response]:
        self.calls.append((list(requests), options))
        numbers = [-r.draw if options.greedy else r.draw * 10 + r.sample for r in requests]
        return [Response((1,), (-1.0,), "stop", str(number)) for number in numbers]

    def refresh(self, version: int) -> None:
        pass


@dataclass
class Table:
    """The scorer: what stands in the table, else 0."""

    table: dict[str, float | None]
    names: tuple[str, ...] = ("right",)

    def score(self, items: Sequence[Scorable]) -> list[Score]:
        return [Score(self.table.get(item.completion, 0.0)) for item in items]


def evaluator(table: dict[str, float | None], prompts: int = 2, samples: int = 4) -> Evaluator:
    contents = [Prompt(content=f"p{i}", columns={}, index=5 + i) for i in range(prompts)]
    ids = [(i,) for i in range(prompts)]
    return Evaluator(contents, ids, Answers(), Table(table), SamplingOptions(stream=1), num_samples=samples)


def test_pass_at_k_is_the_unbiased_one_averaged_over_prompts() -> None:
    """Prompt 0: 1 of 4 right, prompt 1: 2 of 4. k = 1: (1/4 + 2/4)/2; k = 2: (1/2 + 1 - C(2,2)/C(4,2))/2 = 2/3;
    k = 4: 1. A score of .9 is not right, one of 1.5 is."""
    result = evaluator({"2": 1.0, "1": 0.9, "10": 1.5, "13": 1.0}).run()
    assert result.pass_at == pytest.approx({1: 0.375, 2: (0.5 + 5 / 6) / 2, 4: 1.0})


def test_greedy_and_sampled_scores_are_means_over_prompts() -> None:
    """Greedy: 1 ("0") and 0. Sampled: prompt 0 means .25, prompt 1 .5; "0" counts for both kinds."""
    result = evaluator({"0": 1.0, "10": 1.0, "11": 1.0}).run()
    assert result.greedy is not None and result.sampled is not None
    assert (result.greedy.mean, result.greedy.count) == (0.5, 2)
    assert result.sampled.mean == pytest.approx(0.375) and result.sampled.count == 2
    summary = result.summary()
    assert summary["eval/greedy"] == 0.5 and summary["eval/pass_at_1"] == pytest.approx(0.375)
    assert summary["eval/greedy_low"] == pytest.approx(0.0945, abs=1e-4)  # Wilson, 1 of 2
    assert summary["eval/prompts"] == 2 and summary["eval/unscored"] == 0


def test_unscored_responses_count_neither_as_right_nor_as_samples() -> None:
    """Prompt 0: of 4 samples one unscored, one right of three: pass@1 1/3; pass@4 of prompt 1 alone."""
    result = evaluator({"0": None, "1": 1.0, "-1": 1.0, "10": 1.0}).run()
    assert result.num_unscored == 2  # the greedy "0" and the sampled "0"
    assert result.greedy is not None and (result.greedy.mean, result.greedy.count) == (1.0, 1)
    assert result.sampled is not None and result.sampled.mean == pytest.approx((1 / 3 + 1 / 4) / 2)
    assert result.pass_at[1] == pytest.approx((1 / 3 + 1 / 4) / 2) and result.pass_at[4] == 1.0


def test_every_evaluation_asks_the_same_with_its_own_number_of_samples() -> None:
    """D15: the samples of an evaluation have nothing to do with the group size; stream 1 is its own."""
    of = evaluator({}, prompts=3, samples=2)
    of.run()
    of.run()
    first, second = of.sampler.calls[:2], of.sampler.calls[2:]  # type: ignore[attr-defined]
    assert first == second
    assert [options.greedy for _, options in first] == [True, False]
    assert [(r.draw, r.sample) for r in first[1][0]] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(options.stream == 1 for _, options in first)


def test_the_record_has_a_row_for_each_prompt() -> None:
    result = evaluator({"10": 1.0}, samples=2).run()
    assert result.rows[1] == {
        "prompt_index": 6,
        "prompt": "p1",
        "greedy": "-1",
        "greedy_score": 0.0,
        "sampled": ["10", "11"],
        "sampled_scores": [1.0, 0.0],
    }


def test_without_samples_or_prompts_there_is_less_to_report() -> None:
    only_greedy = evaluator({"0": 1.0}, samples=0).run()
    assert only_greedy.sampled is None and only_greedy.pass_at == {} and only_greedy.greedy is not None
    assert evaluator({}, prompts=0).run() == Evaluation(None, None)
