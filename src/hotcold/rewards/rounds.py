"""Every call once: who gets which, what is overdue, what becomes of the calls of a worker that is lost."""

from __future__ import annotations

import operator
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hotcold.errors import RewardError
from hotcold.rewards.base import LARGEST, Scorable
from hotcold.rewards.failures import FEW, Answer, Failure, Kind
from hotcold.rewards.functions import Needs
from hotcold.rewards.process import LOOK, Garbage, Worker, readable
from hotcold.rewards.scores import Part, rows
from hotcold.rewards.wire import OUT_OF_MEMORY

if TYPE_CHECKING:
    from hotcold.rewards.workers import Workers

GRACE = 0.5  # seconds over the deadline, in which a worker may end an awaitable of its own
LOSSES = 16  # responses in a row that ended their worker, before the run stops
LOSSES_AT_FIRST = {"timeout": 2, "memory": 4}  # by a function that has never answered; else FEW


@dataclass(frozen=True)
class WorkerFunction:
    """A reward function that lives in the workers."""

    spec: str  # as the user wrote it
    number: int  # among the functions of the workers
    needs: Needs
    file: str | None
    is_async: bool
    note: str = ""  # for the user, once

    @property
    def name(self) -> str:
        return self.needs.name


@dataclass(frozen=True)
class Call:
    function: WorkerFunction
    name: str  # unique among the rewards of the run
    items: Sequence[Scorable]  # one, or all of a batch function
    plain: list[dict[str, Any]]

    def failure(self, kind: Kind, cause: str) -> Failure:
        return Failure(self.name, kind, f'reward "{self.name}" failed at {rows(self.items)}.\n{cause}')


@dataclass
class Sent:
    """A request on its way: the numbers of its calls, which of them are being worked on since when."""

    id: int
    numbers: Sequence[int]
    heard: float
    left: set[int]  # positions in `numbers` of calls without an answer
    started: dict[int, float] = field(default_factory=dict)


class Round:
    """Every call once."""

    def __init__(self, workers: Workers, calls: dict[int, Call], alone: bool = False) -> None:
        self.workers, self.limits, self.calls, self.alone = workers, workers.limits, calls, alone
        self.answers: dict[int, Answer] = {}
        self.queue = deque(self._requests())
        self.sent: dict[int, Sent] = {}  # by slot
        self._next = int.from_bytes(os.urandom(4))  # no answer to an earlier request is taken for one to this

    def run(self) -> dict[int, Answer]:
        while len(self.answers) < len(self.calls):
            self._hand_out()
            for slot in self._with_news():
                self._read(slot)
            self._look()
        return self.answers

    def _requests(self) -> Iterator[list[int]]:
        """Calls of one function each: alone, so that each is judged by itself, or as many as one worker's share."""
        for function in self.workers.functions:
            numbers = [n for n, call in self.calls.items() if call.function is function]
            num, workers = len(numbers), len(self.workers.slots)
            parts = num if self.alone else 1 if workers == 1 else workers if function.is_async else 4 * workers
            size = max(1, -(-num // max(1, parts)))
            yield from (numbers[i : i + size] for i in range(0, num, size))

    def _hand_out(self) -> None:
        for slot in range(len(self.workers.slots)):
            if slot in self.sent or not self.queue:
                continue
            worker = self.workers.worker(slot)
            numbers = self.queue.popleft()
            self._next += 1
            self.sent[slot] = Sent(self._next, numbers, time.monotonic(), set(range(len(numbers))))
            first = self.calls[numbers[0]]
            items = [item for n in numbers for item in self.calls[n].plain]
            request = {"id": self._next, "function": first.function.number, "name": first.name}
            worker.send({**request, "timeout": self.limits.timeout, "items": items})

    def _with_news(self) -> list[int]:
        busy = {self._worker(slot): slot for slot in self.sent}
        return [busy[worker] for worker in readable(list(busy), self._patience())]

    def _worker(self, slot: int) -> Worker:
        worker = self.workers.slots[slot]
        assert worker is not None
        return worker

    def _patience(self) -> float:
        """Seconds until something may be overdue."""
        now, limit = time.monotonic(), self.limits.timeout
        ends = [since + limit - now for sent in self.sent.values() for since in sent.started.values()]
        return max(0.0, min([LOOK, *ends]))

    def _read(self, slot: int) -> None:
        try:
            for message in self._worker(slot).receive():
                if "printed" in message:
                    self.workers.say_printed(message)
                elif slot in self.sent:
                    self._hear(slot, message)
        except Garbage:
            self._lose(slot, "garbage", self._at_work(slot), "it wrote to the pipe of its worker")

    def _hear(self, slot: int, message: dict[str, Any]) -> None:
        sent, position = self.sent[slot], message.get("call")
        if message.get("id") != sent.id:
            raise Garbage
        sent.heard = time.monotonic()
        if "fatal" in message:
            raise RewardError(str(message["fatal"]))
        if type(position) is not int or position not in sent.left:
            raise Garbage
        if "start" in message:
            sent.started[position] = sent.heard + (GRACE if "awaited" in message else 0.0)
        elif "wait" in message:
            sent.started.pop(position, None)
        else:
            self._answer(slot, position, message)

    def _answer(self, slot: int, position: int, message: dict[str, Any]) -> None:
        sent = self.sent[slot]
        number = sent.numbers[position]
        call = self.calls[number]
        self.answers[number] = self._answer_of(call, message)
        sent.left.discard(position)
        sent.started.pop(position, None)
        self.workers.beat("scoring")
        if "late" not in message:
            self.workers.answered.add(call.function.number)
            self.workers.losses = 0
        if not sent.left:
            del self.sent[slot]

    def _answer_of(self, call: Call, message: dict[str, Any]) -> Answer:
        if "late" in message:
            self.workers.ledger.counts["timeouts"] += len(call.items)
            return [call.failure("timeout", self._late(call, ""))] * len(call.items)
        if "error" in message:
            return [Failure(call.name, "raised", str(message["error"]))] * len(call.items)
        try:
            found = [_one(call, each) for each in message["parts"]]
        except (KeyError, TypeError, ValueError):
            raise Garbage from None
        if len(found) != len(call.items):
            raise Garbage
        return found

    def _look(self) -> None:
        """Whether a process has ended, or a call is overdue."""
        now, limit = time.monotonic(), self.limits.timeout
        for slot, sent in list(self.sent.items()):
            worker = self._worker(slot)
            if worker.is_gone:
                self._read(slot)  # its last words
                if self.sent.get(slot) is sent and self.workers.slots[slot] is worker:
                    self._lose(slot, "ended", self._at_work(slot), "")
                continue
            late = [position for position, since in sent.started.items() if now - since > limit]
            if not late and not sent.started and now - sent.heard > limit + GRACE:
                late = self._at_work(slot)
            if late:
                call = self.calls[sent.numbers[late[0]]]
                cause = self._late(call, worker.place(call.function.file))
                self._lose(slot, "timeout", late, cause)

    def _at_work(self, slot: int) -> list[int]:
        sent = self.sent.get(slot)
        return [] if sent is None else sorted(sent.started) or [min(sent.left)]

    def _lose(self, slot: int, kind: Kind, blamed: Sequence[int], cause: str) -> None:
        """The worker is gone, by itself or by us; the calls that were not at work are handed out again."""
        code = self.workers.end(slot)
        if (sent := self.sent.pop(slot, None)) is None:
            return
        self.workers.ledger.counts["workers_replaced"] += 1
        kind = "memory" if kind == "ended" and code == OUT_OF_MEMORY else kind
        said = cause or self.workers.how_it_ended(code)
        for number in (sent.numbers[position] for position in blamed):
            call = self.calls[number]
            at = "" if said.endswith(")") or not call.function.file else f" ({call.function.file})"
            failure = call.failure(kind, f"{said}{at}")
            self.answers[number] = [failure] * len(call.items)
            self.workers.ledger.counts["timeouts"] += len(call.items) if kind == "timeout" else 0
        if rest := [sent.numbers[position] for position in sorted(sent.left - {*blamed})]:
            self.queue.appendleft(rest)
        if blamed and not self.alone:
            self._count_loss(call, failure)

    def _late(self, call: Call, place: str) -> str:
        return f"no answer within reward_timeout={self.limits.timeout:g} s{place or f' ({call.function.file})'}"

    def _count_loss(self, call: Call, failure: Failure) -> None:
        """Each costs a deadline, or a start: where every response would, the run does not wait for all of them."""
        self.workers.losses += 1
        most = LOSSES if call.function.number in self.workers.answered else LOSSES_AT_FIRST.get(failure.kind, FEW)
        if self.workers.losses >= max(most, len(self.workers.slots)):
            raise RewardError(f"{self.workers.losses} responses in a row ended their worker.\n{failure.text}")


def _one(call: Call, found: dict[str, Any]) -> Part | Failure:
    if "error" in found:
        return Failure(call.name, "no score", str(found["error"]))
    score = found["score"]
    steps = tuple((operator.index(position), _number(value)) for position, value in found["steps"])
    return Part(None if score is None else _number(score), steps)


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise ValueError
    return float(value)
