"""Scores of programs by `reward=code`, as a run gets them."""

from __future__ import annotations

from typing import Any

from hotcold.rewards.base import Scorable
from hotcold.rewards.functions import load_reward
from hotcold.rewards.scorer import FunctionScorer


def scored(
    programs: list[str], partial: bool = False, timeout: float = 6.0, **columns: list[Any]
) -> list[float | None]:
    """`columns`: by name one value for each program."""
    scorer = FunctionScorer([load_reward(f"code?partial={str(partial).lower()}&timeout={timeout}")], [1.0])
    rows = [{name: values[number] for name, values in columns.items()} for number in range(len(programs))]
    try:
        return [score.total for score in scorer.score(list(map(_item, programs, rows)))]
    finally:
        scorer.close()


def _item(program: str, row: dict[str, Any]) -> Scorable:
    return Scorable("q", program, (1,), (2,), row)
