"""Notes on a run that goes nowhere, each with its evidence and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Metrics = dict[str, Any]
Rule = Callable[[Sequence[Metrics]], str | None]

PATIENCE = 3  # steps in a row before a note
LONGER = 5  # where single steps say little: rates that still rise, small batches
FIRST_STEPS = 10  # in which nobody expects anything of a critic


def notes(history: Sequence[Metrics]) -> list[str]:
    """What to say after the last of `history` (metrics of consecutive steps); each note appears once per spell."""
    return [text for rule in RULES if (text := rule(history))]


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


def _no_signal(history: Sequence[Metrics]) -> str | None:
    if not _just_begun(history, lambda m: _at_least(m, "frac_reward_zero_std", 1.0) and not _compares_prompts(m)):
        return None
    last = history[-1]
    truncated, distinct = last.get("completions/truncated") or 0.0, last.get("completions/distinct")
    if truncated > 0.5:
        cause = f"{truncated:.2f} of the responses hit the length limit: raise max_tokens"
    elif distinct is not None and distinct < 0.05:  # no row is computed then, so that there is no entropy to judge by
        cause = f"the responses to a prompt are all the same{_variety(last)}: if the reward is low, lower the rate"
    else:
        cause = "the scores within each group are all equal: try a larger group_size, easier prompts or a finer score"
    return (
        f"{PATIENCE} steps without any signal (zero-variance groups 1.00, truncated {truncated:.2f}, reward "
        f"{last.get('reward')}): nothing is learnt. {cause}."
    )


def _compares_prompts(metrics: Metrics) -> bool:
    """Scores that are equal for each prompt and differ between prompts teach an algorithm that has no groups.

    It is one, where rows are trained all the same: a critic or the mean of the batch is what they are compared with.
    """
    spread = [v for k, v in metrics.items() if k.startswith("rewards/") and k.endswith("/std")]
    return bool(metrics.get("rows/trained")) and any(spread)


def _nothing_trained(history: Sequence[Metrics]) -> str | None:
    """Without groups to compare (else the note above says it): every advantage is 0, or nothing was kept."""
    if not _just_begun(history, lambda m: m.get("rows/trained") == 0):
        return None
    last = history[-1]
    if last.get("frac_reward_zero_std") == 1.0:
        return None
    return (
        f"{PATIENCE} steps without a response to train on ({last.get('rows/dropped', 0)} dropped, "
        f"{last.get('rows/skipped', 0)} with advantage 0, reward {last.get('reward')}): nothing is learnt. "
        "Is any response kept? Try a lower threshold, more responses per prompt, or easier prompts."
    )


def _collapsed(history: Sequence[Metrics]) -> str | None:
    if not _just_begun(history, lambda m: _below(m, "entropy", 0.01)):
        return None
    return (
        f"the policy hardly varies any more (entropy {history[-1]['entropy']:.1e} nats per "
        f"token{_variety(history[-1])}): without different responses there is nothing to compare. "
        "If the reward is not high, lower the learning rate."
    )


def _variety(metrics: Metrics) -> str:
    names = {"distinct responses": "completions/distinct", "repeated text": "completions/repeated"}
    return "".join(f", {name} {metrics[key]:.2f}" for name, key in names.items() if metrics.get(key) is not None)


# ---- the critic


def _score_fades(history: Sequence[Metrics]) -> str | None:
    """(gamma lam)^(T - 1) of the score reaches the first token: 0.6 % at lam 0.95 and 100 tokens."""
    if not _just_begun(history, lambda m: _below(m, "gae/score_weight", 0.05)):
        return None
    last = history[-1]
    return (
        f"only {100 * last['gae/score_weight']:.2g} % of the score reaches the first token of a response "
        f"(gae/score_weight; mean length {_number(last, 'completions/mean_length')} tokens): the early tokens learn "
        "from the critic alone. Set lam=1 (and gamma=1), or a lam nearer to 1 for responses of this length."
    )


def _critic_explains_nothing(history: Sequence[Metrics]) -> str | None:
    def worse(m: Metrics) -> bool:
        # the policy's rate is 0 while the critic warms up
        started = m.get("step", 0) > FIRST_STEPS and m.get("learning_rate") != 0
        return started and _below(m, "value/explained_variance", 0.0)

    if not _just_begun(history, worse, LONGER):
        return None
    return (
        f"the critic is worse than a constant (explained variance {history[-1]['value/explained_variance']:.2f}, for "
        f"{LONGER} steps): as a baseline it adds noise. If value/loss jumps, lower critic.learning_rate; if it falls "
        "slowly, raise it, or give the critic a head start with critic.warmup. lam=1 trusts the critic least."
    )


# ---- the size of a step


def _never_clipped(history: Sequence[Metrics]) -> str | None:
    """Where ratios went far and were not clipped, the bounds are wide on purpose (cispo)."""

    def idle(m: Metrics) -> bool:
        several = (m.get("optimizer_steps") or 0) > 1  # the only step on a batch starts at ratio 1
        return several and m.get("clip_fraction") == 0 and _below(m, "ratio/max", 1.2) and _moves(m)

    if not _just_begun(history, idle, LONGER):
        return None
    return (
        f"clip fraction 0 for {LONGER} steps, no ratio above {history[-1]['ratio/max']:.4f}: the optimiser steps on a "
        "batch are so small that clipping never acts. If the reward rises too slowly, raise the learning rate or "
        "epochs_per_batch; else one step on a batch does the same for less."
    )


def _clipped_often(history: Sequence[Metrics]) -> str | None:
    if not _just_begun(history, lambda m: _above(m, "clip_fraction", 0.3)):
        return None
    last = history[-1]
    return (
        f"clip fraction {last['clip_fraction']:.2f} (approx_kl {_number(last, 'approx_kl')}) for {PATIENCE} steps: "
        "much of the batch has no gradient any more. Fewer epochs_per_batch or minibatches, a lower learning rate, or "
        "max_approx_kl, which ends the passes over a batch in time."
    )


def _norm_decides(history: Sequence[Metrics]) -> str | None:
    return _every_step_clipped(history, "grad_norm/clipped", "grad_norm", "max_grad_norm")


def _norm_decides_for_the_critic(history: Sequence[Metrics]) -> str | None:
    return _every_step_clipped(history, "value/grad_norm_clipped", "value/grad_norm", "critic.max_grad_norm")


def _every_step_clipped(history: Sequence[Metrics], share: str, norm: str, key: str) -> str | None:
    if not _just_begun(history, lambda m: _at_least(m, share, 1.0), LONGER):
        return None
    return (
        f"every optimiser step of the last {LONGER} steps was cut to {key} ({norm} {_number(history[-1], norm)}): "
        f"batches with a large gradient count no more than others. Raise {key} above the usual norm, or lower the rate."
    )


# ---- the leash


def _leash_too_long(history: Sequence[Metrics]) -> str | None:
    def far(m: Metrics) -> bool:
        return m.get("kl/target") is not None and _above(m, "kl/response", 2 * m["kl/target"])

    if not _just_begun(history, far):
        return None
    last = history[-1]
    return (
        f"the KL is above twice its target (kl/response {_number(last, 'kl/response')}, kl/target "
        f"{_number(last, 'kl/target')}, beta {_number(last, 'beta')}): beta does not rise fast enough. "
        "Start with a larger beta, set a shorter kl.horizon, or lower the learning rate."
    )


def _leash_of_no_length(history: Sequence[Metrics]) -> str | None:
    """The policy has been trained and has not moved from its reference at all (D07)."""

    def stuck(m: Metrics) -> bool:
        return _above(m, "beta", 0.0) and m.get("kl") == 0 and _moves(m)

    if not _just_begun(history, stuck, LONGER):
        return None
    return (
        f"the KL to the reference is exactly 0 after {LONGER} steps of training (beta {_number(history[-1], 'beta')}): "
        "either the reference follows the policy because they are one model, or the rate is so low that no "
        "log-probability changes. Look at reference and learning_rate."
    )


def _moves(metrics: Metrics) -> bool:
    """The policy was trained in this step: an update at a rate above 0."""
    return bool(metrics.get("learning_rate")) and bool(metrics.get("optimizer_steps"))


RULES: tuple[Rule, ...] = (
    _no_signal,
    _nothing_trained,
    _collapsed,
    _score_fades,
    _critic_explains_nothing,
    _never_clipped,
    _clipped_often,
    _norm_decides,
    _norm_decides_for_the_critic,
    _leash_too_long,
    _leash_of_no_length,
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


def _just_begun(history: Sequence[Metrics], bad: Callable[[Metrics], bool], patience: int = PATIENCE) -> bool:
    """Whether with the last step `bad` has held for `patience` steps in a row, and not for longer."""
    is_bad = [bad(m) for m in history[-patience - 1 :]]
    return len(is_bad) >= patience and all(is_bad[-patience:]) and not (len(is_bad) > patience and is_bad[0])
