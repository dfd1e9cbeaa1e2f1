"""A response that could not be scored: what may go wrong, what is then done, what is counted and said."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hotcold.errors import RewardError
from hotcold.rewards.scores import Part

Kind = Literal["raised", "no score", "timeout", "ended", "memory", "garbage"]
FEW = 8  # of fewer responses a large share may fail by chance: their failures are added up
COUNTS = ("failed", "timeouts", "retried", "workers_replaced")


@dataclass(frozen=True)
class Limits:
    """What a worker may take, and what follows when it fails."""

    workers: int = 1
    timeout: float = 60.0  # seconds for a response; for a batch function, for its call
    retries: int = 1
    on_error: float | Literal["drop", "stop"] = "drop"
    max_failures: float = 0.5  # share of a step's responses
    memory: float | None = None  # GB of each worker; None: half of what is free, shared out
    env: tuple[str, ...] = ()  # names of variables that a worker may see beside the harmless ones


@dataclass(frozen=True)
class Failure:
    """Of one response, by one function."""

    reward: str
    kind: Kind
    text: str  # as it is shown where it stops the run

    @property
    def cause(self) -> tuple[str, str, str]:
        """The same for failures at the same place in the user's code."""
        place = re.search(r"\(([^()]*)\)$", self.text.rstrip())
        return self.reward, self.kind, place[1] if place else ""


Answer = list[Part | Failure]  # one for each item of a call


@dataclass
class Ledger:
    """Failures over a run."""

    limits: Limits
    tell: Callable[[str], None] = lambda text: None
    counts: Counter[str] = field(default_factory=Counter)
    _noted: set[object] = field(default_factory=set)
    _row: int = 0  # responses without a score since the last one that got one

    def take_counts(self) -> dict[str, int]:
        found = {f"rewards/{name}": self.counts[name] for name in COUNTS}
        self.counts.clear()
        return found

    def tell_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self.tell(text)

    def settle(self, tries: Sequence[Sequence[Answer]]) -> list[list[Part]]:
        """By function, what counts of each response. `tries`: the answers of the first try and of each later one."""
        first, last = tries[0], tries[-1]
        for before, after in zip(first, last, strict=True):
            for one, final in zip(before, after, strict=True):
                if isinstance(one, Failure):
                    self._note(one, final)
        failed = failed_items(last)
        self.counts["failed"] += len(failed)
        if failed and self.limits.on_error == "stop":
            raise RewardError(next(iter(failed.values())).text)
        self.stop_if_too_many(failed, len(last[0]))
        self._count_row(failed, len(last[0]))
        return [[self._part(one) for one in answers] for answers in last]

    def stop_if_too_many(self, failed: dict[int, Failure], num: int) -> None:
        most = self.limits.max_failures
        if len(failed) > most * num and max(len(failed), self._row + len(failed)) > most * FEW:
            raise RewardError(
                f"{len(failed)} of {num} responses have no score, more than reward_max_failures={most:g}.\n"
                f"{most_frequent(failed.values()).text}"
            )

    def _count_row(self, failed: dict[int, Failure], num: int) -> None:
        scored = [number for number in range(num) if number not in failed]
        self._row = num - 1 - scored[-1] if scored else self._row + num

    def _part(self, one: Part | Failure) -> Part:
        if isinstance(one, Part):
            return one
        return Part(None if isinstance(self.limits.on_error, str) else float(self.limits.on_error))

    def _note(self, failure: Failure, final: Part | Failure) -> None:
        key = (failure.reward, failure.kind)
        if key in self._noted or (isinstance(final, Failure) and self.limits.on_error == "stop"):
            return
        self._noted.add(key)
        said = failure.text.replace(".\n", ": ").replace("\n", " ")
        self.tell(f"{said}; {self._follows(final)}; others of this kind are only counted")

    def _follows(self, final: Part | Failure) -> str:
        if isinstance(final, Part):
            return "tried again, it was scored"
        rule = self.limits.on_error
        return "the response has no score" if isinstance(rule, str) else f"the response is scored {rule:g}"


def failed_items(answers: Sequence[Answer]) -> dict[int, Failure]:
    """By item, the first of its failures."""
    found: dict[int, Failure] = {}
    for of_function in answers:
        for number, one in enumerate(of_function):
            if isinstance(one, Failure):
                found.setdefault(number, one)
    return found


def most_frequent(failures: Iterable[Failure]) -> Failure:
    known = list(failures)
    ((cause, _),) = Counter(failure.cause for failure in known).most_common(1)
    return next(failure for failure in known if failure.cause == cause)
