"""The built-in verifiers on literal texts."""

from typing import Any

import pytest

from hotcold.rewards.verifiers import contains, exact, last_number


# C10: the forms that a plain number covers; units, tuples and formulae are not its business
@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("It costs $1,234.00", "1234", 1.0),
        ("#### -3", -3, 1.0),
        ("\N{MINUS SIGN}3", "-3", 1.0),
        ("58,500", "58500", 1.0),
        ("1,00", "100", 0.0),
        ("2+40=42\n#### 42" + " so it is" * 60, "42", 1.0),
        ("0.9999999", "1", 0.0),
        (".5", 0.5, 1.0),
        ("10-3", "3", 1.0),
        ("42.", "42", 1.0),
        ("1e3", "1000", 1.0),
        ("12 or 13", "12", 0.0),
        ("no idea", "12", 0.0),
        ("72", "half of 144 is 72\n#### 72", 1.0),
    ],
)
def test_the_last_number_is_compared_as_a_decimal(completion: str, answer: Any, expected: float) -> None:
    assert last_number(completion, answer) == expected


def test_exact_ignores_outer_blanks_only() -> None:
    assert [exact(text, 5) for text in (" 5\n", "5.0", "5 5")] == [1.0, 0.0, 0.0]


def test_contains_looks_anywhere() -> None:
    assert [contains(text, "East") for text in ("to the East.", "east")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("verifier", "answer", "words"),
    [(last_number, "blue", "not a number"), (contains, "", "empty"), (exact, None, "no answer")],
)
def test_an_answer_that_cannot_be_checked_is_not_a_0(verifier: Any, answer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        verifier("5", answer)
