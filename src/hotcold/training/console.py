"""What a run shows: a live line on a terminal, one line a step elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.status import Status


class Console:
    """Lines go to `echo` and to the run's log; the live line goes to standard error, if that is a terminal."""

    def __init__(
        self,
        echo: Callable[[str], None] | None,
        log: Callable[[str], None] = lambda _: None,
        beat: Callable[[str], None] = lambda _: None,
    ):
        self._echo = echo
        self._log = log
        self._beat = beat  # told of everything that moves
        self._rich = RichConsole(stderr=True, highlight=False)
        self._live = echo is not None and self._rich.is_terminal
        self._status: Status | None = None

    def say(self, text: str) -> None:
        self.quiet_stage()
        self._beat(text[:60])
        if self._echo is not None:
            self._echo(text)
        self._log(text)

    def warn(self, text: str) -> None:
        self.say(f"note: {text}")

    def stage(self, name: str, done: int, of: int) -> None:
        """A stage of the current step; shown only on a terminal."""
        text = f"{name} {done}/{of}" if of else name
        self._beat(text)
        if not self._live:
            return
        if self._status is None:
            self._status = self._rich.status("", spinner="dots")
            self._status.start()
        self._status.update(text)

    def quiet_stage(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def step(self, metrics: dict[str, Any], steps: int, seconds_left: float | None) -> None:
        self.say(step_line(metrics, steps, seconds_left))


def step_line(metrics: dict[str, Any], steps: int, seconds_left: float | None) -> str:
    """One line: step, held-out result, score, what the update did, time. What this algorithm does not have is left out.

    "-" is a quantity that it has and that this step did not yield.
    """
    trains_policy = metrics.get("optimizer_steps", 0) is not None  # else the critic alone is warming up
    parts = [f"step {metrics['step']}/{steps}"]
    if metrics.get("eval/greedy") is not None:
        parts.append(f"held-out {metrics['eval/greedy']:.3f}")
    if metrics.get("eval/loss") is not None:
        parts.append(f"held-out loss {metrics['eval/loss']:.4f}")
    parts += [f"{name} {_short(metrics.get(key))}" for name, key in _shown(metrics, trains_policy)]
    parts.append(f"{metrics['time/step']:.1f} s")
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def _shown(metrics: dict[str, Any], trains_policy: bool) -> list[tuple[str, str]]:
    """(name, key) of what matters for the algorithm at hand: scores, groups, the update, leash, critic, length."""
    has_critic = "value/loss" in metrics
    shown = []
    if metrics.get("reward") is not None or metrics.get("rewards/unscored"):
        shown.append(("reward", "reward"))
    if metrics.get("frac_reward_zero_std") is not None and not has_critic:
        shown.append(("no-signal groups", "frac_reward_zero_std"))
    if trains_policy:
        shown += [("loss", "loss"), ("grad norm", "grad_norm"), ("entropy", "entropy")]
    if "kl" in metrics:
        shown.append(("kl", "kl"))
    if has_critic:
        shown.append(("explained variance", "value/explained_variance"))
    if not trains_policy:
        shown.append(("value loss", "value/loss"))
    return [*shown, ("length", "completions/mean_length")]


def near(path: str | Path) -> str:
    """A path as one would type it: relative where it lies below the current folder."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
