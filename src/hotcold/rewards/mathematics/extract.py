"""Which part of a response is its answer, and which part of a row of the data is the right one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from hotcold.rewards.verifiers import NUMBER

Where = Literal["auto", "boxed", "hash", "tags", "phrase", "last_number"]

NOTHING = frozenset({"", "n/a", "nan", "null", "?", "-"})  # no right answer
LONG_LINE = 200  # characters
MOST_BOXES = 64  # that are looked at, the last ones
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
HASH = re.compile(r"####[ \t]*([^\n]*)")
TAGS = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
PHRASE = re.compile(r"(?i)\banswer\s*\**\s*(?:is|:|=)\s*\**(?:\s*(?:equal to|:)\s*)?\s*")
JOINED = re.compile(r"\s*\$?\s*(?:,|;|and|or|\\text\{\s*(?:and|or)\s*\})?\s*(?:and|or)?\s*\$?\s*(?:[A-Za-z]\s*=\s*)?")
SENTENCE_END = re.compile(r"(?<!\d)\.(?=\s|$)|\.(?=\s+[A-Z]|\s*$)")


def answer_of(response: str, where: Where = "auto") -> str | None:
    """What the response gives as its answer; None where it gives none."""
    text = after_thinking(response)
    if where == "last_number":
        found = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
        return found[-1] if found else None
    readers = {"boxed": boxes, "hash": hashes, "tags": tags}
    kinds = readers if where == "auto" else {where: readers[where]} if where in readers else {}
    marked = [place for reader in kinds.values() for place in reader(text)]
    if marked:
        return _inner(max(marked)[1], where)
    if where in ("auto", "phrase"):
        return phrase(text)
    return None


def _inner(found: str, where: Where) -> str:
    """A box or a phrase within answer tags or behind ####."""
    return found if where != "auto" else (phrase(found) or found)


def after_thinking(response: str) -> str:
    """What follows the last </think>, where anything does."""
    _, closed, rest = response.rpartition("</think>")
    return rest if closed and rest.strip() else response


def boxes(text: str) -> Iterator[tuple[int, str]]:
    """(place, content) of each box; boxes side by side ("\\boxed{1} and \\boxed{2}") are one answer."""
    end, place, content = -1, -1, ""
    for found in list(BOX.finditer(text))[-MOST_BOXES:]:
        inside, after = _content(text, found.end())
        if content and inside and JOINED.fullmatch(text[end : found.start()]) and found.start() >= end:
            place, content, end = found.start(), f"{content}, {inside}", after
        else:
            place, content, end = found.start(), inside, after
        yield place, content


def _content(text: str, start: int) -> tuple[str, int]:
    """What the braces at `start` hold, and where they end. An open brace that nothing closes holds nothing."""
    if text[start : start + 1] != "{":
        word = re.compile(r"[^\s$\\]*").match(text, start)
        return (word[0], word.end()) if word else ("", start)
    depth = 0
    for place in range(start, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return text[start + 1 : place], place + 1
    return "", len(text)


def hashes(text: str) -> Iterator[tuple[int, str]]:
    """What follows each ####, up to the end of its line; of a long line the first word."""
    for found in HASH.finditer(text):
        line = found[1].strip()
        yield found.start(), line if len(line) <= LONG_LINE else line.split()[0]


def tags(text: str) -> Iterator[tuple[int, str]]:
    for found in TAGS.finditer(text):
        yield found.start(), found[1].strip()


def phrase(text: str) -> str | None:
    """Of the last "the answer is ..." or "Answer: ..." what follows, up to the end of the sentence."""
    ends = [found.end() for found in PHRASE.finditer(text)]
    if not ends:
        return None
    said = text[ends[-1] :].partition("\n")[0].strip().strip("*").strip()
    end = SENTENCE_END.search(said)
    return (said[: end.start()] if end else said).strip().strip("*").strip()


def gold_of(value: Any) -> str | None:
    """The right answer as text; of a worked solution what follows #### or stands in its last box."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if value is None or isinstance(value, (bool, list, tuple, dict, set)):
        return None
    text = str(value).strip()
    marked = [place for reader in (boxes, hashes) for place in reader(text)]
    found = max(marked)[1] if marked else text
    return None if found.strip().lower() in NOTHING else found
