"""Evaluation: intervals and pass@k by hand numbers, the same questions every time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from hotcold.prompts import Prompt
from hotcold.rewards.base import Scorable, Score
from hotcold.sampling.base import Request, Response, SamplingOptions
from hotcold.training.evaluate import Evaluation, Evaluator, Interval, interval, interval_text, t975


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


def test_the_interval_of_graded_scores_is_students() -> None:
    """.5, .7, .9: mean .7, sample std .2, half width 4.302653 x .2 / sqrt 3 = .496828."""
    result = interval([0.5, 0.7, 0.9])
    assert result is not None
    assert result.mean == pytest.approx(0.7)
    assert result.high - result.mean == pytest.approx(0.496828, abs=1e-6)
    assert result.mean - result.low == pytest.approx(0.496828, abs=1e-6)


@pytest.mark.parametrize(
    ("freedom", "quantile"),  # printed tables of Student's t, 97.5 %
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423), (199, 1.9720)],
)
def test_students_quantile_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert t975(freedom) == pytest.approx(quantile, abs=5e-5)


def test_intervals_of_nothing_and_of_one_graded_score() -> None:
    """One score of .5 as a share of one: (.5 + 1.920729 ± 2.156285) / 4.841459."""
    assert interval([]) is None
    one = interval([0.5])
    assert one is not None and (one.mean, one.count) == (0.5, 1)
    assert (one.low, one.high) == (pytest.approx(0.054621, abs=1e-6), pytest.approx(0.945379, abs=1e-6))
    assert interval([7.0]) == Interval(7.0, None, None, 1)


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


@dataclass
class Stepwise:
    """Scores .5 and, for the response "1" or "-1", rewards of .25 and .25 on the way."""

    names: tuple[str, ...] = ("stepwise",)

    def score(self, items: Sequence[Scorable]) -> list[Score]:
        on_the_way = ((0, 0.25), (0, 0.25))
        return [Score(0.5, steps=on_the_way if item.completion in ("1", "-1") else ()) for item in items]


def test_rewards_on_the_way_count_wherever_a_score_is_reported() -> None:
    """Greedy "0" has .5, "-1" .5 + .25 + .25 = 1. Samples "0", "1": .5, 1, mean .75; "10", "11": .5."""
    of = replace(evaluator({}, samples=2), scorer=Stepwise())
    result = of.run()
    assert result.greedy is not None and result.greedy.mean == 0.75
    assert result.sampled is not None and result.sampled.mean == 0.625
    assert result.pass_at == {1: 0.25, 2: 0.5}  # of prompt 0 one of two is right, of prompt 1 none
    assert [row["greedy_score"] for row in result.rows] == [0.5, 1.0]
    assert [row["sampled_scores"] for row in result.rows] == [[0.5, 1.0], [0.5, 0.5]]


def test_what_counts_as_correct_is_given() -> None:
    """Weights .7, .2, .1 sum to .9999999999999999 in floats: a hair below the given 1.0 is right, .8 is not."""
    scores: dict[str, float | None] = {"0": 0.7 + 0.2 + 0.1, "1": 0.8, "10": 0.8, "11": 0.2}
    assert evaluator(scores, samples=2).run().pass_at == {1: 0.25, 2: 0.5}
    assert replace(evaluator(scores, samples=2), correct=0.8).run().pass_at == {1: 0.75, 2: 1.0}


def test_equal_graded_scores_do_not_claim_certainty() -> None:
    """Ten times .8: Wilson's bounds of a share of .8 of ten: (.8 + .192073 ± .313617) / 1.384146, z = 1.959964."""
    result = interval([0.8] * 10)
    assert result is not None and result.mean == pytest.approx(0.8)
    assert result.low == pytest.approx((0.8 + 0.192073 - 0.313617) / 1.384146, abs=1e-5)
    assert result.high == pytest.approx((0.8 + 0.192073 + 0.313617) / 1.384146, abs=1e-5)


def test_equal_scores_of_unknown_range_have_no_interval() -> None:
    result = interval([-2.0] * 3)
    assert result == Interval(-2.0, None, None, 3)
    assert str(result) == "-2.000 (no spread seen: no interval, 3 prompts)"
    assert Evaluation(result, None).summary()["eval/greedy_low"] is None
    assert interval_text(Evaluation(result, None).summary()) == str(result)
