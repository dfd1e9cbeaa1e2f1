"""hotcold from Python: the public names, and that `train` passes on what it is given."""

from typing import Any

import pytest

import hotcold
import hotcold.api
from hotcold.config.schema import Config
from hotcold.errors import InputError

Passed = list[tuple[Config, Any]]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Passed:
    """What reaches the training code, which is tested elsewhere."""
    calls: Passed = []
    monkeypatch.setattr(hotcold.api, "launch_train", lambda config, echo: calls.append((config, echo)))
    return calls


def score(completion: str) -> float:
    return float(completion == "5")


def test_every_public_name_is_there_and_no_other() -> None:
    for name in hotcold.__all__:
        assert getattr(hotcold, name) is not None
        assert name in dir(hotcold)
    assert hotcold.__version__ == "0.1.0"
    with pytest.raises(AttributeError, match="module 'hotcold' has no attribute 'trian'"):
        hotcold.trian  # noqa: B018


def test_train_takes_functions_rows_and_an_algorithm(passed: Passed) -> None:
    rows = [{"prompt": "2 + 3", "answer": "5"}]
    algorithm = hotcold.GRPO(group_size=4)
    hotcold.train(model="m", data=rows, reward=score, algorithm=algorithm, steps=3, eval={"every": 2}, echo=None)
    [(config, echo)] = passed
    assert config.data.path == rows and config.reward == (score,) and config.algorithm is algorithm
    assert (config.steps, config.eval.every, echo) == (3, 2, None)


def test_train_takes_the_names_of_the_command_line_too(passed: Passed) -> None:
    hotcold.train("m", "d.jsonl", ["a.py", score], "rloo", group_size=2, reward_weights=[0.7, 0.3], eval__every=0)
    [(config, echo)] = passed
    assert (config.model, config.data.path, config.reward) == ("m", "d.jsonl", ("a.py", score))
    assert (config.algorithm, config.algorithm_options, config.eval.every) == ("rloo", {"group_size": 2}, 0)
    assert config.reward_weights == (0.7, 0.3) and echo is print


def test_nested_data_keys_go_into_a_dict(passed: Passed) -> None:
    hotcold.train("m", {"path": "d.jsonl", "prompt": "question"}, score)
    assert (passed[0][0].data.path, passed[0][0].data.prompt) == ("d.jsonl", "question")


def test_wrong_keys_are_value_errors_and_a_rate_of_zero_is_a_warning(passed: Passed) -> None:
    with pytest.raises(InputError, match=r"unknown key 'stepz'. Did you mean \"steps\"\?"):
        hotcold.train("m", "d.jsonl", score, stepz=3)
    assert issubclass(InputError, ValueError) and not passed
    with pytest.warns(UserWarning, match="learning_rate=0: the parameters will not change"):
        hotcold.train("m", "d.jsonl", score, learning_rate=0)
