"""The recipe with word problems: its data are what its script makes, and its reward knows their answers."""

import json
import re
from pathlib import Path

from hotcold.config.schema import train_config
from hotcold.prompts import make_prompts
from hotcold.rewards.base import Scorable
from hotcold.rewards.failures import Limits
from hotcold.rewards.scorer import load_scorer
from hotcold.user_file import import_file

RECIPES = Path(__file__).parents[2] / "recipes"
ROWS = [json.loads(line) for line in (RECIPES / "gsm8k_form.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_file_is_what_the_script_makes() -> None:
    assert import_file(RECIPES / "gsm8k_form.py").rows() == ROWS and len(ROWS) == 60


def test_every_computation_in_a_solution_is_right_and_the_last_one_is_the_answer() -> None:
    for row in ROWS:
        steps = re.findall(r"<<(\d+)([-+*/])(\d+)=(\d+)>>", row["answer"])
        for a, sign, b, c in steps:
            made = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) // int(b)}[sign]
            assert made == int(c) and (sign != "/" or int(b) * made == int(a))
        assert row["answer"].endswith(f"\n#### {steps[-1][3]}")


def test_the_rewards_of_the_recipe_score_the_solution_of_each_problem_and_of_no_other() -> None:
    config = train_config([str(RECIPES / "gsm8k_form.yaml")])
    prompts = make_prompts(ROWS)
    assert isinstance(prompts[0].content, list)  # messages go through the chat template
    first, other = ROWS[0]["answer"], ROWS[1]["answer"]
    texts = [row["answer"] for row in ROWS] + [other, first.split("#### ")[1]]
    columns = [prompt.columns for prompt in prompts] + [prompts[0].columns] * 2
    items = [Scorable("q", text, (), (), column) for text, column in zip(texts, columns, strict=True)]
    scorer = load_scorer(config.reward, config.reward_weights or (), Limits())
    scores = [one.total for one in scorer.score(items)]
    scorer.close()
    assert scores[:60] == [1.2] * 60
    assert scores[60:] == [0.0, 0.2]  # of another problem; the right number without its mark
