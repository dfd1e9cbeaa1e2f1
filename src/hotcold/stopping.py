"""SIGINT and SIGTERM: a run ends soon, at a point from which it can go on.

Anywhere but inside an update or a save, a signal raises `Stopped` at once. From the first optimiser step to the end of
the step the parameters are neither the old nor the new ones: there the run goes on to the end of the step, for at most
GRACE seconds, and is cut off then. A second signal ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GRACE = 15.0  # seconds; a long product in C delays a signal further, and 30 is the limit


class Stopped(KeyboardInterrupt):
    """A signal to the run. No `except Exception` of a reward catches it."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


class Stopping:
    """What a run knows of signals. Without `listening` there are none but Python's own KeyboardInterrupt."""

    def __init__(self, grace: float = GRACE) -> None:
        self.grace = grace
        self.number: int | None = None  # of the first signal
        self.holds = False  # parameters are being changed
        self._saves = False

    @contextmanager
    def listening(self) -> Iterator[Stopping]:
        """Signals come here. They reach Python's main thread only: in another one a run hears of none."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)}
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._out_of_time)
        try:
            yield self
        finally:
            _set_alarm(0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def hold(self) -> None:
        """From here on parameters change: a signal waits for `release`."""
        self.holds = True

    def release(self) -> None:
        """The state is whole again; `check` follows when it is safe."""
        self.holds = False
        _set_alarm(0)

    def check(self) -> None:
        """Stops for a signal that had to wait, or that somebody's `except:` has swallowed."""
        if self.number is not None and not (self.holds or self._saves):
            raise Stopped(self.number)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A signal waits until what is being written is whole, within the same time."""
        came_before, saved_before = self.number is not None, self._saves
        self._saves = True
        if came_before:
            _set_alarm(self.grace)
        try:
            yield
        finally:
            self._saves = saved_before
            if not self.holds:
                _set_alarm(0)
        if not came_before:
            self.check()

    @property
    def is_due(self) -> bool:
        return self.number is not None

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            say("stopped at once.")
            os._exit(128 + number)
        self.number = number
        if not (self.holds or self._saves):
            raise Stopped(number)
        _set_alarm(self.grace)
        say("stopping when this step is done; again: at once.")

    def _out_of_time(self, number: int, frame: FrameType | None) -> None:
        assert self.number is not None
        raise Stopped(self.number)


def _set_alarm(seconds: float) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, seconds)


def say(text: str) -> None:
    """From a signal's handler: nothing that holds a lock. The cursor, which a live line hides, is shown again."""
    shown = "\x1b[?25h\n" if os.isatty(2) else ""
    os.write(2, f"{shown}hotcold: {text}\n".encode())
