"""The run folder: metrics, lock, privacy, atomic files."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hotcold.errors import InputError
from hotcold.runs import RunFolder, default_run_name
from tests.kills import killed_before_file_operation


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


def test_evaluations_are_plain_json_too(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", "", False, {}) as run:
        run.write_eval("step_000000", {"rows": [{"score": float("-inf"), "text": "\u00e9"}]})
        text = (run.path / "eval" / "step_000000.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"rows": [{"score": None, "text": "\u00e9"}]} and "\u00e9" in text


def test_a_folder_with_a_run_is_not_written_over(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", "seed: 1\n", False, {}):
        pass
    with pytest.raises(InputError, match="resume=auto"):
        RunFolder.open(tmp_path / "run", "seed: 2\n", False, {})
    assert (tmp_path / "run" / "config.yaml").read_text() == "seed: 1\n"


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with (
        RunFolder.open(tmp_path / "run", "", False, {}),
        pytest.raises(InputError, match=f"in use by process {os.getpid()}"),
    ):
        RunFolder.open(tmp_path / "run", "", True, {})
    with RunFolder.open(tmp_path / "run", "", True, {}):
        pass  # released at the end
    assert not (tmp_path / "run" / "lock").exists()


def test_a_killed_writer_is_replaced_though_its_child_lives_on(tmp_path: Path) -> None:
    """The child was forked (as a reward worker may be) and shares the parent's open files."""
    program = f"""
        import os, sys, time
        from pathlib import Path
        from hotcold.runs import RunFolder
        run = RunFolder.open(Path({str(tmp_path / "run")!r}), "", False, {{}})
        child = os.fork()
        if child:
            print(child, flush=True)
        time.sleep(60)
    """
    writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    child = int(writer.stdout.readline())
    try:
        with pytest.raises(InputError, match=f"in use by process {writer.pid}"):
            RunFolder.open(tmp_path / "run", "", True, {})
        writer.kill()
        writer.wait()
        with RunFolder.open(tmp_path / "run", "", True, {}) as run:
            assert run.attempt == 2
    finally:
        writer.kill()
        os.kill(child, signal.SIGKILL)
        writer.stdout.close()


def test_a_lock_left_by_this_machine_is_taken_over_whatever_process_has_its_number_now(tmp_path: Path) -> None:
    """After a kill the pid may belong to somebody else; after a restart of a container even to us (pid 1)."""
    with RunFolder.open(tmp_path / "run", "", False, {}) as run:
        held = json.loads((run.path / "lock").read_text())
    assert held == {"pid": os.getpid(), "host": socket.gethostname(), "boot": held["boot"]}
    for lock in (
        json.dumps(held),  # ours by number
        json.dumps({**held, "pid": os.getppid()}),  # another live process
        json.dumps({**held, "boot": "an earlier one"}),
        json.dumps({**held, "host": "another-container"}),  # the same kernel
        "",  # killed before a word was written
        "12",
    ):
        (tmp_path / "run" / "lock").write_text(lock)
        with RunFolder.open(tmp_path / "run", "", True, {}) as run:
            assert json.loads((run.path / "lock").read_text()) == held


def test_a_lock_of_another_machine_is_respected_and_the_way_out_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = tmp_path / "run" / "lock"
    lock.write_text(json.dumps({"pid": 7, "host": "node-3", "boot": "theirs"}))
    with pytest.raises(InputError, match="in use by process 7 on node-3") as error:
        RunFolder.open(tmp_path / "run", "", True, {})
    assert f"delete {lock}" in str(error.value)
    assert json.loads(lock.read_text())["host"] == "node-3"


def test_where_files_cannot_be_locked_the_process_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre without the flock option answers ENOSYS."""

    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with (
        RunFolder.open(tmp_path / "run", "", False, {}) as run,
        pytest.raises(InputError, match="in use by process"),
    ):
        held = json.loads((run.path / "lock").read_text())
        RunFolder.open(tmp_path / "run", "", True, {})
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for lock in ({**held, "pid": dead.pid}, {**held, "boot": "an earlier one"}):
        (tmp_path / "run" / "lock").write_text(json.dumps(lock))
        with RunFolder.open(tmp_path / "run", "", True, {}):
            pass


def test_a_run_killed_before_it_had_a_config_is_begun_anew_by_the_same_command(tmp_path: Path) -> None:
    """Such a folder holds no run, so `resume=auto` starts one (resumed=False)."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "lock").write_text('{"pid": 1, "ho')
    (path / ".config.yaml.partial").write_text("see")
    with RunFolder.open(path, "seed: 3\n", False, {}):
        assert (path / "config.yaml").read_text() == "seed: 3\n"
        assert {entry.name for entry in path.iterdir() if entry.name.startswith(".")} == set()


def test_a_run_killed_at_any_file_operation_of_its_start_can_be_started_again(tmp_path: Path) -> None:
    for number in range(1, 100):
        path = tmp_path / str(number)
        was_killed = killed_before_file_operation(number, path, lambda path=path: RunFolder.open(path, "", False, {}))
        with RunFolder.open(path, "", (path / "config.yaml").is_file(), {}) as run:
            assert run.attempt <= 2
        if not was_killed:
            break
    assert number > 8


def test_each_start_is_an_attempt_of_its_own_even_without_a_row_of_metrics(tmp_path: Path) -> None:
    attempts = []
    for resumed in (False, True, True):
        with RunFolder.open(tmp_path / "run", "", resumed, {}) as run:
            attempts.append(run.attempt)
    assert attempts == [1, 2, 3]
    recorded = json.loads((tmp_path / "run" / "env.json").read_text())["attempts"]
    assert [entry["attempt"] for entry in recorded] == [1, 2, 3]


def test_what_a_kill_left_half_written_is_cleared_at_the_start(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", "", False, {}) as run:
        (run.path / ".model.partial-9").mkdir()
        (run.checkpoints / ".step_000010.partial-9").mkdir()
        (run.checkpoints / ".step_000005.replaced").mkdir()
    with RunFolder.open(tmp_path / "run", "", True, {}) as run:
        assert [path.name for path in run.checkpoints.iterdir()] == ["step_000005"]
        assert not (run.path / ".model.partial-9").exists()


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
