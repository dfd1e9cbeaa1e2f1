"""What the doctor found: a line each, what needs action first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PROBLEM, NOTE, OK = LEVELS = "problem", "note", "ok"


@dataclass(frozen=True)
class Finding:
    """Evidence, likely cause and next step are one text."""

    level: str
    about: str
    text: str
    steps: tuple[tuple[int, int], ...] = ()  # (first, last) of each time that it was so

    @property
    def line(self) -> str:
        return f"[{self.level}] {self.about}: {' '.join(f'{self.when}{self.text}'.split())}"

    @property
    def when(self) -> str:
        return f"{in_steps(self.steps)}: " if self.steps else ""


@dataclass(frozen=True)
class Report:
    subject: str
    findings: tuple[Finding, ...]
    facts: tuple[str, ...] = ()  # said before the findings
    details: tuple[tuple[str, Any], ...] = ()  # numbers for --json

    @property
    def exit_code(self) -> int:
        return int(any(finding.level == PROBLEM for finding in self.findings))

    def as_text(self) -> str:
        return "\n".join([self.subject, *self.facts, *(finding.line for finding in self.findings)])

    def as_json(self) -> dict[str, Any]:
        findings = [
            {"level": f.level, "about": f.about, "steps": [list(span) for span in f.steps], "text": f.text}
            for f in self.findings
        ]
        return {"subject": self.subject, "facts": list(self.facts), "findings": findings, **dict(self.details)}


def problem(about: str, text: str, steps: Sequence[tuple[int, int]] = ()) -> Finding:
    return Finding(PROBLEM, about, text, tuple(steps))


def note(about: str, text: str, steps: Sequence[tuple[int, int]] = ()) -> Finding:
    return Finding(NOTE, about, text, tuple(steps))


def ok(about: str, text: str) -> Finding:
    return Finding(OK, about, text)


def worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Among equals the order stays: it is that of the checks, in which what matters most comes first."""
    return tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level)))


def in_steps(spans: Sequence[tuple[int, int]]) -> str:
    """'step 3', 'steps 3 to 9', 'steps 3 to 9 and 20 to 24', '35 of the steps 3 to 90'"""
    if len(spans) > 3:
        return f"{sum(last - first + 1 for first, last in spans)} of the steps {spans[0][0]} to {spans[-1][1]}"
    words = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    is_one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"step{'' if is_one else 's'} {' and '.join(words)}"
