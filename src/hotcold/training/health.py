"""Notes on a run that goes nowhere, each with its evidence and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PATIENCE = 3  # steps in a row before a note


def notes(history: Sequence[dict[str, Any]]) -> list[str]:
    """What to say after the last of `history` (metrics of consecutive steps); each note appears once per spell."""
    return [text for rule in (_no_signal, _nothing_trained, _collapsed) if (text := rule(history))]


def first_step_note(metrics: dict[str, Any]) -> str | None:
    """A loss near 0 at the first step looks like a fault and is none (E01)."""
    loss, norm = metrics.get("loss"), metrics.get("grad_norm")
    if loss is None or not norm or abs(loss) > 1e-3 or norm < 100 * abs(loss):
        return None
    return (
        f"the loss is {loss:.1e} by construction: advantages that are centred in their group cancel in the value of "
        f"the loss, not in its gradient (norm {norm:.2g}). Watch the reward, not the loss."
    )


def _no_signal(history: Sequence[dict[str, Any]]) -> str | None:
    share = _spell(history, "frac_reward_zero_std", lambda v: v >= 1.0)
    if share is None:
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


def _nothing_trained(history: Sequence[dict[str, Any]]) -> str | None:
    """Without groups to compare (else the note above says it): every advantage is 0, or nothing was kept."""
    if _spell(history, "rows/trained", lambda v: v == 0) is None:
        return None
    last = history[-1]
    if last.get("frac_reward_zero_std") == 1.0:
        return None
    return (
        f"{PATIENCE} steps without a response to train on ({last.get('rows/dropped', 0)} dropped, "
        f"{last.get('rows/skipped', 0)} with advantage 0, reward {last.get('reward')}): nothing is learnt. "
        "Is any response kept? Try a lower threshold, more responses per prompt, or easier prompts."
    )


def _collapsed(history: Sequence[dict[str, Any]]) -> str | None:
    entropy = _spell(history, "entropy", lambda v: v < 0.01)
    if entropy is None:
        return None
    return (
        f"the policy hardly varies any more (entropy {entropy:.1e} nats per token{_variety(history[-1])}): without "
        "different responses there is nothing to compare. If the reward is not high, lower the learning rate."
    )


def _variety(metrics: dict[str, Any]) -> str:
    names = {"distinct responses": "completions/distinct", "repeated text": "completions/repeated"}
    return "".join(f", {name} {metrics[key]:.2f}" for name, key in names.items() if metrics.get(key) is not None)


def _spell(history: Sequence[dict[str, Any]], key: str, bad: Any) -> float | None:
    """The last value of `key`, when it has just been bad for PATIENCE steps in a row."""
    values = [m.get(key) for m in history[-PATIENCE - 1 :]]
    is_bad = [v is not None and bad(v) for v in values]
    just_now = len(is_bad) >= PATIENCE and all(is_bad[-PATIENCE:]) and not (len(is_bad) > PATIENCE and is_bad[0])
    return values[-1] if just_now else None
