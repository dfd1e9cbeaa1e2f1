"""Does a run learn? The rules of `training.health` over the whole run, and what only the whole record shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median, pstdev

from hotcold.batch import Rollout
from hotcold.doctor.record import Evaluated, Record
from hotcold.doctor.report import Finding, note, problem
from hotcold.training.console import near
from hotcold.training.health import LONGER, RULES, Rule, correlation, is_good, spells

LARGE_SHARE = 0.2  # of the steps: a state that has passed still counts as a fault
MAX_APPROX_KL = 0.1
FEW_NATS = 5.0  # of kl/response, below which a growing KL is no run-away
FAILED = 0.05  # share of the responses whose score failed
FP32_MISMATCH = 1e-3  # two orders of the same arithmetic differ by 1e-4 at most
UNMOVED = 1.001  # largest ratio of a policy that does not move
MANY = 32  # responses, from which on a correlation says something

# ---- are there scores?


def _failed_scores(record: Record) -> Iterator[Finding]:
    failed, num = record.total("rewards/failed"), _num_responses(record)
    late = record.total("rewards/timeouts")
    if failed:
        share = failed / num if num else 1.0
        cause = "most ran into the deadline" if late > failed / 2 else "the log has what was raised"
        text = f"{failed:.0f} scores failed ({share:.1%} of the responses): {cause}. Repair the reward"
        is_fault = share >= FAILED
        yield (problem if is_fault else note)("failed scores", f"{text}.", record.spans("rewards/failed"))
    elif late:
        text = f"{late:.0f} scores ran into the deadline and were had by another try. A faster reward saves the wait."
        yield note("slow scores", text, record.spans("rewards/timeouts"))


def _unscored(record: Record) -> Iterator[Finding]:
    num, unscored = _num_responses(record), record.total("rewards/unscored") - record.total("rewards/failed")
    if num and unscored > num / 2:
        yield problem(
            "unscored",
            f"{unscored / num:.0%} of the responses have no score (None): they are not trained on. Return a number "
            "where the response can be judged.",
            record.spans("rewards/unscored"),
        )


def _num_responses(record: Record) -> float:
    return sum(record.total(f"rows/{kind}") for kind in ("dropped", "skipped", "trained"))


# ---- the rules


def _of_rules(record: Record) -> Iterator[Finding]:
    for rule in RULES:
        if spans := spells(rule, record.rows):
            yield _of_rule(record, rule, spans)


def _of_rule(record: Record, rule: Rule, spans: Sequence[tuple[int, int]]) -> Finding:
    rows = record.rows
    first, last = spans[-1]
    num = sum(last - first + 1 for first, last in spans)
    lasts = last == len(rows) - 1
    is_excused = rule.is_fine_when_good and is_good(rows[last])
    is_fault = rule.is_fault and not is_excused and (lasts or num > LARGE_SHARE * len(rows))
    over = "" if lasts else f" It ended after step {rows[last]['step']}."
    steps = [(rows[first]["step"], rows[last]["step"]) for first, last in spans]
    text = rule.words(rows[: last + 1], last - first + 1) + over
    return (problem if is_fault else note)(rule.about, text, steps)


# ---- do the steps do anything?


def _nonfinite(record: Record) -> Iterator[Finding]:
    spans = record.spans("optimizer_steps/nonfinite")
    if spans:
        num = sum(last - first + 1 for first, last in spans)
        text = (
            f"{record.total('optimizer_steps/nonfinite'):.0f} optimiser steps were left out, since their loss or "
            "gradient was not finite: ratios or scores run away, or a loss of your own takes the log of 0. Lower "
            "learning_rate."
        )
        yield (problem if num >= 3 else note)("not finite", text, spans)


def _empty_steps(record: Record) -> Iterator[Finding]:
    """Of the steps in which the policy was to be trained, those that did not move it."""
    rows = [row for row in record.rows if row.get("optimizer_steps") is not None]
    idle = [row["step"] for row in rows if not row["optimizer_steps"] and not row.get("optimizer_steps/nonfinite")]
    if len(rows) >= LONGER and len(idle) > len(rows) / 2 and not is_good(record.rows[-1]):
        yield problem(
            "idle steps",
            f"{len(idle)} of {len(rows)} steps changed nothing, since no response had an advantage: larger "
            "group_size, easier prompts, or a score with partial credit.",
        )


def _rate(record: Record) -> Iterator[Finding]:
    rates = record.values("learning_rate")
    if len(rates) >= LONGER and not any(rates[-LONGER:]):
        yield problem("learning rate", "it is 0 in the last steps: nothing is learnt. Set learning_rate=1e-5 or so.")
    moved = [r["ratio/max"] for r in record.rows if (r.get("optimizer_steps") or 0) > 1 and r.get("learning_rate")]
    known = [ratio for ratio in moved if ratio is not None]
    if len(known) >= LONGER and max(known) < UNMOVED:
        yield problem(
            "learning rate",
            f"the policy hardly moves: in {len(known)} steps no probability changed by more than "
            f"{max(known) - 1:.1e} of itself (ratio/max; approx_kl {max(record.values('approx_kl'), default=0):.1e} "
            f"at most). Raise learning_rate from {rates[-1]:.1e} to ten times that.",
        )


def _dropped(record: Record) -> Iterator[Finding]:
    """Expert iteration and dapo drop on purpose; there the rule on steps that train nothing has a say."""
    num, dropped = _num_responses(record), record.total("rows/dropped")
    selects = str(record.keys.get("algorithm")) in ("expert_iteration", "dapo") or ".py" in str(
        record.keys.get("algorithm")
    )
    if num and dropped > num / 2 and not selects:
        yield note(
            "dropped rows",
            f"{dropped / num:.0%} of the responses take no part (rows/dropped): they have no score, or are cut off "
            "and truncated=mask leaves them out. Raise max_tokens, or look at the reward.",
        )


# ---- does the policy run away?


def _approx_kl(record: Record) -> Iterator[Finding]:
    values = record.values("approx_kl")
    if len(values) < LONGER or median(values[-LONGER:]) <= MAX_APPROX_KL:
        return
    parts = record.parts("approx_kl")
    rises = parts is not None and parts[1] < parts[2] < parts[3] and parts[3] > 2 * parts[1]
    course = f", and rises ({_course(parts)} by quarter of the run)" if rises and parts else ""
    yield problem(
        "approx_kl",
        f"it is {median(values[-LONGER:]):.2g} in the last {LONGER} steps{course}: the policy is far from the one that "
        "sampled before the batch is used up. Fewer epochs_per_batch or minibatches, a lower learning_rate, or "
        "max_approx_kl=0.05.",
    )


def _kl_runs_away(record: Record) -> Iterator[Finding]:
    kl, reward = record.parts("kl/response"), record.parts("reward")
    if kl is None or reward is None or not (kl[1] < kl[2] < kl[3] and kl[3] > 2 * kl[1] and kl[3] > FEW_NATS):
        return
    noise = pstdev(record.values("reward")[-len(record.rows) // 4 :])
    if reward[3] <= reward[1] + noise:
        yield problem(
            "KL run-away",
            f"the policy leaves its reference without a gain: kl/response {_course(kl)} nats by quarter of the run, "
            f"reward {_course(reward)}. A larger beta, a lower learning_rate, or kl.target={kl[1]:.2g}.",
        )


def _over_optimised(record: Record) -> Iterator[Finding]:
    """Only where the intervals of the best and the last evaluation lie apart."""
    if len(record.evaluations) < 2:
        return
    best, last = max(record.evaluations, key=lambda e: e.greedy), record.evaluations[-1]
    if best.low is None or last.high is None or last.high >= best.low:
        return
    then, now = _reward_near(record, best), _reward_near(record, last)
    rose = then is not None and now is not None and now > then
    fell = f"the held-out score fell from {best.greedy:.3g} (step {best.step}) to {last.greedy:.3g} (step {last.step})"
    if rose:
        yield problem(
            "over-optimisation",
            f"{fell} while the training reward rose from {then:.3g} to {now:.3g}: the score is gamed or the prompts "
            f"are learnt by heart. Read responses; {_back_to(record, best)}; then more prompts, or beta above 0.",
        )
    else:
        yield problem(
            "held-out score",
            f"{fell}: the updates do harm. Lower learning_rate; {_back_to(record, best)}.",
        )


def _reward_near(record: Record, evaluated: Evaluated) -> float | None:
    """Mean training reward of the steps before an evaluation; for the one before training, of the first steps."""
    end = max(evaluated.step, LONGER)
    rewards = [
        row["reward"] for row in record.rows if end - LONGER < row["step"] <= end and row.get("reward") is not None
    ]
    return fmean(rewards) if rewards else None


def _back_to(record: Record, best: Evaluated) -> str:
    folder = record.path / "checkpoints" / f"step_{best.step:06d}"
    return f"the model of step {best.step} is in {near(folder)}" if folder.is_dir() else "start again"


# ---- is it paid for length?


def _length_without_reward(record: Record) -> Iterator[Finding]:
    lengths, rewards = record.parts("completions/mean_length"), record.parts("reward")
    if lengths is None or rewards is None or lengths[3] < 1.5 * lengths[0]:
        return
    noise = pstdev(record.values("reward")[-len(record.rows) // 4 :])
    if rewards[3] <= rewards[0] + noise:
        yield note(
            "length without reward",
            f"responses grow and the reward does not: {_course(lengths)} tokens by quarter of the run, reward "
            f"{_course(rewards)}. A mean per response makes long wrong answers cheap: set weighting=mean_per_token "
            "or weighting=fixed_length, or truncated=penalty.",
        )


def _length_bias(record: Record) -> Iterator[Finding]:
    """Among responses to one prompt: do the longer ones score higher?"""
    pairs = list(_centred(record.rollouts))
    lengths = [len(row.response_ids) for row in record.rollouts]
    if len(pairs) < MANY or pstdev(lengths) < 0.1 * fmean(lengths):
        return
    found = correlation([length for length, _ in pairs], [score for _, score in pairs])
    if found > 0.6:
        yield note(
            "length bias",
            f"of the responses to one prompt the longer ones score higher (correlation {found:.2f} over {len(pairs)} "
            "responses of the last step): look whether the score pays for length.",
        )


def _centred(rollouts: Sequence[Rollout]) -> Iterator[tuple[float, float]]:
    """(length, score) of each response less the means of its group."""
    groups: dict[int, list[tuple[int, float]]] = {}
    for row in rollouts:
        if (score := row.score) is not None:
            groups.setdefault(row.group, []).append((len(row.response_ids), score))
    for rows in groups.values():
        length, score = fmean(n for n, _ in rows), fmean(s for _, s in rows)
        yield from ((n - length, s - score) for n, s in rows)


def _fp32_mismatch(record: Record) -> Iterator[Finding]:
    """In float32 the sampler and the trainer agree to 1e-4; the rule for every dtype is much wider."""
    means, largest = record.values("mismatch/mean_abs"), record.values("mismatch/max_abs")
    is_exact = record.keys.get("dtype") == "fp32" and not record.total("mismatch/weight_mean")
    if not is_exact or not largest or median(largest) <= FP32_MISMATCH or median(means or [0.0]) > 0.05:
        return
    replayed = str(record.keys.get("sampler", "")).startswith("replay:")
    cause = "the recorded rows are of another model or temperature" if replayed else "sampler and trainer disagree"
    yield (note if replayed else problem)(
        "sampler mismatch",
        f"sampled and recomputed log-probabilities differ by {median(largest):.1e} in a usual step, where float32 "
        f"gives 1e-4 at most: {cause}. Look at it with `hotcold verify RECIPE --on-model`, or set mismatch=truncate.",
    )


def _course(parts: Iterable[float] | None) -> str:
    return ", ".join(f"{value:.3g}" for value in parts or ())


LEARNING: tuple[Callable[[Record], Iterable[Finding]], ...] = (  # what matters most comes first
    _nonfinite,
    _failed_scores,
    _of_rules,
    _over_optimised,
    _approx_kl,
    _kl_runs_away,
    _rate,
    _empty_steps,
    _unscored,
    _fp32_mismatch,
    _length_without_reward,
    _length_bias,
    _dropped,
)
