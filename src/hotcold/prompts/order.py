"""Prompts held out, put in an order, recognised again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hotcold.prompts.columns import Prompt


def hold_out(
    prompts: Sequence[Prompt], share: float = 0.05, seed: int = 0, most: int = 200
) -> tuple[list[Prompt], list[Prompt]]:
    """(to train on, held out): `share` of the distinct prompts, at least 1 and at most `most`.

    Which ones depends on their text and the seed, not on the order of rows. A held-out prompt is there once, as its
    first row; its other rows are on neither side, because equal prompts are no independent evidence and must not be
    trained on. With fewer than two distinct prompts all are trained on.
    """
    ranks = {key: hashlib.sha256(f"{seed}|{key}".encode()).digest() for key in {_canonical(p.content) for p in prompts}}
    if len(ranks) < 2:
        return list(prompts), []
    number = min(most, max(1, round(share * len(ranks))), len(ranks) - 1)
    chosen = set(sorted(ranks, key=lambda key: ranks[key])[:number])
    train = [p for p in prompts if _canonical(p.content) not in chosen]
    return train, [p for p in distinct(prompts) if _canonical(p.content) in chosen]


def distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first row of each prompt: several rows with one prompt are one question to an evaluation."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(_canonical(prompt.content), prompt)
    return list(first.values())


@dataclass(frozen=True)
class PromptOrder:
    """Which prompt stands at each position: pass after pass, every prompt once a pass, a function of the seed."""

    num_prompts: int
    seed: int

    def at(self, position: int) -> int:
        number, place = divmod(position, self.num_prompts)
        return _permutation(self.num_prompts, self.seed, number)[place]


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, number: int) -> list[int]:
    """The order that sorts random 64-bit words: unlike a generator's shuffle it is the same in every numpy."""
    import numpy as np

    words = np.random.Philox(np.random.SeedSequence((seed, number))).random_raw(size)
    return np.argsort(words, kind="stable").tolist()


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of rows, prompts and columns; equal exactly when they are."""
    whole = hashlib.sha256()
    for prompt in prompts:
        whole.update(_canonical([prompt.index, prompt.content, prompt.columns]).encode() + b"\n")
    return whole.hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """What JSON can say of a value; of an object only its kind where its text is an address."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(_canonical(item) for item in value)
    if callable(getattr(value, "tolist", None)):
        return _plain(value.tolist())
    text = repr(value)
    return [type(value).__name__, "" if " at 0x" in text else text]
