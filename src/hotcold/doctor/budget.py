"""How much time a preflight may still take."""

from __future__ import annotations

import time

SECONDS = 60.0


class Budget:
    """Counts from `start`, a reading of `time.perf_counter`."""

    def __init__(self, seconds: float = SECONDS, start: float | None = None):
        self.seconds = seconds
        self.start = time.perf_counter() if start is None else start

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.start

    @property
    def left(self) -> float:
        return self.seconds - self.spent
