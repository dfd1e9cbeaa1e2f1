"""Whole runs through the command line on a tiny model: the record, resuming, controls, wrong input."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hotcold.cli import main
from tests.tiny_model import write_tiny

LIKES_A = "def reward(completion):\n    return float('a' in completion)\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, 12 prompts and a reward, as the current one."""
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(LIKES_A)
    return tmp_path


def hotcold(*words: str) -> int:
    with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["hotcold", *words])
        main()
    return int(stop.value.code or 0)


def train(*words: str, run: str = "runs/one", algorithm: str = "rloo", steps: int = 4) -> int:
    arguments = ["model=model", "data=prompts.jsonl", "max_tokens=5", "prompts_per_step=3", "group_size=4"]
    given = {word.split("=")[0] for word in words}
    arguments = [a for a in arguments if a.split("=")[0] not in given]
    if "reward" not in given:
        arguments.append("reward=reward.py")
    return hotcold("train", algorithm, *arguments, f"steps={steps}", f"run={run}", *words)


def metrics(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_learns_and_leaves_a_folder_that_plain_transformers_loads(here: Path) -> None:
    assert train("learning_rate=0.02", "eval.every=10", steps=20) == 0
    rows = metrics("runs/one")
    assert [row["step"] for row in rows] == list(range(1, 21))
    first, last = (sum(r["reward"] for r in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last > first + 0.3  # 'a' is one of 23 tokens at first; the policy gradient makes it common
    model = AutoModelForCausalLM.from_pretrained("runs/one/model")
    tokenizer = AutoTokenizer.from_pretrained("runs/one/model")
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    out = model.generate(**tokenizer("1+2=", return_tensors="pt"), do_sample=False, max_new_tokens=5)
    assert "a" in tokenizer.decode(out[0][4:])
    for name in ("config.yaml", "env.json", "log.txt", "README.md", "rollouts/step_000001.parquet", "eval"):
        assert Path("runs/one", name).exists(), name
    checkpoints = sorted(p.name for p in Path("runs/one/checkpoints").iterdir())
    assert "step_000020" in checkpoints
    AutoModelForCausalLM.from_pretrained("runs/one/checkpoints/step_000020")


def test_sampled_and_recomputed_log_probs_agree_at_every_step(here: Path) -> None:
    assert train("learning_rate=0.02", steps=5) == 0
    largest = [row["mismatch/max_abs"] for row in metrics("runs/one")]
    assert all(value is not None and value <= 1e-4 for value in largest)  # DESIGN's bound for fp32
    assert any(value > 0 for value in largest)  # two different computations, not one compared with itself


def test_the_ratio_is_null_for_one_update_and_exactly_1_at_the_first_of_several(here: Path) -> None:
    """A25, E01"""
    assert train(run="runs/single", algorithm="grpo", steps=1) == 0
    row = metrics("runs/single")[0]
    assert row["approx_kl"] is None and row["clip_fraction"] is None and row["ratio/max"] is None
    assert train("epochs_per_batch=1", "minibatches=3", "learning_rate=0", run="runs/several", algorithm="grpo") == 0
    for row in metrics("runs/several"):
        assert row["ratio/max"] in (1.0, 0.0)  # 0.0: every row of the step was skipped
        assert row["approx_kl"] in (0.0, None) and row["clip_fraction"] in (0.0, None)


def test_a_resumed_run_is_the_run_that_was_never_stopped(here: Path) -> None:
    """D02: the same draws, responses, rewards, rates and parameters."""
    words = ["learning_rate=0.01", "epochs_per_batch=2", "minibatches=3", "save_every=2", "eval.every=0"]
    assert train(*words, run="runs/whole", algorithm="grpo", steps=6) == 0
    assert train(*words, run="runs/parts", algorithm="grpo", steps=3) == 0
    assert train(*words, "resume=auto", run="runs/parts", algorithm="grpo", steps=6) == 0
    assert same(weights("runs/whole/model"), weights("runs/parts/model"))
    keys = ("step", "reward", "loss", "grad_norm", "learning_rate", "entropy", "approx_kl", "completions/mean_length")
    whole, parts = metrics("runs/whole"), {row["step"]: row for row in metrics("runs/parts")}
    assert [[row[key] for key in keys] for row in whole] == [[parts[row["step"]][key] for key in keys] for row in whole]


def test_resuming_with_other_settings_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(steps=2) == 0
    assert train("resume=auto", "temperature=0.7", steps=4) == 2
    assert "temperature: 1.0 then, 0.7 now" in capsys.readouterr().err
    with open("prompts.jsonl", "a") as file:
        file.write('{"prompt": "9+9=", "answer": "18"}\n')
    assert train("resume=auto", steps=4) == 2
    assert "training prompts" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["rloo", "grpo", "reinforce"])
def test_a_constant_reward_leaves_the_parameters_bit_unchanged(here: Path, algorithm: str) -> None:
    """E07, control A. Every batch mean and group mean equals the score, so every advantage is exactly 0."""
    (here / "constant.py").write_text("def reward(completion):\n    return 0.5\n")
    assert train("reward=constant.py", "learning_rate=0.1", algorithm=algorithm) == 0
    assert same(weights("model"), weights("runs/one/model"))
    assert all(row["rows/skipped"] == 12 for row in metrics("runs/one"))


def test_a_coin_flip_reward_moves_held_out_scores_no_further_than_their_interval(here: Path) -> None:
    """E07, control B: scores that do not depend on the response."""
    coin = "import zlib\n\ndef reward(completion_ids, prompt):\n    text = repr((completion_ids, prompt)).encode()\n"
    (here / "coin.py").write_text(coin + "    return float(zlib.crc32(text) % 2)\n")
    assert train("reward=[reward.py,coin.py]", "reward_weights=[0,1]", "learning_rate=1e-3", steps=10) == 0
    rows = metrics("runs/one")
    likes_a = [row["rewards/reward/mean"] for row in rows]
    n = 12 * 5
    first, last = sum(likes_a[:5]) / 5, sum(likes_a[-5:]) / 5
    spread = (first * (1 - first) / n + last * (1 - last) / n) ** 0.5
    assert abs(last - first) <= 2.6 * max(spread, 0.02)


def test_a_second_writer_is_refused_and_a_finished_run_is_not_overwritten(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(steps=1) == 0
    before = Path("runs/one/metrics.jsonl").read_text()
    assert train(steps=1) == 2
    assert "runs/one" in capsys.readouterr().err
    assert Path("runs/one/metrics.jsonl").read_text() == before


def test_a_failing_reward_stops_the_run_names_its_line_and_can_be_resumed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flaky = (
        "import pathlib\n\ndef reward(completion):\n    calls = pathlib.Path('calls')\n"
        "    n = int(calls.read_text()) if calls.exists() else 0\n    calls.write_text(str(n + 1))\n"
        "    if n == 50:\n        raise RuntimeError('broken on purpose')\n    return float('a' in completion)\n"
    )
    (here / "flaky.py").write_text(flaky)
    stops = ("reward_on_error=stop", "reward_retries=0")
    assert train("reward=flaky.py", *stops, "eval.every=0", "save_every=0", steps=6) == 2
    message = capsys.readouterr().err
    assert "broken on purpose" in message and "flaky.py:8" in message and "Traceback" not in message
    done = [row["step"] for row in metrics("runs/one")]
    assert train("reward=flaky.py", "eval.every=0", "save_every=0", "resume=auto", steps=6) == 0
    assert [row["step"] for row in metrics("runs/one")] == [*done, *range(done[-1] + 1, 7)]


def test_everything_truncated_and_nothing_learnt_is_said_within_three_steps(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """E02"""
    (here / "never.py").write_text("def reward(completion):\n    return float(len(completion) > 50)\n")
    assert train("reward=never.py", "max_tokens=1", "eval.every=0", steps=5) == 0
    assert "note: 3 steps without any signal" in capsys.readouterr().out
    assert same(weights("model"), weights("runs/one/model"))


def test_dry_run_shows_values_reasons_prompt_and_arithmetic_and_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--dry-run") == 0
    out = capsys.readouterr().out
    assert "preset rloo" in out and "default on a CPU" not in out.split("max_tokens")[1].split("\n")[0]
    assert "3 prompts x 4 responses = 12 responses" in out and "first prompt, 4 tokens" in out
    assert not Path("runs").exists()


def test_an_algorithm_in_a_users_file_trains(here: Path) -> None:
    lines = """
import dataclasses, torch
from hotcold.algorithms.base import Objective, Plan
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.equations import mean_per_token, reward_to_go

@dataclasses.dataclass(frozen=True)
class Fixed:
    threshold: float = 0.25
    reads = frozenset()
    plan = Plan(group_size=2)
    objectives = (Objective(policy_gradient_loss, mean_per_token),)
    def state(self):
        return {"seen": 0.0}
    def keep(self, batch):
        return torch.ones_like(batch.keep)
    def credit(self, batch, state):
        a = reward_to_go(batch.token_rewards, batch.response_mask) - self.threshold
        a = torch.where(batch.response_mask, a, 0.0)
        return batch.replace(advantages=a), {"seen": state["seen"] + len(batch)}
"""
    (here / "mine.py").write_text(lines)
    arguments = ["model=model", "data=prompts.jsonl", "reward=reward.py", "prompts_per_step=3", "max_tokens=4"]
    assert hotcold("train", "mine.py:Fixed", *arguments, "threshold=0.5", "steps=2", "run=runs/mine") == 0
    state = json.loads(Path("runs/mine/checkpoints/step_000002/trainer/state.json").read_text())
    assert state["progress"]["algorithm"] == {"seen": 12.0}
    assert not same(weights("model"), weights("runs/mine/model"))


WRONG: dict[str, tuple[Sequence[str], str]] = {
    "unknown key": (["lerning_rate=1"], "learning_rate"),
    "no such file": (["data=nothing.jsonl"], "nothing.jsonl"),
    "no such column": (["data.prompt=question"], "question"),
    "group of one": (["group_size=1"], "group_size=1"),
    "minibatches": (["minibatches=5", "objective=clipped_surrogate"], "12 responses"),
    "two policy gradient steps": (["epochs_per_batch=2"], "importance_weighted"),
    "negative rate": (["learning_rate=-1"], "learning_rate"),
    "nan rate": (["learning_rate=nan"], "learning_rate"),
    "temperature 0": (["temperature=0"], "temperature"),
    "no such function": (["reward=reward.py:score"], "score"),
    "no reward file": (["reward=rewards.py"], "rewards.py"),
    "option of another algorithm": (["scale_by_std=true"], "scale_by_std"),
    "epochs": (["epochs=3"], "epochs_per_batch"),
    "foreign key": (["num_generations=8"], "group_size"),
    "top-p in training": (["top_p=0.9"], "top_p"),
    "later": (["tracker=x"], "not available yet"),
    "no such model": (["model=modle"], "modle"),
    "bad weighting": (["weighting=mean"], "mean_per_response"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_short_message_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    words, names = WRONG[case]
    assert train(*words) == 2
    message = capsys.readouterr().err
    assert names in message and len(message.strip().splitlines()) <= 5 and "Traceback" not in message
    assert not Path("runs").exists()


def test_a_zero_rate_is_allowed_with_a_warning(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("learning_rate=0", steps=1) == 0
    assert "nothing will be learnt" in capsys.readouterr().err
    assert same(weights("model"), weights("runs/one/model"))


def test_eval_and_sample_work_on_a_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hotcold("eval", "model=model", "data=prompts.jsonl", "reward=reward.py", "samples=4", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 <= result["eval/greedy_low"] <= result["eval/greedy"] <= result["eval/greedy_high"] <= 1
    assert result["eval/prompts"] == 12 and set(result) >= {"eval/pass_at_1", "eval/pass_at_2", "eval/pass_at_4"}
    assert result["eval/pass_at_1"] <= result["eval/pass_at_4"]
    assert hotcold("sample", "model=model", "prompt=1+2=", "n=3", "max_tokens=4", "top_k=2", "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 3 and all(row["num_tokens"] <= 4 for row in rows)
