"""Whole PPO runs on a tiny model: resuming, the critic's folder, its warm-up, wrong input."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel

from tests.test_end_to_end import here, metrics, same, train, weights
from tests.tiny_model import write_tiny

__all__ = ["here"]  # the fixture

PPO = ("eval.every=0", "save_every=1", "keep_checkpoints=9", "learning_rate=0.01")


def ppo(*words: str, run: str = "runs/one", steps: int = 3) -> int:
    return train(*PPO, *words, run=run, algorithm="ppo", steps=steps)


def checkpoint(run: str, step: int) -> Path:
    return Path(run, "checkpoints", f"step_{step:06d}")


def trainer(run: str, step: int) -> dict[str, dict[str, Tensor]]:
    """Every tensor that the trainer keeps beside the policy."""
    return {path.stem: load_file(path) for path in (checkpoint(run, step) / "trainer").glob("*.safetensors")}


def algorithm_state(run: str, step: int) -> dict[str, float]:
    return json.loads((checkpoint(run, step) / "trainer" / "state.json").read_text())["progress"]["algorithm"]


def timeless(run: str) -> list[dict[str, Any]]:
    """Metrics without what differs between two equal runs: times, and the evaluation at the last step of an attempt."""
    free = ("time/", "memory/", "eval/", "attempt", "tokens_per_second")
    return [{key: value for key, value in row.items() if not key.startswith(free)} for row in metrics(run)]


def test_a_resumed_run_is_the_run_that_was_never_stopped(here: Path) -> None:
    """D02, with a critic, a reference, a beta that moves and several passes."""
    words = ["epochs_per_batch=2", "minibatches=2", "critic.warmup=1", "lam=0.9", "value_clip=0.5"]
    words += ["beta=0.1", "kl.target=0.05", "kl.horizon=100"]
    assert ppo(*words, run="runs/whole", steps=5) == 0
    assert ppo(*words, run="runs/parts", steps=3) == 0
    assert ppo(*words, "resume=auto", run="runs/parts", steps=5) == 0
    assert same(weights("runs/whole/model"), weights("runs/parts/model"))
    whole, parts = trainer("runs/whole", 5), trainer("runs/parts", 5)
    assert set(whole) == set(parts) == {"critic", "optimizer", "critic_optimizer"}
    assert all(same(whole[name], parts[name]) for name in whole)
    assert algorithm_state("runs/whole", 5) == algorithm_state("runs/parts", 5)
    assert timeless("runs/whole") == timeless("runs/parts")
    betas = [row["beta"] for row in metrics("runs/whole")]
    assert betas[0] == 0.1 and len(set(betas)) == 5  # what is carried over does move
    assert algorithm_state("runs/whole", 5)["beta"] != betas[-1]  # that of the next step


def plain_values(folder: str, rows: list[dict[str, Any]]) -> Tensor:
    """Of every response token, row after row: the head on the trunk's state at the token before it."""
    trunk, head = AutoModel.from_pretrained(folder), load_file(Path(folder) / "value_head.safetensors")
    out = []
    for row in rows:
        ids, first = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
        with torch.no_grad():
            states = trunk(torch.tensor([ids])).last_hidden_state[0, first - 1 : -1]
        out.append(states @ head["weight"][0] + head["bias"])
    return torch.cat(out)


def test_the_critic_of_a_run_is_a_folder_that_another_run_takes_up_with_the_same_values(here: Path) -> None:
    assert ppo("critic.learning_rate=0.03", steps=4) == 0
    words = ["model=runs/one/model", "critic.init=runs/one/critic", "critic.learning_rate=0", "seed=5"]
    assert ppo(*words, run="runs/two", steps=1) == 0
    rows = pq.read_table("runs/two/rollouts/step_000001.parquet").to_pylist()
    values = plain_values("runs/one/critic", rows)
    (row,) = metrics("runs/two")
    assert row["value/mean"] == pytest.approx(float(values.mean()), abs=1e-6)
    assert float(values.std()) > 0.01  # it has learnt something that differs between states
    # lam 1: the return of every token is its response's score, so V explains 1 - var(score - V)/var(score) of it
    scores = torch.cat([torch.full((len(r["response_ids"]),), float(r["reward"])) for r in rows])
    explained = 1 - float((scores - values).var(unbiased=False) / scores.var(unbiased=False))
    assert row["value/explained_variance"] == pytest.approx(explained, abs=1e-5)
    assert same(weights("runs/one/critic"), weights("runs/two/critic"))  # rate 0
    heads = [load_file(f"runs/{run}/critic/value_head.safetensors") for run in ("one", "two")]
    assert same(*heads) and float(heads[0]["bias"].abs()) > 0


def test_a_new_critic_says_zero_and_is_a_copy_of_the_policy(here: Path) -> None:
    assert ppo("critic.learning_rate=0", steps=1) == 0
    (row,) = metrics("runs/one")
    assert row["value/mean"] == 0.0 and row["value/explained_variance"] in (0.0, None)
    trunk, policy = weights("runs/one/critic"), weights("model")
    assert same({f"model.{name}": tensor for name, tensor in trunk.items()}, policy)


def write_with_digits_swapped(folder: Path) -> None:
    """A model of the policy's size in whose vocabulary 0 and 1 have each other's id."""
    write_tiny(folder, seed=1)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    ids = content["model"]["vocab"]
    ids["0"], ids["1"] = ids["1"], ids["0"]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("nothing there", "critic.init=elsewhere"),
        ("no model", "elsewhere has no config.json"),
        ("other tokens", "critic.init: the tokenizers of elsewhere and of the policy model differ in 2 tokens"),
    ],
)
def test_a_critic_that_cannot_be_had_is_one_short_message_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], case: str, says: str
) -> None:
    folder = here / "elsewhere"
    if case == "no model":
        folder.mkdir()
    elif case == "other tokens":
        write_with_digits_swapped(folder)
    assert ppo("critic.init=elsewhere") == 2
    message = capsys.readouterr().err
    assert says in message, message
    assert len(message.strip().splitlines()) <= 5 and "Traceback" not in message
    assert not Path("runs").exists()


def test_the_warm_up_trains_the_critic_alone_and_the_policys_rate_rises_after_it(here: Path) -> None:
    assert ppo("critic.warmup=2", "warmup_steps=2", "critic.learning_rate=0.02", steps=5) == 0
    start = weights("model")
    for step in (1, 2):
        assert same(weights(checkpoint("runs/one", step)), start)
        assert not trainer("runs/one", step)["optimizer"]  # its optimiser has not stepped either
    critics = [trainer("runs/one", step)["critic"] for step in range(1, 6)]
    assert not any(same(before, after) for before, after in pairwise(critics))
    policies = [weights(checkpoint("runs/one", step)) for step in range(2, 6)]
    assert not any(same(before, after) for before, after in pairwise(policies))
    rows = metrics("runs/one")
    assert [row["learning_rate"] for row in rows] == [0.0, 0.0, 0.005, 0.01, 0.01]
    assert [row["value/learning_rate"] for row in rows] == [0.01, 0.02, 0.02, 0.02, 0.02]
    assert [row["optimizer_steps"] for row in rows] == [None, None, 1, 1, 1]  # null: it is not trained there
    assert [row["value/optimizer_steps"] for row in rows] == [1] * 5


def test_a_run_that_would_end_within_the_warm_up_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ppo("critic.warmup=3", steps=3) == 2
    message = capsys.readouterr().err
    assert "steps=3" in message and "policy is not trained in the first 3 steps" in message
    assert not Path("runs").exists()
