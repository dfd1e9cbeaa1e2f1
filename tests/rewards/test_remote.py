"""`reward=http://...`: a server asked in OpenRLHF's protocol."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotcold.config.schema import train_config
from hotcold.errors import InputError, RewardError
from hotcold.rewards import requests
from hotcold.rewards.base import Scorable, runs_in_worker
from hotcold.rewards.functions import load_reward
from hotcold.rewards.scorer import FunctionScorer
from tests.rewards.local_server import Answer, Local, of_json, serving
from tests.test_end_to_end import here, metrics, train

__all__ = ["here"]  # the fixture


def lengths(content: Any) -> Answer:
    """As many marks as the response has characters."""
    numbers = [len(query) - len(prompt) for query, prompt in zip(content["query"], content["prompts"], strict=True)]
    return of_json({"rewards": numbers, "extra_logs": {"seen": numbers}})


@pytest.fixture
def local() -> Iterator[Local]:
    with serving(lengths) as found:
        yield found


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PAUSE", 0.01)


def scorer_of(local: Local, options: str = "", said: list[str] | None = None) -> FunctionScorer:
    scorer = FunctionScorer([load_reward(f"{local.url}/get_reward{options}")], [1.0])
    scorer.listen((said if said is not None else []).append, lambda text: None)
    return scorer


def items(*texts: str, prompt: Any = "2+2=", **columns: Any) -> list[Scorable]:
    return [Scorable(prompt, text, (1,), (2,), columns, row=number) for number, text in enumerate(texts)]


def totals(scorer: FunctionScorer, batch: list[Scorable]) -> list[float | None]:
    return [score.total for score in scorer.score(batch)]


def test_queries_prompts_and_labels_go_out_and_the_rewards_come_back_in_order(local: Local) -> None:
    said: list[str] = []
    scorer = scorer_of(local, said=said)
    assert totals(scorer, items("a", "abc", "", answer="4")) == [1.0, 3.0, 0.0]
    (asked,) = local.asked
    assert asked.path == "/get_reward"
    assert asked.content == {
        "query": ["2+2=a", "2+2=abc", "2+2="],
        "prompts": ["2+2="] * 3,
        "labels": ["4", "4", "4"],
    }
    assert said == [f"remote reward: prompts and responses are sent to {local.url}/get_reward"]
    assert scorer.take_counts() == {"remote/calls": 1, "remote/failed": 0, "remote/retries": 0}
    assert scorer.names == ("remote",)


def test_the_label_is_that_of_the_row_and_is_empty_where_there_is_none(local: Local) -> None:
    totals(scorer_of(local), [*items("a", label="x", answer="y"), *items("b"), *items("c", answer={"k": [1]})])
    assert local.asked[0].content["labels"] == ["x", "", {"k": [1]}]


def test_responses_go_out_in_batches_and_come_back_in_order(local: Local) -> None:
    texts = ["x" * number for number in range(20)]
    assert totals(scorer_of(local, "#batch=3&concurrency=4"), items(*texts)) == list(range(20))
    assert sorted(len(asked.content["query"]) for asked in local.asked) == [2, 3, 3, 3, 3, 3, 3]
    assert all(asked.path == "/get_reward" for asked in local.asked)  # what stands after the # is not sent


def test_a_query_of_the_address_is_the_servers(local: Local) -> None:
    totals(scorer_of(local, "?model=large&x=1#batch=2"), items("a"))
    assert local.asked[0].path == "/get_reward?model=large&x=1"


VARIANTS: dict[str, tuple[Any, list[float | None]]] = {
    "rewards": ({"rewards": [1, 0.5]}, [1.0, 0.5]),
    "scores": ({"scores": [1, 0.5]}, [1.0, 0.5]),
    "rewards count, scores do not": ({"scores": [9, 9], "rewards": [1, 0.5], "extra_logs": {}}, [1.0, 0.5]),
    "a column": ({"rewards": [[1], [0.5]]}, [1.0, 0.5]),
    "the list itself": ([True, 0.5], [1.0, 0.5]),
    "null is no score": ({"rewards": [None, 0.5]}, [None, 0.5]),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_each_form_of_the_answer_is_read(name: str, local: Local) -> None:
    answer, scores = VARIANTS[name]
    local.behave = lambda content: of_json(answer)
    assert totals(scorer_of(local), items("a", "b")) == scores


WRONG: dict[str, tuple[Any, str]] = {
    "C01, too few": ({"rewards": [1]}, r"1 rewards for 2 responses \(rows 0, 1 of the data\)"),
    "C01, too many": ({"rewards": [1, 2, 3]}, "3 rewards for 2 responses"),
    "C01, none": ({"rewards": []}, "0 rewards for 2 responses"),
    "C01, a number": ({"rewards": 1}, "no list of rewards for 2 responses"),
    "another key": ({"reward": [1, 2]}, "no list of rewards"),
    "C03, a text": ({"rewards": ["1.0", 1]}, r"row 0 of the data: returned '1.0' \(str\)"),
    "C03, NaN": ({"rewards": [1, float("nan")]}, "row 1 of the data: returned nan"),
    "C03, infinity": ({"rewards": [float("inf"), 1]}, "row 0 of the data: returned inf"),
    "C03, lists": ({"rewards": [[1, 2], [3, 4]]}, r"returned \[1, 2\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_of_the_wrong_length_or_type_is_an_error(name: str, local: Local) -> None:
    answer, message = WRONG[name]
    local.behave = lambda content: of_json(answer)
    with pytest.raises(RewardError, match=message) as error:
        totals(scorer_of(local), items("a", "b"))
    assert len(local.asked) == 1 and len(str(error.value).splitlines()) <= 5


def test_a_batch_that_fails_once_is_sent_again_and_one_that_always_fails_has_no_score(local: Local) -> None:
    def fails_on_b(content: Any) -> Answer:
        return (503, {}, b"") if any(query.endswith("b") for query in content["query"]) else lengths(content)

    local.behave = fails_on_b
    said: list[str] = []
    scorer = scorer_of(local, "#batch=1&retries=2", said)
    assert totals(scorer, items("a", "b", "aa")) == [1.0, None, 2.0]
    assert scorer.take_counts() == {"remote/calls": 3, "remote/failed": 1, "remote/retries": 2}
    assert "row 1 of the data" in said[1] and "status 503" in said[1] and "has no score" in said[1]
    left = [1]
    local.behave = lambda content: (500, {}, b"") if left and left.pop() else lengths(content)
    assert totals(scorer, items("aaa")) == [3.0]


def test_a_server_that_is_gone_or_sends_elsewhere_stops_the_run(local: Local) -> None:
    local.behave = lambda content: (301, {"Location": "http://127.0.0.1:1/"}, b"")
    with pytest.raises(RewardError, match="sends us to another address"):
        totals(scorer_of(local), items("a"))
    reward = load_reward("http://127.0.0.1:9/get_reward#retries=0")
    with pytest.raises(RewardError, match=r"(?s)127\.0\.0\.1:9.*refused.*It has never answered"):
        totals(FunctionScorer([reward], [1.0]), items(*"abcdefgh"))


REFUSED = [
    ("http://", "is no address"),
    ("http://127.0.0.1:1/#bach=2", "has no option 'bach'. Did you mean \"batch\""),
    ("http://127.0.0.1:1/#batch=0", "at least 1"),
    ("http://127.0.0.1:1/#batch=many", "a whole number"),
    ("http://127.0.0.1:1/#", "is no option"),
    ("https://u:p@127.0.0.1/x", "leave name and password out"),
]


@pytest.mark.parametrize(("spec", "message"), REFUSED)
def test_wrong_addresses_and_options_are_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_reward(spec)


def test_an_address_is_no_file_and_has_no_worker(tmp_path: Path) -> None:
    assert not runs_in_worker("http://127.0.0.1:1/reward.py") and not runs_in_worker("http://h/a.py:f#batch=2")
    words = ["rloo", "model=m", "data=d.jsonl", "reward=http://127.0.0.1:1/x"]
    assert train_config(words).reward == ("http://127.0.0.1:1/x",)
    with pytest.raises(InputError, match="takes effect with a reward in a file"):
        train_config([*words, "reward_timeout=5"])
    with pytest.raises(InputError, match="takes effect with a reward of your own"):
        train_config([*words, "reward_dialect=trl"])


def test_a_run_with_a_remote_reward_beside_one_in_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lengths) as local:
        words = [f"reward=[{local.url}/r,reward.py]", "reward_weights=[1,10]", "eval.every=0"]
        assert train(*words, steps=2) == 0
    assert f"are sent to {local.url}/r" in capsys.readouterr().out
    for row in metrics("runs/one"):
        means = row["rewards/remote/mean"], row["rewards/reward/mean"]
        assert row["reward"] == pytest.approx(means[0] + 10 * means[1])
        assert row["remote/calls"] == 1 and row["remote/failed"] == row["rewards/failed"] == 0
    assert json.dumps(local.asked[0].content["labels"]).count('"') == 2 * len(local.asked[0].content["query"])
