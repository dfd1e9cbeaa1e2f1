"""What an algorithm must be, checked once before a run; the same for ours and a user's."""

from __future__ import annotations

from typing import Any

from hotcold.algorithms.base import QUANTITIES, READS, Algorithm, Objective, Plan
from hotcold.algorithms.losses import policy_gradient_loss, surrogate_of
from hotcold.errors import InputError, NotAvailableError

MOST_RESPONSES = 1_000_000  # of a step: they are held in memory at once
OF_MODEL = {  # what each model can be asked for
    "policy": frozenset({"logp", "entropy", "kl"}),
    "critic": frozenset({"values"}),
}


def check_algorithm(algorithm: Algorithm, prompts_per_step: int | None) -> None:
    """Raise InputError where the algorithm cannot run as configured. `prompts_per_step` is None for replayed rows."""
    name = type(algorithm).__name__
    for member in ("plan", "reads", "objectives", "state", "keep", "credit"):
        if not hasattr(algorithm, member):
            raise InputError(
                f"{name} has no `{member}`: an algorithm has plan, reads, objectives, state, keep, credit."
            )
    _known(name, "reads", algorithm.reads, READS)
    if not algorithm.objectives:
        raise InputError(f"{name} has no objective: nothing would be trained.")
    if len({objective.model for objective in algorithm.objectives}) < len(algorithm.objectives):
        raise InputError(f"{name} has two objectives for one model: put both terms into one loss.")
    for objective in algorithm.objectives:
        _check_objective(name, objective, algorithm.plan, prompts_per_step)
    if "values_old" in algorithm.reads and "critic" not in {objective.model for objective in algorithm.objectives}:
        raise InputError(f"{name} reads values_old but trains no critic: add an Objective with model='critic'.")
    if algorithm.plan is not None:
        _check_plan(name, algorithm.plan, algorithm.reads, prompts_per_step)


def _known(name: str, where: str, given: Any, known: frozenset[str]) -> None:
    for quantity in sorted(given):
        if quantity not in known:
            raise InputError(f"{name}: {where} names {quantity!r}; known are {', '.join(sorted(known))}.")


def _check_plan(name: str, plan: Plan, reads: frozenset[str], prompts_per_step: int | None) -> None:
    if plan.group_size < 1:
        raise InputError(f"{name}: group_size={plan.group_size}, at least 1 response per prompt is needed.")
    if plan.group_size * (prompts_per_step or 1) > MOST_RESPONSES:
        raise InputError(
            f"{name}: group_size={plan.group_size} for {prompts_per_step or 1} prompts; a step has at most "
            f"{MOST_RESPONSES} responses. Use smaller groups."
        )
    if plan.refill < 0:
        raise InputError(f"{name}: refill={plan.refill}, give 0 or more.")
    if "greedy_rewards" in reads and not plan.greedy:
        raise InputError(f"{name} reads greedy_rewards but its plan does not sample them: set Plan(greedy=True).")


def _check_objective(name: str, objective: Objective, plan: Plan | None, prompts_per_step: int | None) -> None:
    _known(name, "needs", objective.needs, QUANTITIES)
    if objective.model not in OF_MODEL:
        raise NotAvailableError(f"{name} trains a {objective.model}: not available yet.")
    if wrong := sorted(objective.needs - OF_MODEL[objective.model]):
        raise InputError(
            f"{name}: the {objective.model}'s objective needs {', '.join(wrong)}, which that model does not have; "
            f"it has {', '.join(sorted(OF_MODEL[objective.model]))}."
        )
    if objective.epochs < 1 or objective.minibatches < 1:
        raise InputError(
            f"{name}: epochs and minibatches are at least 1, not {objective.epochs}, {objective.minibatches}."
        )
    steps = objective.epochs * objective.minibatches
    if steps > 1 and objective.on_policy and surrogate_of(objective.loss) is policy_gradient_loss:
        raise InputError(
            f"{name}: {steps} optimiser steps on one batch with policy_gradient, which is right for one.\n"
            "Use objective=importance_weighted or objective=clipped_surrogate, or one epoch and one minibatch."
        )
    if prompts_per_step is None:
        return
    rows = prompts_per_step * (plan.group_size if plan else 1)
    if rows % objective.minibatches:
        what = f"responses of a step ({prompts_per_step} prompts x {plan.group_size})" if plan else "rows of a step"
        raise InputError(
            f"minibatches={objective.minibatches} does not divide the {rows} {what}: use one of {_divisors(rows)}."
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, min(number, 64) + 1) if number % n == 0)
