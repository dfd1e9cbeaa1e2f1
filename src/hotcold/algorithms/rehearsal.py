"""An algorithm goes once through a small made-up batch before a run: what is wrong with it shows in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Forward, Objective, TokenLoss
from hotcold.algorithms.losses import (
    ClippedLoss,
    SequenceClippedLoss,
    TruncatedISLoss,
    ValueLoss,
    importance_weighted_loss,
    policy_gradient_loss,
    surrogate_of,
)
from hotcold.batch import Batch, Rollout, collate
from hotcold.errors import InputError
from hotcold.user_file import describe_error

T = TypeVar("T")
OURS = (policy_gradient_loss, importance_weighted_loss)  # and these classes: they multiply the advantages
OUR_CLASSES = (ClippedLoss, SequenceClippedLoss, TruncatedISLoss)


def rehearse(algorithm: Algorithm) -> None:
    """Raise InputError, with the line of the user's file where there is one, unless every part answers in form."""
    name = type(algorithm).__name__
    state = _ask(name, "state()", algorithm.state)
    try:
        json.dumps(state, allow_nan=False)
    except (TypeError, ValueError):
        raise InputError(
            f"{name}.state() is {state!r}: it goes into the checkpoint, so only plain numbers fit."
        ) from None
    batch = _batch(algorithm)
    kept = _ask(name, "keep(batch)", lambda: algorithm.keep(batch))
    _has_form(name, "keep(batch)", kept, (len(batch),), torch.bool)
    if any(len(batch) % objective.minibatches for objective in algorithm.objectives) or not bool(kept.all()):
        kept = torch.ones_like(batch.keep)
    credited = _ask(name, "credit(batch, state)", lambda: algorithm.credit(batch.select(kept), dict(state)))
    if not (isinstance(credited, tuple) and len(credited) == 2 and isinstance(credited[0], Batch)):
        raise InputError(f"{name}.credit(batch, state) returns {type(credited).__name__}: return (batch, state).")
    for objective in algorithm.objectives:
        _rehearse_objective(name, objective, credited[0])


def _rehearse_objective(name: str, objective: Objective, batch: Batch) -> None:
    shape = tuple(batch.tokens.shape)
    if batch.advantages is not None:
        _has_form(name, "the advantages", batch.advantages, shape, None)
        if not bool(torch.isfinite(batch.advantages[batch.trained]).all()):
            raise InputError(f"{name}: the advantages of finite scores are not finite (NaN or inf).")
    logp = torch.where(batch.trained, -1.0, 0.0).to(batch.token_rewards.dtype)
    surrogate = surrogate_of(objective.loss)
    if batch.advantages is None and (surrogate in OURS or isinstance(surrogate, OUR_CLASSES)):
        raise InputError(f"{name}: credit sets no advantages: return batch.replace(advantages=...), state.")
    if isinstance(surrogate, ValueLoss) and batch.returns is None:
        raise InputError(f"{name}: credit sets no returns for its critic: return batch.replace(returns=...), state.")
    forward = _forward(objective, logp)
    if objective.model == "policy":
        batch = batch.replace(logp_old=logp)
    result = _ask(name, "the loss", lambda: objective.loss(forward, batch))
    if not isinstance(result, TokenLoss):
        raise InputError(f"{name}: the loss returns {type(result).__name__}: return TokenLoss(loss of shape [B, T]).")
    _has_form(name, "the loss", result.loss, shape, None)
    weights = _ask(name, "the weighting", lambda: objective.weighting(batch.trained))
    _has_form(name, "the weights", weights, shape, None)


def _forward(objective: Objective, logp: Tensor) -> Forward:
    """What the objective needs, from a model that says -1 nat everywhere."""
    answers = {"entropy": logp.neg(), "kl": logp.neg(), "values": logp.neg()}
    asked = {name: value.clone().requires_grad_() for name, value in answers.items() if name in objective.needs}
    has_logp = objective.model == "policy"
    return Forward(logp=logp.clone().requires_grad_() if has_logp else None, **asked)


def _batch(algorithm: Algorithm) -> Batch:
    """Two prompts with a group each, scores that differ, responses of one to three tokens."""
    size = algorithm.plan.group_size if algorithm.plan else 2
    rows = [
        Rollout(
            prompt_ids=(1, 2),
            response_ids=tuple(range(3, 4 + i % 3)),
            group=i // size,
            episode=i,
            reward=float(i % 2) + 0.125 * (i // size) if algorithm.plan else None,
            logp_sampler=(-1.0,) * (1 + i % 3),
            greedy_reward=0.5 if algorithm.plan else None,
            demonstration=algorithm.plan is None,
        )
        for i in range(2 * size)
    ]
    batch = collate(rows)
    levels = {"logp_old": -1.0, "logp_ref": -1.5, "kl_old": 0.25, "values_old": 0.125}
    reads = {name: torch.where(batch.trained, level, 0.0) for name, level in levels.items() if name in algorithm.reads}
    if any("kl" in objective.needs for objective in algorithm.objectives):
        reads.setdefault("kl_old", torch.where(batch.trained, 0.25, 0.0))
    return batch.replace(**reads)


def _ask(name: str, what: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{name}: {what} fails on a small made-up batch: {describe_error(error, None)}") from error


def _has_form(name: str, what: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    letters = "[B, T]" if len(shape) == 2 else "[B]"
    kind = "bool" if dtype == torch.bool else "float"
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: {what} is {type(value).__name__}; a {kind} tensor {letters} is needed.")
    if tuple(value.shape) != shape or (dtype is not None and value.dtype != dtype):
        raise InputError(
            f"{name}: {what} has shape {list(value.shape)} and type {value.dtype}; a {kind} tensor {letters}, "
            f"here {list(shape)}, is needed."
        )
