"""A run that stands still says where it stands."""

import threading
import time
from pathlib import Path

import pytest

from hotcold.watchdog import Watchdog
from tests.test_end_to_end import here, train

__all__ = ["here"]  # the fixture


def stands_still(event: threading.Event) -> None:
    event.wait(20)


def test_the_stacks_of_all_threads_are_written_when_nothing_moves(tmp_path: Path) -> None:
    said: list[str] = []
    release = threading.Event()
    other = threading.Thread(target=stands_still, args=(release,))
    dog = Watchdog(tmp_path / "stacks.txt", 0.3, said.append)
    with dog.watching():
        other.start()
        dog.beat("scoring 3/8")
        end = time.monotonic() + 20
        while not said and time.monotonic() < end:
            time.sleep(0.02)
    release.set()
    other.join()
    assert len(said) == 1 and "scoring 3/8" in said[0] and "stacks.txt" in said[0]
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "stands_still" in stacks and "test_the_stacks_of_all_threads" in stacks


def test_where_all_moves_nothing_is_written_or_left(tmp_path: Path) -> None:
    said: list[str] = []
    dog = Watchdog(tmp_path / "stacks.txt", 2.0, said.append)
    with dog.watching():
        for _ in range(30):
            dog.beat("step")
            time.sleep(0.1)
    assert said == [] and not (tmp_path / "stacks.txt").exists()


def test_a_run_that_ends_in_an_error_leaves_no_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError), Watchdog(tmp_path / "stacks.txt", 2.0, print).watching():
        raise ValueError
    assert not (tmp_path / "stacks.txt").exists()


def test_a_run_whose_score_stands_still_leaves_its_stacks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = "import time\n\ndef sleepy(completion):\n    time.sleep(1.5)\n    return float('a' in completion)\n"
    (here / "slow.py").write_text(slow)
    words = ["reward=slow.py", "prompts_per_step=1", "group_size=2", "eval.every=0", "eval.prompts=1", "watchdog=0.5"]
    words.append("reward_workers=0")  # a worker has a deadline of its own
    assert train(*words, steps=1) == 0
    assert "nothing has moved for 0.5 s" in capsys.readouterr().out
    assert Path("runs/one/stacks.txt").stat().st_size > 0


def test_no_watchdog_no_file(here: Path) -> None:
    assert train("watchdog=0", steps=1) == 0
    assert not Path("runs/one/stacks.txt").exists()
