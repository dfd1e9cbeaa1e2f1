"""Rewards in files run in worker processes: whatever they do, the run goes on or stops with the cause."""

import _thread
import os
import re
import signal
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from hotcold.algorithms.grpo import GRPO
from hotcold.batch import Rollout
from hotcold.errors import InputError, RewardError
from hotcold.rewards import workers
from hotcold.rewards.base import Scorable, Score
from hotcold.rewards.failures import Limits
from hotcold.rewards.functions import load_reward
from hotcold.rewards.scorer import FunctionScorer, load_scorer
from hotcold.training.collect import kept, step_batch

TAG = "HOTCOLD_TEST_TAG"  # in the environment of every process that a test starts
TIMEOUT = 0.6
START = 5.0  # seconds over the deadlines, for starting processes on a busy machine


@dataclass
class Place:
    """Rewards in files of a folder, and all processes that they start."""

    folder: Path
    tag: str
    said: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    scorers: list[FunctionScorer] = field(default_factory=list)

    def write(self, body: str, name: str = "reward.py") -> str:
        (self.folder / name).write_text(textwrap.dedent(body))
        return str(self.folder / name)

    def scorer(self, body: str, weights: tuple[float, ...] = (1.0,), **limits: Any) -> FunctionScorer:
        limits = {"timeout": TIMEOUT, "env": (TAG,), **limits}
        scorer = load_scorer([self.write(body)] * len(weights), weights, Limits(**limits))
        scorer.listen(self.said.append, self.log.append)
        self.scorers.append(scorer)
        return scorer

    def processes(self) -> list[int]:
        wanted, found = f"{TAG}={self.tag}".encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def are_gone(self, seconds: float = 5.0) -> bool:
        end = time.monotonic() + seconds
        while self.processes() and time.monotonic() < end:
            time.sleep(0.02)
        return not self.processes()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    tag = uuid.uuid4().hex
    monkeypatch.setenv(TAG, tag)
    there = Place(tmp_path, tag)
    yield there
    for scorer in there.scorers:
        scorer.close()
    assert there.are_gone()


def items(*completions: str, **columns: Any) -> list[Scorable]:
    return [Scorable("2 + 3 =", text, (1, 2), (7, 8, 9), columns, row=10 + i) for i, text in enumerate(completions)]


def totals(scores: list[Score]) -> list[float | None]:
    return [score.total for score in scores]


def on_x(what: str) -> str:
    """A reward that misbehaves at the response x, in its fifth line, and gives every other its length."""
    lines = "\n".join("        " + line for line in what.splitlines())
    head = "import asyncio, math, os, signal, subprocess, sys, time\n\ndef reward(completion):\n"
    return f"{head}    if completion == 'x':\n{lines}\n    return len(completion)\n"


# what the response x makes it do: what is said, how many processes are replaced in the two tries
FAILS = {
    "raises": ("raise ValueError('no number')", r"ValueError: no number \(.*reward\.py:5\)", 0),
    "hangs": ("time.sleep(1000)", r"no answer within reward_timeout=0.6 s \(.*reward\.py:5\)", 2),
    "is busy": ("while True: pass", r"no answer within reward_timeout=0.6 s \(.*reward\.py:5\)", 2),
    "sys.exit": ("sys.exit(0)", r"SystemExit: 0 \(.*reward\.py:5\)", 0),
    "interrupts itself": ("raise KeyboardInterrupt", "KeyboardInterrupt", 0),
    "os._exit": ("os._exit(3)", "its process ended with exit code 3", 2),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL", 2),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV", 2),
    "memory": (
        "all = []\nwhile True: all.append(bytearray(10**7))",
        "out of memory: more than reward_memory=0.3 GB",
        2,
    ),
    "NaN": ("return math.nan", "returned nan", 0),
    "text": ("return '1.0'", r"returned '1.0' \(str\)", 0),
    "a list": ("return [1.0]", r"returned \[1.0\] \(list\)", 0),
    "a broken object": ("class A:\n  def __repr__(self): 1 / 0\nreturn A()", "ZeroDivisionError", 0),
    "the pipe": (
        "for fd in range(3, 64):\n  try: os.write(fd, b'{}\\n')\n  except OSError: pass",
        "wrote to the pipe of its worker",
        2,
    ),
    "half a line": (
        "for fd in range(3, 64):\n  try: os.write(fd, b'x')\n  except OSError: pass",
        "wrote to the pipe of its worker",
        2,
    ),
    "closes the pipe": ("os.closerange(3, 200)\ntime.sleep(1000)", "its process", 2),
}


@pytest.mark.parametrize("name", FAILS)
def test_a_response_whose_reward_fails_has_no_score_and_the_others_have_theirs(name: str, place: Place) -> None:
    what, cause, replaced = FAILS[name]
    start = time.monotonic()
    scorer = place.scorer(on_x(what), memory=0.3)
    assert totals(scorer.score(items("aa", "x", "b", "ccc"))) == [2.0, None, 1.0, 3.0]
    assert time.monotonic() - start < 2 * TIMEOUT + START
    late = 2 if name in ("hangs", "is busy") else 0
    counts = {"failed": 1, "timeouts": late, "retried": 1, "workers_replaced": replaced}
    assert scorer.take_counts() == {f"rewards/{key}": value for key, value in counts.items()}
    (note,) = place.said
    assert 'reward "reward"' in note and "row 11 of the data" in note and "the response has no score" in note
    assert re.search(cause, note), note
    if not late:
        assert totals(scorer.score(items("x", "bb", "bb", "bb"))) == [None, 2.0, 2.0, 2.0]
        assert len(place.said) == 1  # others of the kind are only counted


WORKS = {
    "prints 10 MB": "print('y' * 10**7)",
    "prints 10 MB to the descriptors": "os.write(1, b'y' * 10**7); os.write(2, b'y' * 10**7)",
    "reads its input": "assert sys.stdin.read() == ''",
    "forks a child that stays": "if os.fork() == 0: time.sleep(1000)",
    "forks a child that goes on": "os.fork()",
    "forks a child that ends as if it were the worker": "if os.fork() == 0: sys.exit(3)",
    "starts a program that stays": "subprocess.Popen(['sleep', '1000'])",
    "leaves a daemon behind": "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(1000)\n  os._exit(0)",
    "changes the current folder": "os.chdir('/')",
    "closes its output": "sys.stdout.close()",
}


@pytest.mark.parametrize("name", WORKS)
def test_what_a_reward_does_beside_its_score_hurts_nobody_and_leaves_no_process(name: str, place: Place) -> None:
    scorer = place.scorer(on_x(WORKS[name]))
    for _ in range(2):
        assert totals(scorer.score(items("aa", "x", "b", "ccc"))) == [2.0, 1.0, 1.0, 3.0]
    assert set(scorer.take_counts().values()) == {0} and place.said == []
    assert place.processes()
    scorer.close()
    assert place.are_gone()


def test_what_a_late_call_started_ends_with_it(place: Place) -> None:
    child = "import subprocess\n\ndef reward(completion):\n    subprocess.run(['sleep', '1000'])\n"
    scorer = place.scorer(child, retries=0, max_failures=1.0)
    assert totals(scorer.score(items("a"))) == [None]
    assert place.are_gone()  # nobody has asked for a new worker yet


def test_a_reward_that_fails_now_and_then_scores_all_at_the_second_try(place: Place) -> None:
    body = """
        calls = 0

        def reward(completion):
            global calls
            calls += 1
            if calls % 3 == 0:
                raise RuntimeError("every third time")
            return float(completion)
    """
    scorer = place.scorer(body)
    # calls 3, 6, 9 fail at first; 10, 11, 12 are the second tries, of which 12 fails
    assert totals(scorer.score(items(*"123456789"))) == [1, 2, 3, 4, 5, 6, 7, 8, None]
    assert scorer.take_counts()["rewards/retried"] == 3
    assert "RuntimeError: every third time" in place.said[0] and "tried again, it was scored" in place.said[0]


def test_a_group_with_an_error_has_the_mean_of_the_others_as_its_baseline(place: Place) -> None:
    scorer = place.scorer("def reward(completion):\n    return {'one': 1, 'nought': 0}[completion]\n")
    scores = scorer.score(items("one", "two", "nought", "one"))
    rows = [Rollout((1,), (2, 3), 0, i, reward=score.total) for i, score in enumerate(scores)]
    algorithm = GRPO(group_size=4, scale_by_std=False)
    batch = step_batch(rows)
    batch = batch.select(kept(batch, algorithm))
    credited, _ = algorithm.credit(batch, algorithm.state())
    assert credited.advantages is not None and credited.episode.tolist() == [0, 2, 3]
    # the mean of 1, 0, 1 is 2/3
    assert torch.allclose(credited.advantages[:, 1].double(), torch.tensor([1 / 3, -2 / 3, 1 / 3]).double(), atol=1e-6)


# ---- policy


def test_a_failure_may_be_a_score_by_request_and_may_stop_the_run(place: Place) -> None:
    fails = on_x("raise ValueError('no number')")
    assert totals(place.scorer(fails, on_error=-0.5).score(items("x", "aa"))) == [-0.5, 2.0]
    assert "the response is scored -0.5" in place.said[0]
    with pytest.raises(RewardError, match=r'(?s)^reward "reward" failed at row 11.*no number \(.*reward\.py:5\)$'):
        place.scorer(fails, on_error="stop").score(items("aa", "x", "aa"))


def test_too_many_failures_stop_the_run_with_the_most_frequent_cause(place: Place) -> None:
    body = """
        def reward(completion):
            if completion == "a":
                raise KeyError("rare")
            if completion == "b":
                raise ValueError("frequent")
            return 1.0
    """
    share = dict(max_failures=0.5, retries=0)
    assert totals(place.scorer(body, **share).score(items(*"abbbbccccc"))) == [None] * 5 + [1.0] * 5
    with pytest.raises(RewardError) as stop:
        place.scorer(body, **share).score(items(*"abbbbbcccc"))
    first, second, third = str(stop.value).splitlines()
    assert first == "6 of 10 responses have no score, more than reward_max_failures=0.5."
    assert second == 'reward "reward" failed at row 11 of the data.' and third.startswith("ValueError: frequent (")
    with pytest.raises(RewardError, match="1 of 10 responses"):
        place.scorer(body, max_failures=0.0).score(items(*"accccccccc"))


def test_of_few_responses_all_may_fail_by_chance_but_not_again_and_again(place: Place) -> None:
    scorer = place.scorer(on_x("raise ValueError"), retries=0)
    for _ in range(3):
        scorer.score(items("x", "x"))
        scorer.score(items("a"))
    scorer.score(items("x", "x"))
    scorer.score(items("x", "x"))
    with pytest.raises(RewardError, match="2 of 2"):  # the sixth in a row, more than half of 8
        scorer.score(items("x", "x"))


def test_a_reward_that_always_hangs_stops_the_run_after_two_deadlines(place: Place) -> None:
    scorer = place.scorer("import time\n\ndef reward(completion):\n    time.sleep(1000)\n")
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"(?s)2 responses in a row.*reward_timeout=0.6 s \(.*reward\.py:4\)"):
        scorer.score(items(*"abcdefghijkl"))
    assert time.monotonic() - start < 2 * TIMEOUT + START and place.are_gone()


def test_a_reward_that_always_ends_its_process_stops_the_run_after_eight(place: Place) -> None:
    scorer = place.scorer("import os\n\ndef reward(completion):\n    os._exit(9)\n")
    with pytest.raises(RewardError, match=r"(?s)8 responses in a row.*row 17.*exit code 9 \(.*reward\.py\)"):
        scorer.score(items(*"abcdefghijkl"))


def test_a_bad_response_at_the_start_is_tried_again_and_stops_nothing(place: Place) -> None:
    scorer = place.scorer(on_x("time.sleep(1000)"), timeout=0.3, max_failures=1.0)
    assert totals(scorer.score(items("x"))) == [None]
    assert totals(scorer.score(items("aa"))) == [2.0]


def test_a_batch_function_that_hangs_is_not_asked_again(place: Place) -> None:
    scorer = place.scorer("import time\n\ndef reward(completions):\n    time.sleep(1000)\n")
    with pytest.raises(RewardError, match=r"(?s)12 of 12 responses.*reward_timeout"):
        scorer.score(items(*"abcdefghijkl"))
    assert scorer.take_counts()["rewards/retried"] == 0


def test_a_batch_function_is_asked_again_and_keeps_what_was_a_score(place: Place) -> None:
    body = """
        calls = 0

        def reward(completions):
            global calls
            calls += 1
            return [calls, calls if calls > 1 else "none", calls]
    """
    assert totals(place.scorer(body).score(items(*"abc"))) == [1.0, 2.0, 1.0]


def test_c01_a_list_of_another_length_is_an_error_in_the_program_and_stops_at_once(place: Place) -> None:
    scorer = place.scorer("def reward(completions):\n    return [1.0]\n")
    with pytest.raises(RewardError, match="returned 1 scores for 3 responses"):
        scorer.score(items(*"abc"))
    assert scorer.take_counts()["rewards/retried"] == 0


def test_two_functions_failing_at_one_response_are_one_failed_response(place: Place) -> None:
    scorer = place.scorer(on_x("raise ValueError"), weights=(1.0, 2.0))
    assert scorer.names == ("reward", "reward_2")
    assert totals(scorer.score(items("x", "aa"))) == [None, 6.0]  # 2 + 2 * 2
    assert scorer.take_counts()["rewards/failed"] == 1


# ---- awaitables


def test_async_rewards_wait_together_64_at_a_time_and_a_late_one_is_late_alone(place: Place) -> None:
    body = """
        import asyncio

        running = most = 0

        async def reward(completion):
            global running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(1000 if completion == "x" else 0.01)
            running -= 1
            return most
    """
    scorer = place.scorer(body, retries=0)
    scores = totals(scorer.score(items(*["a"] * 70, "x")))
    assert scores[-2:] == [64.0, None] and None not in scores[:-1]
    assert scorer.take_counts()["rewards/workers_replaced"] == 0  # it was cancelled


def test_a_coroutine_that_blocks_all_others_is_found(place: Place) -> None:
    body = """
        import time

        async def reward(completion):
            if completion == "x":
                time.sleep(1000)
            return len(completion)
    """
    scorer = place.scorer(body)
    assert totals(scorer.score(items("aa", "x", "b"))) == [2.0, None, 1.0]


def test_a_task_of_the_rewards_own_that_exits_fails_alone(place: Place) -> None:
    body = """
        import asyncio, sys

        async def leave():
            sys.exit(0)

        async def reward(completion):
            if completion == "x":
                await asyncio.create_task(leave())
            await asyncio.sleep(0.05)
            return len(completion)
    """
    scorer = place.scorer(body)
    assert totals(scorer.score(items("aa", "x", "b"))) == [2.0, None, 1.0]


# ---- what goes over the wire


def test_scores_are_those_that_the_same_function_gives_in_this_process(place: Place) -> None:
    body = """
        from decimal import Decimal
        from fractions import Fraction
        import numpy as np

        VALUES = [True, 3, 0.1, np.float32(0.1), np.array(2.5), Decimal(".25"), Fraction(1, 3), None, 1e-300,
                  {"score": None}, {"score": 0.1, "steps": [(np.int64(2), 0.7), (0, True)]}]

        def reward(completion):
            return VALUES[int(completion)]
    """
    rows = items(*map(str, range(11)))
    here = FunctionScorer([load_reward(place.write(body))], [3.0]).score(rows)
    assert place.scorer(body, weights=(3.0,), timeout=20.0).score(rows) == here
    assert here[2].total == 0.30000000000000004 and here[7].total is None and here[10].steps[0] == (2, 3 * 0.7)


COLUMNS: dict[str, Any] = {
    "day": date(2026, 12, 1),
    "moment": datetime(2026, 12, 1, 14, 7, 5, 12, tzinfo=timezone(timedelta(hours=2))),
    "span": timedelta(days=-1, microseconds=3),
    "price": Decimal("1.10"),
    "pair": (1, [2.5, None]),
    "names": {"a", "b"},
    "raw": b"\0\xff",
    "by_number": {1: "one", (2, 3): "two"},
    "odd": {"\0": ["set", "not one"]},
    "text": "\ud800 \u00e9 \n",
    "nested": {"list": [{"x": float("inf")}], "yes": True},
}


def test_columns_arrive_as_they_are_in_the_data(place: Place) -> None:
    body = "def reward(completion, **columns):\n    raise ValueError(ascii(columns[completion]))\n"
    scorer = place.scorer(body, retries=0, max_failures=1.0)
    for name, value in COLUMNS.items():
        scorer._workers.ledger._noted.clear()  # type: ignore[union-attr]
        scorer.score(items(name, **COLUMNS))
        said = place.said.pop()
        shown = {ascii(value)} if name != "names" else {"{'a', 'b'}", "{'b', 'a'}"}
        assert any(f"ValueError: {text} (" in said for text in shown), said


def test_a_value_that_cannot_travel_is_scored_in_this_process_and_this_is_said_once(place: Place) -> None:
    class Tool:
        def __eq__(self, other: object) -> bool:
            return other == "3"

        __hash__ = None  # type: ignore[assignment]

    scorer = place.scorer("def reward(completion, tool):\n    return tool == completion\n")
    assert totals(scorer.score([*items("3", "4", tool=Tool()), *items("5", tool="5")])) == [1.0, 0.0, 1.0]
    (note,) = place.said
    assert 'the column "tool" holds' in note and "in this process, without a deadline" in note


def test_several_workers_share_the_responses_and_keep_their_order(place: Place) -> None:
    body = """
        import os

        def reward(completion):
            return {"score": len(completion), "steps": [(0, os.getpid())]}
    """
    scores = place.scorer(body, workers=2).score(items(*["a" * n for n in range(1, 17)]))
    assert totals(scores) == [float(n) for n in range(1, 17)]
    assert len({score.steps[0][1] for score in scores}) == 2 == len(place.processes())


def test_every_answer_says_that_scoring_goes_on(place: Place) -> None:
    scorer, beats = place.scorer(on_x("raise ValueError")), list[str]()
    scorer.listen(place.said.append, place.log.append, beats.append)
    scorer.score(items("a", "x", "b", "c"))
    assert beats == ["scoring"] * 5  # four and a second try


def test_what_a_reward_prints_begins_in_the_log_and_ends_somewhere(place: Place) -> None:
    scorer = place.scorer("import sys\n\ndef reward(completion):\n    print('seen', completion)\n    return 1.0\n")
    scorer.score(items(*["a"] * 5000))
    assert place.log[:2] == ["printed by a reward: seen a"] * 2
    assert "not kept" in place.log[-1] and 100 < len(place.log) < 2000


# ---- the process itself


def test_secrets_of_the_environment_are_not_there_unless_they_are_asked_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")
    monkeypatch.setenv("LC_TIME", "C")
    body = "import os\n\ndef reward(completion):\n    return float(completion in os.environ)\n"
    names = ("MY_API_KEY", "PATH", "LC_TIME", "OMP_NUM_THREADS")
    assert totals(place.scorer(body).score(items(*names))) == [0.0, 1.0, 1.0, 1.0]
    assert totals(place.scorer(body, env=(TAG, "MY_API_KEY")).score(items(*names))) == [1.0, 1.0, 1.0, 1.0]
    with pytest.raises(InputError, match="reward_env=NOT_THERE: the environment has no such variable"):
        place.scorer(body, env=("NOT_THERE",))


def test_a_worker_is_light_has_no_core_dumps_and_none_of_our_descriptors(place: Place, tmp_path: Path) -> None:
    body = """
        import os, resource, sys

        def reward(completion):
            heavy = [name for name in ("torch", "transformers", "pydantic", "numpy") if name in sys.modules]
            cores = resource.getrlimit(resource.RLIMIT_CORE)
            files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) != 99]
            assert not heavy and cores == (0, 0) and not any("held" in file for file in files), (heavy, cores, files)
            return 1.0
    """.replace("if int(fd) != 99]", "if os.path.exists(f'/proc/self/fd/{fd}')]")
    with open(tmp_path / "held", "w") as held:
        os.set_inheritable(held.fileno(), True)
        assert totals(place.scorer(body).score(items("a"))) == [1.0], place.said


@pytest.mark.parametrize("when", ["first", "later"])
def test_c05_workers_serve_a_run_off_the_main_thread_and_after_it(place: Place, when: str) -> None:
    """A process may be tied to the thread that started it: that this one has ended is no failure of a response."""
    scorer = place.scorer(on_x("pass"))
    scorer.close()

    def score() -> list[float | None]:
        return totals(scorer.score(items("x", "aa")))

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(score).result() == [1.0, 2.0]
    if when == "later":
        time.sleep(0.1)
        assert score() == [1.0, 2.0] and set(scorer.take_counts().values()) == {0}


def test_ctrl_c_while_a_reward_is_at_work_ends_its_process(place: Place) -> None:
    scorer = place.scorer("import time\n\ndef reward(completion):\n    time.sleep(1000)\n", timeout=60.0)
    threading.Timer(0.5, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        scorer.score(items("a"))
    assert place.are_gone()


def test_no_worker_outlives_a_run_that_is_killed(place: Place) -> None:
    body = place.write("import time\n\ndef reward(completion):\n    while True: pass\n")
    child = os.fork()
    if child == 0:
        load_scorer([body], [1.0], Limits(env=(TAG,))).score(items("a"))
        os._exit(0)
    end = time.monotonic() + START
    while not (started := [pid for pid in place.processes() if pid != child]) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)  # until it is at work
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert started and place.are_gone()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import os\nos._exit(0)\n", "could not be imported: its process ended with exit code 0"),
        ("import time\ntime.sleep(1000)\n", r"not imported after 3 s \(.*reward.py:2\)"),
        ("all = []\nwhile True: all.append(bytearray(10**7))\n", "out of memory|MemoryError"),
        ("raise KeyError('gold')\n", r"could not be imported: KeyError: 'gold' \(.*reward\.py:1\)"),
        ("def a(completion): ...\ndef b(completion): ...\n", "several public functions: a, b"),
    ],
)
def test_a_file_that_cannot_be_imported_is_an_input_error(
    place: Place, body: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LOADING", 3.0 if "sleep" in body else 60.0)
    with pytest.raises(InputError, match=words) as stop:
        place.scorer(body, memory=0.3)
    assert not isinstance(stop.value, RewardError) and len(str(stop.value).splitlines()) <= 5
    assert place.are_gone()


def test_a_missing_column_is_found_before_anything_is_scored(place: Place) -> None:
    scorer = place.scorer("def reward(completion, answer):\n    return 1.0\n")
    with pytest.raises(InputError, match=r'(?s)"reward" needs "answer".*Columns: answers'):
        scorer.functions[0].needs.check({"answers"})
    with pytest.raises(RewardError, match='"reward" needs "answer"'):
        scorer.score(items("a", answers="1"))
    assert scorer.take_counts()["rewards/retried"] == 0


def test_a_file_that_changed_while_a_run_goes_on_is_noted(place: Place) -> None:
    scorer = place.scorer("def reward(completion):\n    return 1.0\n")
    place.write("def reward(completion):\n    return 2.0  # another rule\n")
    assert totals(scorer.score(items("a"))) == [1.0]
    scorer.close()
    assert totals(scorer.score(items("a"))) == [2.0]
    assert "has changed since the run began" in place.said[0]


def everything(reward: Callable[..., Any]) -> FunctionScorer:
    return load_scorer([reward, "exact"], [1.0, 1.0], Limits())


def test_functions_given_from_python_and_our_own_stay_in_this_process(place: Place) -> None:
    here = os.getpid()
    scorer = everything(lambda completion: float(os.getpid() == here))
    assert totals(scorer.score(items("5", answer="5"))) == [2.0] and scorer.take_counts() == {}
    assert place.processes() == []
    in_this_one = load_scorer(
        [place.write("import os\n\ndef reward(completion):\n    return os.getpid()\n")], [1.0], Limits(workers=0)
    )
    assert totals(in_this_one.score(items("a"))) == [float(here)]
