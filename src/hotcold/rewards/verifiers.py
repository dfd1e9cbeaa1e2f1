"""Scores that a name gives: the completion against the column `answer`. No signal, no process: safe in any thread."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

# A sign counts only where it cannot be a subtraction: "10-3" ends in 3, "x = -3" in -3. Commas only in threes.
NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-+])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)


def exact(completion: str, answer: Any) -> float:
    """1 if the completion without outer blanks is the answer."""
    return float(completion.strip() == _text(answer))


def contains(completion: str, answer: Any) -> float:
    """1 if the answer stands anywhere in the completion."""
    wanted = _text(answer)
    if not wanted:
        raise ValueError("the answer is empty, and every text contains that")
    return float(wanted in completion)


def last_number(completion: str, answer: Any) -> float:
    """1 if the last number in the completion equals the answer, as decimals: "42.0" is 42, "0.999" is not 1."""
    found = NUMBER.findall(_plain(completion))
    return float(bool(found) and _decimal(found[-1]) == _gold(answer))


def _gold(answer: Any) -> Decimal:
    """The answer as a number; of a worked solution ("... #### 72") what follows the mark."""
    text = _plain(_text(answer)).rpartition("####")[2].strip().removeprefix("$")
    if not NUMBER.fullmatch(text):
        raise ValueError(f"the answer {answer!r} is not a number: use reward=exact or reward=contains")
    return _decimal(text)


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def _plain(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


def _text(answer: Any) -> str:
    if answer is None:
        raise ValueError("this row has no answer")
    return str(answer).strip()
