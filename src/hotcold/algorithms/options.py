"""Which keys an algorithm has: those of its preset, and those that a value of another one brings into play."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotcold.algorithms.kl import complete_names
from hotcold.algorithms.presets import PRESETS
from hotcold.errors import InputError, did_you_mean

CLIPPED = ("clipped_surrogate", "sequence_clipped_surrogate", "truncated_is_policy_gradient")
OFF = ("off", "none", None)


@dataclass(frozen=True)
class Conditional:
    """A key that takes effect only beside another one."""

    default: Any
    applies: Callable[[dict[str, Any]], bool]
    hint: str


def _number_of_steps(values: dict[str, Any]) -> int:
    counts = (values.get("epochs_per_batch", 1), values.get("minibatches", 1))
    return counts[0] * counts[1] if all(isinstance(n, int) for n in counts) else 1


def _is_clipped(values: dict[str, Any]) -> bool:
    return values.get("objective", "clipped_surrogate") in CLIPPED  # ppo has no other


def _has_kl(values: dict[str, Any]) -> bool:
    beta = values.get("beta", 0.0)
    return not isinstance(beta, (int, float)) or beta > 0


def _clips_plainly(values: dict[str, Any]) -> bool:
    return values.get("objective", "clipped_surrogate") == "clipped_surrogate"


CONDITIONAL: dict[str, Conditional] = {
    "threshold": Conditional(1.0, lambda v: v.get("keep_rule") == "threshold", "keep_rule=threshold"),
    "fraction": Conditional(0.25, lambda v: v.get("keep_rule") == "top_fraction", "keep_rule=top_fraction"),
    "clip_low": Conditional(0.2, _is_clipped, "objective=clipped_surrogate"),
    "clip_high": Conditional(0.2, _is_clipped, "objective=clipped_surrogate"),
    "dual_clip": Conditional("off", _clips_plainly, "objective=clipped_surrogate"),
    "kl.placement": Conditional("", _has_kl, "beta above 0"),
    "kl.estimator": Conditional("", _has_kl, "beta above 0"),
    "kl.target": Conditional("off", _has_kl, "beta above 0"),
    "kl.horizon": Conditional(
        10_000.0, lambda v: _has_kl(v) and v.get("kl.target", "off") not in OFF, "kl.target, and beta above 0"
    ),
    "max_approx_kl": Conditional(
        "off", lambda v: _number_of_steps(v) > 1, "several optimiser steps on a batch (epochs_per_batch, minibatches)"
    ),
}
HAVE = {  # the key beside which a conditional key can ever take effect; `lam`: ppo, which has one objective
    "threshold": ("keep_rule",),
    "fraction": ("keep_rule",),
    "clip_low": ("objective", "lam"),
    "clip_high": ("objective", "lam"),
    "dual_clip": ("objective", "lam"),
    "max_approx_kl": ("objective", "lam"),
}


def resolved_values(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Every key of a preset with its value, as --dry-run prints it and config.yaml stores it."""
    preset = PRESETS[name].values
    values = {**preset, **options}
    in_use = {key: c for key, c in CONDITIONAL.items() if _may_have(preset, key) and c.applies(values)}
    out = {key: value for key, value in preset.items() if key not in CONDITIONAL or key in in_use}
    out |= {key: c.default for key, c in in_use.items() if key not in out}
    if "kl.placement" in in_use:
        names = complete_names(options.get("kl.placement"), options.get("kl.estimator"), PRESETS[name].kl)
        out |= {"kl.placement": names[0], "kl.estimator": names[1]}
    for key in options:
        if key not in out:
            raise no_such_option(name, key, list(out))
    return {**out, **{key: value for key, value in options.items() if value is not None}}


def _may_have(preset: dict[str, Any], key: str) -> bool:
    return any(other in preset for other in HAVE.get(key, ("beta",)))


def no_such_option(name: str, key: str, known: list[str]) -> InputError:
    condition = CONDITIONAL.get(key)
    preset = PRESETS[name].values if name in PRESETS else None
    if condition is not None and (preset is None or _may_have(preset, key)):
        hint = f" It takes effect with {condition.hint}."
    else:
        hint = did_you_mean(key, known)
    return InputError(f"{key} has no effect on {name}.{hint}\n{name} reads: {', '.join(known)}.")
