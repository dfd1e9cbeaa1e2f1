"""Notes on a run that goes nowhere, each with its evidence and what to do.

A rule names a state of a run and how long it must last. While a run goes on `notes` says it once, when it has lasted;
`spells` finds it in the whole record of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Metrics = dict[str, Any]
History = Sequence[Metrics]  # of consecutive steps

PATIENCE = 3  # steps in a row before a note
LONGER = 5  # where single steps say little: rates that still rise, small batches
FIRST_STEPS = 10  # in which nobody expects anything of a critic
WINDOW = 16  # steps over which a trend is looked for
SEEN = 21  # steps that a rule looks at: the longest window, and the longest patience beside it
GOOD = 0.9  # of 1 that every reward function gives: where few distinct responses are no fault
MASTERED = 0.98


@dataclass(frozen=True)
class Rule:
    """A state that is worth a word once it has lasted `patience` steps."""

    about: str
    holds: Callable[[History], bool]  # at the last step of a history
    words: Callable[[History, int], str]  # at the last step; the state has lasted so many steps
    patience: int = PATIENCE
    window: int = 1  # steps that one look takes in
    is_fault: bool = True  # something is to be done; else it is only good to know
    is_fine_when_good: bool = False  # no fault where nearly every score is the best there is


def notes(history: History) -> list[str]:
    """What to say after the last of `history` (metrics of consecutive steps); each note appears once per spell."""
    return [rule.words(history, rule.patience) for rule in RULES if _just_begun(rule, history)]


def spells(rule: Rule, history: History) -> list[tuple[int, int]]:
    """(first, last) row of each time that the state lasted long enough."""
    holds = [rule.holds(history[max(0, end - SEEN) : end]) for end in range(1, len(history) + 1)]
    found, start = [], 0
    for end in range(len(holds) + 1):
        if end == len(holds) or not holds[end]:
            if end - start >= rule.patience:
                found.append((max(0, start - rule.window + 1), end - 1))
            start = end + 1
    return found


def _just_begun(rule: Rule, history: History) -> bool:
    """Whether with the last step the state has lasted for `patience` steps in a row, and not for longer."""
    ends = range(len(history), max(len(history) - rule.patience - 1, 0), -1)
    holds = [rule.holds(history[:end]) for end in ends]  # newest first
    return len(holds) >= rule.patience and all(holds[: rule.patience]) and not any(holds[rule.patience :])


def is_good(metrics: Metrics, share: float = GOOD) -> bool:
    """Whether every reward function gives at least `share` of 1 on average, which most mean to be the best."""
    means = [v for k, v in metrics.items() if k.startswith("rewards/") and k.endswith("/mean") and v is not None]
    return bool(means) and min(means) >= share


def first_step_note(metrics: Metrics) -> str | None:
    """A loss near 0 at the first step looks like a fault and is none (E01)."""
    loss, norm = metrics.get("loss"), metrics.get("grad_norm")
    if loss is None or not norm or abs(loss) > 1e-3 or norm < 100 * abs(loss):
        return None
    return (
        f"the loss is {loss:.1e} by construction: advantages that are centred, in their group or over the step, cancel "
        f"in the value of the loss, not in its gradient (norm {norm:.2g}). Watch the reward, not the loss."
    )


# ---- nothing to learn from


def _is_without_signal(history: History) -> bool:
    """Where the prompts are mastered it is said otherwise, unless no step has ever taught anything."""
    last = history[-1]
    mastered = _is_saturated(history) and any(_below(m, "frac_reward_zero_std", 1.0) for m in history)
    return _at_least(last, "frac_reward_zero_std", 1.0) and not _compares_prompts(last) and not mastered


def _without_signal(history: History, num: int) -> str:
    last = history[-1]
    truncated, distinct = last.get("completions/truncated") or 0.0, last.get("completions/distinct")
    if truncated > 0.5:
        cause = f"{truncated:.2f} of the responses hit the length limit: raise max_tokens"
    elif distinct is not None and distinct < 0.05:  # no row is computed then, so that there is no entropy to judge by
        cause = f"the responses to a prompt are all the same{_variety(last)}: if the reward is low, lower the rate"
    else:
        cause = "the scores within each group are all equal: try a larger group_size, easier prompts or a finer score"
    return (
        f"{num} steps without any signal (zero-variance groups 1.00, truncated {truncated:.2f}, reward "
        f"{last.get('reward')}): nothing is learnt. {cause}."
    )


def _compares_prompts(metrics: Metrics) -> bool:
    """Scores that are equal for each prompt and differ between prompts teach an algorithm that has no groups.

    It is one, where rows are trained all the same: a critic or the mean of the batch is what they are compared with.
    """
    spread = [v for k, v in metrics.items() if k.startswith("rewards/") and k.endswith("/std")]
    return bool(metrics.get("rows/trained")) and any(spread)


def _has_little_signal(history: History) -> bool:
    last = history[-1]
    few = _above(last, "frac_reward_zero_std", 0.9) and last["frac_reward_zero_std"] < 1
    return few and not is_good(last) and not _compares_prompts(last)


def _little_signal(history: History, num: int) -> str:
    last = history[-1]
    return (
        f"{last['frac_reward_zero_std']:.2f} of the prompts have scores that are all equal (reward "
        f"{_number(last, 'reward')}, for {num} steps): a few prompts decide each step. Set a larger group_size, leave "
        "out prompts that are always or never solved, or give a finer score."
    )


def _trains_nothing(history: History) -> bool:
    """Without groups to compare (else it is said above): every advantage is 0, or nothing was kept."""
    return history[-1].get("rows/trained") == 0 and history[-1].get("frac_reward_zero_std") != 1.0


def _nothing_trained(history: History, num: int) -> str:
    last = history[-1]
    return (
        f"{num} steps without a response to train on ({last.get('rows/dropped', 0)} dropped, "
        f"{last.get('rows/skipped', 0)} with advantage 0, reward {last.get('reward')}): nothing is learnt. "
        "Is any response kept? Try a lower threshold, more responses per prompt, or easier prompts."
    )


def _is_saturated(history: History) -> bool:
    return is_good(history[-1], MASTERED) and _at_least(history[-1], "frac_reward_zero_std", 0.97)


def _saturated(history: History, num: int) -> str:
    last = history[-1]
    return (
        f"the reward is at its top and hardly varies (reward {_number(last, 'reward')}, zero-variance groups "
        f"{last['frac_reward_zero_std']:.2f}, for {num} steps): nothing is left to learn from these prompts. If "
        "eval/greedy is as high, end the run (stop_at); if not, the score is too easy to please: read the responses."
    )


# ---- what the responses are like


def _is_collapsed(history: History) -> bool:
    return _below(history[-1], "entropy", 0.01)


def _collapsed(history: History, num: int) -> str:
    return (
        f"the policy hardly varies any more (entropy {history[-1]['entropy']:.1e} nats per "
        f"token{_variety(history[-1])}): without different responses there is nothing to compare. "
        "If the reward is not high, lower the learning rate."
    )


def _variety(metrics: Metrics) -> str:
    names = {"distinct responses": "completions/distinct", "repeated text": "completions/repeated"}
    return "".join(f", {name} {metrics[key]:.2f}" for name, key in names.items() if metrics.get(key) is not None)


def _are_duplicates(history: History) -> bool:
    last = history[-1]
    unvaried = _below(last, "completions/distinct", 0.05) and _above(last, "frac_reward_zero_std", 0.8)
    return unvaried and last["frac_reward_zero_std"] < 1 and not is_good(last)


def _duplicates(history: History, num: int) -> str:
    last = history[-1]
    return (
        f"the responses to a prompt are nearly all the same (completions/distinct {last['completions/distinct']:.2f}, "
        f"zero-variance groups {last['frac_reward_zero_std']:.2f}, for {num} steps) at a reward of "
        f"{_number(last, 'reward')}: there is little to compare. Lower learning_rate and go back to an earlier "
        "checkpoint; from the start, set temperature nearer to 1."
    )


def _are_truncated(history: History) -> bool:
    """Where there is no signal at all it is said there."""
    return _above(history[-1], "completions/truncated", 0.3) and history[-1].get("frac_reward_zero_std") != 1.0


def _truncated(history: History, num: int) -> str:
    last = history[-1]
    return (
        f"{last['completions/truncated']:.2f} of the responses hit the length limit (longest "
        f"{_number(last, 'completions/max_length')} tokens, for {num} steps): they are scored as they stand, cut off, "
        "so the limit decides the score. Raise max_tokens; or set truncated=mask, which does not train on them."
    )


def _length_follows_reward(history: History) -> bool:
    trend = _trend(history)
    return trend is not None and trend.grows and trend.correlation > 0.8


def _length(history: History, num: int) -> str:
    trend = _trend(history)
    assert trend is not None
    return (
        f"responses grow with the reward: {trend.length_before:.0f} to {trend.length_after:.0f} tokens, reward "
        f"{trend.reward_before:.3g} to {trend.reward_after:.3g} in {WINDOW} steps (correlation "
        f"{trend.correlation:.2f}). If the task needs no more words, length itself is paid: read long responses, take "
        "length out of the score, or set truncated=penalty."
    )


@dataclass(frozen=True)
class Trend:
    """Length and reward over a window: the means of its first and last quarter."""

    length_before: float
    length_after: float
    reward_before: float
    reward_after: float
    correlation: float

    @property
    def grows(self) -> bool:
        return self.length_after >= 1.5 * self.length_before


def _trend(history: History) -> Trend | None:
    rows = history[-WINDOW:]
    pairs = [(m.get("completions/mean_length"), m.get("reward")) for m in rows]
    known = [(length, reward) for length, reward in pairs if length is not None and reward is not None]
    if len(known) < WINDOW:
        return None
    lengths, rewards = [length for length, _ in known], [reward for _, reward in known]
    part = WINDOW // 4
    before = fmean(lengths[:part]), fmean(rewards[:part])
    after = fmean(lengths[-part:]), fmean(rewards[-part:])
    return Trend(before[0], after[0], before[1], after[1], correlation(lengths, rewards))


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Pearson's; 0 where one side does not vary."""
    mean_x, mean_y = fmean(xs), fmean(ys)
    both = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    spread = math.fsum((x - mean_x) ** 2 for x in xs) * math.fsum((y - mean_y) ** 2 for y in ys)
    return both / math.sqrt(spread) if spread > 0 else 0.0


def _sampler_differs(history: History) -> bool:
    """Where a correction is on, somebody knows."""
    return _above(history[-1], "mismatch/mean_abs", 0.05) and "mismatch/weight_mean" not in history[-1]


def _mismatch(history: History, num: int) -> str:
    last = history[-1]
    return (
        f"the responses come from another distribution than the policy (log-probabilities differ by "
        f"{last['mismatch/mean_abs']:.2g} on average, at most {_number(last, 'mismatch/max_abs')}, for {num} steps): "
        "other parameters, another temperature, or another engine sampled them. Make them the same, or set "
        "mismatch=truncate."
    )


# ---- the critic


def _score_fades(history: History) -> bool:
    """(gamma lam)^(T - 1) of the score reaches the first token: 0.6 % at lam 0.95 and 100 tokens."""
    return _below(history[-1], "gae/score_weight", 0.05)


def _faded_score(history: History, num: int) -> str:
    last = history[-1]
    return (
        f"only {100 * last['gae/score_weight']:.2g} % of the score reaches the first token of a response "
        f"(gae/score_weight; mean length {_number(last, 'completions/mean_length')} tokens): the early tokens learn "
        "from the critic alone. Set lam=1 (and gamma=1), or a lam nearer to 1 for responses of this length."
    )


def _is_worse_than_a_constant(history: History) -> bool:
    last = history[-1]
    # the policy's rate is 0 while the critic warms up
    started = last.get("step", 0) > FIRST_STEPS and last.get("learning_rate") != 0
    return started and _below(last, "value/explained_variance", 0.0)


def _critic_explains_nothing(history: History, num: int) -> str:
    return (
        f"the critic is worse than a constant (explained variance {history[-1]['value/explained_variance']:.2f}, for "
        f"{num} steps): as a baseline it adds noise. If value/loss jumps, lower critic.learning_rate; if it falls "
        "slowly, raise it, or give the critic a head start with critic.warmup. lam=1 trusts the critic least."
    )


# ---- the size of a step


def _is_idle(history: History) -> bool:
    """Where ratios went far and were not clipped, the bounds are wide on purpose (cispo)."""
    last = history[-1]
    several = (last.get("optimizer_steps") or 0) > 1  # the only step on a batch starts at ratio 1
    return several and last.get("clip_fraction") == 0 and _below(last, "ratio/max", 1.2) and _moves(last)


def _never_clipped(history: History, num: int) -> str:
    return (
        f"clip fraction 0 for {num} steps, no ratio above {history[-1]['ratio/max']:.4f}: the optimiser steps on a "
        "batch are so small that clipping never acts. If the reward rises too slowly, raise the learning rate or "
        "epochs_per_batch; else one step on a batch does the same for less."
    )


def _is_clipped_often(history: History) -> bool:
    return _above(history[-1], "clip_fraction", 0.3)


def _clipped_often(history: History, num: int) -> str:
    last = history[-1]
    return (
        f"clip fraction {last['clip_fraction']:.2f} (approx_kl {_number(last, 'approx_kl')}) for {num} steps: "
        "much of the batch has no gradient any more. Fewer epochs_per_batch or minibatches, a lower learning rate, or "
        "max_approx_kl, which ends the passes over a batch in time."
    )


def _norm_decides(about: str, share: str, norm: str, key: str) -> Rule:
    def words(history: History, num: int) -> str:
        return (
            f"every optimiser step of the last {num} steps was cut to {key} ({norm} {_number(history[-1], norm)}): "
            f"batches with a large gradient count no more than others. Raise {key} above the usual norm, or lower the "
            "rate."
        )

    return Rule(about, lambda history: _at_least(history[-1], share, 1.0), words, LONGER, is_fault=False)


# ---- the leash


def _is_far(history: History) -> bool:
    last = history[-1]
    return last.get("kl/target") is not None and _above(last, "kl/response", 2 * last["kl/target"])


def _leash_too_long(history: History, num: int) -> str:
    last = history[-1]
    return (
        f"the KL is above twice its target (kl/response {_number(last, 'kl/response')}, kl/target "
        f"{_number(last, 'kl/target')}, beta {_number(last, 'beta')}): beta does not rise fast enough. "
        "Start with a larger beta, set a shorter kl.horizon, or lower the learning rate."
    )


def _is_stuck(history: History) -> bool:
    """The policy has been trained and has not moved from its reference at all (D07)."""
    last = history[-1]
    return _above(last, "beta", 0.0) and last.get("kl") == 0 and _moves(last)


def _leash_of_no_length(history: History, num: int) -> str:
    return (
        f"the KL to the reference is exactly 0 after {num} steps of training (beta {_number(history[-1], 'beta')}): "
        "either the reference follows the policy because they are one model, or the rate is so low that no "
        "log-probability changes. Look at reference and learning_rate."
    )


def _moves(metrics: Metrics) -> bool:
    """The policy was trained in this step: an update at a rate above 0."""
    return bool(metrics.get("learning_rate")) and bool(metrics.get("optimizer_steps"))


RULES: tuple[Rule, ...] = (  # what matters most comes first
    Rule("no signal", _is_without_signal, _without_signal),
    Rule("nothing trained", _trains_nothing, _nothing_trained),
    Rule("entropy", _is_collapsed, _collapsed, is_fine_when_good=True),
    Rule("sampler mismatch", _sampler_differs, _mismatch),
    Rule("duplicates", _are_duplicates, _duplicates, LONGER),
    Rule("little signal", _has_little_signal, _little_signal, LONGER),
    Rule("truncation", _are_truncated, _truncated, LONGER),
    Rule("KL above target", _is_far, _leash_too_long),
    Rule("KL of 0", _is_stuck, _leash_of_no_length, LONGER),
    Rule("score and first token", _score_fades, _faded_score),
    Rule("critic", _is_worse_than_a_constant, _critic_explains_nothing, LONGER, is_fine_when_good=True),
    Rule("clipping too often", _is_clipped_often, _clipped_often),
    Rule("clipping never", _is_idle, _never_clipped, LONGER, is_fault=False),
    Rule("saturation", _is_saturated, _saturated, LONGER, is_fault=False),
    Rule("length", _length_follows_reward, _length, window=WINDOW, is_fault=False),
    _norm_decides("gradient norm", "grad_norm/clipped", "grad_norm", "max_grad_norm"),
    _norm_decides("critic's gradient norm", "value/grad_norm_clipped", "value/grad_norm", "critic.max_grad_norm"),
)

# ---- null is neither above nor below anything


def _below(metrics: Metrics, key: str, limit: float) -> bool:
    return metrics.get(key) is not None and metrics[key] < limit


def _above(metrics: Metrics, key: str, limit: float) -> bool:
    return metrics.get(key) is not None and metrics[key] > limit


def _at_least(metrics: Metrics, key: str, limit: float) -> bool:
    return metrics.get(key) is not None and metrics[key] >= limit


def _number(metrics: Metrics, key: str) -> str:
    return "-" if metrics.get(key) is None else f"{metrics[key]:.3g}"
