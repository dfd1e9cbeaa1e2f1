"""What a worker and its run say to each other: one JSON object a line. Nothing is pickled.

A value of the data that JSON does not have becomes {"\\0": [kind, content]}; `restored` makes the same value again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from hotcold.rewards.base import Scorable

OUT_OF_MEMORY = 77  # exit code of a worker
TAG = "\0"
AS_THEY_ARE = (str, int, float, bool, type(None))


class NotPlain(ValueError):
    """A value that can only be used in the process that holds it."""


# type -> (to what JSON has, and back)
KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: (lambda value: [plain(item) for item in value], lambda found: tuple(map(restored, found))),
    set: (lambda value: [plain(item) for item in value], lambda found: set(map(restored, found))),
    frozenset: (lambda value: [plain(item) for item in value], lambda found: frozenset(map(restored, found))),
    dict: (
        lambda value: [[plain(key), plain(item)] for key, item in value.items()],
        lambda found: {restored(key): restored(item) for key, item in found},
    ),
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    Decimal: (str, Decimal),
    datetime: (datetime.isoformat, datetime.fromisoformat),
    date: (date.isoformat, date.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    timedelta: (
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda found: timedelta(found[0], found[1], found[2]),
    ),
}
BY_NAME = {kind.__name__: back for kind, (_, back) in KINDS.items()}


def plain(value: Any) -> Any:
    """The value as JSON has it; NotPlain where that cannot be."""
    kind = type(value)
    if kind in AS_THEY_ARE:
        return value
    if kind is list:
        return [plain(item) for item in value]
    if kind is dict and TAG not in value and all(type(key) is str for key in value):
        return {key: plain(item) for key, item in value.items()}
    if kind not in KINDS:
        raise NotPlain(f"{kind.__module__}.{kind.__qualname__}")
    return {TAG: [kind.__name__, KINDS[kind][0](value)]}


def restored(found: Any) -> Any:
    if isinstance(found, list):
        return [restored(item) for item in found]
    if not isinstance(found, dict):
        return found
    if TAG in found:
        kind, content = found[TAG]
        return BY_NAME[kind](content)
    return {key: restored(item) for key, item in found.items()}


def plain_item(item: Scorable) -> dict[str, Any]:
    """NotPlain names the column."""
    columns = {}
    for name, value in item.columns.items():
        try:
            columns[name] = plain(value)
        except (NotPlain, RecursionError) as error:
            raise NotPlain(f'the column "{name}" holds {error}') from None
    return {**vars(item), "prompt": plain(item.prompt), "columns": columns}


def restored_item(found: dict[str, Any]) -> Scorable:
    ids = {name: tuple(found[name]) for name in ("prompt_ids", "completion_ids")}
    return Scorable(**{**found, **ids, "prompt": restored(found["prompt"]), "columns": restored(found["columns"])})


def line_of(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
