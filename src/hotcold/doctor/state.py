"""Is a run whole, is it at work, and what does it spend its time on?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from statistics import median

from hotcold.doctor.record import Record
from hotcold.doctor.report import Finding, note, problem
from hotcold.training.console import duration, near
from hotcold.training.health import LONGER

BITS = ("python", "torch", "transformers", "cpu", "cpu_capability", "threads", "gpu")  # what decides the last bits
LONG_SILENCE = 10  # times the usual step
PARTS = ("sample", "score", "update", "eval", "save")
WORDS = {"sample": "sampling", "score": "scoring", "update": "update", "eval": "evaluations", "save": "saving"}

# ---- is it whole?


def _unreadable(record: Record) -> Iterator[Finding]:
    for text in record.unreadable:
        yield problem("record", f"{text}: what it would have told is not looked at")


def _state(record: Record) -> Iterator[Finding]:
    if record.writer:
        yield from _silence(record)
    elif not record.is_finished:
        yield problem("unfinished", f"{_where_it_stopped(record)}. {_how_to_go_on(record)}")


def _silence(record: Record) -> Iterator[Finding]:
    """Nothing has been written for much longer than a step takes."""
    steps = record.values("time/step")
    if not steps:
        return
    file = record.path / "metrics.jsonl"
    silent, usual = time.time() - file.stat().st_mtime, median(steps)
    if silent > max(60.0, LONG_SILENCE * max(steps)):
        yield problem(
            "silence",
            f"{record.writer} is at work, but step {record.last_step} was written {duration(silent)} ago and a step "
            f"takes {duration(usual)}: a score or the machine may be stuck. See the end of log.txt.",
        )


def _where_it_stopped(record: Record) -> str:
    if not record.rows:
        return "no step is recorded"
    if record.steps is not None and record.last_step >= record.steps:
        return f"all {record.last_step} steps are done, but the model was not written"
    return f"stopped after step {record.last_step}" + ("" if record.steps is None else f" of {record.steps}")


def _how_to_go_on(record: Record) -> str:
    command = f"hotcold train resume={near(record.path)}"
    if record.checkpoint is None:
        return (
            f"{'No checkpoint is whole' if record.skipped else 'There is no checkpoint'}, so it begins again: {command}"
        )
    return f"It continues from step {_number_of(record.checkpoint.name)}, the newest whole checkpoint: {command}"


def _number_of(name: str) -> int:
    return int(name.rpartition("_")[2])


def _broken_checkpoints(record: Record) -> Iterator[Finding]:
    for name, reason in record.skipped:
        older = "none older is whole" if record.checkpoint is None else f"{record.checkpoint.name} is used instead"
        yield problem("checkpoint", f"{name} is not whole ({reason}): {older}. Test the disk; delete {name}.")


# ---- the machine


def _other_machine(record: Record) -> Iterator[Finding]:
    """A run that went on elsewhere rounds differently from there on."""
    for before, after in pairwise(record.attempts):
        changed = [
            f"{key} {before.get(key)} then {after.get(key)}" for key in BITS if before.get(key) != after.get(key)
        ]
        if changed:
            yield note(
                "other machine",
                f"start {after.get('attempt')} was on other ground than the one before ({', '.join(changed)}): its "
                "numbers differ in their last bits from those of a run that never stopped.",
            )


def _memory(record: Record) -> Iterator[Finding]:
    spans = record.spans("out_of_memory")
    if spans:
        tokens = record.values("tokens_per_microbatch")
        yield (problem if len(spans) >= 3 else note)(
            "out of memory",
            f"an update did not fit {record.total('out_of_memory'):.0f} times and was computed again in smaller parts: "
            f"the result is the same, the time was lost. Set tokens_per_microbatch={tokens[-1]:.0f}, as it is now, or "
            "max_memory; if it comes again, something else takes the memory.",
            spans,
        )


def _slow_parts(record: Record) -> Iterator[Finding]:
    seconds = seconds_of(record)
    whole = sum(seconds.values())
    if len(record.rows) < LONGER or not whole:
        return
    limits = {
        "score": (0.5, "make the reward async, or score all responses in one call"),
        "eval": (0.4, "set a larger eval.every or fewer eval.prompts"),
        "save": (0.1, "set a larger save_every"),
    }
    for part, (limit, remedy) in limits.items():
        share = seconds.get(part, 0.0) / whole
        if share > limit:
            yield note("time", f"{WORDS[part]} takes {share:.0%} of the time ({duration(seconds[part])}): {remedy}.")


def seconds_of(record: Record) -> dict[str, float]:
    """By part. `time/step` holds evaluations, not saving."""
    found = {part: record.total(f"time/{part}") for part in PARTS}
    rest = record.total("time/step") - sum(found[part] for part in PARTS if part != "save")
    return {**found, "rest": max(0.0, rest)}


def times(record: Record) -> str:
    seconds = seconds_of(record)
    whole = sum(seconds.values())
    if not whole:
        return ""
    shares = sorted(((s / whole, WORDS.get(part, "the rest")) for part, s in seconds.items()), reverse=True)
    shown = ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.01)
    return f"time: {duration(whole)} in {len(record.rows)} steps, of which {shown}"


WHOLE: tuple[Callable[[Record], Iterable[Finding]], ...] = (_unreadable, _broken_checkpoints)
MACHINE: tuple[Callable[[Record], Iterable[Finding]], ...] = (_other_machine, _memory, _slow_parts, _state)
