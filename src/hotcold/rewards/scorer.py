"""Reward functions with weights as one scorer. What is not a score stops the run: a failure is never a 0."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import operator
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

from hotcold.errors import InputError, RewardError
from hotcold.rewards.base import LARGEST, Scorable, Score
from hotcold.rewards.functions import RewardFunction
from hotcold.user_file import describe_error

MAX_CONCURRENT = 64  # awaitables at a time
SHAPE = 'Return a number, True, False, None (no score), or {"score": number, "steps": [(position, value), ...]}.'


@dataclass(frozen=True)
class Part:
    """What one function says of one response."""

    score: float | None
    steps: tuple[tuple[int, float], ...] = ()


class FunctionScorer:
    """The weighted sum of reward functions; a weight of 0 makes a function a metric only.

    A None from a function with another weight leaves the response without a score. Functions that return an awaitable
    (`async def`) are awaited together, in a running event loop (a notebook) from a thread of their own.
    """

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float]) -> None:
        if len(functions) != len(weights):
            raise InputError(
                f"{len(weights)} reward weights for {len(functions)} reward functions: give one weight for each."
            )
        if not all(math.isfinite(weight) for weight in weights):
            raise InputError(f"reward_weights={list(weights)}: finite numbers are needed.")
        self.functions = tuple(functions)
        self.weights = tuple(float(weight) for weight in weights)
        self.names = unique([function.name for function in functions])

    def score(self, items: Sequence[Scorable]) -> list[Score]:
        """One score for each item, in order."""
        if not items:
            return []
        by_function = self._results(items)
        parts = [
            _parts(function, name, results, items)
            for function, name, results in zip(self.functions, self.names, by_function, strict=True)
        ]
        return [self._total([of_function[i] for of_function in parts], items[i]) for i in range(len(items))]

    def _results(self, items: Sequence[Scorable]) -> list[list[Any]]:
        """What each call returned, by function: one for a batch function, else one for each item."""
        results: list[list[Any]] = []
        try:
            for function, name in zip(self.functions, self.names, strict=True):
                results.append([])
                for chunk in _chunks(function, items):
                    results[-1].append(_call(function, name, chunk))
        except BaseException:
            for result in (result for of_function in results for result in of_function):
                if inspect.iscoroutine(result):
                    result.close()  # it would warn that it was never awaited
            raise
        if any(inspect.isawaitable(result) for of_function in results for result in of_function):
            try:
                return _run(self._await_all(results, items))
            except SystemExit as error:  # from a task of the reward's own, which asyncio lets through
                names = ", ".join(f'"{name}"' for name in self.names)
                raise RewardError(f"reward {names} failed at {_rows(items)}.\n{describe_error(error, None)}") from error
        return results

    async def _await_all(self, results: list[list[Any]], items: Sequence[Scorable]) -> list[list[Any]]:
        free = asyncio.Semaphore(MAX_CONCURRENT)

        async def settle(result: Any, function: RewardFunction, name: str, chunk: Sequence[Scorable]) -> Any:
            if not inspect.isawaitable(result):
                return result
            async with free:
                return await _awaited(result, function, name, chunk)

        return await asyncio.gather(
            *(
                asyncio.gather(
                    *(
                        settle(result, function, name, chunk)
                        for result, chunk in zip(of_function, _chunks(function, items), strict=True)
                    )
                )
                for function, name, of_function in zip(self.functions, self.names, results, strict=True)
            )
        )

    def _total(self, parts: Sequence[Part], item: Scorable) -> Score:
        by_name = {name: part.score for name, part in zip(self.names, parts, strict=True)}
        counted = [(weight, part) for weight, part in zip(self.weights, parts, strict=True) if weight != 0]
        if any(part.score is None for _, part in counted):
            return Score(None, by_name)
        total = math.fsum(weight * part.score for weight, part in counted if part.score is not None)
        steps = tuple((position, weight * value) for weight, part in counted for position, value in part.steps)
        largest = max([abs(total), abs(total + math.fsum(v for _, v in steps)), *(abs(v) for _, v in steps)])
        if not largest <= LARGEST:
            raise RewardError(
                f"row {item.row}: the weighted sum of {by_name}, with its steps, reaches {largest}: "
                "use smaller weights or scores."
            )
        return Score(total, by_name, steps)


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names; a repeated one gets the suffix _2, _3, ..."""
    found: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in found:
            number += 1
            candidate = f"{name}_{number}"
        found.append(candidate)
    return tuple(found)


def _chunks(function: RewardFunction, items: Sequence[Scorable]) -> list[Sequence[Scorable]]:
    return [items] if function.per_batch else [[item] for item in items]


def _call(function: RewardFunction, name: str, chunk: Sequence[Scorable]) -> Any:
    try:
        result = function.call(chunk)
        return list(result) if function.per_batch and isinstance(result, Iterator) else result
    except KeyboardInterrupt:  # a signal to the run
        raise
    except BaseException as error:  # sys.exit(0) too: the run must not end as if it were done
        raise _failed(function, name, chunk, error) from error


async def _awaited(result: Awaitable[Any], function: RewardFunction, name: str, chunk: Sequence[Scorable]) -> Any:
    try:
        value = await result
        return list(value) if function.per_batch and isinstance(value, Iterator) else value
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # by us, because another one failed
        raise _failed(function, name, chunk, error) from error


def _failed(function: RewardFunction, name: str, chunk: Sequence[Scorable], error: BaseException) -> RewardError:
    return RewardError(f'reward "{name}" failed at {_rows(chunk)}.\n{describe_error(error, function.file)}')


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs the coroutine in a loop of its own; where one is running already, in another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, asyncio.run, work).result()


def _parts(function: RewardFunction, name: str, results: list[Any], items: Sequence[Scorable]) -> list[Part]:
    values = _list_of_scores(name, results[0], items) if function.per_batch else results
    return [_part(name, value, item) for value, item in zip(values, items, strict=True)]


def _list_of_scores(name: str, result: Any, items: Sequence[Scorable]) -> list[Any]:
    is_array = getattr(result, "ndim", None) == 1 and hasattr(result, "tolist")
    what = f'reward "{name}" takes all responses at once and returned'
    need = f"Return a list of {len(items)}, one score for each response, in order."
    if not is_array and not isinstance(result, (list, tuple)):
        raise RewardError(f"{what} {_show(result)} for {len(items)} responses ({_rows(items)}).\n{need}")
    values = result.tolist() if is_array else list(result)
    if len(values) != len(items):
        raise RewardError(f"{what} {len(values)} scores for {len(items)} responses ({_rows(items)}).\n{need}")
    return values


def _part(name: str, value: Any, item: Scorable) -> Part:
    where = f'reward "{name}", {_rows([item])}:'
    if not isinstance(value, dict):
        return Part(_score(where, value))
    if "score" not in value:  # other keys are not used: verl's functions return some
        raise RewardError(f'{where} returned a dict with the keys {list(value)}; "score" is needed.\n{SHAPE}')
    steps = value.get("steps")
    return Part(_score(where, value["score"]), () if steps is None else _steps(where, steps, item))


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


def _rows(items: Sequence[Scorable]) -> str:
    rows = list(dict.fromkeys(item.row for item in items))
    shown = ", ".join(str(row) for row in rows[:4]) + (", ..." if len(rows) > 4 else "")
    return f"row{'s' if len(rows) > 1 else ''} {shown} of the data"


def _show(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return f"{text if len(text) <= 100 else text[:97] + '...'} ({type(value).__name__})"
