"""`hotcold doctor RUN`: what ails a run, whether it is finished, killed or still going."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hotcold.doctor.learning import LEARNING
from hotcold.doctor.record import Record, read_record
from hotcold.doctor.report import Report, worst_first
from hotcold.doctor.state import MACHINE, WHOLE, seconds_of, times
from hotcold.training.console import near

CHECKS = (*WHOLE, *LEARNING, *MACHINE)  # what matters most comes first
LOOKED_AT = (
    "signal in the groups, truncation, variety of the responses and entropy, length, saturation, held-out against "
    "training reward, KL and approx_kl, clipping, gradient norms, skipped and non-finite steps, dropped rows, critic, "
    "sampler mismatch, failed scores, memory, time, checkpoints"
)


def examine(path: Path) -> Report:
    record = read_record(path)
    findings = worst_first([finding for check in CHECKS for finding in check(record)])
    facts = [line for line in (times(record),) if line]
    if not findings:
        facts.append(f"nothing to report; looked at: {LOOKED_AT}")
    return Report(_subject(record), findings, tuple(facts), tuple(_details(record).items()))


def _subject(record: Record) -> str:
    of = "" if record.steps is None else f" of {record.steps}"
    state = "still going" if record.writer else "finished" if record.is_finished else "not finished"
    names = [str(record.keys[key]) for key in ("algorithm", "model") if record.keys.get(key)]
    return f"{near(record.path)}: {' on '.join(names) or 'a run'}, {record.last_step}{of} steps, {state}"


def _details(record: Record) -> dict[str, Any]:
    return {
        "run": str(record.path),
        "steps": {"done": record.last_step, "wanted": record.steps},
        "finished": record.is_finished,
        "running": record.writer is not None,
        "seconds": {part: value for part, value in seconds_of(record).items() if math.isfinite(value)},
        "looked_at": LOOKED_AT.split(", "),
    }
