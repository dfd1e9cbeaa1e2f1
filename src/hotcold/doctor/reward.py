"""`hotcold doctor REWARD data=FILE`: what a reward says of responses whose worth is known. No model is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from hotcold.assemble import make_scorer
from hotcold.config.schema import EvalConfig, decided
from hotcold.doctor.budget import Budget
from hotcold.doctor.probe import TIMES, WORD, gold_of
from hotcold.doctor.report import Finding, Report, note, ok, problem, worst_first
from hotcold.errors import InputError
from hotcold.intake import check_columns, load_prompts
from hotcold.prompts import Prompt
from hotcold.rewards.base import Scorable
from hotcold.rewards.scorer import FunctionScorer

ROWS = 20
TIMEOUT = 10.0  # seconds that a score may take here
SLOW = 1.0  # seconds of one score, above which it is worth a word
GOOD = ("gold", "in a sentence", "boxed", "in tags", "after ####")  # of these the best counts
WORTHLESS = {
    "empty": "an empty response",
    "blank": "a blank",
    "prompt": "the prompt, repeated",
    "repeated": f"{WORD.strip()!r} {TIMES} times",
    "wrong": "another row's answer",
    "every answer": "the answers of all rows at once",
}
CUT = ("truncated", "repeated")  # kinds that stand for a response at the length limit

Say = Callable[[str], None]


@dataclass(frozen=True)
class Kind:
    """What was said of one kind of response: a score, or None, for each row that has such a response."""

    scores: dict[int, float | None]
    seconds: float = 0.0
    failed: int = 0
    changed: tuple[int, ...] = ()  # rows that got another score the second time
    error: str | None = None
    is_costly: bool = False  # one ran into its deadline, or ended its process

    def with_more(self, other: Kind) -> Kind:
        return Kind(
            {**self.scores, **other.scores},
            max(self.seconds, other.seconds) if other.is_costly else other.seconds,
            self.failed + (0 if other.error else other.failed),
            self.changed + other.changed,
            other.error,
            other.is_costly,
        )

    @property
    def known(self) -> list[float]:
        return [score for score in self.scores.values() if score is not None]

    @property
    def mean(self) -> float | None:
        return fmean(self.known) if self.known else None


@dataclass
class Heard:
    """What the scorer tells while it works."""

    failures: list[str] = field(default_factory=list)

    def tell(self, text: str) -> None:
        self.failures.append(" ".join(text.split()))


def examine(config: EvalConfig, say: Say, budget: Budget) -> Report:
    prompts = load_prompts(config.data)
    scorer = make_scorer(_patient(config))
    assert scorer is not None
    try:
        check_columns(scorer, prompts, config.data.path)
        heard = Heard()
        scorer.listen(heard.tell, lambda text: None)
        rows = prompts[:ROWS]
        kinds, findings = _asked(scorer, rows, say, budget)
    finally:
        scorer.close()
    findings += [*judged(kinds, rows), *_failures(kinds, heard), *_ids(scorer)]
    return _report(config, worst_first(findings), kinds, len(rows), budget)


def _patient(config: EvalConfig) -> EvalConfig:
    """Each failure is counted and none ends it; nobody waits for one long."""
    why = "doctor"
    timeout = min(config.reward_timeout, TIMEOUT)
    return decided(
        config,
        {"reward_retries": (0, why), "reward_max_failures": (1.0, why), "reward_timeout": (timeout, why)},
    )


def responses_to(rows: Sequence[Prompt]) -> dict[str, dict[int, str]]:
    """By kind, for each row that can have it."""
    golds = {row.index: found[1] for row in rows if (found := gold_of(row))}
    kinds: dict[str, dict[int, str]] = {
        "gold": golds,
        "in a sentence": {n: f"The answer is {gold}." for n, gold in golds.items()},
        "boxed": {n: f"The answer is \\boxed{{{gold}}}" for n, gold in golds.items()},
        "in tags": {n: f"<think>I see.</think><answer>{gold}</answer>" for n, gold in golds.items()},
        "after ####": {n: f"I see.\n#### {gold}" for n, gold in golds.items() if "####" not in gold},
        "empty": {row.index: "" for row in rows},
        "blank": {row.index: " \n" for row in rows},
        "truncated": {n: gold[: len(gold) // 2] for n, gold in golds.items() if len(gold) > 1},
        "repeated": {row.index: WORD * TIMES for row in rows},
        "prompt": {row.index: _last_text(row) for row in rows},
        "wrong": {n: other for n, gold in golds.items() if (other := _other(gold, golds)) is not None},
    }
    several = list(dict.fromkeys(golds.values()))
    if len(several) > 2:
        kinds["every answer"] = {n: " ".join(["I do not know.", *several, *several[:1]]) for n in golds}
    return {kind: texts for kind, texts in kinds.items() if texts}


def _other(gold: str, golds: Mapping[int, str]) -> str | None:
    """The first answer that differs, also where the one holds the other ("1" and "12")."""
    others = [other for other in golds.values() if other != gold]
    return next((other for other in others if gold not in other and other not in gold), next(iter(others), None))


def _last_text(row: Prompt) -> str:
    if isinstance(row.content, str):
        return row.content
    return str(row.content[-1].get("content", ""))


# ---- asking


def _asked(
    scorer: FunctionScorer, rows: Sequence[Prompt], say: Say, budget: Budget
) -> tuple[dict[str, Kind], list[Finding]]:
    kinds: dict[str, Kind] = {}
    findings: list[Finding] = []
    per_score = 0.0
    say(f"scoring responses of known worth to {len(rows)} rows, each twice")
    for kind, texts in responses_to(rows).items():
        num = _num_that_fit(len(texts), per_score, budget)
        if num == 0:
            findings.append(note("time", f"too slow to be asked of {kind!r} responses too"))
            continue
        items = [_item(kind, row, texts[row.index]) for row in rows if row.index in texts][:num]
        kinds[kind] = _kind(scorer, items, budget)
        per_score = max(per_score, kinds[kind].seconds)
    return kinds, findings


def _num_that_fit(num: int, per_score: float, budget: Budget) -> int:
    """A kind may take a quarter of what is left, both times together."""
    return num if not per_score else min(num, int(budget.left / 4 / (2 * per_score)))


def _item(kind: str, row: Prompt, text: str) -> Scorable:
    return Scorable(row.content, text, (), tuple(text.encode()), row.columns, kind in CUT, row.index)


def _kind(scorer: FunctionScorer, items: Sequence[Scorable], budget: Budget) -> Kind:
    """The first response alone: where that one costs a deadline or a process, it speaks for the others."""
    alone = _both(scorer, items[:1], budget)
    rest = items[1:]
    if alone.is_costly or alone.error is not None or not rest:
        return alone
    num = _num_that_fit(len(rest), alone.seconds, budget)
    return alone.with_more(_both(scorer, rest[:num], budget)) if num else alone


def _both(scorer: FunctionScorer, items: Sequence[Scorable], budget: Budget) -> Kind:
    start = budget.spent
    first, error = _scores(scorer, items)
    seconds = (budget.spent - start) / len(items)
    counts = scorer.take_counts()
    is_costly = bool(counts.get("rewards/timeouts") or counts.get("rewards/workers_replaced"))
    failed = sum(count for name, count in counts.items() if name.endswith("/failed"))
    if error is not None or first is None:
        return Kind({}, seconds, len(items), error=error)
    again, _ = (first, None) if is_costly else _scores(scorer, items)
    scorer.take_counts()
    changed = tuple(item.row for item, a, b in zip(items, first, again or first, strict=True) if a != b)
    return Kind(dict(zip((i.row for i in items), first, strict=True)), seconds, failed, changed, None, is_costly)


def _scores(scorer: FunctionScorer, items: Sequence[Scorable]) -> tuple[list[float | None] | None, str | None]:
    try:
        return [score.with_steps for score in scorer.score(items)], None
    except InputError as error:
        return None, " ".join(str(error).split())


# ---- what it means


def judged(kinds: Mapping[str, Kind], rows: Sequence[Prompt]) -> Iterator[Finding]:
    yield ok("scores", _shown(kinds))
    yield from _changed(kinds)
    yield from _slow(kinds)
    golds = [found for row in rows if (found := gold_of(row))]
    if not golds:
        yield note("gold", "the rows have no answer, solution, target or response: nothing can be compared with it")
        return
    best = best_by_row(kinds)
    values = {score for kind in kinds.values() for score in kind.known}
    if best and len(values) == 1:
        yield problem("constant", f"every response scores {values.pop():.3g}, right or wrong: nothing would be learnt.")
        return
    yield from _gold(kinds, golds[0][0], best)
    for kind, what in WORTHLESS.items():
        yield from _exploit(kind, what, kinds, best)
    yield from _of_half(kinds, best)


def best_by_row(kinds: Mapping[str, Kind]) -> dict[int, float]:
    """What the right answer earns, in the form that this reward likes best."""
    found: dict[int, float] = {}
    for kind in GOOD:
        for row, score in kinds[kind].scores.items() if kind in kinds else ():
            if score is not None:
                found[row] = max(score, found.get(row, score))
    return found


def _gold(kinds: Mapping[str, Kind], column: str, best: Mapping[int, float]) -> Iterator[Finding]:
    if not best:
        if not any(kinds[kind].error or kinds[kind].failed for kind in GOOD if kind in kinds):
            yield problem("gold", f"the answer (column {column}) gets no score (None) in any form.")
        return
    low = min((score for kind in WORTHLESS if kind in kinds for score in kinds[kind].known), default=None)
    dead = [row for row, score in best.items() if low is not None and score <= low]
    if dead:
        yield problem(
            "gold",
            f"in {len(dead)} of {len(best)} rows (row {dead[0]} ...) the right answer (column {column}) scores no more "
            f"than a worthless response in any of the forms {', '.join(GOOD)}: is that column what the reward "
            "compares with, and in its form?",
        )
    liked = [kind for kind in GOOD if kind in kinds and _takes(kinds[kind], best)]
    if liked and len(liked) < sum(kind in kinds for kind in GOOD):
        yield note("form", f"the right answer has its full score only in the forms: {', '.join(liked)}")


def _takes(kind: Kind, best: Mapping[int, float]) -> bool:
    return bool(kind.known) and all(score == best.get(row) for row, score in kind.scores.items())


def _exploit(kind: str, what: str, kinds: Mapping[str, Kind], best: Mapping[int, float]) -> Iterator[Finding]:
    scores = kinds[kind].scores if kind in kinds else {}
    known = {row: score for row, score in scores.items() if score is not None and row in best}
    as_good = [row for row, score in known.items() if score >= best[row]]
    if as_good:
        row = as_good[0]
        yield problem(
            "exploitable",
            f"{what} scores as well as the right answer in {len(as_good)} of {len(known)} rows (row {row}: "
            f"{known[row]:.3g}, right {best[row]:.3g}): the policy would learn that.",
        )


def _of_half(kinds: Mapping[str, Kind], best: Mapping[int, float]) -> Iterator[Finding]:
    scores = kinds["truncated"].scores if "truncated" in kinds else {}
    as_good = [row for row, score in scores.items() if score is not None and row in best and score >= best[row]]
    if as_good:
        text = f"half of the answer scores as well as all of it in {len(as_good)} of {len(scores)} rows"
        yield note("truncated", text)


def _changed(kinds: Mapping[str, Kind]) -> Iterator[Finding]:
    changed = [(kind, row) for kind, found in kinds.items() for row in found.changed]
    if changed:
        kind, row = changed[0]
        yield problem(
            "determinism",
            f"{len(changed)} of {sum(len(k.scores) for k in kinds.values())} responses got another score the second "
            f"time (first: row {row}, {kind}): the same run would not give the same model.",
        )
    else:
        yield ok("determinism", "the same scores the second time")


def _slow(kinds: Mapping[str, Kind]) -> Iterator[Finding]:
    slowest, found = max(kinds.items(), key=lambda pair: pair[1].seconds)
    mean = fmean(kind.seconds for kind in kinds.values())
    text = f"{_brief(mean)} a score (slowest: {slowest}, {_brief(found.seconds)})"
    yield (note if found.seconds > SLOW else ok)("time", text)


def _failures(kinds: Mapping[str, Kind], heard: Heard) -> Iterator[Finding]:
    for kind, found in kinds.items():
        if found.error is not None:
            yield problem("error", f"it stops the run on {kind!r} responses: {found.error}")
    failed = {kind: found.failed for kind, found in kinds.items() if found.failed and found.error is None}
    if failed:
        shown = ", ".join(f"{num} of {len(kinds[kind].scores)} {kind}" for kind, num in failed.items())
        said = "; ".join(text for text in heard.failures if "of the data" in text)
        yield problem("error", f"it fails on responses that training can meet ({shown}): {said}")
    silent = {
        kind: num
        for kind, found in kinds.items()
        if (num := sum(s is None for s in found.scores.values()) - found.failed) > 0 and kind not in failed
    }
    if silent:
        shown = ", ".join(f"{num} of {len(kinds[kind].scores)} {kind}" for kind, num in silent.items())
        yield note("no score", f"None for {shown}: such responses are not trained on, so they are not discouraged")


def _ids(scorer: FunctionScorer) -> Iterator[Finding]:
    asks = [f.name for f in scorer.functions if {"completion_ids", "prompt_ids"} & {*f.needs.ours}]
    if asks:
        yield note("token ids", f"{', '.join(asks)} can read token ids; without a model they are the bytes of the text")


# ---- as a report


def _shown(kinds: Mapping[str, Kind]) -> str:
    return ", ".join(f"{kind} {'no score' if k.mean is None else f'{k.mean:.3g}'}" for kind, k in kinds.items())


def _brief(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


def _report(
    config: EvalConfig, findings: Sequence[Finding], kinds: Mapping[str, Kind], num: int, budget: Budget
) -> Report:
    counts = {level: sum(f.level == level for f in findings) for level in ("problem", "note")}
    words = ", ".join(f"{n} {level}{'' if n == 1 else 's'}" for level, n in counts.items())
    subject = (
        f"{', '.join(map(str, config.reward))} on {num} rows of {config.data.path}: {words} ({budget.spent:.1f} s)"
    )
    details: dict[str, Any] = {
        "rows": num,
        "scores": {kind: found.mean for kind, found in kinds.items()},
        "failed": {kind: found.failed for kind, found in kinds.items() if found.failed},
        "seconds_per_score": fmean(found.seconds for found in kinds.values()),
        "seconds": budget.spent,
    }
    return Report(subject, tuple(findings), details=tuple(details.items()))
