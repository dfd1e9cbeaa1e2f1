"""docs/rewards.md and docs/data.md: their examples run, and their lists are those of the code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hotcold.batch import Rollout
from hotcold.prompts import make_prompts
from hotcold.prompts.columns import HABITS
from hotcold.prompts.rows import READERS
from hotcold.rewards.base import Scorable
from hotcold.rewards.functions import BUILT_IN, load_reward
from hotcold.rewards.scorer import FunctionScorer
from hotcold.sampling.rollout_files import NEEDED, SCHEMA

DOCS = Path(__file__).parents[1] / "docs"
REWARDS = (DOCS / "rewards.md").read_text(encoding="utf-8")
DATA = (DOCS / "data.md").read_text(encoding="utf-8")


def examples(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def first_cells(page: str, heading: str) -> list[str]:
    """The words in code font in the first column of the first table under a heading."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [word for line in section.splitlines() if line.startswith("| `") for word in _code(line.split("|")[1])]


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def item(completion: str, answer: str) -> Scorable:
    return Scorable("2+2=", completion, (1, 2), tuple(range(len(completion))), {"answer": answer})


# What each example gives for the responses "The sum is 4." and "4", both with the answer "4".
EXPECTED: list[list[tuple[float, Any]]] = [
    [(0.0, ()), (1.0, ())],  # exact
    [(1.0, ()), (1.0, ())],  # contains
    [(1.0, ()), (1.0, ())],  # both are short
    [(1.0, ((0, 0.1),)), (0.0, ())],  # ends in a full stop; 0.1 for a beginning
]


@pytest.mark.parametrize("number", range(len(EXPECTED)))
def test_every_example_of_a_reward_scores_as_it_says(number: int) -> None:
    found = examples(REWARDS, "python")
    assert len(found) == len(EXPECTED)
    names: dict[str, Any] = {}
    exec(found[number], names)
    scores = FunctionScorer([load_reward(names["reward"])], [1.0]).score([item("The sum is 4.", "4"), item("4", "4")])
    assert [(s.total, s.steps) for s in scores] == EXPECTED[number]


def test_every_documented_argument_exists_without_any_column_and_every_built_in_reward_is_documented() -> None:
    arguments = set(first_cells(REWARDS, "Arguments")) - {"**kwargs", "answer"}
    for name in arguments:
        first = "" if name in ("completion", "response", "solution_str", "prompt") else "completion, "
        load_reward(eval(f"lambda {first}{name}: 0")).check(set())
    for name in ("completions", "prompts", "responses"):
        load_reward(eval(f"lambda {name}: [0]")).check(set())
    assert len(arguments) == 7
    assert set(first_cells(REWARDS, "Built in")) == set(BUILT_IN)


def test_the_signatures_of_other_libraries_are_taken_as_they_are_shown() -> None:
    section = REWARDS.split("## Functions written for other libraries")[1].split("\n## ")[0]
    shown = re.findall(r"`((?:async )?def [^`]+)`", section)
    assert len(shown) == 4
    columns = {"answer", "data_source", "ground_truth"}
    for signature in shown:
        names: dict[str, Any] = {}
        exec(f"{signature}: ...", names)
        load_reward(next(v for k, v in names.items() if k != "__builtins__")).check(columns)


def test_the_row_of_the_data_page_is_a_prompt() -> None:
    (prompt,) = make_prompts([json.loads(text) for text in examples(DATA, "json")])
    assert prompt.content == "What is 7 + 5? Reply with only the number." and prompt.columns == {"answer": "12"}


def test_files_columns_and_recorded_columns_are_those_of_the_code() -> None:
    for ending in READERS:
        assert f"{ending}`" in DATA, ending
    assert "The first of " + ", ".join(f"`{name}`" for name in HABITS) in DATA
    recorded = first_cells(DATA, "Recorded rows in place of prompts")
    assert recorded == [name for name in SCHEMA.names if name in recorded]
    public = {"steps", "logp_sampler", "truncated", "version", "response_mask", *NEEDED}
    assert set(recorded) == public <= set(Rollout.__dataclass_fields__) | {"step"}
