"""From names and values, as in YAML or on the command line, to an algorithm. The one table of names to objects."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hotcold.algorithms.base import Algorithm
from hotcold.algorithms.baselines import (
    batch_mean_baseline,
    greedy_baseline,
    leave_one_out_baseline,
    no_baseline,
)
from hotcold.algorithms.expert_iteration import BestOfGroup, Threshold, TopFraction
from hotcold.algorithms.kl import Adaptive, KLTerm, kl_from_names
from hotcold.algorithms.losses import (
    ClippedLoss,
    SequenceClippedLoss,
    TruncatedISLoss,
    importance_weighted_loss,
    policy_gradient_loss,
)
from hotcold.algorithms.options import OFF, no_such_option, resolved_values
from hotcold.algorithms.presets import NOT_BUILT, PRESETS
from hotcold.equations import fixed_length, mean_per_response, mean_per_token, sum_per_response
from hotcold.errors import InputError, NotAvailableError, did_you_mean
from hotcold.user_file import import_file

BASELINES = {
    "none": no_baseline,
    "batch_mean": batch_mean_baseline,
    "leave_one_out": leave_one_out_baseline,
    "greedy": greedy_baseline,
}
OBJECTIVES = {
    "policy_gradient": policy_gradient_loss,
    "importance_weighted": importance_weighted_loss,
    "clipped_surrogate": ClippedLoss,
    "sequence_clipped_surrogate": SequenceClippedLoss,
    "truncated_is_policy_gradient": TruncatedISLoss,
}
CLIPPED = (ClippedLoss, SequenceClippedLoss, TruncatedISLoss)
WEIGHTINGS = {
    "sum_per_response": sum_per_response,
    "mean_per_response": mean_per_response,
    "mean_per_token": mean_per_token,
    "fixed_length": fixed_length,
}
KEEP_RULES = {"threshold": Threshold, "best_of_group": BestOfGroup, "top_fraction": TopFraction}
STARTS = {"current": False, "starting": True}


def build_algorithm(name: str, options: dict[str, Any], max_tokens: int) -> Algorithm:
    """The algorithm `name` (a preset, or file.py:Class) with `options` over its defaults."""
    if name in NOT_BUILT:
        raise NotAvailableError(f"algorithm {name} is not available yet. There are: {', '.join(PRESETS)}.")
    if name in PRESETS:
        cls, fields = _class_of(name), resolved_values(name, options)
    elif ".py" in name:
        cls, fields = _user_class(name), dict(options)
    else:
        raise InputError(
            f"unknown algorithm {name!r}.{did_you_mean(name, [*PRESETS, *NOT_BUILT])} There are: "
            f"{', '.join(PRESETS)}, or file.py:Class for your own."
        )
    return _construct(name, cls, _to_objects(name, cls, fields, max_tokens))


def _to_objects(name: str, cls: type, values: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Names become the objects they stand for."""
    fields = dict(values)
    parameters = inspect.signature(cls).parameters
    if isinstance(fields.get("baseline"), str):
        fields["baseline"] = _pick("baseline", fields["baseline"], BASELINES)
    if isinstance(fields.get("weighting"), str):
        fields["weighting"] = _weighting(fields["weighting"], max_tokens)
    if isinstance(fields.get("objective"), str):
        fields["objective"] = _objective(fields, takes_clips="clip_low" in parameters)
    if isinstance(fields.get("keep_rule"), str):
        fields["keep_rule"] = _keep_rule(fields)
    if isinstance(fields.get("start_from"), str) and name in PRESETS:
        fields["from_starting"] = _pick("start_from", fields.pop("start_from"), STARTS)
    if "kl" in parameters and "beta" in fields:
        fields["kl"] = _kl(fields, PRESETS[name].kl if name in PRESETS else ("reward", "k1"))
    for key in OPTIONAL_NUMBERS:
        if key in fields and fields[key] in OFF:
            fields[key] = None
    return {key.replace(".", "_"): value for key, value in fields.items()}


OPTIONAL_NUMBERS = ("dual_clip", "value_clip", "critic.lam", "max_approx_kl")


def _objective(fields: dict[str, Any], takes_clips: bool) -> Any:
    """The loss; where the class itself takes the clips, what makes the loss from them."""
    objective = _pick("objective", fields["objective"], OBJECTIVES)
    if takes_clips:
        if objective not in CLIPPED:
            raise InputError(f"objective={fields['objective']} has no clips: rloo and reinforce take it.")
        return objective
    if objective not in CLIPPED:
        return objective
    clips = {"clip_low": _number(fields, "clip_low"), "clip_high": _number(fields, "clip_high")}
    dual = fields.pop("dual_clip", None)
    return objective(**clips) if dual in OFF else objective(**clips, dual_clip=_as_number("dual_clip", dual))


def _kl(fields: dict[str, Any], default: tuple[str | None, str]) -> KLTerm | None:
    beta = _number(fields, "beta")
    placement, estimator = fields.pop("kl.placement", None), fields.pop("kl.estimator", None)
    target, horizon = fields.pop("kl.target", None), fields.pop("kl.horizon", 10_000.0)
    if beta == 0:
        return None
    adaptive = None
    if target not in OFF:
        adaptive = Adaptive(_as_number("kl.target", target), _as_number("kl.horizon", horizon))
    return kl_from_names(beta, placement, estimator, adaptive, default)


def _keep_rule(fields: dict[str, Any]) -> Any:
    rule = _pick("keep_rule", fields["keep_rule"], KEEP_RULES)
    if rule is Threshold:
        return Threshold(_number(fields, "threshold"))
    return TopFraction(_number(fields, "fraction")) if rule is TopFraction else rule()


def _number(fields: dict[str, Any], key: str) -> float:
    return _as_number(key, fields.pop(key))


def _as_number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{key}={value!r} is not a number.")
    return float(value)


def _weighting(text: str, max_tokens: int) -> Callable[..., Any]:
    name, _, length = text.partition(":")
    weighting = _pick("weighting", name, WEIGHTINGS)
    if weighting is not fixed_length:
        if length:
            raise InputError(f"weighting={text!r}: only fixed_length takes a length.")
        return weighting
    if length and not (length.isdigit() and int(length) > 0):
        raise InputError(f"weighting={text!r}: the length is a positive whole number, e.g. fixed_length:128.")
    return partial(fixed_length, length=int(length) if length else max_tokens)


def _pick(key: str, name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        raise InputError(f"{key}={name!r} is unknown.{did_you_mean(name, list(table))} There are: {', '.join(table)}.")
    return table[name]


def _class_of(name: str) -> type:
    module, _, cls = PRESETS[name].cls.partition(":")
    return getattr(importlib.import_module(module), cls)


def _user_class(spec: str) -> type:
    """The class of `file.py:Class`."""
    path, _, cls = spec.partition(":")
    module = import_file(Path(path))
    classes = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]
    if not cls:
        raise InputError(f"{path}: name the class, e.g. {path}:{classes[0] if classes else 'MyAlgorithm'}.")
    if cls not in classes:
        raise InputError(f"{path} has no class {cls!r}.{did_you_mean(cls, classes)} It has: {', '.join(classes)}.")
    return getattr(module, cls)


def _construct(name: str, cls: type, fields: dict[str, Any]) -> Algorithm:
    parameters = inspect.signature(cls).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in fields:
            if key not in parameters:
                raise no_such_option(name, key, list(parameters))
    missing = [
        k for k, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if absent := [key for key in missing if key not in fields]:
        raise InputError(f"{name} needs {', '.join(absent)}: give {absent[0]}=...")
    for key, value in fields.items():
        if key in ("dual_clip", "value_clip", "critic_lam", "max_approx_kl") and value is not None:
            _as_number(key, value)
        _check_type(name, key, value, parameters[key].default if key in parameters else None)
    return cls(**fields)


def _check_type(name: str, key: str, value: Any, default: Any) -> None:
    """A value of another kind than the default (a word for a number) is caught here, by name."""
    if isinstance(default, bool):
        good = isinstance(value, bool)
    elif isinstance(default, int):
        good = isinstance(value, int) and not isinstance(value, bool)
    elif isinstance(default, float):
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
    else:
        good = True
    if not good:
        raise InputError(f"{name}: {key}={value!r} should be like its default, {default!r}.")
