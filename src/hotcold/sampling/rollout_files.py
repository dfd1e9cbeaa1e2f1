"""Rollouts as parquet: what a run writes and what `sampler=replay:FILE` reads.

Columns: step, group, episode int; prompt_ids, response_ids list<int>; response_mask list<bool> over response_ids
(optional: all true); reward double, null is no score; steps (optional) list<{position, value}>, pairs [position, value]
are read too; logp_sampler list<double> (optional); truncated bool; version int. A run adds unit, greedy_reward, parts
(JSON), text, prompt_text, finish_reason, prompt_index and draw. Any other column is left alone, unless it looks like a
misspelt one of these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hotcold.batch import Rollout
from hotcold.errors import InputError, did_you_mean
from hotcold.files import write_file
from hotcold.rewards.base import LARGEST

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
EFFECTIVE = ("response_mask", "steps", "logp_sampler", "truncated", "version", "unit", "greedy_reward")
ROUNDING = 1e-4  # an engine's log-probability of a certain token may come out this far above 0
ABOUT = "hotcold.step"
NEEDED = ("step", "group", "episode", "prompt_ids", "response_ids", "reward")


def write_rollouts(path: Path, step: int, rollouts: Sequence[Rollout], about: dict[str, Any] | None = None) -> None:
    """At once or not at all. `about`: what a reader may want to know of the step as a whole, kept beside the rows."""
    table = pa.Table.from_pylist([_row(step, r) for r in rollouts], schema=SCHEMA)
    table = table.replace_schema_metadata({ABOUT: json.dumps(about or {})})
    write_file(path, lambda file: pq.write_table(table, file))


def read_about(path: Path) -> dict[str, Any] | None:
    """What `write_rollouts` was told of the step; None where the file is missing, broken or silent."""
    try:
        metadata = pq.read_schema(path).metadata or {}
        return json.loads(metadata[ABOUT.encode()])
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None


def read_rollouts(path: str | Path) -> dict[int, list[Rollout]]:
    """The rollouts of each step, in the order of the file."""
    table = _read_table(Path(path))
    out: dict[int, list[Rollout]] = {}
    for number, row in enumerate(_as_rows(path, table)):
        step = _whole(row, "step", f"{path}, row {number}")
        out.setdefault(step, []).append(_rollout(row, f"{path}, row {number}"))
    if not out:
        raise InputError(f"{path} has no row: nothing to replay.")
    for step, rollouts in out.items():
        _check_episodes(path, step, rollouts)
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


def _as_rows(path: str | Path, table: pa.Table) -> list[dict[str, Any]]:
    try:
        return table.select([name for name in SCHEMA.names if name in table.column_names]).to_pylist()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: a column has text that is not UTF-8 ({error}). Write it again.") from None


def _read_table(path: Path) -> pa.Table:
    if not path.is_file():
        raise InputError(f"sampler=replay:{path}: there is no such file.")
    try:
        with pq.ParquetFile(path) as file:  # not read_table, which makes columns of folder names like step=4/
            table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} could not be read as parquet: {str(error).splitlines()[0][:200]}") from error
    if missing := [name for name in NEEDED if name not in table.column_names]:
        raise InputError(f"{path} lacks the column {missing[0]}. Needed are {', '.join(NEEDED)}.")
    _check_spelling(path, table.column_names)
    for name in SCHEMA.names:
        if name in table.column_names and name != "steps":  # pairs and structs are both read
            table = _cast(path, table, name)
    return table


def _check_spelling(path: Path, names: list[str]) -> None:
    """An optional column with a slip in its name would be left out without a word."""
    if twice := [name for name in names if names.count(name) > 1 and name in SCHEMA.names]:
        raise InputError(f"{path} has the column {twice[0]} twice.")
    absent = [name for name in EFFECTIVE if name not in names]
    for name in names:
        if name not in SCHEMA.names and (close := get_close_matches(name, absent, n=1, cutoff=0.8)):
            raise InputError(f"{path}: the column {name} is not known.{did_you_mean(name, close)}")


def _cast(path: Path, table: pa.Table, name: str) -> pa.Table:
    """The column in the type of the schema (int32 ids and float rewards are widened; text is refused)."""
    column, wanted = table[name], SCHEMA.field(name).type
    try:
        if _has_text(column.type) and not _has_text(wanted):
            raise pa.ArrowInvalid("text")
        column = column.cast(wanted)
    except pa.ArrowException:
        raise InputError(f"{path}: the column {name} is {table[name].type}, {wanted} is needed.") from None
    return table.set_column(table.column_names.index(name), name, column)


def _has_text(kind: pa.DataType) -> bool:
    """Text, or a list or dictionary of it: arrow would read "5" as 5."""
    if pa.types.is_struct(kind):
        return any(_has_text(kind.field(i).type) for i in range(kind.num_fields))
    if hasattr(kind, "value_type"):
        return _has_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)


def _check_episodes(path: str | Path, step: int, rollouts: Sequence[Rollout]) -> None:
    """Several rows may form one episode; baselines are over the episodes of a group."""
    group: dict[int, int] = {}
    for r in rollouts:
        if group.setdefault(r.episode, r.group) != r.group:
            raise InputError(
                f"{path}, step {step}: the episode {r.episode} is in the groups {group[r.episode]} and {r.group}.\n"
                "An episode is one response to one prompt: number the responses of a step without repeating."
            )


def _rollout(row: dict[str, Any], where: str) -> Rollout:
    prompt, response = _ids(row, "prompt_ids", where), _ids(row, "response_ids", where)
    logp = _per_token(row, "logp_sampler", len(response), where)
    if logp is not None and not all(map(math.isfinite, logp)):
        raise InputError(f"{where}: logp_sampler has an entry that is not finite.")
    if logp and max(logp) > ROUNDING:
        raise InputError(
            f"{where}: logp_sampler has {max(logp)}; the logarithm of a probability is never above 0.\n"
            "It is in nats and not negated."
        )
    reward, steps = _score(row, "reward", where), _steps(row, len(response), where)
    if not abs(whole := math.fsum([reward or 0.0, *(value for _, value in steps)])) <= LARGEST:
        raise InputError(f"{where}: reward and steps together are {whole}, too large for float32. Scale the scores.")
    return Rollout(
        prompt_ids=prompt,
        response_ids=response,
        group=_whole(row, "group", where),
        episode=_whole(row, "episode", where),
        response_mask=_per_token(row, "response_mask", len(response), where),
        reward=reward,
        steps=steps,
        logp_sampler=logp,
        truncated=bool(row.get("truncated") or False),
        version=row.get("version") or 0,
        greedy_reward=_score(row, "greedy_reward", where),
        unit=row.get("unit"),
        parts=_parts(row, where),
        text=row.get("text") or "",
        prompt_text=row.get("prompt_text") or "",
        finish_reason=row.get("finish_reason") or "",
        prompt_index=_or(row.get("prompt_index"), -1),
        draw=_or(row.get("draw"), -1),
    )


def _score(row: dict[str, Any], name: str, where: str) -> float | None:
    score = row.get(name)
    if score is not None and not math.isfinite(score):
        raise InputError(f"{where}: {name} is {score}. A response without a score has null.")
    if score is not None and abs(score) > LARGEST:
        raise InputError(f"{where}: {name} is {score}, too large for float32. Scale the scores.")
    return score


def _steps(row: dict[str, Any], length: int, where: str) -> tuple[tuple[int, float], ...]:
    entries = row.get("steps")
    if entries is None:
        return ()
    if not isinstance(entries, list):
        raise InputError(f"{where}: steps is {entries!r}; a list of pairs (position, value) is needed.")
    return tuple(_position_and_value(entry, length, where) for entry in entries)


def _position_and_value(entry: Any, length: int, where: str) -> tuple[int, float]:
    """A struct, as a run writes it, or a pair."""
    pair = [entry.get("position"), entry.get("value")] if isinstance(entry, dict) else entry
    if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, (int, float)) for n in pair)):
        raise InputError(f"{where}: steps has {entry!r}; a position and a value are needed.")
    position, value = pair
    if not (abs(value) <= LARGEST and position in range(length)):
        raise InputError(
            f"{where}: steps has position {position}, value {value}; the response has {length} tokens, from 0."
        )
    return int(position), float(value)


def _parts(row: dict[str, Any], where: str) -> dict[str, float | None]:
    try:
        parts = json.loads(row.get("parts") or "{}")
    except ValueError:
        parts = None
    if not isinstance(parts, dict):
        raise InputError(f"{where}: parts is no JSON object of reward names and scores.")
    return parts


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
