"""The report as text for a terminal, and as markdown for the documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from hotcold.lab.case import ABOUT_WORLDS
from hotcold.verify.report import HEADER, HEADER_EXPLAINED, Part, Report, cells

MULTIPLE = 'a positive multiple of the target, as of every algorithm without expects = "elsewhere"'
MOST = (58, 44)  # characters of the first two columns; a longer cell pushes the rest


def as_text(report: Report, is_long: bool) -> str:
    """One line for each row; those that differ again at the end, with what was stated."""
    lines: list[str] = []
    for part in report.parts:
        lines += [f"{part.title}: {part.about}", *_lines(part), ""]
    lines += [*_refused(report), *_checks(report, is_long), *_differing(report)]
    lines += [*(f"note: {note}" for note in report.notes), *HEADER_EXPLAINED, ""]
    lines += [f"world {name}: {about}" for name, about in ABOUT_WORLDS.items() if is_long and _in_use(report, name)]
    return "\n".join([*lines, report.summary, f"{report.seconds:.0f} s"])


def _in_use(report: Report, world: str) -> bool:
    return any(certificate.case.world == world for certificate in report.certificates)


def _lines(part: Part) -> Iterator[str]:
    rows = [cells(certificate) for certificate in part.certificates]
    width = [min(most, max(len(row[i]) for row in [HEADER, *rows])) for i, most in enumerate(MOST)]
    yield _line("", HEADER, width)
    for certificate, row in zip(part.certificates, rows, strict=True):
        yield _line("" if certificate.agrees else "!", row, width)


def _line(mark: str, row: Sequence[str], width: Sequence[int]) -> str:
    first, second, verdict, bias, variance, best = row
    return f"{mark:<2}{first:<{width[0]}}  {second:<{width[1]}}  {bias:>6} {variance:>8} {best:>8}  {verdict}"


def _refused(report: Report) -> Iterator[str]:
    if not report.refusals:
        return
    yield "refused: it cannot be built, and what it would expect"
    for refusal in report.refusals:
        yield f"{'' if refusal.holds else '!':<2}{refusal.label}"
        yield f"    {refusal.reason}"
        if refusal.anyway is not None:
            yield f"    an algorithm that does it anyway {refusal.anyway.verdict}"
    yield ""


def _checks(report: Report, is_long: bool) -> Iterator[str]:
    if not report.checks:
        return
    yield "checks"
    for check in report.checks:
        mark = {True: "ok", False: "FAILED", None: "not asked"}[check.passed]
        yield f"  {mark:<10}{check.name}: {check.evidence}"
        if check.passed is False:
            yield from textwrap.wrap(check.what_to_do, 100, initial_indent=" " * 12, subsequent_indent=" " * 12)
    yield ""


def _differing(report: Report) -> Iterator[str]:
    if not report.differing:
        return
    yield "differs from what is stated"
    for certificate in report.differing:
        yield f"! {certificate.case.label}; {certificate.case.where}"
        stated = MULTIPLE if certificate.predicted == "multiple" else certificate.predicted
        yield f"    stated:   {stated}"
        off = certificate.off_stated
        sums = "" if off is None or off <= 1e-9 else f"; the stated sums differ by {off:.2g}"
        yield f"    measured: {certificate.verdict}{sums}"
    yield ""


# ---- markdown

BEGIN, END = "<!-- begin: hotcold verify --markdown -->", "<!-- end -->"


def as_markdown(report: Report) -> str:
    """The tables alone; numbers to few digits, so that the same code always writes the same text."""
    blocks = []
    for part in report.parts:
        rows = [cells(certificate) for certificate in part.certificates]
        blocks.append("\n".join([f"### {part.title}: {part.about}", "", *_markdown_table(HEADER, rows)]))
    if report.refusals:
        shown = [(r.label, r.reason, "-" if r.anyway is None else r.anyway.verdict) for r in report.refusals]
        header = ("refused", "reason", "one that does it anyway")
        blocks.append("\n".join(["### Refused", "", *_markdown_table(header, shown)]))
    return "\n\n".join([*blocks, report.summary])


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def with_tables(document: str, tables: str) -> str:
    """The document with the part between the two marks replaced; at its end where there are none."""
    head, begin, rest = document.partition(BEGIN)
    if not begin:
        return f"{document.rstrip()}\n\n{BEGIN}\n\n{tables}\n\n{END}\n"
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n\n{tables}\n\n{END}{tail}"


def tables_of(document: str) -> str:
    return document.partition(BEGIN)[2].partition(END)[0].strip()
