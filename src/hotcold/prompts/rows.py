"""Rows from where the user has them: files, a Python function, a reasoning-gym task, a data set by name."""

from __future__ import annotations

import csv
import inspect
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, final
from urllib.parse import parse_qsl

from hotcold.errors import InputError, did_you_mean
from hotcold.user_file import MEMORY, describe_error, existing, import_file, one_line, pick_function, siblings

NOTHING = frozenset({"", "nan", "NaN", "None", "null", "NULL", "<NA>"})  # a CSV cell that says: no value
MOST_LEVELS = 100
WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")  # UTF-16 and UTF-32


@final
class Rows(list[dict[str, Any]]):
    """Rows that know where they stand in their file."""

    source: str = ""
    lines: Sequence[int] = ()

    def where(self, row: int) -> str:
        """'row 3 (line 4 of sums.csv)', or as much of it as is known."""
        return f"row {row} (line {self.lines[row]} of {self.source})" if self.lines else f"row {row}"


def read_rows(source: str, split: str | None = None) -> list[dict[str, Any]]:
    """The rows of a .jsonl, .json, .parquet or .csv file, FILE.py:FUNCTION, reasoning_gym:TASK or a data set's name.

    A reasoning-gym task takes options, `reasoning_gym:chain_sum?size=500&seed=3`; a data set may name its
    configuration, `owner/name:configuration`. In a CSV file an empty cell, nan, None and null are no value.
    """
    path = Path(source).expanduser()
    reader = READERS.get(path.suffix.lower())
    task = re.fullmatch(r"reasoning[_-]gym[:/](.+)", source)
    python = re.fullmatch(r"(.+\.py)(?::(\w+))?", source)
    if split is not None and (reader or task or python):
        raise InputError(f"data.split={split} has no effect on {source}: it is for data sets by name. Leave it out.")
    if task:
        rows = _reasoning_gym_rows(task[1])
    elif python:
        rows = _function_rows(Path(python[1]).expanduser(), python[2])
    elif reader:
        rows = _file_rows(reader, existing(path))
    else:
        rows = _named_rows(source, split)
    if not rows:
        raise InputError(f"{source} has no rows. At least one prompt is needed.")
    rows.source = rows.source or source
    return rows


def _file_rows(reader: Callable[[Path], Rows], path: Path) -> Rows:
    try:
        return reader(path)
    except MemoryError:
        raise InputError(f"{path} does not fit in memory. Give a smaller file.") from None


def _is_deep(value: Any) -> bool:
    """What is nested more deeply than anybody writes ends every function that calls itself."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [x for item in level if isinstance(item, (dict, list)) for x in _inside(item)]
        if not level:
            return False
    return True


def _inside(item: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return item.values() if isinstance(item, dict) else item


def _text(path: Path) -> str:
    """A UTF-8 file, with or without a byte order mark; what is not that is refused with the line."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if raw.startswith(WIDE_BOMS):
        raise InputError(f"{path} is UTF-16 or UTF-32. Save it as UTF-8.")
    if not raw.removeprefix(b"\xef\xbb\xbf").strip():
        raise InputError(f"{path} is empty. At least one prompt is needed.")
    if (at := raw.find(b"\0")) >= 0:
        line = raw.count(b"\n", 0, at) + 1
        raise InputError(
            f"{path}, line {line}: a NUL byte, so this is no UTF-8 text.\n"
            "It may be UTF-16 (save it as UTF-8) or cut off while it was written (write it again)."
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {line}: not UTF-8 (byte 0x{raw[error.start]:02x}). Save it as UTF-8.") from None


def _jsonl_rows(path: Path) -> Rows:
    rows, lines = Rows(), []
    for line, text in enumerate(_text(path).split("\n"), 1):  # no other character ends a line of JSON
        if text.strip():
            row = _parsed(text, f"{path}, line {line}", "one JSON object a line is needed")
            if not isinstance(row, dict):
                raise InputError(f"{path}, line {line}: {shown(row)}; an object like {{...}} is needed.")
            rows.append(row)
            lines.append(line)
    rows.source, rows.lines = str(path), lines
    return rows


def _json_rows(path: Path) -> Rows:
    content = _parsed(_text(path), str(path), "a list of objects is needed (one object a line is .jsonl)")
    if not isinstance(content, list):
        raise InputError(f"{path} holds {shown(content)}; a list of objects is needed: [{{...}}, {{...}}].")
    for number, row in enumerate(content):
        if not isinstance(row, dict):
            raise InputError(f"{path}, row {number}: {shown(row)}; an object like {{...}} is needed.")
    return Rows(content)


def _parsed(text: str, where: str, needed: str) -> Any:
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "\n" in text.strip() else ""
        raise InputError(f"{where}{line}: not valid JSON ({error.msg}, column {error.colno}): {needed}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: JSON that cannot be read ({error}).") from None
    if _is_deep(found):
        raise InputError(f"{where}: nested more than {MOST_LEVELS} levels deep. Flatten it or leave it out.")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not in JSON; null says that there is no value")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. Of a key that stands twice json would keep the last value without a word."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f'the key "{key}" stands twice in one object, with {shown(found[key])} and {shown(value)}')
        found[key] = value
    return found


def _csv_rows(path: Path) -> Rows:
    rows, lines = Rows(), []
    csv.field_size_limit(2**31 - 1)  # a long prompt is no error
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    names: list[str] = []
    start = 1
    try:
        for cells in reader:
            if not names:
                names = _header(cells, path)
            elif cells:
                if len(cells) != len(names):
                    raise InputError(
                        f"{path}, line {start}: {len(cells)} cells, but the header has {len(names)} columns "
                        f"({', '.join(names)[:200]}).\nQuote a text that holds commas or line breaks."
                    )
                rows.append({n: None if c.strip() in NOTHING else c for n, c in zip(names, cells, strict=True)})
                lines.append(start)
            start = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{path}, line {start}: not valid CSV ({error}).") from None
    rows.source, rows.lines = str(path), lines
    return rows


def _header(cells: list[str], path: Path) -> list[str]:
    names = [cell.strip() for cell in cells]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{path}: two columns are named {twice[0]!r}. Rename one.")
    return names


def _parquet_rows(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_size(path, file.metadata)
            names = file.schema_arrow.names
            rows = Rows() if len(names) > len({*names}) else Rows(file.read().to_pylist())
    except InputError:
        raise
    except Exception as error:  # text that is not UTF-8, dates beyond Python's, and what else stands in foreign bytes
        raise InputError(f"{path} is no whole Parquet file ({one_line(error)}). Write it again.") from None
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{path}: two columns are named {twice[0]!r}. Rename one.")
    return rows


def check_size(path: Path, metadata: Any) -> None:
    """Compressed columns of equal values may be a million times larger in memory than in their file."""
    stored = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    if max(stored, 8 * metadata.num_rows * metadata.num_columns) > MEMORY:
        raise InputError(f"{path} holds {metadata.num_rows} rows, more than fit in memory. Give a smaller file.")


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _jsonl_rows,
    ".ndjson": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
}


def _function_rows(path: Path, name: str | None) -> Rows:
    function = pick_function(import_file(path), path, name, "rows")
    try:
        return as_rows(function())
    except InputError as error:
        raise InputError(f"{path}:{function.__name__}: {error}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # exit() and whatever the file itself derives from BaseException
        raise InputError(f"{path}:{function.__name__} failed: {describe_error(error, str(path))}") from error


def _reasoning_gym_rows(spec: str) -> Rows:
    task, _, query = spec.partition("?")
    given = {key: _option(value) for key, value in parse_qsl(query, True)}
    rows = reasoning_gym_dataset(task, {"size": 500, "seed": 0} | given)
    # what reward=reasoning_gym scores with
    rules = {key: value for key, value in given.items() if key not in ("size", "seed")}
    return Rows({**row, "task": task, "entry": dict(row), "options": rules} for row in rows)


def _option(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def reasoning_gym_dataset(task: str, options: dict[str, Any]) -> Any:
    """The data set of a task; it has the rows and their scorer."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise InputError(
            f"the task {task} needs the package reasoning-gym: pip install 'hotcold[reasoning-gym]'"
        ) from error
    if task not in DATASETS:
        close = did_you_mean(task, list(DATASETS))
        raise InputError(
            f"reasoning-gym has no task {task!r}.{close} It has {len(DATASETS)}: list(DATASETS) shows them."
        )
    known = [field.name for field in fields(DATASETS[task][1])]
    if unknown := [key for key in options if key not in known]:
        raise InputError(f"{task} has no option {unknown[0]!r}.{did_you_mean(unknown[0], known)} It has: {known}.")
    try:
        return create_dataset(task, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(f"reasoning-gym refuses {task} with {options}: {one_line(error)}") from error


def _named_rows(source: str, split: str | None) -> Rows:
    path = Path(source).expanduser()
    if os.path.exists(path) or source.startswith((".", "/", "~")):
        kind = path.suffix or "a file without an ending"
        raise InputError(f"{existing(path)}: {kind} is not read. Needed: {', '.join(READERS)} or FILE.py:FUNCTION.")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InputError(
            f"there is no file {source}.{did_you_mean(path.name, siblings(path))}\n"
            "To load it as a data set by name: pip install 'hotcold[datasets]'"
        ) from error
    name, _, configuration = source.partition(":")
    never = {"trust_remote_code": False} if "trust_remote_code" in inspect.signature(load_dataset).parameters else {}
    try:
        loaded = load_dataset(name, configuration or None, split=split, **never)
    except Exception as error:
        raise InputError(
            f"{source} is no file, and as a data set: {type(error).__name__}: {one_line(error)}"
        ) from error
    if isinstance(loaded, dict):
        if len(loaded) > 1:
            raise InputError(f"{source} has several splits: add data.split=, one of {', '.join(map(str, loaded))}.")
        loaded = next(iter(loaded.values()))
    return Rows(dict(row) for row in loaded)


def as_rows(rows: Iterable[Any]) -> Rows:
    """Rows from Python: a list, a generator or any other iterable of dicts."""
    if isinstance(rows, Rows):
        return rows
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise InputError(f"{shown(rows)} was given; a list of rows is needed: [{{'prompt': ...}}, ...].")
    listed = list(rows)
    for number, row in enumerate(listed):
        if not isinstance(row, Mapping):
            raise InputError(f"row {number}: {shown(row)}; a dict like {{'prompt': ...}} is needed.")
    return Rows(dict(row) for row in listed)


def shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (Mapping, list, tuple)) and not value:
        return "an empty list" if not isinstance(value, Mapping) else "an empty object"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
