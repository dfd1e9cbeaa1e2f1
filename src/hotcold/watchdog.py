"""A run that stands still says where: the stacks of all threads go to a file."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

OFTEN = 1.0  # seconds between two rearmings


class Watchdog:
    """`beat` is called whenever something has moved. After `seconds` without one, the stacks are written.

    They come from a thread in C, which a computation that holds Python's lock cannot keep from writing.
    """

    def __init__(self, path: Path, seconds: float, say: Callable[[str], None]):
        self.path, self.seconds, self.say = path, seconds, say
        self._where, self._last, self._armed = "starting", time.monotonic(), 0.0
        self._file: int | None = None
        self._end = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        if not self.seconds:
            yield
            return
        with open(self.path, "ab", buffering=0) as file:
            self._file = file.fileno()
            thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
            self.beat("starting")
            thread.start()
            try:
                yield
            finally:
                self._end.set()
                self._file = None
                faulthandler.cancel_dump_traceback_later()
                thread.join()
                if not os.fstat(file.fileno()).st_size:
                    self.path.unlink(missing_ok=True)

    def beat(self, where: str) -> None:
        self._where, self._last = where, time.monotonic()
        if self._file is not None and self._last - self._armed >= min(OFTEN, self.seconds / 10):
            self._armed = self._last
            faulthandler.dump_traceback_later(self.seconds, repeat=False, file=self._file, exit=False)

    def _watch(self) -> None:
        """Says it once for each time that the run stands still."""
        said = 0.0
        while not self._end.wait(min(10.0, self.seconds / 10)):
            last = self._last
            if time.monotonic() - last > self.seconds + OFTEN and last != said:
                said = last
                self.say(
                    f"note: nothing has moved for {self.seconds:g} s ({self._where}); where each thread stands is in "
                    f"{self.path}. A large model may need longer: watchdog=SECONDS, 0 is off."
                )
