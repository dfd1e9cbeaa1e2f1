"""The run's side of its workers: who gets which response, what is overdue, what is tried again."""

from __future__ import annotations

import operator
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotcold.errors import InputError, RewardError
from hotcold.memory import free_bytes
from hotcold.rewards.base import LARGEST, Scorable
from hotcold.rewards.calls import chunks, parts_here
from hotcold.rewards.failures import FEW, Answer, Failure, Kind, Ledger, Limits, failed_items
from hotcold.rewards.functions import Needs, RewardFunction, load_reward
from hotcold.rewards.process import Garbage, Worker, environment, readable
from hotcold.rewards.scores import Part, rows
from hotcold.rewards.wire import OUT_OF_MEMORY, NotPlain, plain_item

LOADING = 120.0  # seconds in which the user's file must be imported
GRACE = 0.5  # seconds over the deadline, in which a worker may end an awaitable of its own
LOOK = 0.1  # seconds between looks at whether a process still lives
FAREWELL = 2.0  # seconds in which a worker may end by itself at the end of the run
LOSSES = 16  # responses in a row that ended their worker, before the run stops
LOSSES_AT_FIRST = {"timeout": 2, "memory": 4}  # by a function that has never answered; else FEW
GB = 10**9


@dataclass(frozen=True)
class WorkerFunction:
    """A reward function that lives in the workers."""

    spec: str  # as the user wrote it
    number: int  # among the functions of the workers
    needs: Needs
    file: str | None
    is_async: bool

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


class Workers:
    """Processes for the functions in files. One that fails is ended, with all that it started, and replaced."""

    def __init__(self, rewards: Sequence[str], limits: Limits) -> None:
        self.limits, self.ledger = limits, Ledger(limits)
        self.log: Callable[[str], None] = lambda text: None
        self.answered: set[int] = set()  # functions that have answered at least once
        self.losses = 0  # workers lost since the last answer
        self._rewards, self._folder = list(rewards), os.getcwd()
        self._here_too: dict[int, RewardFunction] = {}  # loaded in this process
        self._variables = environment(limits.env)
        self._memory = memory_of_each(limits)
        self.slots: list[Worker | None] = [None] * limits.workers
        self._ending = weakref.finalize(self, _end_all, self.slots)
        self._described = self._start(0)
        self.functions = tuple(
            _function(spec, number, found)
            for number, (spec, found) in enumerate(zip(rewards, self._described, strict=True))
        )

    def close(self) -> None:
        """Ends the processes. A later call would start new ones."""
        _end_all(self.slots)

    def parts(self, asked: Sequence[tuple[WorkerFunction, str]], items: Sequence[Scorable]) -> list[list[Part]]:
        """By function what it says of each item; functions come with the names under which they are reported."""
        calls, spans, known = self._calls(asked, items)
        try:
            answers = known | Round(self, calls).run()
            tries = [_by_function(spans, answers)]
            self._count_timeouts(tries[0], items)
            for _ in range(self.limits.retries):
                again = {n: calls[n] for n in calls if any(isinstance(one, Failure) for one in answers[n])}
                if not again:
                    break
                self.ledger.counts["retried"] += sum(isinstance(one, Failure) for n in again for one in answers[n])
                new = Round(self, again, alone=True).run()
                answers = answers | {n: _better(answers[n], new[n]) for n in new}
                tries.append(_by_function(spans, answers))
            return self.ledger.settle(tries)
        except BaseException:
            _end_all(self.slots, patience=0.0)  # whatever they were at
            raise

    def _calls(
        self, asked: Sequence[tuple[WorkerFunction, str]], items: Sequence[Scorable]
    ) -> tuple[dict[int, Call], list[range], dict[int, Answer]]:
        """(calls by number, the numbers of each function, answers of those that had to be made here)"""
        calls: dict[int, Call] = {}
        spans: list[range] = []
        known: dict[int, Answer] = {}
        for function, name in asked:
            found = chunks(function.needs.per_batch, items)
            start = spans[-1].stop if spans else 0
            spans.append(range(start, start + len(found)))
            for number, chunk in zip(spans[-1], found, strict=True):
                try:
                    calls[number] = Call(function, name, chunk, [plain_item(item) for item in chunk])
                except NotPlain as error:
                    known[number] = self._here(function, name, chunk, str(error))
        return calls, spans, known

    def _here(self, function: WorkerFunction, name: str, items: Sequence[Scorable], why: str) -> Answer:
        self.ledger.tell_once(f'reward "{name}" runs in this process, without a deadline, where {why}')
        if function.number not in self._here_too:
            self._here_too[function.number] = load_reward(function.spec)
        return list(parts_here([self._here_too[function.number]], [name], items)[0])

    def _count_timeouts(self, answers: Sequence[Answer], items: Sequence[Scorable]) -> None:
        """Where too many responses ran into the deadline it would take as long again to see the same."""
        late = {n: f for n, f in failed_items(answers).items() if f.kind == "timeout"}
        self.ledger.stop_if_too_many(late, len(items))

    # ---- processes

    def worker(self, slot: int) -> Worker:
        """The worker of a slot; one that ended while nothing was asked of it is replaced without a word."""
        worker = self.slots[slot]
        if worker is not None and worker.is_gone:
            self.end(slot)
        if self.slots[slot] is None:
            self._restart(slot)
        found = self.slots[slot]
        assert found is not None
        return found

    def end(self, slot: int) -> int | None:
        worker, self.slots[slot] = self.slots[slot], None
        return None if worker is None else worker.ended()

    def _restart(self, slot: int) -> None:
        try:
            described = self._start(slot)
        except RewardError:
            raise
        except InputError as error:
            raise RewardError(f"a worker for the rewards could not be started again.\n{error}") from None
        if described != self._described:
            self.ledger.tell_once("the file of a reward has changed since the run began; new workers use the new one")

    def _start(self, slot: int) -> list[dict[str, Any]]:
        """Starts a worker; what it says of its functions."""
        worker = self.slots[slot] = Worker(self._variables, self._folder)
        worker.send({"rewards": self._rewards, "memory": self._memory})
        end = time.monotonic() + LOADING
        try:
            while True:
                for message in self._heard(worker):
                    if "ready" in message:
                        return message["ready"]
                    raise InputError(str(message.get("refused", "a worker for the rewards said what it should not.")))
                if worker.is_gone or time.monotonic() > end:
                    raise self._not_started(slot, worker)
        except Garbage:
            self.end(slot)
            raise InputError(f"{', '.join(self._rewards)}: wrote to the pipe of its worker on import.") from None
        except BaseException:
            self.end(slot)
            raise

    def _heard(self, worker: Worker) -> Iterator[dict[str, Any]]:
        for _ in readable([worker], LOOK):
            for message in worker.receive():
                if "printed" in message:
                    self.say_printed(message)
                else:
                    yield message

    def _not_started(self, slot: int, worker: Worker) -> InputError:
        what = ", ".join(self._rewards)
        if not worker.is_gone:
            return InputError(f"{what}: not imported after {LOADING:g} s{worker.place(None)}.")
        said = worker.errors()
        how = self.how_it_ended(self.end(slot))
        return InputError(f"{what} could not be imported: {how}.{' ' + said if said else ''}")

    def how_it_ended(self, code: int | None) -> str:
        if code == OUT_OF_MEMORY:
            return f"out of memory: more than reward_memory={(self._memory or 0) / GB:.3g} GB"
        if code is not None and code < 0:
            why = ", by itself or by the system where memory is short" if code == -signal.SIGKILL else ""
            return f"its process was ended by {_name_of(-code)}{why}"
        return f"its process ended with exit code {code}"

    def say_printed(self, message: dict[str, Any]) -> None:
        """What the user's code printed goes to the run's log."""
        for line in str(message["printed"]).splitlines():
            self.log(f"printed by a reward: {line}")
        if message.get("cut"):
            self.log("printed by a reward: ... (the rest of what this worker prints is not kept)")


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


def memory_of_each(limits: Limits) -> int | None:
    """Bytes that a worker may write to."""
    if limits.memory is not None:
        return int(limits.memory * GB)
    free = free_bytes("cpu")
    return None if free is None else free // 2 // limits.workers


def _function(spec: str, number: int, found: dict[str, Any]) -> WorkerFunction:
    needs = Needs(found["name"], found["per_batch"], tuple(found["columns"]), tuple(found["ours"]))
    return WorkerFunction(spec, number, needs, found["file"], found["is_async"])


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


def _better(before: Answer, after: Answer) -> Answer:
    """What was a score at an earlier try stays."""
    return [one if isinstance(one, Part) else other for one, other in zip(before, after, strict=True)]


def _by_function(spans: Sequence[range], answers: dict[int, Answer]) -> list[Answer]:
    return [[one for number in span for one in answers[number]] for span in spans]


def _name_of(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _end_all(slots: list[Worker | None], patience: float = FAREWELL) -> None:
    for slot, worker in enumerate(slots):
        slots[slot] = None
        if worker is not None:
            worker.ended(patience)
