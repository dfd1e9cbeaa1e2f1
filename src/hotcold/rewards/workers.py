"""The run's side of its workers: their processes, what is tried again, what is said of failures."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hotcold.errors import InputError, RewardError
from hotcold.memory import free_bytes
from hotcold.rewards.base import Scorable
from hotcold.rewards.calls import chunks, parts_here
from hotcold.rewards.failures import Answer, Failure, Ledger, Limits, failed_items
from hotcold.rewards.functions import Needs, RewardFunction, load_reward
from hotcold.rewards.process import LOOK, Garbage, Worker, environment, readable
from hotcold.rewards.rounds import Call, Round, WorkerFunction
from hotcold.rewards.scores import Part
from hotcold.rewards.wire import OUT_OF_MEMORY, NotPlain, plain_item

LOADING = 120.0  # seconds in which the user's file must be imported
FAREWELL = 2.0  # seconds in which a worker may end by itself at the end of the run
GB = 10**9


class Workers:
    """Processes for the functions in files. One that fails is ended, with all that it started, and replaced."""

    def __init__(self, rewards: Sequence[str], limits: Limits, dialect: str = "auto") -> None:
        self.limits, self.ledger = limits, Ledger(limits)
        self.log: Callable[[str], None] = lambda text: None
        self.beat: Callable[[str], None] = lambda stage: None
        self.answered: set[int] = set()  # functions that have answered at least once
        self.losses = 0  # workers lost since the last answer
        self._rewards, self._folder, self._dialect = list(rewards), os.getcwd(), dialect
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
            self._here_too[function.number] = load_reward(function.spec, self._dialect)
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
        worker.send({"rewards": self._rewards, "dialect": self._dialect, "memory": self._memory})
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


def memory_of_each(limits: Limits) -> int | None:
    """Bytes that a worker may write to."""
    if limits.memory is not None:
        return int(limits.memory * GB)
    free = free_bytes("cpu")
    return None if free is None else free // 2 // limits.workers


def _function(spec: str, number: int, found: dict[str, Any]) -> WorkerFunction:
    instead = tuple((argument, tuple(columns)) for argument, columns in found["instead"])
    columns, ours, always = (tuple(found[key]) for key in ("columns", "ours", "always"))
    needs = Needs(found["name"], found["per_batch"], columns, ours, instead, always)
    return WorkerFunction(spec, number, needs, found["file"], found["is_async"], found["note"])


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
