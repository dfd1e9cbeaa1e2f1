"""Prompts from a user's files: rows, the columns that hold the prompt, the held-out part and the order."""

from __future__ import annotations

import csv
import functools
import hashlib
import importlib.util
import io
import json
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from hotcold.errors import InputError, did_you_mean

HABITS = ("prompt", "messages", "question", "problem", "input")  # where a prompt is looked for, in this order
MAX_HELD_OUT = 200

Row = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    index: int  # row number in the source, from 0
    content: str | list[dict[str, Any]]  # text, or messages
    columns: dict[str, Any]  # all other columns of the row, for the reward


# ---- rows


def read_rows(source: str, split: str | None = None) -> list[Row]:
    """Rows of a file, of a Python function (`file.py:function`), of a reasoning-gym task or of a `datasets` name."""
    gym = re.fullmatch(r"reasoning_gym[:/]([^?]+)(?:\?(.*))?", source)
    if gym or Path(source).exists() or re.search(r"\.py(:\w*)?$", source) or _looks_like_path(source):
        if split is not None:
            raise InputError(f"data.split={split} is for `datasets` names, and {source} has no splits: leave it out.")
        rows = _gym_rows(gym[1], gym[2] or "") if gym else _file_rows(source)
    else:
        rows = _named_rows(source, split)
    if not rows:
        raise InputError(f"{source} has no rows: at least one prompt is needed.")
    return rows


def _file_rows(source: str) -> list[Row]:
    if re.search(r"\.py(:\w*)?$", source):
        name, _, function = source.partition(".py")
        return _function_rows(Path(name + ".py"), function.removeprefix(":"))
    path = Path(source)
    if not path.exists():
        raise InputError(_missing(path))
    if path.is_dir():
        raise InputError(f"{source} is a folder: give a file ({', '.join(_READERS)}).")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{source}: cannot tell what is in it. Use a file that ends in {', '.join(_READERS)}.")
    return reader(path)


def _looks_like_path(source: str) -> bool:
    """A `datasets` name is `name` or `owner/name`; `owner` is no folder here and what follows a dot is a number."""
    path = Path(source)
    has_suffix = re.fullmatch(r"\.[A-Za-z]\w*", path.suffix) is not None
    in_folder = len(path.parts) == 2 and path.parent.is_dir()
    return has_suffix or in_folder or source.startswith((".", "~", "/")) or len(source.split("?")[0].split("/")) > 2


def _missing(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"{path}: file does not exist, nor does the folder {folder}."
    return f"{path}: file does not exist.{did_you_mean(path.name, sorted(p.name for p in folder.iterdir()))}"


def _read_text(path: Path) -> str:
    raw = path.read_bytes()
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path} is UTF-16: save it as UTF-8.")
    if (at := raw.find(b"\0")) >= 0:
        raise InputError(f"{path}, line {_line(raw, at)}: NUL byte. It is damaged or UTF-16; UTF-8 text is needed.")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, line {_line(raw, error.start)}: not UTF-8. Save the file as UTF-8.") from error
    if not text.strip():
        raise InputError(f"{path} is empty: at least one row is needed.")
    return text


def _line(raw: bytes, at: int) -> int:
    return raw.count(b"\n", 0, at) + 1


def _jsonl_rows(path: Path) -> list[Row]:
    rows = []
    # Not splitlines(): JSON strings may hold U+2028 and the like as they are.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            hint = " A list over many lines is a .json file." if number == 1 and line.strip() in "[{" else ""
            raise InputError(f"{where}: not JSON: {error.msg}, column {error.colno}.{hint}") from error
        rows.append(_checked_row(row, where))
    return rows


def _json_rows(path: Path) -> list[Row]:
    try:
        rows = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        hint = " One object a line is a .jsonl file." if error.msg == "Extra data" else ""
        raise InputError(f"{path}, line {error.lineno}: not JSON: {error.msg}, column {error.colno}.{hint}") from error
    if not isinstance(rows, list):
        raise InputError(f"{path} holds {_kind(rows)}: a list of objects is needed, [{{...}}, {{...}}].")
    return [_checked_row(row, f"{path}, {_row(i)}") for i, row in enumerate(rows)]


def _checked_row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise InputError(f'{where} is {_kind(row)}: an object is needed, {{"prompt": ..., ...}}.')
    return row


def _parquet_rows(path: Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as file:
            return pq.read_table(file).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from error


def _csv_rows(path: Path) -> list[Row]:
    """An empty cell is an empty text."""
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    rows: list[Row] = []
    header: list[str] = []
    try:
        for cells in reader:
            if not cells:
                continue
            if not header:
                header = _checked_header(cells, path)
                continue
            if len(cells) != len(header):
                raise InputError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells, but the header has {len(header)}. "
                    'A cell with a comma, a quote or a line break stands in "quotes".'
                )
            rows.append(dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV: {error}.") from error
    return rows


def _checked_header(cells: list[str], path: Path) -> list[str]:
    names = [cell.strip() for cell in cells]
    if "" in names or len(set(names)) < len(names):
        raise InputError(f"{path}: the header {', '.join(map(repr, names))} has an empty or a repeated name.")
    return names


_READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
}


def _function_rows(path: Path, name: str) -> list[Row]:
    """What the user's own function returns."""
    if not path.is_file():
        raise InputError(_missing(path))
    if not name:
        raise InputError(f"{path}: name the function that returns the rows, {path}:FUNCTION.")
    spec = importlib.util.spec_from_file_location(f"hotcold_rows_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
        rows = list(function()) if callable(function) else None
    except Exception as error:
        raise InputError(f"{_place(path, error)}: {type(error).__name__}: {error}") from error
    if rows is None:
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise InputError(f"{path} has no function {name}.{did_you_mean(name, names)}")
    return [_checked_row(row, f"{path}:{name}, {_row(i)}") for i, row in enumerate(rows)]


def _place(path: Path, error: Exception) -> str:
    """The last line of the user's file that the error passed through."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == path.resolve()
    ]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _gym_rows(task: str, query: str) -> list[Row]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise InputError(
            f"reasoning_gym:{task} needs the package reasoning-gym: pip install 'hotcold[reasoning-gym]'"
        ) from error
    if task not in DATASETS:
        raise InputError(f"reasoning-gym has no task {task}.{did_you_mean(task, list(DATASETS))}")
    # Without a seed reasoning-gym draws one, and every run would have other prompts.
    options = {"seed": 0, **_query(query)}
    try:
        entries = list(reasoning_gym.create_dataset(task, **options))
    except Exception as error:  # its checks are asserts and type errors of many kinds
        raise InputError(f"reasoning_gym:{task} does not accept {options}: {error}") from error
    return [{"prompt": e["question"], "answer": e["answer"], "task": task, "entry": dict(e)} for e in entries]


def _query(query: str) -> dict[str, Any]:
    """`size=500&seed=3` as {"size": 500, "seed": 3}."""
    options: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def _named_rows(source: str, split: str | None) -> list[Row]:
    """A `datasets` name; `NAME?config=main` picks one of its configurations, `?split=test` one of its splits."""
    name, _, query = source.partition("?")
    options = dict(parse_qsl(query))
    if unknown := set(options) - {"config", "split"}:
        raise InputError(f"{source}: unknown {', '.join(sorted(unknown))}; after the name stand config= and split=.")
    try:
        import datasets  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError as error:
        raise InputError(
            f"{source}: no such file. To read the dataset of that name: pip install 'hotcold[datasets]'"
        ) from error
    split = options.get("split") or split or "train"
    try:
        loaded = datasets.load_dataset(name, options.get("config"), split=split)
    except Exception as error:  # network, names and formats fail in many ways
        raise InputError(
            f"{source} is no file, and split {split} of the dataset of that name cannot be read:\n"
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    return [dict(row) for row in loaded]


# ---- prompts


def make_prompts(rows: Iterable[Row], column: str | None = None) -> list[Prompt]:
    """The prompt of every row, from `column` or by habit; every row is checked before anything is sampled."""
    rows = [_checked_row(row, _row(i)) for i, row in enumerate(rows)]
    if not rows:
        raise InputError("the prompts have no rows: at least one is needed.")
    column = column or _find_column(rows)
    return [_make_prompt(i, row, column) for i, row in enumerate(rows)]


def _find_column(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        raise InputError(f'{_row(0)} is empty: a column "prompt" is needed.')
    for habit in HABITS:
        # `input` beside `instruction` is only half of a prompt.
        if habit in names and not (habit == "input" and "instruction" in names):
            return habit
    raise InputError(
        f"no column with the prompt: there are {', '.join(map(str, names[:12]))}. "
        f"Name one with data.prompt=COLUMN; found by themselves are {', '.join(HABITS)}."
    )


def _make_prompt(index: int, row: Row, column: str) -> Prompt:
    if column not in row:
        have = f"it has {', '.join(map(str, list(row)[:12]))}" if row else "it is empty"
        raise InputError(f'{_row(index)} has no column "{column}": {have}.{did_you_mean(column, list(row))}')
    where = f'{_row(index)}, column "{column}"'
    columns = {name: value for name, value in row.items() if name != column}
    content = _checked_content(row[column], where)
    if column == "messages" and not isinstance(content, str) and content[-1]["role"] == "assistant":
        columns.setdefault("answer", content[-1]["content"])  # the reference answer, not for the model to see
        content = content[:-1]
        if not content:
            raise InputError(f"{where} holds an assistant's message only: a user's must come first.")
    graded = row.get("reward_model")  # verl's place for the answer
    if isinstance(graded, dict) and "ground_truth" in graded:
        columns.setdefault("ground_truth", graded["ground_truth"])
    return Prompt(index, content, columns)


def _checked_content(value: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str | list) and not value:
        raise InputError(f"{where} is {_kind(value)}: fill it in or remove the row.")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InputError(f"{where} is {_kind(value)}: text or a list of messages is needed.")
    messages = [_checked_message(message, f"{where}, message {i}") for i, message in enumerate(value)]
    if not any(message["content"] for message in messages):
        raise InputError(f"{where}: every message is empty. Fill one in or remove the row.")
    return messages


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    needed = '{"role": "user", "content": "text"} is needed.'
    if not isinstance(message, dict):
        raise InputError(f"{where} is {_kind(message)}: {needed}")
    for key in ("role", "content"):
        if key not in message:
            raise InputError(f'{where} has no "{key}": {needed}')
        if not isinstance(message[key], str):
            raise InputError(f'{where}: "{key}" is {_kind(message[key])}: {needed}')
    # Parquet gives every message the keys of all; a template may take a null for a value.
    return {key: value for key, value in message.items() if value is not None}


def _row(index: int) -> str:
    return f"row {index} (counted from 0)"


def _kind(value: Any) -> str:
    """A value in words."""
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return f"{value!r}, not text"
    if isinstance(value, str | list | dict):
        kind = {str: "text", list: "a list", dict: "an object"}[type(value)]
        return kind if value else kind.replace("a list", "an empty list").replace("text", "empty text")
    return f"of type {type(value).__name__}"


# ---- held out, and the order


def hold_out(prompts: Sequence[Prompt], share: float = 0.05, seed: int = 0) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out): `share` of the distinct prompts is held out, 1 to 200; equal prompts are on one side.

    Which ones depends on their text and the seed alone, so that a shuffled file holds out the same. The held-out ones
    come in the order of their hashes: its first few are a fair sample of a sorted file.
    """
    keys = [_canonical(prompt.content) for prompt in prompts]
    ranked = sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed} {key}".encode()).digest())
    if len(ranked) < 2:
        return list(prompts), []
    count = min(max(1, round(share * len(ranked))), MAX_HELD_OUT, len(ranked) - 1)
    rank = {key: place for place, key in enumerate(ranked[:count])}
    train = [prompt for prompt, key in zip(prompts, keys, strict=True) if key not in rank]
    held = [(rank[key], place) for place, key in enumerate(keys) if key in rank]
    return train, [prompts[place] for _, place in sorted(held)]


@dataclass(frozen=True)
class PromptOrder:
    """Which prompt stands at a position of the endless order: a fresh permutation each pass, with no state to save."""

    num_prompts: int
    seed: int

    def at(self, position: int) -> int:
        number, place = divmod(position, self.num_prompts)
        return int(_permutation(self.num_prompts, self.seed, number)[place])


@functools.lru_cache(maxsize=4)
def _permutation(num_prompts: int, seed: int, number: int) -> np.ndarray:
    return np.random.default_rng([seed, number]).permutation(num_prompts)


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the prompts with their columns and their order: a run continues on the same ones."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(_canonical([prompt.index, prompt.content, prompt.columns]).encode() + b"\n")
    return digest.hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, default=str)


def _plain(value: Any) -> Any:
    """Keys as text and sets in order: reasoning-gym's entries have keys that JSON has not."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else value
