"""What the reward says of responses whose worth is known: the answer itself, nothing, half of it, one word for ever."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hotcold.doctor.budget import Budget
from hotcold.doctor.report import Finding, note, ok, problem
from hotcold.errors import InputError
from hotcold.intake import EncodedPrompts
from hotcold.prompts import Prompt
from hotcold.rewards.base import Scorable, Score, Scorer
from hotcold.sampling.base import Request, Response
from hotcold.training.collect import scorable

GOLD = ("answer", "solution", "target", "response")  # columns, the first that a row has
KINDS = ("gold", "empty", "truncated", "repeated")
ROWS = 3
SLOW = 3.0  # seconds of a kind of response, above which one response of it must do
SHARE = 0.15  # of what is left of the budget, that one score may take
WORD, TIMES = "the ", 64  # the repeated response


@dataclass(frozen=True)
class Probed:
    """Mean score by kind of response; None where no response of the kind got one."""

    scores: dict[str, float | None]
    column: str | None = None  # where gold came from
    per_score: float = 0.0  # seconds of one
    findings: tuple[Finding, ...] = ()


def gold_of(prompt: Prompt) -> tuple[str, str] | None:
    """(column, text)"""
    for name in GOLD:
        value = prompt.columns.get(name)
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and str(value).strip():
            return name, str(value)
    return None


def responses_to(prompt: Prompt) -> dict[str, str]:
    """By kind."""
    found = {"empty": "", "repeated": WORD * TIMES}
    if (gold := gold_of(prompt)) is None:
        return found
    half = gold[1][: len(gold[1]) // 2]
    return {"gold": gold[1], **found, **({"truncated": half} if half else {})}


def probe(train: EncodedPrompts, scorer: Scorer, tokenizer: Any, budget: Budget) -> Probed:
    rows = [(prompt, ids, responses_to(prompt)) for prompt, ids in zip(train.prompts[:ROWS], train.ids, strict=False)]
    golds = [found for prompt, _, _ in rows if (found := gold_of(prompt))]
    scores: dict[str, float | None] = {}
    findings: list[Finding] = []
    per_score = 0.0
    for kind in KINDS:
        items = [_item(kind, prompt, ids, texts[kind], tokenizer) for prompt, ids, texts in rows if kind in texts]
        items = items if per_score * len(items) < SLOW else items[:1]
        if not items or per_score > SHARE * budget.left:
            findings += [note("reward", f"too slow to be asked of {_a(kind)} response too")] if items else []
            continue
        mark = budget.spent
        try:
            scores[kind] = _mean(scorer.score(items))
        except InputError as error:
            text = " ".join(str(error).split())
            findings.append(problem("reward", f"it fails on {_a(kind)} response, which training can meet: {text}"))
        per_score = max(per_score, (budget.spent - mark) / len(items))
    return Probed(scores, golds[0][0] if golds else None, per_score, tuple(findings))


def _item(kind: str, prompt: Prompt, ids: tuple[int, ...], text: str, tokenizer: Any) -> Scorable:
    of_text = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    reason = "stop" if kind in ("gold", "empty") else "length"
    return scorable(prompt, Request(ids, 0), Response(of_text, (), reason, text))


def _mean(scores: Sequence[Score]) -> float | None:
    known = [total for score in scores if (total := score.with_steps) is not None]
    return fmean(known) if known else None


# ---- what it means


def judged(probed: Probed, sampled: Sequence[float | None]) -> Iterator[Finding]:
    known = [score for score in sampled if score is not None]
    if probed.scores:
        yield ok("reward", _shown(probed, known))
    yield from probed.findings
    if probed.column is None:
        yield note("reward", f"the rows have no {', '.join(GOLD[:-1])} or {GOLD[-1]}, so there is no gold response")
        yield from _against_sampled(probed.scores, known)
    else:
        yield from _against_gold(probed.scores, known)


def _shown(probed: Probed, sampled: Sequence[float]) -> str:
    parts = [f"{kind} {_number(score)}" for kind, score in probed.scores.items()]
    if sampled:
        parts.append(f"sampled {min(sampled):.3g} to {max(sampled):.3g}, mean {fmean(sampled):.3g}")
    origin = f" (gold: column {probed.column}; mean of at most {ROWS} rows)" if probed.column else ""
    return ", ".join(parts) + origin


def _against_gold(scores: Mapping[str, float | None], sampled: Sequence[float]) -> Iterator[Finding]:
    gold = scores.get("gold")
    if gold is None:
        if "gold" in scores:
            yield problem("reward", "it gives the answer of the data no score (None): is it in the form it expects?")
        return
    as_good = [kind for kind in ("empty", "repeated") if (score := scores.get(kind)) is not None and score >= gold]
    is_top = bool(sampled) and max(sampled) > gold
    if len(as_good) == 2 and is_top:
        yield note(
            "reward",
            f"gold scores no more than an empty response ({gold:.3g}), and sampled ones reach {max(sampled):.3g}: the "
            "answer in the data is not in the form that the reward wants, so this says little",
        )
    elif as_good:
        text = " and ".join(f"{_a(kind)} response ({_number(scores[kind])})" for kind in as_good)
        yield problem(
            "reward",
            f"{text} scores as well as gold ({gold:.3g}): either the answer in the data is not in the form that the "
            "reward wants, or saying nothing pays. Print what the reward compares.",
        )
    half = scores.get("truncated")
    if half is not None and half >= gold and not as_good:
        yield note("reward", f"half of the gold response scores as well as all of it ({half:.3g})")


def _against_sampled(scores: Mapping[str, float | None], sampled: Sequence[float]) -> Iterator[Finding]:
    if not sampled:
        return
    for kind in ("empty", "repeated"):
        score = scores.get(kind)
        if score is not None and score >= max(sampled) and (score > min(sampled) or len(sampled) == 1):
            yield problem(
                "reward",
                f"{_a(kind)} response scores {score:.3g}, as much as the best of {len(sampled)} sampled ones: the "
                "policy will learn that. Give it less.",
            )


def _a(kind: str) -> str:
    return f"an {kind}" if kind == "empty" else f"a {kind}"


def _number(score: float | None) -> str:
    return "no score" if score is None else f"{score:.3g}"
