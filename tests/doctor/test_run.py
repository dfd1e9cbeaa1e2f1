"""`hotcold doctor RUN`: each finding from hand-made metrics, at its threshold and just below it, and real toy runs."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotcold.batch import Rollout
from hotcold.checkpoint import write_checkpoint
from hotcold.doctor.record import read_record
from hotcold.doctor.report import Finding, Report, in_steps, note, ok, problem, worst_first
from hotcold.doctor.run import examine
from hotcold.sampling.rollout_files import write_rollouts

Row = dict[str, Any]
KEYS = {"algorithm": "grpo", "model": "m", "dtype": "fp32", "sampler": "transformers"}


def row(step: int, /, **changes: Any) -> Row:
    """Of a healthy run, which uses several optimiser steps and an evaluation now and then."""
    healthy = {
        "reward": 0.4,
        "frac_reward_zero_std": 0.3,
        "completions/mean_length": 40.0,
        "completions/truncated": 0.1,
        "completions/distinct": 0.9,
        "rewards/exact/mean": 0.4,
        "rewards/exact/std": 0.5,
        "rewards/unscored": 0.0,
        "entropy": 1.2,
        "learning_rate": 1e-5,
        "optimizer_steps": 4,
        "optimizer_steps/nonfinite": 0,
        "approx_kl": 0.02,
        "ratio/max": 1.6,
        "clip_fraction": 0.05,
        "grad_norm": 0.8,
        "grad_norm/clipped": 0.5,
        "mismatch/max_abs": 1e-5,
        "mismatch/mean_abs": 1e-7,
        "rows/dropped": 0,
        "rows/skipped": 4,
        "rows/trained": 12,
        "out_of_memory": 0,
        "tokens_per_microbatch": 1024,
        "time/sample": 4.0,
        "time/score": 1.0,
        "time/update": 4.5,
        "time/save": 0.0,
        "time/step": 10.0,
    }
    return {"step": step, "attempt": 1, **healthy, **changes}


def write_run(path: Path, rows: Sequence[Row], finished: bool = True, **keys: Any) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump({**KEYS, "steps": len(rows), **keys}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if finished:
        (path / "model").mkdir()
    return path


Examine = Callable[..., Report]


@pytest.fixture
def examined(tmp_path: Path) -> Examine:
    def run(rows: Sequence[Row], **keys: Any) -> Report:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return examine(write_run(tmp_path / "run", rows, **keys))

    return run


def every(num: int = 20, /, **changes: Any) -> list[Row]:
    return [row(step, **changes) for step in range(1, num + 1)]


def ramp(key: str, values: Sequence[float], size: int = 5) -> list[Row]:
    """So many steps with each of the values."""
    return [row(i + 1, **{key: values[i // size]}) for i in range(size * len(values))]


def about(report: Report) -> list[tuple[str, str]]:
    return [(f.level, f.about) for f in report.findings]


def one(report: Report) -> Finding:
    (finding,) = report.findings
    return finding


# ---- the healthy run


def test_a_healthy_run_has_nothing_to_report_and_says_what_was_looked_at(examined: Examine) -> None:
    report = examined(every())
    text = report.as_text()
    assert report.findings == () and report.exit_code == 0
    assert "nothing to report; looked at: signal" in text and "grpo on m, 20 of 20 steps, finished" in text
    assert "time: 3 min in 20 steps, of which update 45%, sampling 40%, scoring 10%, the rest 5%" in text


def test_findings_are_sorted_by_what_needs_action_and_stay_in_order_otherwise() -> None:
    found = [note("a", "x"), problem("b", "x"), ok("c", "x"), problem("d", "x")]
    assert [f.about for f in worst_first(found)] == ["b", "d", "a", "c"]
    assert Report("s", (note("a", "x"),)).exit_code == 0 and Report("s", tuple(found)).exit_code == 1
    assert problem("a", "two\nlines", [(3, 9)]).line == "[problem] a: steps 3 to 9: two lines"


def test_spans_of_steps_in_words() -> None:
    assert in_steps([(3, 3)]) == "step 3" and in_steps([(3, 9), (20, 20)]) == "steps 3 to 9 and 20"
    assert in_steps([(1, 2), (4, 5), (7, 7), (9, 12)]) == "9 of the steps 1 to 12"


# ---- the rules over a whole run


def test_a_rule_that_holds_at_the_end_is_a_problem_with_its_steps(examined: Examine) -> None:
    rows = [*every(10), *[row(step, entropy=0.001) for step in range(11, 21)]]
    finding = one(examined(rows))
    assert finding.level == "problem" and finding.line.startswith("[problem] entropy: steps 11 to 20: the policy")
    assert "entropy 1.0e-03" in finding.text and "learning rate" in finding.text


def test_a_short_spell_that_has_passed_is_a_note_and_a_long_one_a_problem(examined: Examine) -> None:
    """3 of 20 steps are a seventh; 5 are a quarter, above a fifth."""
    for num, level in ((3, "note"), (5, "problem")):
        rows = [row(step, entropy=0.001 if 6 <= step < 6 + num else 1.2) for step in range(1, 21)]
        finding = one(examined(rows))
        assert finding.level == level and finding.text.endswith(f"It ended after step {5 + num}.")
    assert examined([row(step, entropy=0.001 if 6 <= step < 8 else 1.2) for step in range(1, 21)]).findings == ()


def test_little_variety_at_a_high_reward_is_no_problem(examined: Examine) -> None:
    assert one(examined(every(entropy=0.001, **{"rewards/exact/mean": 0.95}))).level == "note"
    assert one(examined(every(entropy=0.001, **{"rewards/exact/mean": 0.85}))).level == "problem"


@pytest.mark.parametrize(
    ("name", "bad", "below"),
    [
        ("no signal", {"frac_reward_zero_std": 1.0, "rewards/exact/std": 0.0}, {"frac_reward_zero_std": 0.89}),
        ("little signal", {"frac_reward_zero_std": 0.91, "rewards/exact/std": 0.0}, {"frac_reward_zero_std": 0.9}),
        ("truncation", {"completions/truncated": 0.31}, {"completions/truncated": 0.3}),
        (
            "duplicates",
            {"completions/distinct": 0.04, "frac_reward_zero_std": 0.85},
            {"completions/distinct": 0.05, "frac_reward_zero_std": 0.85},
        ),
        ("clipping too often", {"clip_fraction": 0.31}, {"clip_fraction": 0.3}),
        ("critic", {"value/explained_variance": -0.01}, {"value/explained_variance": 0.0}),
        ("KL above target", {"kl/target": 2.0, "kl/response": 4.1}, {"kl/target": 2.0, "kl/response": 4.0}),
        ("sampler mismatch", {"mismatch/mean_abs": 0.051}, {"mismatch/mean_abs": 0.05}),
    ],
)
def test_a_state_of_every_step_is_a_problem_and_just_below_it_is_none(
    examined: Examine, name: str, bad: Row, below: Row
) -> None:
    report = examined(every(**bad))
    assert about(report) == [("problem", name)] and report.exit_code == 1
    assert examined(every(**below)).findings == ()


def test_a_mastered_task_is_a_note_that_says_to_stop(examined: Examine) -> None:
    done = {"frac_reward_zero_std": 0.97, "reward": 0.99, "rewards/exact/mean": 0.99}
    finding = one(examined(every(**done)))
    assert (finding.level, finding.about) == ("note", "saturation") and "stop_at" in finding.text
    assert examined(every(**{**done, "frac_reward_zero_std": 0.96})).findings == ()


# ---- do the steps do anything?


def test_steps_that_were_not_finite_are_named_and_three_are_a_problem(examined: Examine) -> None:
    for steps, level in (({4, 9}, "note"), ({4, 9, 10}, "problem")):
        rows = [row(step, **{"optimizer_steps/nonfinite": int(step in steps)}) for step in range(1, 21)]
        finding = one(examined(rows))
        assert (finding.level, finding.about) == (level, "not finite")
        assert finding.steps == (((4, 4), (9, 9)) if len(steps) == 2 else ((4, 4), (9, 10)))


def test_steps_that_change_nothing_are_a_problem_from_more_than_half_of_them(examined: Examine) -> None:
    for idle, found in ((10, []), (11, [("problem", "idle steps")])):
        rows = [row(s, optimizer_steps=4) for s in range(1, 21 - idle)]
        rows += [row(s, optimizer_steps=0) for s in range(21 - idle, 21)]
        assert about(examined(rows)) == found


def test_a_rate_of_zero_and_a_rate_that_moves_nothing_are_problems(examined: Examine) -> None:
    assert about(examined(every(learning_rate=0.0))) == [("problem", "learning rate")]
    still = {"ratio/max": 1.0009, "approx_kl": 1e-9, "clip_fraction": 0.01}
    finding = one(examined(every(**still)))
    assert finding.level == "problem" and "9.0e-04" in finding.text and "1.0e-05" in finding.text
    assert examined(every(**{**still, "ratio/max": 1.001})).findings == ()
    assert examined(every(**{**still, "ratio/max": 1.0, "optimizer_steps": 1})).findings == ()  # 1 by construction


def test_dropped_rows_are_noted_unless_the_algorithm_drops_on_purpose(examined: Examine) -> None:
    rows = every(**{"rows/dropped": 17})  # of 33
    assert about(examined(rows)) == [("note", "dropped rows")]
    assert examined(rows, algorithm="dapo").findings == examined(rows, algorithm="mine.py:Mine").findings == ()
    assert examined(every(**{"rows/dropped": 16})).findings == ()  # half


# ---- scores


def test_failed_scores_are_a_problem_from_one_in_twenty(examined: Examine) -> None:
    """16 responses a step, 20 steps: 320. 16 failures are 5 %, 15 are 4.7 %."""
    for failed, level in ((16, "problem"), (15, "note")):
        rows = [row(step, **{"rewards/failed": int(step <= failed), "rewards/timeouts": 0}) for step in range(1, 21)]
        finding = one(examined(rows))
        assert (finding.level, finding.about, finding.steps) == (level, "failed scores", ((1, failed),))
        assert f"{failed} scores failed" in finding.text and "was raised" in finding.text
    assert "deadline" in one(examined(every(**{"rewards/failed": 4, "rewards/timeouts": 3}))).text
    assert examined(every(**{"rewards/failed": 0, "rewards/timeouts": 0})).findings == ()


def test_retried_scores_are_a_note(examined: Examine) -> None:
    assert about(examined(every(**{"rewards/failed": 0, "rewards/timeouts": 1}))) == [("note", "slow scores")]


def test_responses_without_a_score_are_a_problem_from_more_than_half(examined: Examine) -> None:
    assert about(examined(every(**{"rewards/unscored": 9}))) == [("problem", "unscored")]  # of 16
    assert examined(every(**{"rewards/unscored": 8})).findings == ()


# ---- running away


def test_approx_kl_above_a_tenth_is_a_problem_and_says_whether_it_rises(examined: Examine) -> None:
    rising = one(examined(ramp("approx_kl", [0.01, 0.02, 0.05, 0.2])))
    assert rising.level == "problem" and "0.2 in the last 5 steps, and rises (0.01, 0.02, 0.05, 0.2" in rising.text
    level = one(examined(every(approx_kl=0.11)))
    assert level.level == "problem" and "rises" not in level.text and "max_approx_kl" in level.text
    assert examined(every(approx_kl=0.1)).findings == ()


def test_a_kl_that_grows_without_a_gain_is_a_problem(examined: Examine) -> None:
    """Quarters 1, 2, 4, 8 nats; at 4.9 it is small, and from 5 to 9.9 it has not doubled."""
    finding = one(examined(ramp("kl/response", [1.0, 2.0, 4.0, 8.0])))
    assert finding.about == "KL run-away" and "1, 2, 4, 8 nats" in finding.text and "beta" in finding.text
    assert examined(ramp("kl/response", [1.0, 2.0, 3.0, 4.9])).findings == ()
    assert examined(ramp("kl/response", [1.0, 5.0, 7.0, 9.9])).findings == ()
    gains = [{**r, "reward": 0.1 * ((r["step"] - 1) // 5)} for r in ramp("kl/response", [1.0, 2.0, 4.0, 8.0])]
    assert examined(gains).findings == ()


def evaluations(values: Sequence[float], rewards: Sequence[float], half: float = 0.03) -> list[Row]:
    """One every fifth step."""
    rows = []
    for i, r in enumerate(every(5 * len(values))):
        at = i // 5
        value = values[at]
        greedy = {"eval/greedy": value, "eval/greedy_low": value - half, "eval/greedy_high": value + half}
        rows.append({**r, "reward": rewards[at], **(greedy if r["step"] % 5 == 0 else {})})
    return rows


def test_held_out_score_that_falls_while_the_reward_rises_is_over_optimisation(examined: Examine) -> None:
    """Best 0.60 - 0.03 = 0.57 against last 0.53 + 0.03 = 0.56: apart. At 0.55 the intervals touch."""
    finding = one(examined(evaluations([0.5, 0.6, 0.58, 0.53], [0.3, 0.4, 0.5, 0.6])))
    assert finding.about == "over-optimisation" and finding.level == "problem"
    assert "from 0.6 (step 10) to 0.53 (step 20)" in finding.text and "from 0.4 to 0.6" in finding.text
    assert examined(evaluations([0.5, 0.6, 0.58, 0.55], [0.3, 0.4, 0.5, 0.6])).findings == ()
    assert one(examined(evaluations([0.5, 0.6, 0.58, 0.53], [0.4, 0.4, 0.4, 0.3]))).about == "held-out score"


def test_the_evaluation_before_training_counts_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", evaluations([0.4, 0.4, 0.4, 0.4], [0.3, 0.3, 0.3, 0.3]))
    (run / "eval").mkdir()
    before = {"step": 0, "eval/greedy": 0.6, "eval/greedy_low": 0.55, "eval/greedy_high": 0.65}
    (run / "eval" / "step_000000.json").write_text(json.dumps(before))
    assert "from 0.6 (step 0) to 0.4 (step 20)" in one(examine(run)).text


# ---- length


def test_length_that_grows_and_does_not_pay_is_a_note(examined: Examine) -> None:
    finding = one(examined(ramp("completions/mean_length", [40.0, 45.0, 50.0, 60.0])))
    assert (finding.level, finding.about) == ("note", "length without reward") and "weighting" in finding.text
    assert examined(ramp("completions/mean_length", [40.0, 45.0, 50.0, 59.0])).findings == ()


def test_length_and_reward_that_grow_together_are_a_note(examined: Examine) -> None:
    rows = [row(i, reward=0.02 * i, **{"completions/mean_length": 40.0 + 5 * i}) for i in range(1, 21)]
    finding = one(examined(rows))
    assert (finding.level, finding.about) == ("note", "length") and "correlation 1.00" in finding.text
    assert finding.steps == ((1, 20),), "the window of the first look begins with the run"


def test_longer_responses_to_one_prompt_that_score_higher_are_a_note(tmp_path: Path) -> None:
    """Eight groups of four: lengths 4, 8, 12, 16. Scores that follow them; scores that do not."""
    run = write_run(tmp_path / "run", every())
    (run / "rollouts").mkdir()

    def rollouts(scores: Sequence[float]) -> list[Rollout]:
        lengths = (4, 8, 12, 16)
        return [
            Rollout((1, 2), (3,) * lengths[i], group=g, episode=4 * g + i, reward=scores[i] + g, version=0)
            for g in range(8)
            for i in range(4)
        ]

    write_rollouts(run / "rollouts" / "step_000020.parquet", 20, rollouts((0.0, 0.1, 0.2, 0.3)))
    finding = one(examine(run))
    assert finding.about == "length bias" and "correlation 1.00 over 32 responses" in finding.text
    write_rollouts(run / "rollouts" / "step_000020.parquet", 20, rollouts((0.3, 0.0, 0.0, 0.3)))
    assert examine(run).findings == ()


# ---- the machine


def test_float32_numbers_that_differ_more_than_rounding_are_a_problem(examined: Examine) -> None:
    bad = {"mismatch/max_abs": 0.002}
    assert about(examined(every(**bad))) == [("problem", "sampler mismatch")]
    assert about(examined(every(**bad), sampler="replay:rows.parquet")) == [("note", "sampler mismatch")]
    assert examined(every(**bad), dtype="bf16").findings == ()
    assert examined(every(**{"mismatch/max_abs": 0.001})).findings == ()


def test_memory_that_ran_out_is_told_with_its_steps_and_the_number_to_keep(examined: Examine) -> None:
    rows = [row(s, out_of_memory=int(s == 7), tokens_per_microbatch=512 if s > 6 else 1024) for s in range(1, 21)]
    finding = one(examined(rows))
    assert finding.level == "note" and finding.steps == ((7, 7),) and "tokens_per_microbatch=512" in finding.text
    often = [row(s, out_of_memory=int(s in (3, 7, 11))) for s in range(1, 21)]
    assert one(examined(often)).level == "problem"


def test_a_part_that_takes_most_of_the_time_is_noted(examined: Examine) -> None:
    finding = one(examined(every(**{"time/score": 10.0, "time/step": 19.0})))
    assert finding.line.startswith("[note] time: scoring takes 53% of the time") and "async" in finding.text
    assert examined(every(**{"time/score": 9.0, "time/step": 19.0})).findings == ()
    assert "saving takes 17%" in one(examined(every(**{"time/save": 2.0}))).text


# ---- finished, killed, still going


def weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x" * 100)


def checkpoint(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / f"step_{step:06d}"
    write_checkpoint(folder, weights, {}, {"progress": {"step": step}})
    return folder


def test_a_run_that_stopped_says_from_which_checkpoint_it_goes_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", every(20), finished=False, steps=40)
    finding = one(examine(run))
    assert "stopped after step 20 of 40. There is no checkpoint, so it begins again" in finding.text
    checkpoint(run, 10)
    finding = one(examine(run))
    assert "continues from step 10" in finding.text and finding.text.endswith(f"hotcold train resume={run}")
    (run / "model").mkdir()  # of an earlier, shorter run that was continued
    assert about(examine(run)) == [("problem", "unfinished")]


def test_a_run_that_did_all_steps_and_wrote_no_model_is_not_finished(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", every(), finished=False)
    assert "all 20 steps are done, but the model was not written" in one(examine(run)).text


def test_a_run_that_reached_its_goal_is_finished(examined: Examine) -> None:
    rows = [*every(19), row(20, **{"eval/greedy": 0.9})]
    assert examined(rows, steps=40, stop_at=0.9).findings == ()
    assert about(examined(rows, steps=40, stop_at=0.91)) == [("problem", "unfinished")]


def test_a_start_with_other_versions_is_a_note(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", every())
    starts = [{"attempt": 1, "torch": "2.1", "threads": 2}, {"attempt": 2, "torch": "2.2", "threads": 2}]
    (run / "env.json").write_text(json.dumps({"attempts": starts}))
    finding = one(examine(run))
    assert (finding.level, finding.about) == ("note", "other machine") and "(torch 2.1 then 2.2)" in finding.text
    (run / "env.json").write_text(json.dumps({"attempts": [starts[0], {**starts[0], "attempt": 2}]}))
    assert examine(run).findings == ()


def test_a_checkpoint_that_is_not_whole_is_named_with_the_one_that_is_used(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", every(20), finished=False, steps=40)
    checkpoint(run, 10)
    broken = checkpoint(run, 20)
    (broken / "model.safetensors").write_bytes(b"x" * 99 + b"y")
    broken_one, unfinished = examine(run).findings
    assert broken_one.text.startswith("step_000020 is not whole (model.safetensors has changed): step_000010 is used")
    assert "continues from step 10" in unfinished.text


def test_a_run_at_work_is_not_called_unfinished_but_one_that_is_silent_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", every(10), finished=False, steps=40)
    boot = Path("/proc/sys/kernel/random/boot_id")
    holder = {"pid": os.getpid(), "host": os.uname().nodename, "boot": boot.read_text().strip()}
    (run / "lock").write_text(json.dumps(holder))
    report = examine(run)
    assert report.findings == () and "still going" in report.subject
    for ago, found in ((99, []), (101, [("problem", "silence")])):  # steps take 10 s
        then = time.time() - ago
        os.utime(run / "metrics.jsonl", (then, then))
        assert about(examine(run)) == found
    (run / "lock").write_text(json.dumps({**holder, "pid": 2**22 + 1}))  # no process has this number
    assert about(examine(run)) == [("problem", "unfinished")]


def test_what_cannot_be_read_is_said_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", every(entropy=0.001))
    (run / "config.yaml").write_text("a: [1\n")
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step_000020.parquet").write_text("no parquet")
    report = examine(run)
    assert about(report) == [("problem", "record"), ("problem", "record"), ("problem", "entropy")]
    (run / "metrics.jsonl").write_text('{"no": "step"}\n')
    assert ("problem", "record") in about(examine(run))


def test_half_a_line_at_the_end_and_a_folder_without_steps_are_no_crash(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", every(), finished=True)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "rew')
    assert examine(run).findings == ()
    empty = write_run(tmp_path / "empty", [], finished=False, steps=5)
    assert "no step is recorded" in one(examine(empty)).text and read_record(empty).last_step == 0
