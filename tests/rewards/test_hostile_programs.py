"""Programs that want a score without earning it, or harm, at the best level of this machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotcold.rewards.code import Boxes
from hotcold.sandbox.box import Box, Limits, best_level, interpreter, refusal
from hotcold.sandbox.launch import FIRST_UID
from tests.rewards.hostile import Outcome, attack, is_alive, names, place_secrets

DEADLINE = 1.0


@pytest.fixture(scope="module")
def boxes() -> Iterator[Boxes]:
    place_secrets()
    with Boxes(Limits(seconds=DEADLINE)) as made:
        yield made


def _attacked(boxes: Boxes, name: str) -> Outcome:
    outcome = attack(boxes, name)
    slow = outcome.is_held and outcome.seconds > DEADLINE + 1
    return attack(boxes, name) if slow else outcome  # another process may have held the processor


@pytest.mark.parametrize("name", names())
def test_a_hostile_program_neither_passes_nor_escapes_and_ends_in_time(boxes: Boxes, name: str) -> None:
    outcome = _attacked(boxes, name)
    assert not outcome.has_passed
    assert outcome.seconds <= DEADLINE + 1
    if best_level() == "strong":  # what weaker levels let through is listed in docs/rewards.md
        assert outcome.escapes == ()


def test_right_programs_pass_after_all_of_them(boxes: Boxes) -> None:
    assert is_alive(boxes)


def test_there_are_forty_of_them_at_least() -> None:
    assert len(names()) >= 40


def test_nothing_is_left_running_when_the_sandbox_is_closed() -> None:
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nprint('started')"
    others = _of_sandboxes()
    with Box(limits=Limits(seconds=DEADLINE)) as box:
        started = _of_sandboxes()
        assert len(started) > len(others)
        assert box.script(daemon).out == "started\n"
        assert _of_sandboxes() == started
    assert _of_sandboxes() == others


def _of_sandboxes() -> set[str]:
    """Processes that a launcher of this process has started, or that run as a user of a sandbox."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = b"hotcold.sandbox.launch" in (path / "cmdline").read_bytes() and _descends(path)
            if is_ours or path.stat().st_uid >= FIRST_UID:
                found.add(path.name)
        except OSError:
            pass
    return found


def _descends(path: Path) -> bool:
    for _ in range(4):
        parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
        if parent == str(os.getpid()):
            return True
        path = Path("/proc") / parent
        if parent == "0":
            return False
    return False


@pytest.mark.parametrize("level", ["rlimits", "landlock", "namespaces", "strong"])
def test_each_level_that_the_machine_has_runs_right_programs_and_fails_wrong_ones(level: str) -> None:
    python = None
    if refusal(level) is not None:
        python = "/usr/bin/python3"  # ours may lie where only root can read it
        if not os.path.exists(python) or python == interpreter():
            pytest.skip(f"this machine lacks the level {level}: {refusal(level)}")
    place_secrets()
    with Boxes(Limits(seconds=DEADLINE), level, python) as made:
        assert is_alive(made)
        for name in ("equals_everything", "forges_verdict", "exit_0", "busy_wait", "signals_to_parent"):
            assert not attack(made, name).has_passed, name
