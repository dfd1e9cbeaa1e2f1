"""`reward=code`: the program in a response, run against the tests of its row in a sandbox.

An expected value never enters the process that the program runs in. Outputs and the values of calls are compared here.
What asserts compare is compared in a second sandbox, which asks the program's for plain values.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hotcold.rewards.base import Scorable
from hotcold.rewards.code_blocks import program_of, same_output
from hotcold.rewards.code_tests import COLUMNS, Asserts, Call, InputOutput, Test, Unusable, same_value, tests_of
from hotcold.rewards.dialects import Column, of_items
from hotcold.sandbox.box import FIND, Box, Limits, Lost, Session, parsed
from hotcold.sandbox.values import decode, encode

SLOTS = os.cpu_count() or 1


@dataclass
class Boxes:
    """Sandboxes that are started when they are first needed and used again; a program never meets another's."""

    limits: Limits
    level: str | None = None
    python: str | None = None
    wrapper: str | None = FIND
    _free: queue.SimpleQueue[Box] = field(default_factory=queue.SimpleQueue)

    @contextmanager
    def one(self) -> Iterator[Box]:
        try:
            box = self._free.get_nowait()
        except queue.Empty:
            box = Box(self.level, self.limits, self.python, self.wrapper)
        try:
            yield box
        except BaseException:
            box.close()
            raise
        self._free.put(box)

    def close(self) -> None:
        while not self._free.empty():
            self._free.get().close()

    def __enter__(self) -> Boxes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def passed(
    boxes: Boxes, program: str, tests: Sequence[Test], tolerance: float = 0.0, all_of: bool = True
) -> list[bool]:
    """By test whether the program passes it. With `all_of` it ends at the first that fails."""
    found: list[bool] = []
    for group in _alike(tests):
        if all_of and not all(found):
            break
        if isinstance(group[0], Call):
            found += _called(boxes, program, [t for t in group if isinstance(t, Call)], tolerance, all_of)
        for test in group:
            if all_of and not all(found):
                break
            if isinstance(test, InputOutput):
                found.append(_output_is_right(boxes, program, test, tolerance))
            elif isinstance(test, Asserts):
                found += _asserted(boxes, program, test)
    return found + [False] * (sum(t.count if isinstance(t, Asserts) else 1 for t in tests) - len(found))


def _alike(tests: Sequence[Test]) -> list[list[Test]]:
    groups: dict[type, list[Test]] = {}
    for test in tests:
        groups.setdefault(type(test), []).append(test)
    return list(groups.values())


def _output_is_right(boxes: Boxes, program: str, test: InputOutput, tolerance: float) -> bool:
    for _ in range(2):  # a sandbox that does not answer may be the machine's fault once
        with boxes.one() as box:
            ended = box.script(program, test.given)
        if ended.how != "lost":
            return ended.is_well and same_output(ended.out, test.expected, tolerance)
    return False


def _called(boxes: Boxes, program: str, tests: Sequence[Call], tolerance: float, all_of: bool) -> list[bool]:
    """In their order and in one process of the program; after a call that ended it, in a new one."""
    found: list[bool] = []
    may_be_lost = True  # a sandbox that does not answer may be the machine's fault once
    while len(found) < len(tests) and (not all_of or all(found)):
        some, is_lost = _called_in_one(boxes, program, tests[len(found) :], tolerance, all_of)
        found += some
        if not some and not (is_lost and may_be_lost):
            break
        may_be_lost = may_be_lost and not is_lost
    return found + [False] * (len(tests) - len(found))


def _called_in_one(
    boxes: Boxes, program: str, tests: Sequence[Call], tolerance: float, all_of: bool
) -> tuple[list[bool], bool]:
    """Results up to the first that ends the process, and whether the sandbox was lost."""
    found: list[bool] = []
    limit = boxes.limits.seconds
    with boxes.one() as box, box.session("functions", program, limit * (len(tests) + 1)) as session:
        if session.listen(limit) is not None:
            for test in tests:
                found.append(_call_is_right(session, test, limit, tolerance))
                if session.ended or (all_of and not found[-1]):
                    break
    return found, session.is_lost


def _call_is_right(session: Session, test: Call, limit: float, tolerance: float) -> bool:
    if test.expression:
        asked: dict[str, Any] = {"do": "eval", "with": {"text": test.expression}}
    else:
        args = [encode(arg) for arg in test.args]
        asked = {"do": "call", "with": {"args": args, "kwargs": {}, "name": test.name}}
    session.tell(json.dumps(asked), limit)
    line = session.listen(limit)
    try:
        answer = {} if line is None else parsed(line)
        return "value" in answer and same_value(decode(answer["value"]), test, tolerance)
    except (Lost, ValueError, RecursionError):  # a forged line
        return False


def _asserted(boxes: Boxes, program: str, test: Asserts) -> list[bool]:
    for _ in range(2):
        verdict, is_lost = _verdict(boxes, program, test)
        if not is_lost:
            break
    if verdict is None:
        raise Unusable("the tests hand the program what cannot leave their own process")
    return verdict if len(verdict) == test.count else [False] * test.count


def _verdict(boxes: Boxes, program: str, test: Asserts) -> tuple[list[bool] | None, bool]:
    """What the tests say, and whether a sandbox was lost."""
    nonce, limit = secrets.token_hex(16), boxes.limits.seconds
    verdict: list[bool] | None = []
    with (
        boxes.one() as box,
        boxes.one() as other,
        box.session("functions", program, limit) as subject,
        other.session("tests", test.source, limit, nonce=nonce) as tester,
    ):
        verdict = _carried(subject, tester, nonce, time.monotonic() + limit)
    return verdict, subject.is_lost or tester.is_lost


def _carried(subject: Session, tester: Session, nonce: str, end: float) -> list[bool] | None:
    """Questions to the program, answers to the tests, until these tell the verdict; None: they have none."""

    def left() -> float:
        return max(0.01, end - time.monotonic())

    if subject.listen(left()) is None:
        return []
    while (question := tester.listen(left())) is not None:
        message = parsed(question)
        if "verdict" in message:
            verdict = message["verdict"] if message.get("nonce") == nonce else []
            return None if verdict is None else [one is True for one in verdict]
        subject.tell(question, left())
        if (answer := subject.listen(left())) is None:
            return []
        tester.tell(answer, left())
    return []


# ---- the reward


class CodeReward:
    """Its sandboxes stay between calls. Their processes end with the threads that started them, so these stay too."""

    columns: tuple[str, ...] = ()  # any of COLUMNS, as the dialect says

    def __init__(self, limits: Limits, partial: bool, tolerance: float) -> None:
        self._boxes, self._partial, self._tolerance = Boxes(limits), partial, tolerance
        self._pool: ThreadPoolExecutor | None = None
        self._tell: Callable[[str], None] = lambda text: None
        self._beat: Callable[[str], None] = lambda stage: None
        self._is_told = False
        self.dialect = replace(of_items(()), many_columns={"tests": Column(COLUMNS)})

    def __call__(self, items: Sequence[Scorable], tests: Sequence[Any]) -> list[float | None]:
        """`tests` stands for the columns of which one must be there."""
        self._pool = self._pool or ThreadPoolExecutor(SLOTS)
        scores: list[float | None] = []
        for item, found in zip(items, self._pool.map(self._score, items), strict=True):
            self._beat("scoring programs")
            if isinstance(found, Unusable):  # which is not the program's fault
                self._say_once(f"reward=code gives row {item.row} of the data no score: {found}; others are not named")
            scores.append(None if isinstance(found, Unusable) else found)
        return scores

    def listen(self, tell: Callable[[str], None], beat: Callable[[str], None], folder: Path | None) -> None:
        self._tell, self._beat = tell, beat

    def take_counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._boxes.close()

    def _score(self, item: Scorable) -> float | Unusable:
        """In a thread of the pool."""
        try:
            tests = tests_of(item.columns)
            wanted = frozenset[str]().union(*(test.wanted for test in tests))
            program = program_of(item.completion, wanted)
            found = passed(self._boxes, program, tests, self._tolerance, all_of=not self._partial)
        except Unusable as error:
            return error
        return sum(found) / len(found) if self._partial else float(all(found))

    def _say_once(self, text: str) -> None:
        if not self._is_told:
            self._is_told = True
            self._tell(text)


def code(partial: bool = False, timeout: float = 6.0, memory: int = 512, tolerance: float = 0.0) -> CodeReward:
    """`partial`: the share of tests as the score. `timeout`: seconds a test. `memory`: MB. `tolerance`: of numbers."""
    if not 0 < timeout <= 3600:
        raise ValueError("timeout is a number of seconds above 0, at most 3600")
    if memory < 64:
        raise ValueError("memory is a number of MB, at least 64: Python alone takes about 30")
    if not 0 <= tolerance < 1:
        raise ValueError("tolerance is a number from 0 to below 1, as in 1e-6")
    return CodeReward(Limits(seconds=timeout, memory=memory * 10**6), partial, tolerance)
