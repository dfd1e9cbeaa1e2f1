"""Scores of user functions: accepted types, refused values, alignment, concurrency."""

import asyncio
import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from hotcold.errors import InputError, RewardError
from hotcold.rewards.base import Scorable, Score
from hotcold.rewards.functions import load_reward
from hotcold.rewards.scorer import FunctionScorer


def item(completion: str = "5", row: int = 0, **columns: Any) -> Scorable:
    return Scorable("2 + 3 =", completion, (1, 2), (7, 8, 9), columns, row=row)


def four() -> list[Scorable]:
    return [item(str(i), row=10 + i) for i in range(4)]


def score(function: Callable[..., Any], items: list[Scorable]) -> list[Score]:
    return FunctionScorer([load_reward(function)], [1.0]).score(items)


def totals(function: Callable[..., Any], items: list[Scorable]) -> list[float | None]:
    return [one.total for one in score(function, items)]


def returning(values: Any) -> Callable[..., Any]:
    def fixed(completions: list[str]) -> Any:
        return values

    return fixed


@pytest.mark.parametrize("values", [[1.0], [1, 0, 1], [1] * 5, []])
def test_c01_a_list_of_another_length_is_refused(values: list[float]) -> None:
    with pytest.raises(RewardError, match=rf'"fixed".* returned {len(values)} scores for 4 responses .*10, 11'):
        score(returning(values), four())


@pytest.mark.parametrize("value", [0.5, None, "1111", {0: 1.0}, torch.tensor(0.5)])
def test_c01_what_is_no_list_is_not_broadcast(value: Any) -> None:
    with pytest.raises(RewardError, match=r'"fixed".* for 4 responses'):
        score(returning(value), four())


def test_c01_a_generator_of_the_right_length_is_accepted() -> None:
    def lazily(completions: list[str]) -> Iterator[float]:
        yield from (float(text) for text in completions)

    assert totals(lazily, four()) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([True, 0, 1, np.float32(0.5)], [1.0, 0.0, 1.0, 0.5]),  # mean .625
        ([torch.tensor(0.25), np.bool_(True), Fraction(1, 2), Decimal(".25")], [0.25, 1.0, 0.5, 0.25]),
        ([torch.tensor(3), np.int64(-2), None, torch.tensor(0.5, dtype=torch.bfloat16)], [3.0, -2.0, None, 0.5]),
        (np.array([1, 0, 1, 0]), [1.0, 0.0, 1.0, 0.0]),
        (torch.tensor([0.5, 1.0, 0.0, 0.25]), [0.5, 1.0, 0.0, 0.25]),
    ],
)
def test_c03_numbers_of_every_kind_become_floats(values: Any, expected: list[float | None]) -> None:
    found = totals(returning(values), four())
    assert found == expected
    assert all(type(value) is float for value in found if value is not None)


@pytest.mark.parametrize(
    "bad",
    [
        "1.0",
        [1.0],
        math.nan,
        math.inf,
        -math.inf,
        1e39,
        1e400,
        10**400,
        Decimal("1e400"),
        1j,
        torch.tensor([1.0]),
        np.nan,
    ],
)
def test_c03_what_is_no_finite_number_names_function_and_row(bad: Any) -> None:
    with pytest.raises(RewardError, match=r'"fixed", row 12 of the data: returned .*\n.*Return a number'):
        score(returning([0.0, 1.0, bad, 0.0]), four())


def test_c07_async_rewards_run_at_the_same_time() -> None:
    running, most = 0, 0

    async def slow(completion: str) -> float:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.05)
        running -= 1
        return float(completion)

    items = [item(str(i)) for i in range(8)]
    assert totals(slow, items) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert most == 8  # all 8 slept together


def test_c07_at_most_64_run_at_a_time() -> None:
    running, most = 0, 0

    async def slow(completion: str) -> float:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    score(slow, [item() for _ in range(70)])
    assert most == 64


def test_c07_sync_and_async_mix_also_in_a_running_event_loop() -> None:
    async def later(completion: str) -> float:
        await asyncio.sleep(0)
        return 2.0

    async def all_later(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [4.0] * len(completions)

    def now(completion: str) -> float:
        return 1.0

    scorer = FunctionScorer([load_reward(f) for f in (later, all_later, now)], [1.0, 1.0, 10.0])

    async def notebook() -> list[Score]:
        return scorer.score([item(), item()])

    # 2 + 4 + 10 * 1
    assert [one.total for one in asyncio.run(notebook())] == [16.0, 16.0]
    assert [one.total for one in scorer.score([item(), item()])] == [16.0, 16.0]


def test_c07_an_async_reward_that_raises_names_row_and_line() -> None:
    async def broken(completion: str) -> float:
        await asyncio.sleep(0)
        raise KeyError("gold")

    with pytest.raises(RewardError, match=r'(?s)"broken" failed at row 3.*KeyError.*gold.*test_scorer\.py:\d+'):
        score(broken, [item(row=3)])


def test_c05_last_number_scores_in_every_kind_of_thread() -> None:
    scorer = FunctionScorer([load_reward("last_number")], [1.0])

    def once(_: int = 0) -> float | None:
        return scorer.score([item("so 40 + 2 makes 42.", answer="42")])[0].total

    async def inside_a_loop() -> float | None:
        return once()

    assert once() == 1.0
    with ThreadPoolExecutor(1) as worker:
        assert worker.submit(once).result() == 1.0
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(once, range(32))) == [1.0] * 32
    assert asyncio.run(inside_a_loop()) == 1.0


@pytest.mark.parametrize("group_size", [2, 7])
def test_c09_each_response_is_graded_with_its_own_row(group_size: int) -> None:
    seen: list[str] = []

    def grade(completions: list[str], answer: list[str]) -> list[float]:
        seen.extend(answer)
        return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]

    def grade_one(completion: str, answer: str) -> float:
        return float(answer in completion)

    items = [item(text, row, answer=text) for row, text in enumerate("xy") for _ in range(group_size)]
    assert totals(grade, items) == [1.0] * (2 * group_size)
    assert totals(grade_one, items) == [1.0] * (2 * group_size)
    assert seen == ["x"] * group_size + ["y"] * group_size


def test_the_total_is_the_weighted_sum_and_weight_0_is_a_metric_only() -> None:
    functions = [lambda completion: 3, lambda completion: 0.5, lambda completion: None]
    scorer = FunctionScorer([load_reward(f) for f in functions], [2.0, -1.0, 0.0])
    assert scorer.names == ("lambda", "lambda_2", "lambda_3")
    # 2 * 3 - 1 * 0.5
    assert scorer.score([item()]) == [Score(5.5, {"lambda": 3.0, "lambda_2": 0.5, "lambda_3": None})]


def test_none_from_a_function_that_counts_leaves_the_response_without_a_score() -> None:
    functions = [lambda completion: 1.0, lambda completion: None if completion == "?" else 1.0]
    scorer = FunctionScorer([load_reward(f) for f in functions], [1.0, 1.0])
    assert [one.total for one in scorer.score([item("?"), item("5")])] == [None, 2.0]


def test_steps_carry_the_weight_of_their_function() -> None:
    def stepwise(completion_ids: list[int]) -> dict[str, Any]:
        return {"score": 1, "steps": [(0, 0.5), (2, True)]}

    assert FunctionScorer([load_reward(stepwise)], [2.0]).score([item()]) == [
        Score(2.0, {"stepwise": 1.0}, ((0, 1.0), (2, 2.0)))
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"score": 1, "steps": [(3, 1.0)]}, "position 3, but the response has 3 tokens"),
        ({"score": 1, "steps": [(-1, 1.0)]}, "position -1"),
        ({"score": 1, "steps": [(0, math.nan)]}, "Return pairs"),
        ({"score": 1, "steps": 5}, "Return pairs"),
        ({"reward": 1}, '"score"'),
    ],
)
def test_a_dict_that_is_no_score_is_refused(value: dict[str, Any], words: str) -> None:
    with pytest.raises(RewardError, match=words):
        score(lambda completion: value, [item()])


def test_an_exception_names_function_row_and_line_and_keeps_its_cause() -> None:
    def fails(completion: str) -> float:
        return float(completion)

    line = fails.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=rf'(?s)"fails" failed at row 4.*test_scorer\.py:{line}') as caught:
        score(fails, [item("1", 3), item("five", 4)])
    assert isinstance(caught.value.__cause__, ValueError)


def test_weights_must_be_one_finite_number_for_each_function() -> None:
    with pytest.raises(InputError, match="2 reward weights for 1 reward"):
        FunctionScorer([load_reward("exact")], [1.0, 2.0])
    with pytest.raises(InputError, match="finite"):
        FunctionScorer([load_reward("exact")], [math.nan])


class Stopped(KeyboardInterrupt):
    """As a signal is told to the run."""


def test_a_reward_that_exits_stops_the_run_with_a_message_and_not_as_if_it_had_ended_well() -> None:
    def leaves(completion: str) -> float:
        sys.exit(0)

    async def leaves_later(completion: str) -> float:
        await asyncio.sleep(0)
        sys.exit(0)

    async def leaves_from_a_task(completion: str) -> float:
        return await asyncio.create_task(leaves_later(completion))

    async def cancels(completion: str) -> float:
        raise asyncio.CancelledError

    for function in (leaves, leaves_later, leaves_from_a_task):
        with pytest.raises(RewardError, match=rf'(?s)"{function.__name__}".*SystemExit'):
            score(function, [item(row=3)])
    with pytest.raises(RewardError, match="CancelledError"):
        score(cancels, [item(row=3)])


def test_a_signal_inside_a_reward_is_no_failure_of_the_reward() -> None:
    def interrupted(completion: str) -> float:
        raise Stopped

    async def interrupted_later(completion: str) -> float:
        raise Stopped

    for function in (interrupted, interrupted_later):
        with pytest.raises(Stopped):
            score(function, [item()])


def test_scores_that_only_their_steps_make_too_large_are_refused() -> None:
    def huge(completion: str) -> dict[str, Any]:
        return {"score": 3e38, "steps": [(0, 3e38)]}  # together 6e38, above float32's 3.4e38

    with pytest.raises(RewardError, match=r"row 7.*smaller"):
        score(huge, [item(row=7)])
