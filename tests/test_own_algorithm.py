"""An algorithm in a file outside the package that uses everything the loop offers, trained from the command line.

It uses no name but those of docs/your_algorithm.md, docs/glossary.md and `hotcold.equations`.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from tests.test_end_to_end import hotcold, metrics, same, weights
from tests.tiny_model import write_tiny

MINE = '''
from dataclasses import dataclass

import torch

from hotcold.algorithms.base import Objective, Plan, TokenLoss
from hotcold.algorithms.critic_free import on_trained, to_go
from hotcold.algorithms.losses import ValueLoss
from hotcold.equations import mean_per_token, policy_gradient, reward_to_go, sum_per_response


def leashed(forward, batch):
    """-A log pi + beta KL of the state; the strength travels with the rows."""
    kl = batch.extras["strength"][:, None] * forward.kl
    return TokenLoss(policy_gradient(forward.logp, batch.advantages) + kl, {"mine/kl": forward.kl.detach()})


@dataclass(frozen=True)
class Everything:
    group_size: int = 8
    refill: int = 2
    strength: float = 0.01  # reward per nat
    memory: float = 0.8  # of the usual score

    reads = frozenset({"greedy_rewards", "kl_old", "values_old"})

    @property
    def plan(self):
        return Plan(group_size=self.group_size, greedy=True, refill=self.refill)

    @property
    def objectives(self):
        policy = Objective(leashed, sum_per_response, needs=frozenset({"logp", "kl"}))
        critic = Objective(ValueLoss(), mean_per_token, needs=frozenset({"values"}), model="critic")
        return policy, critic

    def state(self):
        return {"usual": 0.0, "responses": 0.0}

    def keep(self, batch):
        """Prompts whose responses differ in score."""
        same = batch.group[:, None] == batch.group[None, :]
        scores = batch.rewards.nan_to_num()
        return (same & (scores[:, None] != scores[None, :])).any(1)

    def credit(self, batch, state):
        later = reward_to_go(batch.kl_old, batch.response_mask) - batch.kl_old
        returns = to_go(batch, gamma=1.0) - self.strength * later
        baseline = (batch.greedy_rewards[:, None] + batch.values_old + state["usual"]) / 3
        usual = self.memory * state["usual"] + (1 - self.memory) * batch.rewards.mean().item()
        batch = batch.replace(
            advantages=on_trained(batch, returns - baseline),
            returns=on_trained(batch, returns),
            extras=batch.extras | {"strength": torch.full((len(batch),), self.strength)},
            metrics=batch.metrics | {"mine/usual": state["usual"]},
        )
        return batch, {"usual": usual, "responses": state["responses"] + len(batch)}
'''
SEVEN_FIRST = "def reward(completion):\n    return float(completion.startswith('7'))\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path / "model")
    prompts = [{"prompt": f"{a}+{b}?"} for a in range(5) for b in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (tmp_path / "seven.py").write_text(SEVEN_FIRST)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def train(*words: str, run: str = "runs/one") -> int:
    arguments = ["model=model", "data=prompts.jsonl", "reward=seven.py", "prompts_per_step=4", "max_tokens=3"]
    return hotcold(
        "train", "mine.py:Everything", *arguments, f"run={run}", "learning_rate=0.02", "eval.every=0", *words
    )


def checkpoint(run: str, step: int) -> Path:
    return Path(run, "checkpoints", f"step_{step:06d}")


def progress(run: str, step: int) -> dict[str, Any]:
    return json.loads((checkpoint(run, step) / "trainer" / "state.json").read_text())["progress"]


def test_an_algorithm_of_ones_own_with_every_part_learns(here: Path) -> None:
    """Greedy response, refill, exact KL, a state and a critic: 1 response in 24 begins with a 7 at first."""
    assert train("steps=25") == 0
    rows = metrics("runs/one")
    first, last = (sum(row["reward"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert first < 0.3 and last > 0.8
    final = json.loads(Path("runs/one/eval/step_000025.json").read_text())
    assert final["eval/greedy"] == 1.0  # of prompts that it was not trained on
    assert sum(row["groups/refilled"] for row in rows) > 0
    assert all(row["groups/refilled"] <= 2 * 4 for row in rows)
    sampled = pq.read_table("runs/one/rollouts/step_000025.parquet").to_pylist()
    assert {row["greedy_reward"] for row in sampled} <= {0.0, 1.0}  # one for every row, no null
    assert rows[0]["mine/kl"] == pytest.approx(0, abs=1e-9) and rows[0]["mine/kl"] == rows[0]["kl"]
    learnt = [row for row in rows if row.get("mine/kl") is not None]
    assert max(row["mine/kl"] for row in learnt) > 0.1
    assert max(abs(row["value/mean"]) for row in rows if row.get("value/mean") is not None) > 0.05


def test_its_state_and_its_critic_survive_a_resume_bit_for_bit(here: Path) -> None:
    words = ["save_every=1", "keep_checkpoints=9", "memory=0.5"]
    assert train(*words, "steps=5", run="runs/whole") == 0
    assert train(*words, "steps=2", run="runs/parts") == 0
    assert train(*words, "steps=5", "resume=auto", run="runs/parts") == 0
    usual = [progress("runs/whole", step)["algorithm"]["usual"] for step in range(1, 6)]
    assert len(set(usual)) == 5
    for key in ("step", "position", "version", "algorithm"):
        assert progress("runs/whole", 5)[key] == progress("runs/parts", 5)[key], key
    assert [row["mine/usual"] for row in metrics("runs/whole")] == [0.0, *usual[:4]]
    trained = [row["rows/trained"] + row["rows/skipped"] for row in metrics("runs/whole")]
    assert progress("runs/whole", 5)["algorithm"]["responses"] == sum(trained)
    assert same(weights("runs/whole/model"), weights("runs/parts/model"))
    for name in ("critic", "optimizer", "critic_optimizer"):
        whole, parts = (
            load_file(checkpoint(run, 5) / "trainer" / f"{name}.safetensors") for run in ("runs/whole", "runs/parts")
        )
        assert same(whole, parts), name
    assert same(weights("runs/whole/critic"), weights("runs/parts/critic"))
    early, late = (load_file(checkpoint("runs/parts", step) / "trainer" / "critic.safetensors") for step in (2, 5))
    assert not same(early, late)


def test_its_fields_are_options_and_part_of_what_a_run_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("steps=1", "strength=0.5", "refill=0") == 0
    assert metrics("runs/one")[0]["groups/refilled"] == 0
    assert train("steps=2", "strength=0.1", "refill=0", "resume=auto") == 2
    assert "strength: 0.5 then, 0.1 now" in capsys.readouterr().err
    assert train("steps=1", "strenght=0.5", run="runs/two") == 2
    assert "strength" in capsys.readouterr().err and not Path("runs/two").exists()
