"""What the reward says of responses whose worth is known: the answer itself, nothing, half of it, one word for ever."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hotcold.batch import Rollout
from hotcold.doctor.budget import Budget
from hotcold.doctor.report import Finding, note, ok, problem
from hotcold.errors import InputError
from hotcold.intake import EncodedPrompts
from hotcold.prompts import Prompt
from hotcold.rewards.base import Scorer
from hotcold.sampling.base import Request, Response
from hotcold.training.collect import scorable

GOLD = ("answer", "solution", "target", "response")  # columns, the first that a row has
ROWS = 3
WORD, TIMES = "the ", 64  # the repeated response


@dataclass(frozen=True)
class Probed:
    """Mean score by kind of response; a kind that nobody could score is None."""

    scores: dict[str, float | None]
    column: str | None  # where gold came from


def gold_of(prompt: Prompt) -> tuple[str, str] | None:
    """(column, text)"""
    for name in GOLD:
        value = prompt.columns.get(name)
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and str(value).strip():
            return name, str(value)
    return None


def responses_to(prompt: Prompt, sampled: str | None) -> dict[str, str]:
    """By kind. Without an answer in the data half of a sampled response stands for a truncated one."""
    gold = gold_of(prompt)
    whole = gold[1] if gold else sampled
    found = {"gold": gold[1]} if gold else {}
    found |= {"empty": "", "repeated": WORD * TIMES}
    half = (whole or "")[: len(whole or "") // 2]
    return {**found, "truncated": half} if half else found


def probe(
    train: EncodedPrompts, scorer: Scorer, tokenizer: Any, rollouts: Sequence[Rollout], budget: Budget
) -> Iterator[Finding]:
    sampled = {row.prompt_index: row.text for row in reversed(rollouts)}
    rows = [(prompt, ids) for prompt, ids in zip(train.prompts, train.ids, strict=True)]
    rows = sorted(rows, key=lambda row: row[0].index not in sampled)[:ROWS]
    wanted = {prompt.index: responses_to(prompt, sampled.get(prompt.index)) for prompt, _ in rows}
    scores: dict[str, float | None] = {}
    for kind in ("gold", "empty", "truncated", "repeated"):
        there = [(*row, wanted[row[0].index][kind]) for row in rows if kind in wanted[row[0].index]]
        if not there:
            continue
        if budget.left < 1:
            yield note("reward", f"no time is left for the score of {_a(kind)} response")
            continue
        try:
            scores[kind] = _mean_score(there, kind, scorer, tokenizer)
        except InputError as error:
            text = " ".join(str(error).split())
            yield problem("reward", f"it fails on {_a(kind)} response, which training will meet: {text}")
    golds = [found for prompt, _ in rows if (found := gold_of(prompt))]
    yield from judged(Probed(scores, golds[0][0] if golds else None), [r.score for r in rollouts])


def _mean_score(rows: Sequence[tuple[Any, ...]], kind: str, scorer: Scorer, tokenizer: Any) -> float | None:
    items = []
    for prompt, ids, text in rows:
        of_text = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        reason = "stop" if kind in ("gold", "empty") else "length"
        items.append(scorable(prompt, Request(ids, 0), Response(of_text, (), reason, text)))
    found = [score.with_steps for score in scorer.score(items)]
    known = [score for score in found if score is not None]
    return fmean(known) if known else None


# ---- what it means


def judged(probed: Probed, sampled: Sequence[float | None]) -> Iterator[Finding]:
    known = [score for score in sampled if score is not None]
    yield ok("reward", _shown(probed, known))
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
