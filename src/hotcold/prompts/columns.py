"""From rows to prompts: the column is found, every row is checked.

Columns by habit, the first that any row has: `prompt`, `messages`, `question`, `problem`, `input`. Text stays as it is;
messages lose a trailing assistant turn, which is the reference answer. Every other column is kept by name. Where a row
has no `answer`, it is filled from the reference turn, from verl's `reward_model.ground_truth` (also kept as
`ground_truth`) or from OpenRLHF's `label`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotcold.errors import InputError, did_you_mean
from hotcold.prompts.rows import as_rows, shown

HABITS = ("prompt", "messages", "question", "problem", "input")


@dataclass(frozen=True)
class Prompt:
    """One row of the user's data: `Prompt(3, "What is 2 + 3?", {"answer": "5"})`."""

    index: int  # row number in the source, from 0
    content: str | list[dict[str, Any]]
    columns: dict[str, Any]


def make_prompts(rows: Iterable[Mapping[str, Any]], column: str | None = None) -> list[Prompt]:
    """Every row as a prompt, checked; `column` names the prompt's column where habit does not find it."""
    rows = as_rows(rows)
    if not rows:
        raise InputError("the data have no rows. At least one prompt is needed.")
    for number, row in enumerate(rows):
        if not row:
            raise InputError(f"{rows.where(number)} is empty; a column {column or 'prompt'!r} is needed.")
    found = find_column(rows, column)
    return [_prompt(number, row, found, rows.where(number)) for number, row in enumerate(rows)]


def find_column(rows: Sequence[Mapping[str, Any]], column: str | None = None) -> str:
    """The column of the prompts: the one that is named, else the first of `HABITS` that any row has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if column is not None:
        if column not in names:
            raise InputError(f"no column {column!r}.{did_you_mean(column, names)} There are: {', '.join(names)}.")
        return column
    for habit in HABITS:
        if habit in names and not (habit == "input" and "instruction" in names):  # there `input` is half of a prompt
            return habit
    raise InputError(
        f"no column of prompts found: there are {', '.join(names)}; looked for {', '.join(HABITS)}.\n"
        "Name it: data.prompt=COLUMN."
    )


def _prompt(index: int, row: dict[str, Any], column: str, where: str) -> Prompt:
    place = f"{where}, column {column!r}"
    if column not in row:
        raise InputError(f"{place}: missing; the row has {', '.join(row)}.")
    content, reference = row[column], None
    if isinstance(content, str) and column != "messages":
        check_text(content, place)
        check_not_blank(content, place)
    elif isinstance(content, (list, tuple)):
        content, reference = _messages(content, place)
    else:
        needed = "messages are" if column == "messages" else "text or messages are"
        raise InputError(f"{place}: {shown(content)}; {needed} needed.")
    columns = {name: value for name, value in row.items() if name != "prompt" or column != "prompt"}
    verl = row.get("reward_model")
    if isinstance(verl, Mapping) and "ground_truth" in verl:
        columns.setdefault("ground_truth", verl["ground_truth"])
    answers = [a for a in (reference, columns.get("ground_truth"), columns.get("label")) if a is not None]
    return Prompt(index, content, {**({"answer": answers[0]} if answers else {}), **columns})


def check_text(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{place}: half of a surrogate pair, which no tokenizer reads. Remove it.") from None


def check_not_blank(text: str, place: str) -> None:
    if not text.strip():
        what = "only blanks" if text else "empty text"
        raise InputError(f"{place}: {what}. Fill it or remove the row.")


def checked_messages(content: Sequence[Any], place: str) -> list[dict[str, Any]]:
    """Messages with role and content each, without null fields."""
    return [_message(message, f"{place}, message {number}") for number, message in enumerate(content)]


def _messages(content: Sequence[Any], place: str) -> tuple[list[dict[str, Any]], Any]:
    """(messages without a trailing assistant turn, what that turn said)"""
    messages = checked_messages(content, place)
    reference = messages.pop().get("content") if messages and messages[-1]["role"] == "assistant" else None
    if not messages:
        what = "no messages" if not content else "only the assistant's turn, which is the answer"
        raise InputError(f"{place}: {what}; a user's turn is needed.")
    return messages, reference


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(f"{place}: {shown(message)}; {{'role': 'user', 'content': '...'}} is needed.")
    content = message.get("content")
    if isinstance(content, str):
        check_text(content, place)
        if message["role"] == "user":  # others may be silent
            check_not_blank(content, place)
    elif not (isinstance(content, list) and content) and not message.get("tool_calls"):
        raise InputError(f"{place}: its content is {shown(content)}; text is needed.")
    return {key: value for key, value in message.items() if value is not None}  # Parquet adds null fields
