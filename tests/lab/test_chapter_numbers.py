"""The chapter's numbers beside ours: all of them, each at the precision it is printed with."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from hotcold.lab import chapter
from hotcold.lab.chapter import Number, chapter_numbers

MAP = Path(__file__).parents[2] / "docs" / "chapter.md"


def test_every_number_of_the_chapter_agrees_with_ours() -> None:
    numbers = chapter_numbers()
    assert [n.text for n in numbers if not n.passed] == []
    # 39: a vector. 40: 3 samples and their mean (12 entries), mean square, variance twice; 41 the same and a factor.
    # 42: 4 rows of 5. 43: 3. 44: 3 vectors. Questions: 3 entries, 3 tokens, 2 numbers, 3 tokens.
    assert Counter(n.place for n in numbers) == {
        39: 3,
        40: 15,
        41: 16,
        42: 20,
        43: 3,
        44: 9,
        49: 3,
        50: 3,
        51: 2,
        52: 3,
    }
    assert len({(n.place, n.what) for n in numbers}) == len(numbers)


def test_each_place_is_an_example_or_a_question_of_the_map() -> None:
    text = MAP.read_text(encoding="utf-8")
    listed = {int(number) for number in re.findall(r"^### (\d+)\.", text, re.MULTILINE)}
    examples = text[text.index("## Examples by hand") : text.index("## Practice")]
    questions = text[text.index("## Questions") :].split("\n## ")[0]
    named = {int(number) for part in (examples, questions) for number in re.findall(r"### (\d+)\.", part)}
    places = {n.place for n in chapter_numbers()}
    assert places == named and places <= listed


@pytest.mark.parametrize(
    "printed, ours, passed",
    [
        ("8/81", 8 / 81, True),
        ("8/81", 0.0987, False),
        ("~0.099", 8 / 81, True),
        ("~0.099", 0.0984, False),  # rounds to 0.098
        ("2.4", 2.4, True),
        ("2.4", 2.41, False),  # an exact decimal, not a rounded one
        ("~0.4515", 0.451475, True),
        ("~0.4515", 0.4514, False),
        ("yes", 1.0, True),
        ("no", 1.0, False),
        ("0", math.nan, False),
    ],
)
def test_a_number_passes_at_its_printed_precision_and_no_further(printed: str, ours: float, passed: bool) -> None:
    assert Number(1, "x", printed, ours).passed is passed
    assert Number(1, "x", printed, ours).as_dict()["passed"] is passed


def _upside_down(log_ratio: torch.Tensor, *rest: object, **more: object) -> torch.Tensor:
    return ORIGINAL["clipped_surrogate"](-log_ratio, *rest, **more)


def _times_two(*given: object, **more: object) -> torch.Tensor:
    return 2 * ORIGINAL["kl_shaped_rewards"](*given, **more)


def _lam_squared(*given: object, lam: float = 0.95, **more: object) -> torch.Tensor:
    return ORIGINAL["gae"](*given, lam=lam**2, **more)


def _not_shifted(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, tokens.roll(-1, 1)[..., None])[..., 0]


ORIGINAL = {name: getattr(chapter, name) for name in ("clipped_surrogate", "kl_shaped_rewards", "gae", "token_logp")}
FAULTS = [  # what is replaced, by what, where it must show
    ("clipped_surrogate", _upside_down, {42, 51}),
    ("kl_shaped_rewards", _times_two, {44}),
    ("gae", _lam_squared, {44}),
    ("token_logp", _not_shifted, {41, 49}),  # it reads the prompt token, which is A: right where only A counts
]


@pytest.mark.parametrize("name, wrong, places", FAULTS)
def test_a_wrong_equation_is_seen_where_the_chapter_uses_it(
    name: str, wrong: object, places: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chapter, name, wrong)
    failed = [n for n in chapter_numbers() if not n.passed]
    assert places <= {n.place for n in failed}
    assert all("DIFFERS" in n.text for n in failed)
