"""The certificate of an algorithm that nothing is known of: a user's class, or one that does what ours refuse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hotcold.algorithms.base import Algorithm
from hotcold.errors import InputError
from hotcold.lab.case import RATE, WORLDS, Case, Situation
from hotcold.lab.certificate import EXACT, Certificate, certificate, exact_scale, likelihood_gradient, target_with
from hotcold.lab.expectation import Setting, expected_update
from hotcold.lab.kl_parts import RIGHT, name_of, without_reference
from hotcold.lab.numbers import Array
from hotcold.lab.tiny import Tiny
from hotcold.lab.truth import state_values

Expects = Literal["unbiased", "multiple", "elsewhere"]
EXPECTS: tuple[Expects, ...] = ("unbiased", "multiple", "elsewhere")
OWN_WORLDS = ("fixed", "variable", "fixed, steps", "variable, steps", "variable, tool")
NOT_FOUND = (
    "nothing that can be left out explains it: look at which responses the baseline is made of, at which token gets "
    'which reward, and for a part that is not detached; if it is meant so, set expects = "elsewhere"'
)
MOST_GROUPS = 2000  # groups that are enumerated


@dataclass(frozen=True)
class Own:
    """`expects` is what its author states: the target exactly, a positive multiple of it, or neither."""

    name: str
    algorithm: Algorithm
    options: dict[str, Any]
    expects: Expects = "multiple"

    @property
    def group_size(self) -> int:
        return self.algorithm.plan.group_size if self.algorithm.plan else 1

    @property
    def beta(self) -> float:
        """Of its KL: the field `beta`, or that of its term `kl`."""
        term = getattr(self.algorithm, "kl", None)
        return float(getattr(term, "beta", None) or getattr(self.algorithm, "beta", None) or 0.0)

    @property
    def bonus(self) -> float:
        return float(getattr(self.algorithm, "entropy_bonus", 0.0))

    @property
    def has_reference(self) -> bool:
        asks = {name for objective in self.algorithm.objectives for name in objective.needs}
        return bool(self.algorithm.reads & {"logp_ref", "kl_old"}) or "kl" in asks

    @property
    def num_steps(self) -> int:
        return max(o.epochs * o.minibatches for o in self.algorithm.objectives)


def stated_by(algorithm: Algorithm, given: str | None) -> Expects:
    """`expect=` on the command line, else the class's own `expects`, else a multiple of the target."""
    word = given if given is not None else getattr(algorithm, "expects", "multiple")
    for known in EXPECTS:
        if word == known:
            return known
    raise InputError(f"expect={word!r} is unknown. There are: {', '.join(EXPECTS)}.")


def certify_own(own: Own, world: str, situation: Situation = Situation()) -> Certificate:
    """On one world. A disagreement: it points elsewhere although its author expects it not to."""
    tiny = WORLDS[world]
    setting = _setting(own, tiny, situation)
    measured = expected_update(own.algorithm, tiny, setting)
    gradient, target = measured.gradient.numpy(), target_of(own, tiny)
    case = Case(own.name, own.options, world, situation)
    num_rows = own.group_size * situation.groups
    made = certificate(case, gradient, target, measured.variance, None, None, True, own.beta, num_rows)
    reasons = () if made.scale is not None else tuple(why_elsewhere(own, tiny, setting, gradient)) or (NOT_FOUND,)
    return replace(made, reasons=reasons, predicted=own.expects, agrees=keeps_to(own.expects, made))


def keeps_to(expects: Expects, made: Certificate) -> bool:
    if expects == "elsewhere":
        return True
    if made.scale is None:
        return False
    return abs(made.scale - 1) <= EXACT if expects == "unbiased" else made.scale > 0


def target_of(own: Own, tiny: Tiny) -> Array:
    if own.algorithm.plan is None:
        return likelihood_gradient(tiny)
    return target_with(tiny, own.beta, own.bonus)


def _setting(own: Own, tiny: Tiny, situation: Situation) -> Setting:
    check_size(own.group_size, len(tiny.responses), situation.groups)
    return Setting(
        num_groups=situation.groups,
        sampler=tiny.sampler if own.algorithm.plan is None else None,
        mismatch=situation.mismatch,
        values=[v + (0.3, -0.4)[i % 2] for i, v in enumerate(state_values(tiny))],
        rate=RATE if own.num_steps > 1 else 0.0,
    )


def check_size(group_size: int, num_responses: int, num_groups: int = 1) -> None:
    """Groups without order of `group_size` out of `num_responses`."""
    if math.comb(num_responses + group_size - 1, group_size) ** num_groups <= MOST_GROUPS:
        return
    most = max(n for n in range(1, group_size) if math.comb(num_responses + n - 1, n) ** num_groups <= MOST_GROUPS)
    raise InputError(
        f"group_size={group_size}: every group of responses is summed over, and there are too many of that size.\n"
        f"Use group_size={most} or less: what is shown holds for larger groups too, with their own factors."
    )


def why_elsewhere(own: Own, tiny: Tiny, setting: Setting, gradient: Array) -> list[str]:
    """What can be found out by leaving things away: the KL, rewards on the way, several steps."""
    if not own.has_reference:
        return [] if own.algorithm.plan is None else _why_not_the_reward(own, tiny, setting)
    alone = expected_update(own.algorithm, without_reference(tiny), setting).gradient.numpy()
    is_exact = exact_scale(alone, target_with(without_reference(tiny), 0.0, own.bonus)) is not None
    part = name_of(gradient - alone, tiny)
    reasons = []
    if part is None and is_exact:
        reasons.append("the KL term is the gradient of no KL")
    elif part is not None and part != RIGHT:
        reasons.append(part)
    elif part is not None and is_exact:
        reasons.append("reward and KL have different factors")
    return reasons if is_exact or own.algorithm.plan is None else reasons + _why_not_the_reward(own, tiny, setting)


def _why_not_the_reward(own: Own, tiny: Tiny, setting: Setting) -> list[str]:
    reasons = []
    if own.num_steps > 1 and setting.rate:
        reasons.append(f"{own.num_steps} steps on a batch: after the first one the gradient of a surrogate")
    if not tiny.has_fixed_length and _fits(own, WORLDS["fixed"], setting):
        reasons.append("it is exact where all responses have one length: look at how tokens are averaged")
    if tiny.steps and _fits(own, replace(tiny, steps={}), setting):
        reasons.append("it is exact without rewards on the way: look at which token gets which reward")
    if _moves_without_scores(own, tiny, setting):
        reasons.append(
            "scores that are all equal move it too: look for a part of the loss that does not come from a score, a "
            "baseline that is not detached, and at how tokens are averaged"
        )
    return reasons


def _moves_without_scores(own: Own, tiny: Tiny, setting: Setting) -> bool:
    constant = replace(without_reference(tiny), reward=dict.fromkeys(tiny.responses, 1.0), steps={})
    values = [0.7] * len(constant.prefixes)
    gradient = expected_update(own.algorithm, constant, replace(setting, values=values)).gradient.numpy()
    return own.bonus == 0 and float(abs(gradient).max()) > EXACT


def _fits(own: Own, tiny: Tiny, setting: Setting) -> bool:
    plain = without_reference(tiny)
    values = [v + (0.3, -0.4)[i % 2] for i, v in enumerate(state_values(plain))]
    gradient = expected_update(own.algorithm, plain, replace(setting, values=values)).gradient.numpy()
    scale = exact_scale(gradient, target_with(plain, 0.0, own.bonus))
    return scale is not None and scale > 0


def certify_all(own: Own, worlds: Sequence[str] = OWN_WORLDS) -> list[Certificate]:
    certificates = [certify_own(own, world) for world in worlds]
    if own.algorithm.plan is not None and own.group_size <= 3:
        certificates.append(certify_own(own, "fixed", Situation(groups=2)))
    return certificates
