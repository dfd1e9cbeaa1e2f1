"""From rows to demonstrations: prompts with the response that is to be learnt.

Where the prompt's column holds messages that end with an assistant turn, every assistant turn of them is a response.
Else the response has a column of its own; by habit the first of `response`, `completion`, `output`, `answer`, `chosen`
that any row has. A column that is named goes before both. A preference pair is two demonstrations of one row, one with
`response_column="chosen"` and one with `response_column="rejected"`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotcold.errors import InputError, did_you_mean
from hotcold.prompts.columns import Prompt, check_not_blank, check_text, checked_messages, find_column, make_prompts
from hotcold.prompts.order import distinct, fingerprint, hold_out
from hotcold.prompts.rows import as_rows, shown

RESPONSE_HABITS = ("response", "completion", "output", "answer", "chosen")
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Demonstration:
    """One row: `Demonstration(Prompt(3, "What is 2 + 3?", {"answer": "5"}), "5")`."""

    prompt: Prompt  # what a model is asked when it generates: all but the last response
    response: str | Messages  # the text after a text; or the whole messages, those of the prompt included
    num_given: int = 0  # of the messages: so many at the start are prompt and never trained

    @property
    def turns(self) -> list[int]:
        """Which messages are responses. The first message is none: there is no prompt before it."""
        if isinstance(self.response, str):
            return []
        first = max(self.num_given, 1)
        return [n for n, message in enumerate(self.response) if n >= first and message["role"] == "assistant"]

    @property
    def opening(self) -> str | Messages:
        """All that comes before the first response: what tells one question from another."""
        return self.prompt.content if isinstance(self.response, str) else self.response[: self.turns[0]]

    @property
    def last_text(self) -> str:
        """The last response as text, for the record."""
        said = self.response if isinstance(self.response, str) else self.response[self.turns[-1]].get("content")
        return said if isinstance(said, str) else ""


def make_demonstrations(
    rows: Iterable[Mapping[str, Any]], prompt_column: str | None = None, response_column: str | None = None
) -> list[Demonstration]:
    """Every row as a demonstration, checked; columns are named where habit does not find them."""
    rows = as_rows(rows)
    prompts = make_prompts(rows, prompt_column)
    asked = find_column(rows, prompt_column)
    answered = _response_column(rows, asked, response_column)
    out = []
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        where, content = rows.where(number), row[asked]
        is_told = not isinstance(content, str) and response_column is None
        if is_told and (answered is None or content[-1]["role"] == "assistant"):
            out.append(_conversation(prompt, content, f"{where}, column {asked!r}"))
        elif answered is None:
            raise InputError(
                f"{where}: no response: there are {', '.join(row)}; looked for {', '.join(RESPONSE_HABITS)}.\n"
                "Name its column: data.response=COLUMN."
            )
        else:
            out.append(_answered(prompt, row, answered, where))
    return out


def _response_column(rows: Sequence[Mapping[str, Any]], asked: str, named: str | None) -> str | None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    if named is None:
        return next((habit for habit in RESPONSE_HABITS if habit in names and habit != asked), None)
    if named not in names:
        raise InputError(f"no column {named!r}.{did_you_mean(named, names)} There are: {', '.join(names)}.")
    if named == asked:
        raise InputError(
            f"data.response={named} is the column of the prompts too.\n"
            "Name another; or leave it out, and the assistant turns of the messages are the responses."
        )
    return named


def _conversation(prompt: Prompt, content: Sequence[Any], place: str) -> Demonstration:
    """Messages whose assistant turns are the responses."""
    messages = checked_messages(content, place)
    made = Demonstration(prompt, messages)
    if not made.turns:
        raise InputError(
            f"{place}: no assistant turn after another one, so there is no response to learn.\n"
            "Add one, or name the column of the responses: data.response=COLUMN."
        )
    _check_words(messages, 1, place)
    return made


def _answered(prompt: Prompt, row: Mapping[str, Any], column: str, where: str) -> Demonstration:
    """A prompt and a response with a column of its own, as text or as messages."""
    place, value = f"{where}, column {column!r}", row.get(column)
    if value is None:
        what = "null" if column in row else f"missing (the row has {', '.join(row)})"
        raise InputError(f"{place}: {what}; a response is needed. Fill it or remove the row.")
    if isinstance(value, str):
        check_text(value, place)
        check_not_blank(value, place)
        if isinstance(prompt.content, str):
            return Demonstration(prompt, value)
        messages = [*prompt.content, {"role": "assistant", "content": value}]
        return Demonstration(prompt, messages, len(prompt.content))
    if isinstance(value, (list, tuple)):
        return _answered_by_messages(prompt, checked_messages(value, place), place)
    raise InputError(f"{place}: {shown(value)}; text or messages are needed.")


def _answered_by_messages(prompt: Prompt, messages: Messages, place: str) -> Demonstration:
    """Messages after the prompt's, or the whole of them once more from its first; a text is one user message."""
    content = prompt.content
    given: Messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    prompt = replace(prompt, content=given)
    first = 0
    if messages and messages[0]["role"] != "assistant":
        first = len(given)
        if messages[:first] != given:
            raise InputError(
                f"{place}: the messages begin with {shown(messages[0])}, which is not how the prompt begins.\n"
                "An assistant's turn is needed, or the prompt's own messages and then the assistant's."
            )
    made = Demonstration(prompt, [*given, *messages[first:]], len(given))
    if not made.turns:
        raise InputError(f"{place}: no assistant turn, so there is no response to learn. Add one or remove the row.")
    _check_words(messages, first, place)
    return made


def _check_words(messages: Messages, first: int, place: str) -> None:
    """No response, from message `first` on, may be without words and without a call of a tool."""
    for number, message in enumerate(messages):
        content = message.get("content")
        if number >= first and message["role"] == "assistant" and isinstance(content, str):
            if not message.get("tool_calls"):
                check_not_blank(content, f"{place}, message {number}")


def hold_out_demonstrations(
    demonstrations: Sequence[Demonstration], share: float = 0.05, seed: int = 0, most: int = 200
) -> tuple[list[Demonstration], list[Demonstration]]:
    """(to train on, held out), as `hold_out` does it with what comes before the first response."""
    train, held_out = hold_out(_openings(demonstrations), share, seed, most)
    return [demonstrations[p.index] for p in train], [demonstrations[p.index] for p in held_out]


def distinct_demonstrations(demonstrations: Sequence[Demonstration]) -> list[Demonstration]:
    """The first row of each opening."""
    return [demonstrations[prompt.index] for prompt in distinct(_openings(demonstrations))]


def apart_from(
    demonstrations: Sequence[Demonstration], others: Sequence[Demonstration | Prompt]
) -> list[Demonstration]:
    """The demonstrations whose opening begins none of the others."""
    seen = {_key(other.content if isinstance(other, Prompt) else other.opening) for other in others}
    return [demonstration for demonstration in demonstrations if _key(demonstration.opening) not in seen]


def fingerprint_demonstrations(demonstrations: Sequence[Demonstration]) -> str:
    """SHA-256 of rows, prompts, columns and responses; equal exactly when they are."""
    return fingerprint(
        [
            replace(d.prompt, columns={"columns": d.prompt.columns, "response": d.response, "given": d.num_given})
            for d in demonstrations
        ]
    )


def _openings(demonstrations: Sequence[Demonstration]) -> list[Prompt]:
    """As prompts whose index is the place in the list, so that what is chosen can be found again."""
    return [Prompt(place, demonstration.opening, {}) for place, demonstration in enumerate(demonstrations)]


def _key(content: str | Messages) -> str:
    return fingerprint([Prompt(0, content, {})])
