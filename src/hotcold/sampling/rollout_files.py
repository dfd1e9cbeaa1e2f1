"""Rollouts as parquet: what a run writes and what `sampler=replay:FILE` reads.

Columns: step, group, episode int; prompt_ids, response_ids list<int>; response_mask list<bool> over response_ids
(optional: all true); reward double, null is no score; steps list<{position, value}> and logp_sampler list<double>
(optional); truncated bool; version int. A run adds unit, greedy_reward, parts (JSON), text, prompt_text, finish_reason,
prompt_index and draw.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hotcold.batch import Rollout
from hotcold.errors import InputError

INTS, FLOATS = pa.list_(pa.int64()), pa.list_(pa.float64())
STEPS = pa.list_(pa.struct([("position", pa.int64()), ("value", pa.float64())]))
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group", pa.int64()),
        ("episode", pa.int64()),
        ("prompt_ids", INTS),
        ("response_ids", INTS),
        ("response_mask", pa.list_(pa.bool_())),
        ("reward", pa.float64()),
        ("steps", STEPS),
        ("logp_sampler", FLOATS),
        ("truncated", pa.bool_()),
        ("version", pa.int64()),
        ("unit", pa.int64()),
        ("greedy_reward", pa.float64()),
        ("parts", pa.string()),
        ("text", pa.string()),
        ("prompt_text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_index", pa.int64()),
        ("draw", pa.int64()),
    ]
)
NEEDED = ("step", "group", "episode", "prompt_ids", "response_ids", "reward")


def write_rollouts(path: Path, step: int, rollouts: Sequence[Rollout]) -> None:
    """At once or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(pa.Table.from_pylist([_row(step, r) for r in rollouts], schema=SCHEMA), partial)
    partial.replace(path)


def read_rollouts(path: str | Path) -> dict[int, list[Rollout]]:
    """The rollouts of each step, in the order of the file."""
    table = _read_table(Path(path))
    out: dict[int, list[Rollout]] = {}
    for number, row in enumerate(table.to_pylist()):
        step = _whole(row, "step", f"{path}, row {number}")
        out.setdefault(step, []).append(_rollout(row, f"{path}, row {number}"))
    if not out:
        raise InputError(f"{path} has no row: nothing to replay.")
    return out


def _row(step: int, r: Rollout) -> dict[str, Any]:
    return {
        "step": step,
        "group": r.group,
        "episode": r.episode,
        "prompt_ids": r.prompt_ids,
        "response_ids": r.response_ids,
        "response_mask": r.response_mask,
        "reward": r.reward,
        "steps": [{"position": position, "value": value} for position, value in r.steps],
        "logp_sampler": r.logp_sampler,
        "truncated": r.truncated,
        "version": r.version,
        "unit": r.unit,
        "greedy_reward": r.greedy_reward,
        "parts": json.dumps(r.parts),
        "text": r.text,
        "prompt_text": r.prompt_text,
        "finish_reason": r.finish_reason,
        "prompt_index": r.prompt_index,
        "draw": r.draw,
    }


def _read_table(path: Path) -> pa.Table:
    if not path.is_file():
        raise InputError(f"sampler=replay:{path}: there is no such file.")
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} could not be read as parquet: {str(error).splitlines()[0][:200]}") from error
    if missing := [name for name in NEEDED if name not in table.column_names]:
        raise InputError(f"{path} lacks the column {missing[0]}. Needed are {', '.join(NEEDED)}.")
    for name in SCHEMA.names:
        if name in table.column_names:
            table = _cast(path, table, name)
    return table


def _cast(path: Path, table: pa.Table, name: str) -> pa.Table:
    """The column in the type of the schema (int32 ids and float rewards are widened; text is refused)."""
    column, wanted = table[name], SCHEMA.field(name).type
    if name == "steps" and not pa.types.is_null(column.type) and column.type != wanted:
        column = pa.chunked_array([pa.array([_as_structs(v) for v in column.to_pylist()], wanted)])
    try:
        if pa.types.is_string(column.type) and not pa.types.is_string(wanted):
            raise pa.ArrowInvalid("text")
        column = column.cast(wanted)
    except pa.ArrowException:
        raise InputError(f"{path}: the column {name} is {table[name].type}, {wanted} is needed.") from None
    return table.set_column(table.column_names.index(name), name, column)


def _as_structs(value: Any) -> Any:
    """Pairs [position, value] are read like the structs that a run writes."""
    if value is None:
        return None
    return [v if isinstance(v, dict) else {"position": int(v[0]), "value": float(v[1])} for v in value]


def _rollout(row: dict[str, Any], where: str) -> Rollout:
    prompt, response = _ids(row, "prompt_ids", where), _ids(row, "response_ids", where)
    reward = row["reward"]
    if reward is not None and not math.isfinite(reward):
        raise InputError(f"{where}: reward is {reward}. A response without a score has null.")
    steps = tuple((s["position"], s["value"]) for s in row.get("steps") or ())
    for position, value in steps:
        if not (0 <= position < len(response) and math.isfinite(value)):
            raise InputError(
                f"{where}: steps has ({position}, {value}); the response has the tokens 0 to {len(response) - 1}."
            )
    return Rollout(
        prompt_ids=prompt,
        response_ids=response,
        group=_whole(row, "group", where),
        episode=_whole(row, "episode", where),
        response_mask=_per_token(row, "response_mask", len(response), where),
        reward=reward,
        steps=steps,
        logp_sampler=_per_token(row, "logp_sampler", len(response), where),
        truncated=bool(row.get("truncated") or False),
        version=row.get("version") or 0,
        greedy_reward=row.get("greedy_reward"),
        unit=row.get("unit"),
        parts=json.loads(row.get("parts") or "{}"),
        text=row.get("text") or "",
        prompt_text=row.get("prompt_text") or "",
        finish_reason=row.get("finish_reason") or "",
        prompt_index=_or(row.get("prompt_index"), -1),
        draw=_or(row.get("draw"), -1),
    )


def _or(value: Any, default: int) -> int:
    return default if value is None else value


def _whole(row: dict[str, Any], name: str, where: str) -> int:
    if row[name] is None:
        raise InputError(f"{where}: {name} is null; a whole number is needed.")
    return row[name]


def _ids(row: dict[str, Any], name: str, where: str) -> tuple[int, ...]:
    ids = row[name]
    if ids is None or any(i is None or i < 0 for i in ids):
        raise InputError(f"{where}: {name} is null or has a null or negative token id.")
    return tuple(ids)


def _per_token(row: dict[str, Any], name: str, length: int, where: str) -> Any:
    values = row.get(name)
    if values is None:
        return None
    if len(values) != length:
        raise InputError(f"{where}: {name} has {len(values)} entries, response_ids has {length}.")
    if any(v is None for v in values):
        raise InputError(f"{where}: {name} has a null entry.")
    return tuple(values)
