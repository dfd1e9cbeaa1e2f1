"""The report as one HTML file: no address outside it, readable in the dark and on a phone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from hotcold.lab.case import ABOUT_WORLDS
from hotcold.verify.report import HEADER, HEADER_EXPLAINED, Report, cells

STYLE = """
:root { color-scheme: light dark; --line: #8884; --bad: #c0392b; --good: #27803b; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a7a; --good: #7fd493; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 75rem; }
table { border-collapse: collapse; width: 100%; margin-bottom: 2rem; font-size: 0.92rem; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--line); }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.bad td:first-child { border-left: 4px solid var(--bad); }
.unbiased { color: var(--good); } .bad .verdict { color: var(--bad); }
small, .about { opacity: 0.75; }
input { font: inherit; width: 100%; box-sizing: border-box; padding: 0.4rem; margin: 0.5rem 0 1rem; }
@media (max-width: 45rem) {
  thead { display: none; } tr { display: block; padding: 0.5rem 0; border-bottom: 1px solid var(--line); }
  td { display: block; border: 0; padding: 0.1rem 0.4rem; overflow-wrap: anywhere; } td.number { text-align: left; }
  td[data-name]::before { content: attr(data-name) ": "; opacity: 0.7; }
}
"""
SCRIPT = """
document.getElementById("filter").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(/\\s+/);
  for (const row of document.querySelectorAll("tbody tr"))
    row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
});
"""


def as_html(report: Report) -> str:
    body = "\n".join(_body(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>hotcold verify</title>\n<style>{STYLE}</style></head>\n<body>\n{body}\n"
        f"<script>{SCRIPT}</script>\n</body></html>\n"
    )


def _body(report: Report) -> Iterator[str]:
    yield f"<h1>hotcold verify</h1>\n<p><b>{escape(report.summary)}</b></p>"
    yield "".join(f"<p>note: {escape(note)}</p>" for note in report.notes)
    yield f"<p class=about>{'<br>'.join(escape(line) for line in HEADER_EXPLAINED)}</p>"
    worlds = "".join(f"<li>{escape(name)}: {escape(about)}</li>" for name, about in ABOUT_WORLDS.items())
    yield f"<details><summary>The worlds</summary><ul>{worlds}</ul></details>"
    yield '<input id="filter" type="search" placeholder="show rows with these words" aria-label="filter">'
    for check in report.checks:
        mark = {True: "ok", False: "failed", None: "not asked"}[check.passed]
        todo = f"<br><small>{escape(check.what_to_do)}</small>" if check.passed is False else ""
        yield f"<p><b>{mark}</b> {escape(check.name)}: {escape(check.evidence)}{todo}</p>"
    for part in report.parts:
        yield f"<h2>{escape(part.title)}</h2><p class=about>{escape(part.about)}</p>"
        rows = [(cells(c), c.agrees, "" if c.agrees else f"stated: {c.predicted}") for c in part.certificates]
        yield _table(HEADER, rows)
    if report.refusals:
        yield "<h2>Refused</h2><p class=about>It cannot be built; what an algorithm that does it anyway expects.</p>"
        shown = [
            ((r.label, r.reason, "-" if r.anyway is None else r.anyway.verdict), r.holds, "") for r in report.refusals
        ]
        yield _table(("refused", "reason", "anyway"), shown)


def _table(header: Sequence[str], rows: Sequence[tuple[Sequence[str], bool, str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "\n".join(_row(header, cells, good, more) for cells, good, more in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def _row(header: Sequence[str], cells: Sequence[str], good: bool, more: str) -> str:
    out = []
    for i, (name, cell) in enumerate(zip(header, cells, strict=True)):
        kind = "number" if i > 2 else "verdict" if i == 2 else ""
        kind += " unbiased" if i == 2 and cell.startswith("unbiased") else ""
        extra = f"<br><b>{escape(more)}</b>" if i == 2 and more else ""
        named = f' data-name="{escape(name)}"' if i > 2 else ""
        out.append(f'<td class="{kind}"{named}>{escape(cell)}{extra}</td>')
    return f"<tr{'' if good else ' class=bad'}>{''.join(out)}</tr>"
