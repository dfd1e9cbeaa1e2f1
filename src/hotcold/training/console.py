"""What a run shows: a live line on a terminal, one line a step elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console as RichConsole
from rich.status import Status


class Console:
    """Prints to standard output, and keeps the same lines in the run's log through `log`."""

    def __init__(self, log: Callable[[str], None] = lambda _: None, quiet: bool = False):
        self._rich = RichConsole(highlight=False, quiet=quiet, soft_wrap=True)
        self._log = log
        self._status: Status | None = None

    def say(self, text: str) -> None:
        self._rich.print(text, markup=False)
        self._log(text)

    def warn(self, text: str) -> None:
        self._rich.print(f"note: {text}", markup=False, style="yellow")
        self._log(f"note: {text}")

    def stage(self, name: str, done: int, of: int) -> None:
        """A stage of the current step; shown only on a terminal."""
        if not self._rich.is_terminal:
            return
        if self._status is None:
            self._status = self._rich.status("", spinner="dots")
            self._status.start()
        self._status.update(f"{name} {done}/{of}" if of else name)

    def quiet_stage(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def step(self, metrics: dict[str, Any], steps: int, seconds_left: float | None) -> None:
        self.quiet_stage()
        self.say(step_line(metrics, steps, seconds_left))


def step_line(metrics: dict[str, Any], steps: int, seconds_left: float | None) -> str:
    """One line: step, reward, spread, gradient norm, length, time."""
    parts = [
        f"step {metrics['step']}/{steps}",
        f"reward {_short(metrics.get('reward'))}",
        f"no-signal groups {_short(metrics.get('frac_reward_zero_std'))}",
        f"grad norm {_short(metrics.get('grad_norm'))}",
        f"entropy {_short(metrics.get('entropy'))}",
        f"length {_short(metrics.get('completions/mean_length'))}",
        f"{metrics['time/step']:.1f} s",
    ]
    if metrics.get("eval/greedy") is not None:
        parts.insert(1, f"held-out {metrics['eval/greedy']:.3f}")
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
