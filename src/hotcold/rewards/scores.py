"""What counts as a score: the judgement of a returned value, in one place for every process that calls a reward."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

from hotcold.errors import RewardError
from hotcold.rewards.base import LARGEST, Scorable

SHAPE = 'Return a number, True, False, None (no score), or {"score": number, "steps": [(position, value), ...]}.'


@dataclass(frozen=True)
class Part:
    """What one function says of one response."""

    score: float | None
    steps: tuple[tuple[int, float], ...] = ()


def values_of(name: str, per_batch: bool, result: Any, items: Sequence[Scorable]) -> list[Any]:
    """What a call returned for each of its items; a batch function must have said as much as it was asked."""
    return _list_of_scores(name, result, items) if per_batch else [result]


def part(name: str, value: Any, item: Scorable) -> Part:
    """The value as a score; RewardError for what is none."""
    where = f'reward "{name}", {rows([item])}:'
    if not isinstance(value, dict):
        return Part(_score(where, value))
    if "score" not in value:  # other keys are not used: verl's functions return some
        raise RewardError(f'{where} returned a dict with the keys {list(value)}; "score" is needed.\n{SHAPE}')
    steps = value.get("steps")
    return Part(_score(where, value["score"]), () if steps is None else _steps(where, steps, item))


def rows(items: Sequence[Scorable]) -> str:
    """'row 3 of the data'"""
    found = list(dict.fromkeys(item.row for item in items))
    shown = ", ".join(str(row) for row in found[:4]) + (", ..." if len(found) > 4 else "")
    return f"row{'s' if len(found) > 1 else ''} {shown} of the data"


def _list_of_scores(name: str, result: Any, items: Sequence[Scorable]) -> list[Any]:
    is_array = getattr(result, "ndim", None) == 1 and hasattr(result, "tolist")
    what = f'reward "{name}" takes all responses at once and returned'
    need = f"Return a list of {len(items)}, one score for each response, in order."
    if not is_array and not isinstance(result, (list, tuple)):
        raise RewardError(f"{what} {_show(result)} for {len(items)} responses ({rows(items)}).\n{need}")
    values = result.tolist() if is_array else list(result)
    if len(values) != len(items):
        raise RewardError(f"{what} {len(values)} scores for {len(items)} responses ({rows(items)}).\n{need}")
    return values


def _steps(where: str, steps: Any, item: Scorable) -> tuple[tuple[int, float], ...]:
    length = len(item.completion_ids)
    found = []
    try:
        for position, value in steps:
            found.append((operator.index(position), _number(value)))
    except (TypeError, ValueError, OverflowError):
        raise RewardError(
            f'{where} "steps" is {_show(steps)}.\nReturn pairs [(position, finite number), ...].'
        ) from None
    for position, _ in found:
        if not 0 <= position < length:
            raise RewardError(
                f"{where} a step stands at position {position}, but the response has {length} tokens.\n"
                "Positions are indices into completion_ids, from 0."
            )
    return tuple(found)


def _score(where: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        return _number(value)
    except (TypeError, ValueError, OverflowError):
        raise RewardError(f"{where} returned {_show(value)}, which is not a finite number.\n{SHAPE}") from None


def _number(value: Any) -> float:
    """A finite float; text is not read as a number and a list of one is not unpacked."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # a tensor or numpy scalar
    if not isinstance(value, (Real, Decimal)):
        raise TypeError
    number = float(value)
    if not abs(number) <= LARGEST:
        raise ValueError
    return number


def _show(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return f"{text if len(text) <= 100 else text[:97] + '...'} ({type(value).__name__})"
