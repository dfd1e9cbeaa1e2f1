"""Rewards for how a response is written: format, length, overlong, repetition, phrases."""

from types import SimpleNamespace
from typing import Any

import pytest

from hotcold import intake
from hotcold.errors import InputError
from hotcold.prompts.columns import Prompt
from hotcold.rewards.base import Scorable
from hotcold.rewards.form import Format
from hotcold.rewards.functions import load_reward
from hotcold.rewards.scorer import FunctionScorer


def score(spec: str, completion: str, tokens: int = 0) -> float | None:
    item = Scorable("q", completion, (1,), tuple(range(tokens)), {})
    return FunctionScorer([load_reward(spec)], [1.0]).score([item])[0].total


BLOCK = "```\n<think>r</think><answer>4</answer>\n```"


@pytest.mark.parametrize(
    ("completion", "opened", "whole"),
    [  # C14: 1 or 0 where the template has written <think>, and where it has not
        ("r</think><answer>4</answer>", 1, 0),
        ("<think>r</think><answer>4</answer>", 0, 1),  # documented: a second opening
        ("<think>a</think><think>b</think><answer>c</answer>", 0, 0),
        ("r</think><answer>4</answer><answer>5</answer>", 0, 0),
        ("<think>r</think><answer>4</answer><answer>5</answer>", 0, 0),
        ("<think>r</think><answer>4</answer> so 4", 0, 0),
        ("r</think><answer>4</answer> so 4", 0, 0),
        ("<think>r</think><answer>4", 0, 0),
        ("<think>r<answer>4</answer>", 0, 0),
        ("r<answer>4</answer>", 0, 0),
        (BLOCK, 0, 0),  # documented: tags in a code block count, and the fence stands beside them
        (f"<think>{BLOCK}</think><answer>4</answer>", 0, 0),
        ("<think>```\nx < y > z\n```</think><answer>4</answer>", 0, 1),
        ("\n<think>\nr\n</think>\n\n<answer>\n4\n</answer>\n", 0, 1),
        ("\nr\n</think>\n\n<answer>\n4\n</answer>\n", 1, 0),
        ("<think></think><answer>4</answer>", 0, 0),
        ("<think>r</think><answer> </answer>", 0, 0),
        ("<think>r</think> and <answer>4</answer>", 0, 0),
        ("<answer>4</answer><think>r</think>", 0, 0),
        ("<think>r</think><answer>4</think></answer>", 0, 0),
        ("<THINK>r</THINK><answer>4</answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_c14_a_format_is_each_tag_once_around_something(completion: str, opened: int, whole: int) -> None:
    assert (score("format?opened=true", completion), score("format", completion)) == (opened, whole)


def test_a_format_that_does_not_fit_what_the_template_writes_is_said() -> None:
    whole, opened = (load_reward(spec).function for spec in ("format", "format?opened=true"))
    assert isinstance(whole, Format) and isinstance(opened, Format)
    assert "use 'format?opened=true'" in whole.misfit("<|assistant|>\n<think>\n")
    assert "every response scores 0" in opened.misfit("<|assistant|>\n")
    assert not whole.misfit("<|assistant|>\n") and not opened.misfit("<|assistant|>\n<think>")


def test_a_format_may_have_other_tags_and_an_endless_response_takes_no_time() -> None:
    assert (
        score("format?tags=[reasoning, code, answer]", "<reasoning>a</reasoning><code>b</code><answer>c</answer>") == 1
    )
    assert score("format?tags=answer", "<answer>c</answer>") == 1
    assert score("format", "<think>" * 20_000) == 0 and score("format", "<think>" + "a " * 100_000) == 0


@pytest.mark.parametrize(
    ("spec", "completion", "tokens", "value"),
    [
        ("length?target=100", "", 100, 1.0),
        ("length?target=100", "", 75, 0.75),
        ("length?target=100", "", 125, 0.75),
        ("length?target=100", "", 250, 0.0),
        ("length?target=100&width=50", "", 75, 0.5),
        ("length?target=3&unit=words", "one two three", 9, 1.0),
        ("length?target=4&unit=characters", "abc", 9, 0.75),
        ("overlong?limit=100&buffer=20", "", 80, 0.0),
        ("overlong?limit=100&buffer=20", "", 85, -0.25),
        ("overlong?limit=100&buffer=20", "", 100, -1.0),
        ("overlong?limit=100&buffer=20", "", 500, -1.0),
        ("overlong?limit=4&buffer=2&unit=words", "a b c", 500, -0.5),
        ("repetition?n=2", "a b a b a b", 0, -0.6),  # ab ba ab ba ab: 2 of 5 are new
        ("repetition?n=1", "A a b", 0, -1 / 3),
        ("repetition", "one two three", 0, 0.0),
        ("repetition", "a b c d e f g h", 0, 0.0),
        ("repetition?n=2&unit=tokens", "a a a a a", 5, 0.0),  # the ids are all different
        ("phrases?required=[so, therefore]", "So it is, so there.", 0, 0.5),
        ("phrases?required=[So]&case=true", "so", 0, 0.0),
        ("phrases?required=[so]&forbidden=[as an AI]", "so, as an ai", 0, 0.0),
        ("phrases?forbidden=[sorry]", "fine", 0, 1.0),
        ("phrases?forbidden=[sorry]", "Sorry", 0, 0.0),
        ("phrases?required=[so]", "so " * 50, 0, 1.0),  # counted once
    ],
)
def test_each_counts_what_it_says(spec: str, completion: str, tokens: int, value: float) -> None:
    assert score(spec, completion, tokens) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("length", "needs the option target"),
        ("length?target=0", "at least 1"),
        ("length?target=5&unit=lines", "one of tokens, words, characters"),
        ("overlong?limit=10&buffer=11", "at most the limit"),
        ("repetition?n=0", "at least 1"),
        ("phrases", r"required=\[\.\.\.\] or forbidden"),
        ("format?tags=[a, a]", "each once"),
        ("format?tags=[<a>]", "names like"),
    ],
)
def test_an_option_out_of_range_is_an_error(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_reward(spec)


def test_c14_a_run_says_at_the_start_that_its_template_has_opened_the_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "encode_prompt", lambda *given, **named: (1, 2))
    monkeypatch.setattr(intake, "has_template", lambda tokenizer: False)
    tokenizer = SimpleNamespace(decode=lambda ids, **named: "<|assistant|><think>\n")
    model: Any = SimpleNamespace(tokenizer=tokenizer, context_length=None)
    settings: Any = SimpleNamespace(reward=("exact", "format", "format?opened=true"), data=SimpleNamespace(chat=None))
    notes: list[str] = []
    for _ in range(2):  # prompts to train on, and held-out ones
        intake.encode([Prompt(0, "q", {})], model, settings, notes)
    assert len(notes) == 1 and notes[0].startswith("the prompt ends in <think>")
