"""What is scored, and what a score is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

LARGEST = 3.4028234663852886e38  # float32's: scores are trained on as float32


@dataclass(frozen=True)
class Scorable:
    """One response to score."""

    prompt: str | list[dict[str, Any]]  # as in the data: text, or messages
    completion: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    columns: dict[str, Any]  # every other column of the prompt's row
    truncated: bool = False
    row: int = -1  # row of the data file, for messages


@dataclass(frozen=True)
class Score:
    total: float | None  # weighted sum; None: no score
    parts: dict[str, float | None] = field(default_factory=dict)  # by reward function
    steps: tuple[tuple[int, float], ...] = ()  # intermediate rewards: (index of the response token, value)

    @property
    def with_steps(self) -> float | None:
        """The whole score of the response: total and intermediate rewards. This is what is reported and compared."""
        return None if self.total is None else math.fsum([self.total, *(value for _, value in self.steps)])


class Scorer(Protocol):
    names: tuple[str, ...]  # of the reward functions, unique

    def score(self, items: Sequence[Scorable]) -> list[Score]:
        """One score for each item, in order; raises RewardError naming function, row and value."""

    def take_counts(self) -> dict[str, int]:
        """What went wrong since the last call, by the name of a metric."""


@runtime_checkable
class Service(Protocol):
    """A reward of ours that takes the items themselves, and tells the run what it does."""

    columns: tuple[str, ...]  # that it needs

    def __call__(self, items: Sequence[Scorable]) -> list[float | None]: ...

    def listen(self, tell: Callable[[str], None], beat: Callable[[str], None], folder: Path | None) -> None:
        """Called once, before anything is scored. `folder`: of the run, if it has one."""

    def take_counts(self) -> dict[str, int]: ...

    def close(self) -> None: ...


IN_WORKERS = frozenset({"reasoning_gym", "math"})  # rewards with a name that may hang or take all memory


def runs_in_worker(reward: object) -> bool:
    """Code in a file may hang, exit or take all memory, and so gets a process of its own."""
    if not isinstance(reward, str):
        return False
    if named := re.fullmatch(r"(\w+)(\?.*)?", reward, re.DOTALL):
        return named[1] in IN_WORKERS
    return is_own(reward)


def runs_programs(reward: object) -> bool:
    """Whether what a model wrote is run, for which there is a sandbox."""
    return isinstance(reward, str) and reward.partition("?")[0] == "code"


def is_own(reward: object) -> bool:
    """Whether a function of the user's is meant, not a name of ours or an address."""
    if not isinstance(reward, str):
        return True
    if re.fullmatch(r"\w+(\?.*)?|https?://.*", reward, re.DOTALL):
        return False
    return reward.endswith(".py") or ".py:" in reward
