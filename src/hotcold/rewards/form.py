"""Rewards for how a response is written: tags, length, repetition, phrases. None of them knows what is right."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

Unit = Literal["tokens", "words", "characters"]


class Format:
    """1 where each tag opens and closes once, in this order, around something, and nothing stands between or beside.

    `opened`: the chat template has written the first opening tag, which the response then must not write again.
    """

    def __init__(self, tags: Sequence[str], opened: bool) -> None:
        self.opened = opened
        self.signs = [sign for tag in tags for sign in (f"<{tag}>", f"</{tag}>")]
        self._cut = re.compile(rf"(</?(?:{'|'.join(tags)})>)")

    def __call__(self, completion: str) -> float:
        pieces = self._cut.split(self.signs[0] + completion if self.opened else completion)
        outside, inside = pieces[0::4], pieces[2::4]
        is_empty = [not text.strip() for text in (*outside, *inside)]
        return float(pieces[1::2] == self.signs and is_empty == [True] * len(outside) + [False] * len(inside))

    def misfit(self, prompt: str) -> str:
        """What to change where the prompt, as the model sees it, and `opened` do not agree; else nothing."""
        first = self.signs[0]
        if prompt.rstrip().endswith(first) == self.opened:
            return ""
        if self.opened:
            return f"reward=format has opened=true, but the prompt does not end in {first}: every response scores 0"
        return f"the prompt ends in {first}, so every response scores 0 with reward=format: use 'format?opened=true'"


def make_format(tags: list[str] = ["think", "answer"], opened: bool = False) -> Format:  # noqa: B006
    if not tags or len({*tags}) < len(tags) or not all(re.fullmatch(r"\w+", tag) for tag in tags):
        raise ValueError("tags: names like [think, answer] are needed, each once")
    return Format(tags, opened)


def make_length(target: int, width: int | None = None, unit: Unit = "tokens") -> Callable[[str, list[int]], float]:
    """1 at the target, less by 1/width for each unit beside it, at least 0. `width` is the target where not given."""
    if target < 1 or (width is not None and width < 1):
        raise ValueError("a target and a width of at least 1 are needed")
    wide = width or target

    def length(completion: str, completion_ids: list[int]) -> float:
        return max(0.0, 1 - abs(size(completion, completion_ids, unit) - target) / wide)

    return length


def make_overlong(limit: int, buffer: int, unit: Unit = "tokens") -> Callable[[str, list[int]], float]:
    """0 up to limit - buffer, from there down to -1 at the limit, and -1 beyond (the soft punishment of DAPO)."""
    if not 1 <= buffer <= limit:
        raise ValueError("a buffer of at least 1 and at most the limit is needed")

    def overlong(completion: str, completion_ids: list[int]) -> float:
        over = size(completion, completion_ids, unit) - (limit - buffer)
        return -min(1.0, over / buffer) if over > 0 else 0.0

    return overlong


def make_repetition(n: int = 4, unit: Literal["words", "tokens"] = "words") -> Callable[[str, list[int]], float]:
    """Minus the share of runs of n words (or tokens) that stood in the response before; 0 where it is shorter."""
    if n < 1:
        raise ValueError("n: at least 1 is needed")

    def repetition(completion: str, completion_ids: list[int]) -> float:
        pieces: Sequence[object] = completion.casefold().split() if unit == "words" else completion_ids
        runs = [tuple(pieces[start : start + n]) for start in range(len(pieces) - n + 1)]
        return len({*runs}) / len(runs) - 1 if runs else 0.0

    return repetition


def make_phrases(
    required: list[str] = [],  # noqa: B006
    forbidden: list[str] = [],  # noqa: B006
    case: bool = False,
) -> Callable[[str], float]:
    """The share of the required phrases that the response has, each counted once; 0 where it has a forbidden one."""
    if not required and not forbidden:
        raise ValueError("required=[...] or forbidden=[...] is needed")

    def form(text: str) -> str:
        return text if case else text.casefold()

    wanted, unwanted = [form(text) for text in required], [form(text) for text in forbidden]

    def phrases(completion: str) -> float:
        text = form(completion)
        if any(phrase in text for phrase in unwanted):
            return 0.0
        return sum(phrase in text for phrase in wanted) / len(wanted) if wanted else 1.0

    return phrases


def size(completion: str, completion_ids: Sequence[int], unit: Unit) -> int:
    if unit == "tokens":
        return len(completion_ids)
    return len(completion.split()) if unit == "words" else len(completion)
