"""What a run has left in its folder, read without touching it: finished, killed or still going."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hotcold.batch import Rollout
from hotcold.checkpoint import newest_checkpoint
from hotcold.config.sources import read_recipe
from hotcold.errors import InputError
from hotcold.runs import RunFolder, writer_of
from hotcold.sampling.rollout_files import read_rollouts
from hotcold.training.health import Metrics

PARTS = 4  # of a run, whose medians are compared
LEAST = 16  # steps, below which there is no trend


@dataclass(frozen=True)
class Evaluated:
    step: int
    greedy: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Record:
    path: Path
    keys: dict[str, Any]  # of config.yaml, by dotted name
    rows: Sequence[Metrics]  # one a step
    evaluations: Sequence[Evaluated]  # that before the first step included
    rollouts: Sequence[Rollout]  # of the last step
    writer: str | None  # who is at work in the folder
    checkpoint: Path | None  # the newest whole one
    skipped: Sequence[tuple[str, str]]  # newer ones that are not whole, and why
    unreadable: Sequence[str]
    attempts: Sequence[dict[str, Any]] = ()  # each start of the run: versions and hardware

    @property
    def last_step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def steps(self) -> int | None:
        """As many as are asked for."""
        steps = self.keys.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def has_model(self) -> bool:
        return (self.path / "model").is_dir()

    @property
    def has_stopped_early(self) -> bool:
        """Where `stop_at` was reached."""
        stop_at = self.keys.get("stop_at")
        greedy = self.rows[-1].get("eval/greedy") if self.rows else None
        return isinstance(stop_at, (int, float)) and greedy is not None and greedy >= stop_at

    @property
    def is_finished(self) -> bool:
        return self.has_model and (self.steps is None or self.last_step >= self.steps or self.has_stopped_early)

    def values(self, key: str) -> list[float]:
        return [row[key] for row in self.rows if row.get(key) is not None]

    def total(self, key: str) -> float:
        return sum(self.values(key))

    def spans(self, key: str) -> list[tuple[int, int]]:
        """(first, last) step of each time that the metric was above 0."""
        found: list[tuple[int, int]] = []
        for row in self.rows:
            if not row.get(key):
                continue
            step = row["step"]
            if found and found[-1][1] == step - 1:
                found[-1] = (found[-1][0], step)
            else:
                found.append((step, step))
        return found

    def parts(self, key: str) -> list[float] | None:
        """The medians of the quarters of the run; None in a short run, or where a quarter has no value."""
        if len(self.rows) < LEAST:
            return None
        size = len(self.rows) / PARTS
        quarters = [self.rows[round(i * size) : round((i + 1) * size)] for i in range(PARTS)]
        known = [[row[key] for row in quarter if row.get(key) is not None] for quarter in quarters]
        return [median(values) for values in known] if all(known) else None


def is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file()


def read_record(path: Path) -> Record:
    unreadable: list[str] = []
    rows = _rows(path, unreadable)
    checkpoint, skipped = newest_checkpoint(path / "checkpoints")
    return Record(
        path=path,
        keys=_keys(path, unreadable),
        rows=rows,
        evaluations=_evaluations(path, rows, unreadable),
        rollouts=_last_rollouts(path, unreadable),
        writer=writer_of(path),
        checkpoint=checkpoint,
        skipped=skipped,
        unreadable=unreadable,
        attempts=_attempts(path, unreadable),
    )


def _rows(path: Path, unreadable: list[str]) -> list[Metrics]:
    try:
        rows = RunFolder.read_metrics(path)
    except (KeyError, TypeError):
        unreadable.append("metrics.jsonl has a line that is no step")
        return []
    except OSError as error:
        unreadable.append(f"metrics.jsonl cannot be read ({error.strerror})")
        return []
    return rows


def _keys(path: Path, unreadable: list[str]) -> dict[str, Any]:
    try:
        return {key: given.value for key, given in read_recipe(str(path / "config.yaml")).items()}
    except InputError as error:
        unreadable.append(str(error).splitlines()[0])
        return {}


def _evaluations(path: Path, rows: Sequence[Metrics], unreadable: list[str]) -> list[Evaluated]:
    first = path / "eval" / "step_000000.json"
    before: Metrics = {}
    try:
        before = json.loads(first.read_text(encoding="utf-8")) if first.is_file() else {}
    except (OSError, ValueError):
        unreadable.append(f"eval/{first.name} cannot be read")
    found = [before, *rows]
    return [
        Evaluated(row.get("step", 0), row["eval/greedy"], row.get("eval/greedy_low"), row.get("eval/greedy_high"))
        for row in found
        if isinstance(row, dict) and row.get("eval/greedy") is not None
    ]


def _attempts(path: Path, unreadable: list[str]) -> list[dict[str, Any]]:
    file = path / "env.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))["attempts"] if file.is_file() else []
    except (OSError, ValueError, KeyError, TypeError):
        unreadable.append("env.json cannot be read")
        return []


def _last_rollouts(path: Path, unreadable: list[str]) -> list[Rollout]:
    files = sorted((path / "rollouts").glob("step_*.parquet"))
    if not files:
        return []
    try:
        return [row for rows in read_rollouts(files[-1]).values() for row in rows]
    except InputError as error:
        unreadable.append(str(error).splitlines()[0])
        return []
