"""Signals: where a run ends, with which exit code, and that it goes on to the same end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hotcold.stopping import Stopped, Stopping
from tests.test_end_to_end import here, metrics, same, train, weights

__all__ = ["here"]  # the fixture

WORDS = ["epochs_per_batch=2", "minibatches=3", "save_every=0", "eval.every=0", "learning_rate=0.01"]


def signalled(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_stops_at_once_outside_an_update() -> None:
    with Stopping().listening(), pytest.raises(Stopped) as stopped:
        signalled(signal.SIGTERM)
    assert stopped.value.exit_code == 143


def test_a_signal_waits_for_the_end_of_an_update() -> None:
    done = []
    with Stopping().listening() as stopping, pytest.raises(Stopped) as stopped:
        stopping.hold()
        signalled(signal.SIGINT)
        done.append("the step goes on")
        stopping.release()
        done.append("it is recorded")
        stopping.check()
        done.append("never reached")
    assert done == ["the step goes on", "it is recorded"] and stopped.value.exit_code == 130


def test_an_update_that_takes_too_long_is_cut_off() -> None:
    start = time.monotonic()
    with Stopping(grace=0.2).listening() as stopping, pytest.raises(Stopped):
        stopping.hold()
        signalled(signal.SIGTERM)
        while time.monotonic() < start + 20:
            time.sleep(0.01)
    assert time.monotonic() < start + 10
    assert stopping.holds  # so that nobody takes these parameters for a state


def test_a_signal_waits_until_what_is_written_is_whole() -> None:
    done = []
    with Stopping().listening() as stopping, pytest.raises(Stopped), stopping.saving():
        signalled(signal.SIGINT)
        done.append("written")
    assert done == ["written"]


def test_what_a_stop_saves_is_not_stopped_by_the_signal_that_asked_for_it() -> None:
    with Stopping(grace=20).listening() as stopping:
        with pytest.raises(Stopped):
            signalled(signal.SIGINT)
        with stopping.saving():
            pass
        with pytest.raises(Stopped):
            stopping.check()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_handlers_of_before_come_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    with Stopping().listening():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before


# ---- runs


def test_a_signal_inside_an_update_ends_after_the_step_and_the_run_goes_on_to_the_same_end(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import hotcold.engines.local as local

    assert train(*WORDS, run="runs/whole", algorithm="grpo", steps=4) == 0
    step, count = local.LocalEngine.step, [0]

    def with_a_signal(self: local.LocalEngine, model: str, rate: float, max_norm: float | None) -> object:
        count[0] += 1
        if count[0] == 8:  # the second of the six optimiser steps of step 2
            signalled(signal.SIGTERM)
        return step(self, model, rate, max_norm)

    monkeypatch.setattr(local.LocalEngine, "step", with_a_signal)
    assert train(*WORDS, run="runs/cut", algorithm="grpo", steps=4) == 143
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert "from step 2, the last one saved" in capsys.readouterr().out
    assert [row["step"] for row in metrics("runs/cut")] == [1, 2]
    assert train(*WORDS, "resume=auto", run="runs/cut", algorithm="grpo", steps=4) == 0
    assert same(weights("runs/whole/model"), weights("runs/cut/model"))


def test_a_signal_while_responses_are_scored_saves_the_steps_start(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stops = (
        "import os, pathlib, signal\n\ndef reward(completion):\n    with open('calls', 'ab') as log:\n"
        "        n = log.tell()\n        log.write(b'x')\n"
        "    if n == 30:\n        os.kill(PARENT, signal.SIGTERM)\n    return float('a' in completion)\n"
    )  # 2 calls at the start, 12 a step: call 30 is in step 3
    (here / "stops.py").write_text(stops.replace("PARENT", str(os.getpid())))
    assert train("reward=stops.py", "save_every=0", "eval.every=0", steps=4) == 143
    assert "from step 2, the last one saved" in capsys.readouterr().out
    assert train("reward=stops.py", "save_every=0", "eval.every=0", "resume=auto", steps=4) == 0
    assert [row["step"] for row in metrics("runs/one")] == [1, 2, 3, 4]


def test_scored_responses_that_were_written_are_used_again_if_the_same_parameters_sampled_them(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import hotcold.training.loop as loop

    assert train(*WORDS, run="runs/whole", algorithm="grpo", steps=3) == 0
    update = loop.update

    def interrupted(*arguments: object) -> object:
        if arguments[5] == 2:  # the number of the step
            signalled(signal.SIGINT)
        return update(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "update", interrupted)
    assert train(*WORDS, run="runs/cut", algorithm="grpo", steps=3) == 130
    monkeypatch.undo()
    monkeypatch.chdir(here)
    written = Path("runs/cut/rollouts/step_000002.parquet").stat().st_mtime_ns
    capsys.readouterr()
    assert train(*WORDS, "resume=auto", run="runs/cut", algorithm="grpo", steps=3) == 0
    assert "step 2: its scored responses were written before the stop" in capsys.readouterr().out
    assert Path("runs/cut/rollouts/step_000002.parquet").stat().st_mtime_ns == written
    assert same(weights("runs/whole/model"), weights("runs/cut/model"))


def test_scored_responses_of_other_parameters_are_sampled_anew(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("save_every=1", "eval.every=0", steps=2) == 0
    other = Path("runs/one/rollouts/step_000002.parquet").read_bytes()
    Path("runs/one/rollouts/step_000003.parquet").write_bytes(other)
    capsys.readouterr()
    assert train("save_every=1", "eval.every=0", "resume=auto", steps=3) == 0
    assert "used again" not in capsys.readouterr().out
    assert Path("runs/one/rollouts/step_000003.parquet").read_bytes() != other


def test_responses_are_scored_anew_by_a_score_that_was_mended(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import hotcold.training.loop as loop

    def interrupted(*arguments: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "update", interrupted)
    assert train(*WORDS, algorithm="grpo", steps=1) == 130
    monkeypatch.undo()
    monkeypatch.chdir(here)
    (here / "reward.py").write_text("def reward(completion):\n    return 0.25\n")
    capsys.readouterr()
    assert train(*WORDS, "resume=auto", algorithm="grpo", steps=1) == 0
    assert "used again" not in capsys.readouterr().out
    assert metrics("runs/one")[0]["reward"] == 0.25


def test_a_signal_during_the_last_check_of_a_save_still_saves_the_step(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import hotcold.training.loop as loop

    due = loop.Loop._reached

    def with_a_signal(self: loop.Loop, progress: loop.Progress) -> bool:
        if progress.step == 2 and not self.stopping.is_due and self.stopping._saves:
            signalled(signal.SIGTERM)
        return due(self, progress)

    monkeypatch.setattr(loop.Loop, "_reached", with_a_signal)
    assert train(*WORDS, algorithm="grpo", steps=4) == 143
    assert "from step 2, the last one saved" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_process_ends_soon_and_leaves_no_child(here: Path, number: int, code: int) -> None:
    slow = "import time\n\ndef reward(completion):\n    open('scoring', 'w').close()\n    time.sleep(600)\n"
    (here / "slow.py").write_text(slow)
    command = [sys.executable, "-m", "hotcold", "train", "rloo", "model=model", "data=prompts.jsonl", "threads=1"]
    command += ["reward=slow.py", "max_tokens=3", "eval.every=0", "steps=2", "run=runs/slow"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not Path("scoring").exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == code and said.strip().endswith("stopped.")
    assert children_of(process.pid) == []


def children_of(pid: int) -> list[str]:
    """Processes whose session or parent was this one."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if str(pid) in (fields[1], fields[3]):
            found.append(status.parent.name)
    return found


def test_what_a_run_ended_with_is_written_down(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("save_every=1", "eval.every=0", steps=2) == 0
    result = json.loads(Path("runs/one/result.json").read_text())
    assert result["step"] == 2 and len(result["parameters_sha256"]) == len(result["optimizer_sha256"]) == 64
    assert result["parameters_sha256"][:16] in capsys.readouterr().out
    assert train("save_every=1", "eval.every=0", "seed=1", run="runs/two", steps=2) == 0
    assert json.loads(Path("runs/two/result.json").read_text())["parameters_sha256"] != result["parameters_sha256"]
