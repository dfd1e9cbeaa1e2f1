"""Programs that want a score without earning it, or harm, at the best level of this machine."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotcold.rewards.code import Boxes, passed
from hotcold.sandbox.box import LEVELS, SOURCES, Box, Limits, best_level, interpreter, refusal
from hotcold.sandbox.launch import FIRST_UID
from tests.rewards.hostile import RIGHT, Outcome, attack, is_alive, names, place_secrets
from tests.rewards.hostile import tests_for as of_kind

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


AS_ANOTHER = """
from hotcold.rewards.code import Boxes, passed
from hotcold.rewards.code_tests import tests_of
from hotcold.sandbox.box import Limits, best_level
with Boxes(Limits(seconds=1.0)) as boxes:
    tests = tests_of({"tests": "assert f(2) == 4"})
    print(best_level(), passed(boxes, "def f(x): return 4", tests), passed(boxes, "def f(x): return 5", tests))
"""


def test_a_user_without_rights_has_a_sandbox_too() -> None:
    python = "/usr/bin/python3"  # ours may lie where only root can read it
    command = [python, "-P", "-c", f"import sys; sys.path.insert(0, {SOURCES!r})\n{AS_ANOTHER}"]
    if os.geteuid() != 0:
        pytest.skip("the tests run as a user without rights already")
    if subprocess.run([*command[:3], f"import os; os.listdir({SOURCES!r})"], user=64123, group=64123).returncode:
        pytest.skip("another user cannot read a Python and this package")
    done = subprocess.run(command, user=64123, group=64123, extra_groups=[], capture_output=True, text=True)
    level, _, verdicts = done.stdout.strip().partition(" ")
    assert level in LEVELS and verdicts == "[True] [False]", done.stderr


@pytest.mark.parametrize("kind", RIGHT)
def test_a_sandbox_that_ended_while_it_was_idle_is_replaced(kind: str) -> None:
    with Boxes(Limits(seconds=5.0)) as made:
        with made.one() as idle:
            idle._process.kill()
        assert all(passed(made, RIGHT[kind], of_kind(kind)))


def test_a_set_is_printed_in_the_same_order_in_every_sandbox() -> None:
    outputs = set()
    for _ in range(3):
        with Box() as box:
            outputs.add(box.script("print({'a', 'b', 'c', 'd', 'e', 'f'}, hash('a'))").out)
    assert len(outputs) == 1


def test_bubblewrap_makes_the_same_sandbox_where_it_is_installed() -> None:
    if (wrapper := shutil.which("bwrap")) is None:
        pytest.skip("bubblewrap is not installed")
    place_secrets()
    with Boxes(Limits(seconds=DEADLINE), "strong", wrapper=wrapper) as made:
        assert is_alive(made)
        for name in ("home", "imports_hotcold", "writes_to_system", "daemon", "shared_memory", "forges_verdict"):
            assert attack(made, name).is_held, name
        assert is_alive(made)
