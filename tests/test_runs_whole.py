"""Whole runs again: what is kept, what is refused on resuming, faults in scores and in a user's algorithm."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from hotcold.assemble import assemble
from hotcold.config.schema import Config
from hotcold.sampling.transformers_engine import TransformersSampler
from tests.test_end_to_end import here, hotcold, metrics, same, train, weights

__all__ = ["here"]  # the fixture


def state(run: str, step: int) -> dict[str, Any]:
    return json.loads(Path(run, "checkpoints", f"step_{step:06d}", "trainer", "state.json").read_text())


def checkpoints(run: str = "runs/one") -> list[str]:
    return sorted(path.name for path in Path(run, "checkpoints").iterdir())


def write_eval(number: int) -> str:
    rows = [json.loads(line) for line in Path("prompts.jsonl").read_text().splitlines()][:number]
    Path("held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "eval.data=held.jsonl"


def test_prompts_of_the_held_out_file_are_never_trained_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(write_eval(5), steps=5) == 0
    assert "5 training prompts stand in eval.data too and were left out" in capsys.readouterr().out
    held = {json.loads(line)["prompt"] for line in Path("held.jsonl").read_text().splitlines()}
    for path in Path("runs/one/rollouts").iterdir():
        assert not held & set(pq.read_table(path)["prompt_text"].to_pylist())


def test_the_best_checkpoint_stays_beside_the_newest_ones(here: Path) -> None:
    words = ["learning_rate=0.02", "eval.every=3", "save_every=5", "keep_checkpoints=1", write_eval(4)]
    assert train(*words, steps=14) == 0
    scores = {r["step"]: r["eval/greedy"] for r in metrics("runs/one") if r.get("eval/greedy") is not None}
    best = max(scores, key=lambda step: (scores[step], -step))
    if scores[best] > json.loads(Path("runs/one/eval/step_000000.json").read_text())["eval/greedy"]:
        assert f"step_{best:06d}" in checkpoints()
        assert state("runs/one", best)["progress"]["best_step"] == best
    assert "step_000014" in checkpoints() and len(checkpoints()) <= 2


def test_a_run_that_reached_its_mark_is_saved_and_does_not_go_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["learning_rate=0.03", "eval.every=2", "save_every=0", "stop_at=0.5"]
    assert train(*words, steps=60) == 0
    last = metrics("runs/one")[-1]
    assert last["step"] < 60 and last["eval/greedy"] >= 0.5 and f"step_{last['step']:06d}" in checkpoints()
    before = weights("runs/one/model")
    capsys.readouterr()
    assert train(*words, "resume=auto", steps=60) == 0
    assert f"ended at step {last['step']}, where stop_at was reached" in capsys.readouterr().out
    assert metrics("runs/one")[-1]["step"] == last["step"] and same(before, weights("runs/one/model"))


def test_rollouts_say_which_parameters_sampled_them_and_the_sampler_hears_of_new_ones(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D14"""
    heard: list[int] = []
    monkeypatch.setattr(TransformersSampler, "refresh", lambda self, version: heard.append(version))
    assert train("minibatches=2", algorithm="grpo", steps=3) == 0
    sampled_by = [
        set(pq.read_table(f"runs/one/rollouts/step_00000{step}.parquet")["version"].to_pylist()) for step in (1, 2, 3)
    ]
    assert sampled_by == [{0}, {heard[0]}, {heard[1]}] and heard == sorted(heard)
    taken = [row["optimizer_steps"] for row in metrics("runs/one")]
    assert heard == [taken[0], taken[0] + taken[1], sum(taken)]


def test_training_and_evaluation_draw_from_different_random_numbers(here: Path) -> None:
    config = Config.from_keys(
        algorithm="rloo", model="model", data="prompts.jsonl", reward="reward.py", prompts_per_step=3, max_tokens=4
    )
    ready = assemble(config)
    assert ready.evaluator is not None
    assert ready.evaluator.options.stream != ready.source.options.stream  # type: ignore[attr-defined]


@pytest.mark.parametrize(("algorithm", "shown"), [("rloo", "none "), ("grpo", "1.0 ")])
def test_gradients_are_clipped_by_default_except_where_responses_are_summed(
    here: Path, capsys: pytest.CaptureFixture[str], algorithm: str, shown: str
) -> None:
    assert train("--dry-run", algorithm=algorithm) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("max_grad_norm")]
    assert line.removeprefix("max_grad_norm").strip().startswith(shown)


def test_resuming_needs_the_model_the_rewards_and_the_weights_it_began_with(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("learning_rate=0.01", steps=2) == 0
    shutil.copytree("runs/one/model", "other")
    shutil.copy("reward.py", "second.py")
    for words, message in (
        (["model=other"], "the starting model's weights are not the same"),
        (["reward=second.py"], "reward: [reward.py] then, [second.py] now"),
        (["warmup_steps=1"], "warmup_steps: 3 then, 1 now"),
    ):
        assert train("learning_rate=0.01", "resume=auto", *words, steps=4) == 2
        assert message in capsys.readouterr().err
    assert train("learning_rate=0.01", "resume=auto", steps=1) == 2
    assert "has done 2 steps already, steps=1 is fewer" in capsys.readouterr().err
    assert train("learning_rate=0.01", "resume=auto", "save_every=1", steps=4) == 0
    assert "steps: 4" in Path("runs/one/config.yaml").read_text()


def test_what_has_changed_is_listed_and_can_be_allowed_by_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(steps=2) == 0
    with open("prompts.jsonl", "a") as file:
        file.write('{"prompt": "9+9=", "answer": "18"}\n')
    assert train("resume=auto", "learning_rate=0.5", steps=3) == 2
    said = capsys.readouterr().err
    assert "learning_rate: 1e-05 then, 0.5 now" in said and "allow_changed=[learning_rate,data]" in said
    assert train("resume=auto", "learning_rate=0.5", "allow_changed=data", steps=3) == 2
    assert train("resume=auto", "learning_rate=0.5", "allow_changed=[learning_rate,data]", steps=3) == 0
    assert [row["learning_rate"] for row in metrics("runs/one")][2] == 0.5
    assert train("resume=auto", "learning_rate=0.5", "allow_changed=lerning_rate", steps=4) == 2
    assert 'Did you mean "learning_rate"?' in capsys.readouterr().err
    assert hotcold("train", "resume=runs/one", "learning_rate=0.25", "steps=4") == 2  # allowed once, not for ever
    assert "learning_rate: 0.5 then, 0.25 now" in capsys.readouterr().err
    assert train("allow_changed=data", run="runs/two", steps=1) == 2
    assert "resume" in capsys.readouterr().err and not Path("runs/two").exists()


def test_a_disk_without_room_for_what_is_kept_is_refused_before_the_start(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of 3 x 4 bytes for each parameter: two kept, the best one, one being written, and the model."""
    size = sum(tensor.numel() for tensor in weights("model").values())
    room = 4 * size * (3 * 4 + 1) + 10_000_000
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1, free=room - 1))
    words = [write_eval(3), "save_every=2", "keep_checkpoints=2"]
    assert train(*words, steps=20) == 2
    said = capsys.readouterr().err
    assert "4 checkpoints" in said and "keep_checkpoints=2" in said and not Path("runs").exists()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1, free=room))
    assert train(*words, steps=2) == 0


def test_a_score_that_fails_at_once_leaves_the_name_free(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "wrong.py").write_text("def reward(completion):\n    return 'yes'\n")
    assert train("reward=wrong.py") == 2
    said = capsys.readouterr()
    assert "'yes'" in said.err and not Path("runs/one").exists()
    assert "no step was done: runs/one is taken away again" in said.out
    assert train(steps=1) == 0


def test_a_score_that_fails_in_an_evaluation_loses_no_step(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (
        "import pathlib\n\ndef reward(completion):\n    log = pathlib.Path('calls')\n"
        "    n = int(log.read_text()) if log.exists() else 0\n    log.write_text(str(n + 1))\n"
        "    assert n != 26\n    return float('a' in completion)\n"
    )  # 2 at the start (one held-out prompt), 12 a step: call 26 belongs to the evaluation after step 2
    (here / "late.py").write_text(lines)
    words = ["reward=late.py", "reward_on_error=stop", "reward_retries=0", "eval.every=2", "save_every=0"]
    assert train(*words, steps=4) == 2
    assert "hotcold train resume=runs/one   (from step 2, the last one saved)" in capsys.readouterr().out
    assert checkpoints() == ["step_000002"]
    assert train(*words, "resume=auto", steps=4) == 0
    assert [row["step"] for row in metrics("runs/one")] == [1, 2, 3, 4]


def test_a_run_goes_on_by_its_folder_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(steps=2, run="one") == 0
    assert hotcold("train", "resume=runs/one", "steps=3") == 0
    assert [row["step"] for row in metrics("runs/one")] == [1, 2, 3]
    assert hotcold("train", "resume=one", "steps=3") == 2
    assert "Did you mean resume=runs/one?" in capsys.readouterr().err


def test_ctrl_c_between_two_updates_loses_no_step(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (
        "import pathlib\n\ndef reward(completion):\n    log = pathlib.Path('calls')\n"
        "    n = int(log.read_text()) if log.exists() else 0\n    log.write_text(str(n + 1))\n"
        "    if n == 30:\n        raise KeyboardInterrupt\n    return float('a' in completion)\n"
    )  # 2 calls at the start, 12 a step: call 30 is in step 3
    (here / "stop.py").write_text(lines)
    assert train("reward=stop.py", "reward_workers=0", "save_every=0", "eval.every=0", steps=4) == 130
    assert "to go on: hotcold train resume=runs/one   (from step 2, the last one saved)" in capsys.readouterr().out
    assert hotcold("train", "resume=runs/one") == 0
    assert [row["step"] for row in metrics("runs/one")] == [1, 2, 3, 4]


def test_a_score_without_a_return_is_said_at_the_first_step(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "empty.py").write_text("def reward(completion):\n    float('a' in completion)\n")
    assert train("reward=empty.py") == 2
    assert "for any of the first 12 responses: is a `return` missing?" in capsys.readouterr().err
    assert not Path("runs/one").exists()


def test_a_place_where_no_folder_can_be_made_is_an_input_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(run="/proc/no/such/place") == 2
    assert "/proc/no/such/place cannot be made" in capsys.readouterr().err


def test_a_score_may_change_the_current_folder(here: Path) -> None:
    (here / "elsewhere").mkdir()
    lines = "import os\n\ndef reward(completion):\n    os.chdir('/')\n    return 1.0\n"
    (here / "moves.py").write_text(lines)
    assert train("reward=moves.py", steps=2) == 0
    assert (here / "runs/one/model/model.safetensors").is_file()


def test_a_rate_that_ruins_the_parameters_ends_the_run_without_a_bad_checkpoint(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D18"""
    assert train("learning_rate=1e38", "warmup_steps=0", "save_every=1", "eval.every=0") == 2
    assert "not finite: lower learning_rate" in capsys.readouterr().err
    assert not Path("runs/one/checkpoints/step_000001").exists()


ALGORITHM = """
import torch
from hotcold.algorithms.base import Objective, Plan
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.equations import mean_per_token

class Mine:
    plan = Plan(group_size=2)
    reads = frozenset()
    objectives = (Objective(policy_gradient_loss, mean_per_token),)
    calls = 0
    def state(self):
        return {}
    def keep(self, batch):
        return torch.ones_like(batch.keep)
    def credit(self, batch, state):
        type(self).calls += 1
        CREDIT
"""


def run_mine(credit: str, *words: str, run: str = "runs/mine") -> int:
    Path("mine.py").write_text(ALGORITHM.replace("CREDIT", credit))
    arguments = ["model=model", "data=prompts.jsonl", "reward=reward.py", "prompts_per_step=2", "max_tokens=3"]
    return hotcold("train", "mine.py:Mine", *arguments, f"run={run}", "eval.every=0", *words)


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        ("return batch.rewards.no_such_thing, state", "mine.py:18"),
        ("return batch", "return (batch, state)"),
        ("return batch.replace(advantages=batch.rewards), state", "[B, T]"),
        ("return batch.replace(advantages=batch.token_rewards / 0 * 0), state", "not finite"),
    ],
)
def test_a_fault_in_a_users_algorithm_is_named_before_anything_is_sampled(
    here: Path, capsys: pytest.CaptureFixture[str], credit: str, message: str
) -> None:
    assert run_mine(credit) == 2
    error = capsys.readouterr().err
    assert message in error and "bug in hotcold" not in error
    assert not Path("runs").exists()


def test_nan_advantages_skip_the_step_and_five_in_a_row_stop_the_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D18: a NaN advantage sends no gradient, so that only the loss shows it. The first two calls are the rehearsal and
    the measuring of memory."""
    scale = "(1.0 if type(self).calls < 3 else float('nan'))"
    credit = f"return batch.replace(advantages=batch.token_rewards * {scale}), state"
    assert run_mine(credit, "steps=9") == 2
    out = capsys.readouterr()
    assert "5 steps in a row" in out.err
    assert "note: step 1: an update was skipped, since it is not finite (policy: the loss at token" in out.out
    assert [row["optimizer_steps/nonfinite"] for row in metrics("runs/mine")] == [1] * 5
    assert run_mine(credit.replace("< 3", "!= 4"), "steps=4", run="runs/once") == 0
    assert [row["optimizer_steps/nonfinite"] for row in metrics("runs/once")] == [0, 1, 0, 0]
