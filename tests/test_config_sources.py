"""Keys and values as they are written on the command line and in a recipe."""

import math
from pathlib import Path

import pytest

from hotcold.config.schema import Config, sample_config, train_config
from hotcold.config.sources import plain_value, read_arguments
from hotcold.errors import InputError

ENOUGH = ("model=m", "data=d.jsonl", "reward=r.py")


def train(*words: str) -> Config:
    return train_config(["grpo", *ENOUGH, *words])


def complaint(*words: str) -> str:
    with pytest.raises(InputError) as caught:
        train(*words)
    return str(caught.value)


# ---- how values are written


def test_the_three_ways_to_write_a_key_are_the_same() -> None:
    for words in (["eval.every=5"], ["--eval.every", "5"], ["--eval.every=5"]):
        assert train(*words).eval.every == 5


def test_numbers_words_and_nothing_are_read_as_yaml_1_2_reads_them() -> None:
    # PyYAML alone (YAML 1.1) reads these as text, False, 8, 750 and a date.
    assert plain_value("1e-5") == 0.00001
    assert [plain_value(text) for text in ("no", "010", "12:30", "2024-01-01")] == ["no", 10, "12:30", "2024-01-01"]
    assert [plain_value(text) for text in ("true", "False", "null", "-3", ".5", "7.")] == [
        True,
        False,
        None,
        -3,
        0.5,
        7.0,
    ]
    assert math.isnan(plain_value("nan")) and plain_value("-.inf") == -math.inf
    assert plain_value("1.2.3") == "1.2.3" and plain_value("e5") == "e5"


def test_a_list_and_a_quoted_text_are_written_in_one_word() -> None:
    config = train_config(["grpo", "model=m", "data=d", "reward=[a.py, b.py:style]", "reward_weights=[1, 1e-1]"])
    assert config.reward == ("a.py", "b.py:style") and config.reward_weights == (1.0, 0.1)
    assert train('stop="\\n\\n"').stop == ("\n\n",)
    assert train("stop=[a, '#']").stop == ("a", "#")
    assert train("stop=# not a comment: text").stop == ("# not a comment: text",)
    assert "neither a list nor a quoted text" in complaint("stop=[a")


def test_names_and_prompts_are_taken_as_they_stand() -> None:
    assert train("run=007").run == "007"
    assert sample_config(["m", "prompt=5"]).prompt == "5"
    assert sample_config(["m", "--prompt", "x=3: [what is x]?"]).prompt == "x=3: [what is x]?"


def test_a_key_given_twice_or_without_a_value_is_an_error() -> None:
    assert complaint("steps=5", "--steps", "6") == "steps is given twice. Keep one of them."
    assert complaint("data.path=e.jsonl") == "data.path is given twice. Keep one of them."
    assert complaint("chat=true", "data.chat=true") == "data.chat is given twice. Keep one of them."
    assert "the algorithm is given twice: grpo and rloo" in complaint("algorithm=rloo")
    assert "steps= has no value" in complaint("steps=")
    assert "--steps has no value" in complaint("--steps")
    assert "--steps has no value" in complaint("--steps", "seed=3")
    assert "'fast' is not understood" in complaint("fast")


def test_a_folder_name_with_an_equals_sign_is_a_word() -> None:
    assert read_arguments(["runs/lr=3/config.yaml"]) == (["runs/lr=3/config.yaml"], {})


# ---- recipes


def recipe(folder: Path, text: str) -> str:
    (folder / "recipe.yaml").write_text(text)
    return str(folder / "recipe.yaml")


RECIPE = """\
algorithm: rloo
model: m
data: {path: d.jsonl, prompt: question}
reward: r.py
learning_rate: 1e-5
resume: no
eval:
  every: 7
group_size: 4
"""


def test_a_recipe_holds_nested_keys_and_the_command_line_wins(tmp_path: Path) -> None:
    config = train_config([recipe(tmp_path, RECIPE), "eval.every=9"])
    assert config.algorithm == "rloo" and config.algorithm_options == {"group_size": 4}
    assert (config.learning_rate, config.resume, config.data.prompt) == (1e-5, "no", "question")
    assert config.eval.every == 9
    assert config.reasons["eval.every"] == "given on the command line"
    assert config.reasons["data.prompt"] == f"recipe {tmp_path}/recipe.yaml"
    assert config.reasons["steps"] == "default"


def test_errors_of_a_recipe_name_file_and_line(tmp_path: Path) -> None:
    cases = {
        RECIPE + "stepz: 5\n": "line 10: unknown key 'stepz'. Did you mean \"steps\"?",
        RECIPE.replace("every: 7", "every: often"): "line 8: eval.every=often: a whole number is needed.",
        RECIPE + "model: n\n": "model is given twice ({path}, line 2, {path}, line 10). Keep one of them.",
        RECIPE.replace("rloo", "rlo"): "line 1: unknown algorithm 'rlo'. Did you mean \"rloo\"?",
        RECIPE + "a: [1\n": "not valid YAML",
        RECIPE + "dtype: bf17\n": "line 10: dtype=bf17: auto, fp32 or bf16 is needed",
        RECIPE + "kl: 0.1\n": "line 10: kl is a group of keys: write one of kl.placement, kl.estimator,",
        RECIPE + "lora: {rank: 4, alpha: big}\n": "line 10: lora.alpha=big: a number is needed",
        "- 1\n": "a recipe is a list of `key: value` lines",
    }
    for text, expected in cases.items():
        path = recipe(tmp_path, text)
        with pytest.raises(InputError) as caught:
            train_config([path])
        assert expected.format(path=path) in str(caught.value), text


def test_a_recipe_that_does_not_exist_is_said_so() -> None:
    with pytest.raises(InputError, match=r"there is no recipe nowhere\.yaml"):
        train_config(["nowhere.yaml"])


def test_paths_of_a_recipe_are_looked_for_here_first_then_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "d.jsonl").write_text("")
    (there / "r.py").write_text("")
    (there / "m").mkdir()
    monkeypatch.chdir(here)
    config = train_config([recipe(there, RECIPE.replace("reward: r.py", "reward: [r.py:f, absent.py]"))])
    assert config.data.path == "d.jsonl"  # exists in the current directory
    assert config.reward == (f"{there}/r.py:f", "absent.py")
    assert config.model == "m"  # a bare name may be a hub name, it is left alone
