"""What `hotcold verify RUN_FOLDER` reports of whole runs of a tiny model."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from hotcold import launch
from hotcold.config.schema import train_config
from hotcold.errors import InputError
from hotcold.lab.of_run import RunReport, StepFigures
from hotcold.lab.variance import BATCH, CRITIC, GROUP, LEAVE_ONE_OUT, NONE, OWN, BaselineVariance
from hotcold.verify.models import verify_run
from tests.tiny_model import write_tiny


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tiny(folder / "model")
    rows = [{"prompt": f"{i}+{i + 1}=" + "0" * (i % 3), "response": "42"} for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def reward(completion):\n    return float(len(set(completion)) % 3)\n")
    return folder


def run_of(files: Path, name: str, algorithm: str, *words: str) -> Path:
    given = [f"model={files}/model", f"data={files}/prompts.jsonl", f"run={files}/{name}", "prompts_per_step=6"]
    given += [] if algorithm == "sft" else [f"reward={files}/reward.py", "group_size=4", "max_tokens=6"]
    config = train_config([algorithm, *given, "eval.every=0", "eval.prompts=1", "learning_rate=0.002", *words])
    launch.train(config, echo=None)
    return files / name


@pytest.fixture(scope="module")
def grpo(files: Path) -> Path:
    return run_of(files, "grpo", "grpo", "beta=0.1", "steps=4", "save_every=1", "keep_checkpoints=9")


def rows_of(report: RunReport) -> dict[str, BaselineVariance]:
    return {row.baseline: row for row in report.baselines}


def test_a_run_is_looked_at_where_its_parameters_are_still_there(grpo: Path) -> None:
    before = {p: p.read_bytes() for p in sorted(grpo.rglob("*")) if p.is_file()}
    said: list[str] = []
    report = verify_run(grpo, steps=2, dims=256, progress=said.append)
    assert {p: p.read_bytes() for p in sorted(grpo.rglob("*")) if p.is_file()} == before
    assert [s.step for s in report.steps] == [1, 4]
    assert [s.policy for s in report.steps] == [
        "the starting model, which sampled the responses",
        "the checkpoint of step 3, which sampled the responses",
    ]
    assert all((s.num_prompts, s.num_used, s.num_responses) == (6, 6, 24) for s in report.steps)
    # the sampler is the policy, so every ratio is 1 up to rounding; the checkpoint of step 4 has moved away
    for step in report.steps:
        assert step.ess_responses == pytest.approx(1.0, abs=1e-5) and step.ess_tokens == pytest.approx(1.0, abs=1e-5)
        assert step.ess_responses_now is not None and step.ess_responses_now < 1 - 1e-4
    assert report.newest == "step_000004" and said[0].startswith("step 1: gradients of prompt 1 of 6")
    assert report.passed and report.weighting == "mean_per_response"


def test_the_report_compares_every_baseline_with_none(grpo: Path) -> None:
    report = verify_run(grpo, steps=1, prompts=5, dims=256)
    rows = rows_of(report)
    assert list(rows) == [NONE, BATCH, GROUP, LEAVE_ONE_OUT, OWN]
    # with one score at the end the two differ by a scale, which is taken out
    assert rows[GROUP].variance == pytest.approx(rows[LEAVE_ONE_OUT].variance, rel=1e-9)
    assert rows[OWN].change is None and rows[OWN].signal_to_noise is not None
    loo, none = rows[LEAVE_ONE_OUT], rows[NONE]
    assert loo.variance is not None and none.variance and loo.change == pytest.approx(loo.variance / none.variance - 1)
    assert loo.low is not None and loo.high is not None and loo.low < loo.change < loo.high
    assert [s.step for s in report.steps] == [4] and report.steps[0].num_used == 5
    verb = "cut" if loo.change < 0 else "raise"
    assert f"leave-one-out would {verb} variance by {abs(100 * loo.change):.0f} % (95 % interval " in report.text
    assert "informative groups: " in report.text and "effective sample size 100 % of the responses" in report.text
    assert "fewer than 8 prompts" in report.text and "the first prompts of a step stand for all" in report.text
    json.dumps(report.as_dict(), allow_nan=False)


def test_the_nearest_checkpoint_stands_in_where_the_right_one_is_gone(grpo: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(grpo, copy)
    for step in (1, 2, 4):
        shutil.rmtree(copy / "checkpoints" / f"step_00000{step}")
    (copy / "rollouts" / "step_000001.parquet").unlink()
    (copy / "rollouts" / "step_000004.parquet").unlink()
    report = verify_run(copy, steps=2, prompts=2, dims=64)
    assert [(s.step, s.policy) for s in report.steps] == [
        (2, "the starting model, 1 step before the one that sampled"),
        (3, "the checkpoint of step 3, 1 step after the one that sampled"),
    ]
    # the ratios say so: the policy is not the one that sampled
    assert all(s.ess_responses is not None and s.ess_responses < 1 - 1e-6 for s in report.steps)


def test_a_checkpoint_that_is_not_whole_is_named_and_skipped(grpo: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(grpo, copy)
    weights = copy / "checkpoints" / "step_000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    report = verify_run(copy, steps=2, prompts=2, dims=64)
    assert [s.step for s in report.steps] == [1, 3]  # step 4 would need the checkpoint of step 3
    assert report.notes[0].startswith("checkpoint step_000003 is not whole (")


def test_a_critic_and_an_adapter_are_read_from_the_checkpoint(files: Path) -> None:
    run = run_of(files, "ppo", "ppo", "lora.rank=2", "steps=2", "save_every=1", "minibatches=2")
    report = verify_run(run, steps=2, dims=128)
    rows = rows_of(report)
    assert CRITIC in rows and rows[CRITIC].change is not None
    # rank 2 in 7 linear layers, far fewer than the model's parameters
    assert 500 < report.num_parameters < 4000
    assert report.steps[0].ess_responses == pytest.approx(1.0, abs=1e-5)
    # at the second step the critic has learnt something: it is no longer the same as no baseline
    last = rows_of(verify_run(run, steps=1, dims=128))
    assert last[CRITIC].change != 0.0


def test_a_run_without_rewards_or_with_another_model_is_refused(files: Path, grpo: Path, tmp_path: Path) -> None:
    sft = run_of(files, "sft", "sft", "steps=1")
    with pytest.raises(InputError, match="no reward weights them"):
        verify_run(sft)
    with pytest.raises(InputError, match="no run folder"):
        verify_run(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(grpo, copy)
    env = json.loads((copy / "env.json").read_text())
    env["attempts"][-1]["model_sha256"] = "0" * 64
    (copy / "env.json").write_text(json.dumps(env))
    with pytest.raises(InputError, match="has changed since"):
        verify_run(copy)
    shutil.copy(grpo / "env.json", copy / "env.json")
    shutil.rmtree(copy / "rollouts")
    (copy / "rollouts").mkdir()
    with pytest.raises(InputError, match="sampled nothing yet"):
        verify_run(copy)


def test_the_words_of_a_report() -> None:
    step = StepFigures(3, "the starting model, which sampled the responses", 8, 8, 32, 5, None, None)
    rows = (
        BaselineVariance(NONE, 2.0, 0.0, None, None, None, 0.5, 0.1),
        BaselineVariance(BATCH, 2.2, 0.0, 0.1, -0.05, 0.2, 0.4, None),
        BaselineVariance(LEAVE_ONE_OUT, 1.24, 0.0, -0.38, -0.5, -0.21, 0.9, 0.2),
    )
    text = RunReport("runs/x", (step,), rows, "sum_per_response", 10, 16).text
    assert "leave-one-out would cut variance by 38 % (95 % interval 21 to 50 %) against no baseline" in text
    assert "-38 % (-50 % to -21 %)" in text and "0.900 ± 0.200" in text
    assert "batch mean would" not in text  # neither the best nor leave-one-out
    assert "informative groups: 5 of 8" in text and "no effective sample size" in text
    assert not RunReport("x", (step,), (BaselineVariance(NONE, math.nan, *[None] * 6),), "", 1, 1).passed
