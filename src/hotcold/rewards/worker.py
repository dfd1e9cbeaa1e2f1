"""The process in which a user's reward functions run. It imports neither torch nor anything else that is slow.

It reads requests from one pipe and writes what happens to another: "start" when the work on a call begins, "wait" when
it is an awaitable whose turn has not come, then its answer. Deadlines are kept by the run, which ends this process;
only an awaitable's deadline is kept here, since others wait beside it.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import hashlib
import inspect
import io
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotcold.errors import InputError, RewardError
from hotcold.rewards.base import Scorable
from hotcold.rewards.calls import MAX_CONCURRENT, awaited, call, chunks, note_of
from hotcold.rewards.functions import RewardFunction, load_reward
from hotcold.rewards.scores import part, rows, values_of
from hotcold.rewards.wire import OUT_OF_MEMORY, line_of, restored_item
from hotcold.user_file import describe_error

PRINTED = 8192  # characters of its output that are handed on
PR_SET_PDEATHSIG = 1


class Link:
    """The two pipes. A child that the user's code forked must not speak on them, nor do this process's work."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = os.fdopen(requests, "rb")
        self._answers, self._pid, self._lock = answers, os.getpid(), threading.Lock()
        for descriptor in (requests, answers):
            os.set_inheritable(descriptor, False)

    def receive(self) -> dict[str, Any] | None:
        line = self._requests.readline()
        return json.loads(line) if line else None

    def send(self, **message: Any) -> None:
        if os.getpid() != self._pid:
            os._exit(0)
        rest = memoryview(line_of(message))
        with self._lock:
            while rest:
                rest = rest[os.write(self._answers, rest) :]

    @property
    def is_ours(self) -> bool:
        return os.getpid() == self._pid


class Printed(io.RawIOBase):
    """Standard output and error of the user's code: the beginning goes to the run's log, the rest nowhere."""

    def __init__(self, link: Link) -> None:
        self._link, self._left = link, PRINTED

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1  # which is /dev/null

    def write(self, data: Any) -> int:
        text = bytes(data)
        if self._left > 0 and text and self._link.is_ours:
            self._link.send(printed=text[: self._left].decode(errors="replace"), cut=len(text) > self._left)
            self._left -= len(text)
        return len(text)


class Work:
    """The calls of one request."""

    def __init__(self, link: Link, function: RewardFunction, request: dict[str, Any]) -> None:
        self.link, self.function = link, function
        self.name, self.id, self.timeout = request["name"], request["id"], request["timeout"]
        items = [restored_item(found) for found in request["items"]]
        self.calls = chunks(function.per_batch, items)
        self.left = set(range(len(self.calls)))

    def run(self) -> None:
        waiting = []
        for number, items in enumerate(self.calls):
            self.link.send(id=self.id, call=number, start=True)
            result = self._called(number, items)
            if inspect.isawaitable(result):
                self.link.send(id=self.id, call=number, wait=True)
                waiting.append((number, result))
        if waiting:
            try:
                asyncio.run(self._await_all(waiting))
            except BaseException as error:  # from a task of the reward's own: which call made it is not known
                for number in sorted(self.left):
                    self._fail(number, error)

    def _called(self, number: int, items: Sequence[Scorable]) -> Any:
        try:
            for item in items:
                self.function.needs.check(item.columns)
        except InputError as error:
            self.link.send(id=self.id, fatal=str(error))
            return None
        try:
            result = call(self.function, self.name, items)
        except BaseException as error:
            return self._fail(number, error)
        return result if inspect.isawaitable(result) else self._judge(number, result, items)

    async def _await_all(self, waiting: Sequence[tuple[int, Any]]) -> None:
        free = asyncio.Semaphore(MAX_CONCURRENT)

        async def settle(number: int, result: Any) -> None:
            async with free:
                self.link.send(id=self.id, call=number, start=True, awaited=True)
                items = self.calls[number]
                try:
                    async with asyncio.timeout(self.timeout):
                        value = await awaited(result, self.function, self.name, items)
                except TimeoutError:
                    self._answer(number, late=True)
                except RewardError as error:
                    self._fail(number, error)
                else:
                    self._judge(number, value, items)

        await asyncio.gather(*(settle(number, result) for number, result in waiting))

    def _judge(self, number: int, result: Any, items: Sequence[Scorable]) -> None:
        try:
            values = values_of(self.name, self.function.per_batch, result, items)
        except RewardError as error:  # not as many as were asked for: a bug in the program
            self.link.send(id=self.id, fatal=str(error))
            return
        self._answer(number, parts=[self._part(value, item) for value, item in zip(values, items, strict=True)])

    def _part(self, value: Any, item: Scorable) -> dict[str, Any]:
        try:
            found = part(self.name, value, item)
        except RewardError as error:
            return {"error": str(error)}
        except Exception as error:  # its repr or its comparison raised
            return {"error": f'reward "{self.name}", {rows([item])}: its result fails.\n{describe_error(error, None)}'}
        return {"score": found.score, "steps": found.steps}

    def _fail(self, number: int, error: BaseException) -> None:
        if isinstance(error.__cause__ or error, MemoryError):
            os._exit(OUT_OF_MEMORY)  # what it still holds would fail the calls that follow
        where = f'reward "{self.name}" failed at {rows(self.calls[number])}.'
        known = isinstance(error, RewardError)
        self._answer(number, error=str(error) if known else f"{where}\n{describe_error(error, self.function.file)}")

    def _answer(self, number: int, **answer: Any) -> None:
        self.left.discard(number)
        self.link.send(id=self.id, call=number, **answer)


def main(parent: int, requests: int, answers: int) -> None:
    die_with(parent)
    link = Link(requests, answers)
    setup = link.receive()
    if setup is None:
        return
    limit(setup["memory"])
    redirect(link)
    try:
        functions = [load_reward(spec, setup["dialect"]) for spec in setup["rewards"]]
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:
        link.send(refused=str(error) if isinstance(error, InputError) else describe_error(error, None))
        return
    link.send(ready=[described(function) for function in functions])
    try:
        while (request := link.receive()) is not None:
            Work(link, functions[request["function"]], request).run()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def described(function: RewardFunction) -> dict[str, Any]:
    is_async = inspect.iscoroutinefunction(function.function) or inspect.iscoroutinefunction(
        getattr(function.function, "__call__", None)  # noqa: B004
    )
    digest = hashlib.sha256(Path(function.file).read_bytes()).hexdigest() if function.file else ""
    return {
        **vars(function.needs),
        "file": function.file,
        "is_async": is_async,
        "digest": digest,
        "note": note_of(function),
    }


def die_with(parent: int) -> None:
    """No worker outlives its run, be it ended by SIGKILL."""
    with suppress(OSError, AttributeError):  # not Linux: the end of the pipe ends it
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def limit(memory: int | None) -> None:
    """RLIMIT_DATA counts what the process may write to alone; RLIMIT_AS would also count what is only reserved."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory is not None:
        with suppress(ValueError, OSError):  # a lower limit is there already
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # where memory ends all the same, the run is not what is killed


def redirect(link: Link) -> None:
    """Until now standard error was a file that the run reads; it stays the place of the stack of a late call."""
    stacks = os.dup(2)
    os.set_inheritable(stacks, False)
    os.dup2(1, 2)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    raw = io.BufferedWriter(Printed(link))
    sys.stdout = sys.stderr = io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", line_buffering=True)
    sys.argv = ["reward-worker"]
