"""The run folder: metrics, lock, privacy, atomic files."""

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hotcold.errors import InputError
from hotcold.runs import RunFolder, default_run_name


def test_the_last_attempt_of_a_step_wins(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", "steps: 3\n", False, {}) as run:
        assert run.attempt == 1
        for step in (1, 2, 3):
            run.append_metrics({"step": step, "attempt": run.attempt, "reward": 0.0})
    with RunFolder.open(tmp_path / "run", "steps: 3\n", True, {}) as run:
        assert run.attempt == 2
        run.append_metrics({"step": 3, "attempt": run.attempt, "reward": 1.0})
    assert [(r["step"], r["reward"]) for r in RunFolder.read_metrics(tmp_path / "run")] == [
        (1, 0.0),
        (2, 0.0),
        (3, 1.0),
    ]


def test_half_a_line_from_a_kill_costs_that_line_only(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", "", False, {}) as run:
        run.append_metrics({"step": 1, "attempt": 1})
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "att')
    with RunFolder.open(tmp_path / "run", "", True, {}) as run:
        run.append_metrics({"step": 2, "attempt": run.attempt})
    assert [(r["step"], r["attempt"]) for r in RunFolder.read_metrics(tmp_path / "run")] == [(1, 1), (2, 2)]


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", "", False, {}) as run:
        run.append_metrics({"step": 1, "attempt": 1, "loss": float("nan"), "ratio/max": float("inf")})
    line = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert json.loads(line) == {"step": 1, "attempt": 1, "loss": None, "ratio/max": None}


def test_a_folder_with_a_run_is_not_written_over(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", "seed: 1\n", False, {}):
        pass
    with pytest.raises(InputError, match="resume=auto"):
        RunFolder.open(tmp_path / "run", "seed: 2\n", False, {})
    assert (tmp_path / "run" / "config.yaml").read_text() == "seed: 1\n"


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", "", False, {}):
        with pytest.raises(InputError, match=f"in use by process {os.getpid()}"):
            RunFolder.open(tmp_path / "run", "", True, {})
    with RunFolder.open(tmp_path / "run", "", True, {}):
        pass  # released at the end


def test_the_lock_of_a_killed_process_or_an_earlier_boot_is_taken_over(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", "", False, {}) as run:
        held = json.loads((run.path / "lock").read_text())
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for lock in ({**held, "pid": dead.pid}, {**held, "boot": "another"}):
        (tmp_path / "run" / "lock").write_text(json.dumps(lock))
        with RunFolder.open(tmp_path / "run", "", True, {}) as run:
            assert json.loads((run.path / "lock").read_text())["pid"] == os.getpid()
    (tmp_path / "run" / "lock").write_text(json.dumps({**held, "host": socket.gethostname() + "-other"}))
    with pytest.raises(InputError, match="in use"):
        RunFolder.open(tmp_path / "run", "", True, {})


def test_only_the_owner_may_look_into_a_run(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", "", False, {}) as run:
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700


def test_the_environments_variables_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    with RunFolder.open(tmp_path / "run", "", False, {"model_sha256": "abc"}):
        pass
    text = (tmp_path / "run" / "env.json").read_text()
    assert "hf_secret_value" not in text and json.loads(text)["attempts"][0]["model_sha256"] == "abc"


def test_run_names_say_algorithm_and_model_and_are_plain() -> None:
    name = default_run_name("my file.py:Best", "some/dir/Qwen 3")
    assert name.startswith("Best-Qwen_3-") and "/" not in name and " " not in name
