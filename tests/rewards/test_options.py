"""Options of rewards with a name, as in `reward=length?target=100`."""

from collections.abc import Callable
from typing import Literal

import pytest

from hotcold.errors import InputError
from hotcold.rewards.base import runs_in_worker
from hotcold.rewards.functions import load_reward
from hotcold.rewards.options import Factory, split_options


def make(
    size: int,
    share: float = 0.5,
    strict: bool = False,
    column: str | None = "answer",
    words: list[str] = [],  # noqa: B006
    mode: Literal["last", "all"] = "last",
) -> Callable[[str], object]:
    if size == 0:
        raise ValueError("size: more than 0 is needed")
    return lambda completion: (size, share, strict, column, words, mode)


def made(spec: str) -> object:
    return Factory(make)(*split_options(spec))("")


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ("r?size=3", (3, 0.5, False, "answer", [], "last")),
        ("r?size=3&share=1e-2&strict=true&mode=all", (3, 0.01, True, "answer", [], "all")),
        ("r?size=3&share=2&column=null", (3, 2.0, False, None, [], "last")),
        ("r?size=3&column=007", (3, 0.5, False, "007", [], "last")),
        ("r?size=3&column='a b'", (3, 0.5, False, "a b", [], "last")),
        ('r?size=3&words=[Step 1, "a, b", no]', (3, 0.5, False, "answer", ["Step 1", "a, b", "no"], "last")),
        ("r?words=one&size=3", (3, 0.5, False, "answer", ["one"], "last")),
        ('r?size=3&words=["a & b?", "x=1"]', (3, 0.5, False, "answer", ["a & b?", "x=1"], "last")),
    ],
)
def test_options_are_read_by_their_types(spec: str, values: object) -> None:
    assert made(spec) == values


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("r?sise=3", r"reward=r has no option 'sise'\. Did you mean \"size\"\? It has: size, share"),
        ("r", "reward=r needs the option size"),
        ("r?size=0", r"size=0: size: more than 0 is needed\.$"),
        ("r?size=3.5", r"size=3\.5: a whole number"),
        ("r?size=1&share=much", "share=much: a number"),
        ("r?size=1&share=1e999", "share=1e999: a number"),
        ("r?size=1&strict=1", "true or false"),
        ("r?size=1&mode=first", "one of last, all"),
        ("r?size=1&words=[a, [b]]", "list of texts"),
        ("r?size=1&words=[a", "list"),
        ("r?size=1&size=2", "size is given twice"),
        ("r?size", "'size' is no option"),
        ("r?", "is no option"),
        ("r?size=", "is no option"),
    ],
)
def test_a_wrong_option_is_one_short_message(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        made(spec)
    assert len(str(error.value).splitlines()) == 1


def test_a_reward_without_options_refuses_them_and_a_misspelt_name_is_answered() -> None:
    with pytest.raises(InputError, match=r"reward=exact takes no options: leave 'x' out"):
        load_reward("exact?x=1")
    with pytest.raises(InputError, match=r'Did you mean "exact"\?'):
        load_reward("exakt?x=1")


def test_a_name_is_no_file_whatever_its_options_hold() -> None:
    assert not runs_in_worker("phrases?required=[run.py:main]") and not runs_in_worker("exact")
    assert runs_in_worker("reasoning_gym") and runs_in_worker("a.py") and runs_in_worker("./a.py:f")
