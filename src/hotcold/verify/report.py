"""What a call of `hotcold verify` found, as plain rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotcold.lab.certificate import Certificate
from hotcold.lab.checks import Check
from hotcold.lab.refused import Refusal


@dataclass(frozen=True)
class Part:
    """Certificates under one heading."""

    title: str
    about: str
    certificates: tuple[Certificate, ...]


@dataclass(frozen=True)
class Report:
    parts: tuple[Part, ...]
    refusals: tuple[Refusal, ...] = ()
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def certificates(self) -> list[Certificate]:
        return [certificate for part in self.parts for certificate in part.certificates]

    @property
    def differing(self) -> list[Certificate]:
        return [certificate for certificate in self.certificates if not certificate.agrees]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]

    @property
    def is_good(self) -> bool:
        return not self.differing and not self.failed and all(refusal.holds for refusal in self.refusals)

    @property
    def summary(self) -> str:
        """One line."""
        kinds = Counter(kind(certificate) for certificate in self.certificates)
        found = ", ".join(f"{count} {name}" for name, count in kinds.most_common())
        words = [f"{len(self.certificates)} rows: {found}."]
        if self.refusals:
            words.append(f"{len(self.refusals)} refused.")
        words.append(f"{len(self.differing)} differ from what is stated.")
        if self.checks:
            asked = [check for check in self.checks if check.passed is not None]
            words.append(f"{len(asked) - len(self.failed)} of {len(asked)} checks passed.")
        return " ".join(words)

    def as_json(self) -> dict[str, Any]:
        rows = [{"part": part.title, **c.as_json()} for part in self.parts for c in part.certificates]
        return {
            "good": self.is_good,
            "summary": self.summary,
            "seconds": round(self.seconds, 2),
            "rows": rows,
            "refused": [refusal.as_json() for refusal in self.refusals],
            "checks": [check.as_json() for check in self.checks],
            "notes": list(self.notes),
        }


def kind(certificate: Certificate) -> str:
    return certificate.verdict.split(":")[0].split(" up to ")[0] + (
        " up to a factor" if " up to " in certificate.verdict else ""
    )


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def cells(certificate: Certificate) -> tuple[str, ...]:
    """A row in words: algorithm, world, verdict, bias, the two variances."""
    return (
        certificate.case.label,
        certificate.case.where,
        certificate.verdict,
        number(certificate.bias, 3),
        number(certificate.noise),
        number(certificate.noise_to_best),
    )


HEADER = ("algorithm", "world", "expected gradient", "bias", "variance", "to best")
HEADER_EXPLAINED: Sequence[str] = (
    "expected gradient: exact, summed over every group of responses, through the code that trains; against grad J,",
    "  with a KL grad J - beta grad KL(pi || ref), with an entropy bonus also that of each visited state's entropy",
    "bias: |E g - target| / |target|",
    "variance: of the update, if its mean were as long as the target; 1 is REINFORCE without a baseline from as many",
    "  responses. to best: the same, 1 is REINFORCE with the best constant baseline",
)
