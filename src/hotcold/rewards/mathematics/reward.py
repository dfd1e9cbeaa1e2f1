"""`reward=math`: 1 if the response's answer is the right one, 0 if not, None where that cannot be told."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from hotcold.rewards.dialects import PLAIN, Column
from hotcold.rewards.mathematics import symbolic
from hotcold.rewards.mathematics.answers import Answer, Rules, read, same
from hotcold.rewards.mathematics.clean import clean
from hotcold.rewards.mathematics.expressions import LONGEST
from hotcold.rewards.mathematics.extract import Where, answer_of, gold_of
from hotcold.rewards.mathematics.sums import Refused, TooLarge, Unreadable

COLUMNS = ("answer", "solution", "target", "gold", "ground_truth")  # the first that a row has
WITHOUT = (
    "reward=math compares numbers, fractions, roots, polynomials, sets, intervals, tuples, lists, matrices, equations "
    "and words by itself. Answers with other functions (sin, log), roots of sums and systems of inequalities get no "
    f"score: math-verify is not installed ({symbolic.INSTALL})"
)


class MathReward:
    """The right answer is in the column `gold`, else in the first of COLUMNS that the row has."""

    def __init__(self, where: Where, gold: str | None, rules: Rules) -> None:
        self.where, self.rules = where, rules
        self.note = "" if symbolic.is_installed() else WITHOUT
        self.dialect = replace(PLAIN, one_columns={"gold": Column((gold,) if gold else COLUMNS)})

    def __call__(self, completion: str, gold: Any) -> float | None:
        right = gold_of(gold)
        verdict = None if right is None else is_right(right, answer_of(completion, self.where), self.rules)
        return None if verdict is None else float(verdict)


def make_math(
    answer: Literal["auto", "boxed", "hash", "tags", "phrase", "last_number"] = "auto",
    gold: str | None = None,
    tolerance: float = 0.0,
    percent: Literal["unit", "hundredth"] = "unit",
) -> MathReward:
    if not 0 <= tolerance < 1:
        raise ValueError("a tolerance of 0 to 1 is needed, a share of the right answer")
    return MathReward(answer, gold, Rules(tolerance, percent))


def is_right(gold: str, answer: str | None, rules: Rules = Rules()) -> bool | None:
    """None where the gold answer is in no language that is known here, or the two cannot be compared."""
    right, why = _read(gold, rules)
    if answer is not None and _is_as_written(gold, answer):
        return True
    if right is None and (isinstance(why, Refused) or not _can_be_parsed(gold)):
        return None
    if answer is None or not answer.strip():
        return False
    given, why = _read(answer, rules)
    if right is not None and given is not None:
        return _same(right, given, rules)
    if given is None and (isinstance(why, Refused) or not symbolic.is_mathematical(answer)):
        return False
    return _by_symbols(gold, answer)


def _is_as_written(gold: str, answer: str) -> bool:
    return max(len(gold), len(answer)) <= LONGEST and clean(answer) == clean(gold) != ""


def _same(right: Answer, given: Answer, rules: Rules) -> bool:
    try:
        return same(right, given, rules)
    except Unreadable:  # a product of long sums
        return False


@lru_cache(4096)
def _read(text: str, rules: Rules) -> tuple[Answer | None, Exception | None]:
    try:
        return read(text, rules), None
    except Unreadable as error:
        return None, error
    except RecursionError:
        return None, TooLarge("a deep expression")


def _can_be_parsed(gold: str) -> bool:
    return symbolic.is_installed() and symbolic.is_mathematical(gold) and _parsed(gold) is not None


def _by_symbols(gold: str, answer: str) -> bool | None:
    if not symbolic.is_installed():
        return None
    right = _parsed(gold)
    if right is None:  # in our language, and not in theirs
        return None
    given = _parsed(answer)
    return False if given is None else symbolic.equal(right, given)


@lru_cache(4096)
def _parsed(text: str) -> Any:
    return symbolic.parsed(text)
