"""Reward functions found by name, their arguments matched by name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hotcold.errors import InputError, NotAvailableError
from hotcold.prompts import Prompt
from hotcold.rewards.base import Scorable
from hotcold.rewards.functions import check_columns_of_rows, load_reward
from hotcold.rewards.scorer import FunctionScorer

MESSAGES = [{"role": "user", "content": "2 + 3 ="}]


def item(completion: str = "5", prompt: Any = "2 + 3 =", **columns: Any) -> Scorable:
    return Scorable(prompt, completion, (1, 2), (7, 8, 9), columns, row=0)


def total(function: Callable[..., Any] | str, one: Scorable) -> float | None:
    return FunctionScorer([load_reward(function)], [1.0]).score([one])[0].total


def of_lists(prompts: list[Any], completions: list[str]) -> list[float]:
    return [float(text == "5") for text in completions]


def of_answer(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def of_tolerance(response: str, answer: str, tolerance: float) -> float:
    return float(abs(float(response) - float(answer)) <= tolerance)


def of_columns(completion: str, **columns: Any) -> float:
    assert columns.pop("prompt") in ("2 + 3 =", MESSAGES)
    ids = {"prompt_ids": [1, 2], "completion_ids": [7, 8, 9], "truncated": False}
    return float(columns == {"answer": "5", "level": 2} | ids)


def of_id_lists(completion_ids: list[list[int]]) -> list[int]:
    return [len(ids) for ids in completion_ids]


def of_ids(completion_ids: list[int], prompt_ids: list[int], truncated: bool) -> float:
    return len(completion_ids) + 10 * len(prompt_ids) + 100 * truncated


class Grader:
    def __call__(self, completion: str, answer: str) -> float:
        return float(completion == answer)


@pytest.mark.parametrize("prompt", ["2 + 3 =", MESSAGES])
@pytest.mark.parametrize(
    ("function", "name", "expected"),
    [
        (of_lists, "of_lists", 1.0),
        (of_answer, "of_answer", 1.0),
        (of_columns, "of_columns", 1.0),
        (of_id_lists, "of_id_lists", 3.0),
        (of_ids, "of_ids", 23.0),  # 3 + 10 * 2
        (lambda completion, answer: completion == answer, "lambda", 1.0),
        (partial(of_tolerance, tolerance=0.5), "of_tolerance", 1.0),
        (partial(of_tolerance, answer="9", tolerance=0.5), "of_tolerance", 0.0),  # bound: not the column
        (Grader(), "Grader", 1.0),
    ],
)
def test_c08_every_kind_of_callable_gets_what_it_names(
    function: Callable[..., Any], name: str, expected: float, prompt: Any
) -> None:
    reward = load_reward(function)
    reward.check({"answer", "level"})
    assert reward.name == name
    assert total(function, item("5", prompt, answer="5", level=2)) == expected


def test_c08_a_missing_column_is_found_before_the_run_with_the_columns_there_are() -> None:
    with pytest.raises(
        InputError, match=r'(?s)"of_answer" needs "answer".*Did you mean "answers".*Columns: answers, id'
    ):
        load_reward(of_answer).check({"answers", "id"})


def test_c08_singular_and_plural_together_are_refused() -> None:
    with pytest.raises(InputError, match=r'"prompt".*"completions"'):
        load_reward(lambda prompt, completions: 1.0)


def test_a_default_stands_in_for_a_column_that_is_not_there() -> None:
    def with_default(completion: str, answer: str = "5") -> float:
        return float(completion == answer)

    load_reward(with_default).check(set())
    assert total(with_default, item("5")) == 1.0
    assert total(with_default, item("5", answer="6")) == 0.0


def test_a_class_stands_for_an_object_of_it() -> None:
    assert total(Grader, item("5", answer="5")) == 1.0
    with pytest.raises(InputError, match="no __call__"):
        load_reward(type("Nothing", (), {}))
    with pytest.raises(InputError, match=r"partial\(\) failed"):  # needs an argument
        load_reward(partial)


def test_verl_signatures_are_taken_as_they_are() -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
    ) -> dict[str, float]:
        return {"score": float(solution_str == ground_truth), "length": 1.0}

    assert total(compute_score, item("5", data_source="sums", ground_truth="5")) == 1.0


def write(folder: Path, text: str, name: str = "checks.py") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_a_file_gives_the_named_function_or_reward_or_its_only_one(tmp_path: Path) -> None:
    two = write(tmp_path, "def reward(completion): return 1\ndef other(completion): return 2\n")
    one = write(tmp_path, "from os.path import join\ndef _no(): ...\ndef only(completion): return 3\n", "one.py")
    assert [total(spec, item()) for spec in (two, f"{two}:other", one)] == [1.0, 2.0, 3.0]
    assert [load_reward(spec).name for spec in (two, f"{two}:other", one)] == ["reward", "other", "only"]


def test_a_file_with_several_functions_lists_them(tmp_path: Path) -> None:
    file = write(tmp_path, "def style(completion): return 1\ndef length(completion): return 2\n")
    with pytest.raises(InputError, match="style, length"):
        load_reward(file)
    with pytest.raises(InputError, match=r"(?s)lenght.*length"):
        load_reward(f"{file}:lenght")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\nimport no_such_module_here\n", r"no_such_module_here.*checks\.py:2"),
        ("def f(:\n", r"SyntaxError.*checks\.py:1"),
    ],
)
def test_a_file_that_fails_to_import_shows_its_own_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_reward(write(tmp_path, text))


def test_a_missing_file_names_a_near_one(tmp_path: Path) -> None:
    write(tmp_path, "def reward(completion): return 1\n", "rewards.py")
    with pytest.raises(InputError, match=r'reward\.py.*Did you mean "rewards\.py"'):
        load_reward(str(tmp_path / "reward.py"))


@pytest.mark.parametrize("spec", ["model:./rm"])
def test_what_comes_later_is_said_to_be_not_available(spec: str) -> None:
    with pytest.raises(NotAvailableError, match="not available yet"):
        load_reward(spec)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r'(?s)Did you mean "exact"\?.*last_number'):
        load_reward("exakt")


def prompts(*columns: dict[str, Any]) -> list[Prompt]:
    return [Prompt(10 + number, "q", one) for number, one in enumerate(columns)]


def test_a_column_that_some_rows_lack_is_named_with_the_first_such_row() -> None:
    reward = load_reward(of_answer)
    check_columns_of_rows(reward, prompts({"answer": "5"}, {"answer": "6"}))
    with pytest.raises(
        InputError, match=r'"of_answer" needs "answer", which row 11 of eval\.jsonl lacks \(2 of 3'
    ) as bad:
        check_columns_of_rows(reward, prompts({"answer": "5"}, {"id": 1}, {"id": 2}), "eval.jsonl")
    assert "none" not in str(bad.value)


def test_a_column_that_no_row_has_is_answered_with_those_of_every_row() -> None:
    with pytest.raises(InputError, match=r'(?s)needs "answer".*Did you mean "answers".*Columns: answers, id\.') as bad:
        check_columns_of_rows(load_reward(of_answer), prompts({"answers": "5", "id": 1}, {"answers": "6", "id": 2}))
    assert len(str(bad.value).splitlines()) <= 5


@pytest.mark.parametrize(
    ("function", "column"),
    [
        (lambda completion, response: 0.0, "response"),
        (lambda prompts, completions: [0.0], "completions"),
        (lambda completion, prompt_ids: 0.0, "prompt_ids"),
        (lambda completion, **columns: 0.0, "truncated"),
        (lambda completion, prompt: 0.0, "prompt"),
    ],
)
def test_a_column_that_an_argument_of_ours_hides_is_refused(function: Callable[..., Any], column: str) -> None:
    with pytest.raises(InputError, match=rf'(?s)column "{column}".*Rename the column'):
        check_columns_of_rows(load_reward(function), prompts({column: "x"}))


def test_a_column_of_such_a_name_that_no_argument_asks_for_is_left_alone() -> None:
    check_columns_of_rows(load_reward(lambda completion, answer: 0.0), prompts({"response": "x", "answer": "5"}))


def test_a_class_whose_making_exits_is_an_error() -> None:
    class Exits:
        def __init__(self) -> None:
            raise SystemExit(0)

        def __call__(self, completion: str) -> float:
            return 0.0

    with pytest.raises(InputError, match=r"Exits\(\) failed: SystemExit"):
        load_reward(Exits)
