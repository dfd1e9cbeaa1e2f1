"""Reward functions called in this process: one call for each response or for all, what is awaited awaited together."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hotcold.errors import RewardError
from hotcold.rewards.base import Scorable, Service
from hotcold.rewards.functions import RewardFunction
from hotcold.rewards.scores import Part, part, rows, values_of
from hotcold.user_file import describe_error

MAX_CONCURRENT = 64  # awaitables at a time


def parts_here(
    functions: Sequence[RewardFunction], names: Sequence[str], items: Sequence[Scorable]
) -> list[list[Part]]:
    """By function what it says of each item. A failure of any kind ends it with RewardError."""
    results = _results(functions, names, items)
    return [
        _parts(function, name, of_function, items)
        for function, name, of_function in zip(functions, names, results, strict=True)
    ]


def note_of(function: object) -> str:
    """What a reward has to say to the user once, before it scores."""
    note = getattr(function, "note", None) or getattr(getattr(function, "function", None), "note", None)
    return note if isinstance(note, str) else ""


def chunks(per_batch: bool, items: Sequence[Scorable]) -> list[Sequence[Scorable]]:
    """The items of each call."""
    return [items] if per_batch else [[item] for item in items]


def call(function: RewardFunction, name: str, chunk: Sequence[Scorable]) -> Any:
    """What the function returned, maybe an awaitable."""
    try:
        result = function.call(chunk)
        return list(result) if function.per_batch and isinstance(result, Iterator) else result
    except KeyboardInterrupt:  # a signal to the run
        raise
    except BaseException as error:  # sys.exit(0) too: the run must not end as if it were done
        if isinstance(error, RewardError) and isinstance(function.function, Service):
            raise  # it says what is to be said
        raise _failed(function, name, chunk, error) from error


async def awaited(result: Awaitable[Any], function: RewardFunction, name: str, chunk: Sequence[Scorable]) -> Any:
    try:
        value = await result
        return list(value) if function.per_batch and isinstance(value, Iterator) else value
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # by us: another one failed, or its time is over
        raise _failed(function, name, chunk, error) from error


def _failed(function: RewardFunction, name: str, chunk: Sequence[Scorable], error: BaseException) -> RewardError:
    return RewardError(f'reward "{name}" failed at {rows(chunk)}.\n{describe_error(error, function.file)}')


def _results(functions: Sequence[RewardFunction], names: Sequence[str], items: Sequence[Scorable]) -> list[list[Any]]:
    """What each call returned, by function: one for a batch function, else one for each item."""
    results: list[list[Any]] = []
    try:
        for function, name in zip(functions, names, strict=True):
            results.append([])
            for chunk in chunks(function.per_batch, items):
                results[-1].append(call(function, name, chunk))
    except BaseException:
        for result in (result for of_function in results for result in of_function):
            if inspect.iscoroutine(result):
                result.close()  # it would warn that it was never awaited
        raise
    if any(inspect.isawaitable(result) for of_function in results for result in of_function):
        try:
            return _run(_await_all(functions, names, results, items))
        except SystemExit as error:  # from a task of the reward's own, which asyncio lets through
            quoted = ", ".join(f'"{name}"' for name in names)
            raise RewardError(f"reward {quoted} failed at {rows(items)}.\n{describe_error(error, None)}") from error
    return results


async def _await_all(
    functions: Sequence[RewardFunction],
    names: Sequence[str],
    results: list[list[Any]],
    items: Sequence[Scorable],
) -> list[list[Any]]:
    free = asyncio.Semaphore(MAX_CONCURRENT)

    async def settle(result: Any, function: RewardFunction, name: str, chunk: Sequence[Scorable]) -> Any:
        if not inspect.isawaitable(result):
            return result
        async with free:
            return await awaited(result, function, name, chunk)

    return await asyncio.gather(
        *(
            asyncio.gather(
                *(
                    settle(result, function, name, chunk)
                    for result, chunk in zip(of_function, chunks(function.per_batch, items), strict=True)
                )
            )
            for function, name, of_function in zip(functions, names, results, strict=True)
        )
    )


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs the coroutine in a loop of its own; where one is running already, in another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, asyncio.run, work).result()


def _parts(function: RewardFunction, name: str, results: list[Any], items: Sequence[Scorable]) -> list[Part]:
    values = values_of(name, True, results[0], items) if function.per_batch else results
    return [part(name, value, item) for value, item in zip(values, items, strict=True)]
