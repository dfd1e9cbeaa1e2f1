"""What theory says of an algorithm's expected gradient, from its choices alone: a multiple of the target, or elsewhere.

The target is grad J; with a KL grad J - beta grad KL(pi || ref); with an entropy bonus also the gradient of the entropy
of each visited state. For given rows (sft) it is the gradient of their log-likelihood. The rules are those of
docs/verify.md. Nothing is measured here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotcold.lab.case import Case
from hotcold.lab.stated import World, rejected_share


@dataclass(frozen=True)
class Predicted:
    """`factor` of the target; None: elsewhere, for `reasons`. `notes`: what the verdict alone does not say."""

    factor: float | None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        if self.factor is None:
            return f"elsewhere: {'; '.join(self.reasons)}"
        return "unbiased" if self.factor == 1 else f"unbiased up to {self.factor:.4g}"


def predicted(case: Case) -> Predicted:
    world = World(case)
    reasons: list[str] = []
    of_weight = _weighting(world, reasons)
    if case.algorithm == "expert_iteration":
        return Predicted(None, ("it is the gradient of the log-likelihood of the responses that were kept", *reasons))
    of_credit = 1.0 if world.imitates else _credit(world, reasons)
    factor, in_loss = of_weight * of_credit, of_weight
    reasons += [*_objective(world), *_kl(world), *_sampling(world), *_rows(world)]
    steps = case.num_steps
    if steps > 1 and case.situation.rate:
        reasons.append(f"{steps} steps on a batch: after the first one the gradient of a surrogate")
    factor, in_loss = factor * steps, in_loss * steps
    if world.values.get("drop_zero_variance") and not reasons:
        again = _dropping_factor(world)
        factor, in_loss = factor * again, in_loss * again
    if factor != in_loss and (world.bonus or _has_kl_in_loss(world)):
        reasons.append(f"the baseline scales the reward's part by {of_credit:.4g}, and not what is in the loss")
    if reasons:
        return Predicted(None, tuple(reasons), _notes(world))
    return Predicted(factor, (), _notes(world))


def _weighting(world: World, reasons: list[str]) -> float:
    name = str(world.values["weighting"]).partition(":")[0]
    if name == "sum_per_response":
        return 1.0
    if name == "fixed_length":
        return 1 / world.fixed_length
    if world.tiny.has_fixed_length:
        return 1 / world.tiny.max_tokens
    reasons.append(f"{name.replace('_', ' ')} on varying lengths")
    return 1.0


def _credit(world: World, reasons: list[str]) -> float:
    """The factor of the baseline: a mean that includes the response itself shrinks the gradient."""
    values, size = world.values, world.group_size
    if values.get("whiten"):
        reasons.append("advantages are whitened over the step")
    if world.gamma < 1 and world.tiny.max_tokens > 1:
        reasons.append("the discount changes the objective")
    if world.case.has_critic:
        if values["lam"] < 1 and world.case.situation.critic != "exact":
            reasons.append("lam below 1 trusts a critic that is not exact")
        return 1.0
    if "scale_by_std" in values:
        if values["scale_by_std"]:
            reasons.append("division by the group's std")
        return (size - 1) / size
    rows = size * world.case.situation.groups
    return (rows - 1) / rows if values.get("baseline") == "batch_mean" else 1.0


def _objective(world: World) -> list[str]:
    """Off the policy that sampled, a ratio per token is not that of the response."""
    if world.case.sampled_by != "older policy":
        return []
    objective = world.values.get("objective", "clipped_surrogate")
    if world.case.num_steps == 1 or objective == "policy_gradient":
        return ["responses of an older policy, with no ratio to correct it"]
    what = {
        "importance_weighted": "the token's ratio is not that of the whole response",
        "clipped_surrogate": "the token's ratio is not that of the whole response, and it is clipped",
        "sequence_clipped_surrogate": "the response's mean ratio is not its whole ratio, and it is clipped",
        "truncated_is_policy_gradient": "the token's ratio is not that of the whole response, and it is truncated",
    }
    return [what[objective]]


def _has_kl_in_loss(world: World) -> bool:
    return world.kl is not None and world.kl[0] != "reward"


def _kl(world: World) -> list[str]:
    if world.kl is None or world.kl[0] == "reward" or world.kl[1] == "exact":
        return []
    if world.kl == ("loss", "k3"):
        return ["k3 in the loss: the forward KL(ref || pi) of each visited state"]
    several = world.tiny.max_tokens > 1
    return [f"{world.kl[1]} in the loss: the KL of later states is missing"] if several else []


def _sampling(world: World) -> list[str]:
    """Another engine sampled: corrected exactly by the ratio of the whole response, as long as none is cut."""
    situation = world.case.situation
    rule = situation.mismatch
    if world.case.sampled_by != "another engine":
        return []
    if rule is None:
        return ["another policy sampled, and nothing corrects it"]
    several = world.tiny.max_tokens > 1
    if rule.level != "sequence" and several:
        what = "the token's weight" if rule.level == "token" else "the mean weight"
        return [f"{what} is not that of the whole response"]
    ratios = [world.policy.of_response(y) / world.sampler.of_response(y) for y in world.tiny.responses]
    if rule.mode == "truncate":
        return [f"weights above {rule.cap:g} are cut"] if max(ratios) > rule.cap else []
    outside = min(ratios) < rule.low or max(ratios) > rule.high
    return [f"weights outside {rule.low:g} to {rule.high:g} become 0"] if outside else []


def _rows(world: World) -> list[str]:
    """Rows that do not take part."""
    reasons = []
    if world.case.situation.truncated == "mask" and world.tiny.cut:
        reasons.append("truncated responses are left out")
    if world.values.get("drop_zero_variance"):
        reasons += _dropping(world)
    return reasons


def _dropping(world: World) -> list[str]:
    """A dropped group has advantages 0, unless something else tells its responses apart: then a gradient is lost."""
    other = {
        "rewards on the way": bool(world.tiny.steps),
        "a KL": world.beta > 0,
        "an entropy bonus": world.bonus != 0,
        "a length penalty": _penalty_varies(world),
    }
    lost = [name for name, there in other.items() if there]
    return [f"groups of equal scores are dropped in spite of {' and '.join(lost)}"] if lost else []


def _dropping_factor(world: World) -> float:
    """Of one prompt, asked n times in the step, of whose groups a share q is dropped: (1 - q^n)/(1 - q).

    The others have the denominators for themselves: n/(k + 1) with k of the n - 1 others left. With refill and n = 1 an
    accepted group comes (1 - q^(refill + 1))/(1 - q) times as often.
    """
    q, n = rejected_share(world), world.case.situation.groups
    draws = n if n > 1 else 1 + int(world.values.get("refill", 0))
    return math.fsum(q**k for k in range(draws))


def _penalty_varies(world: World) -> bool:
    return len({world.penalty(y) for y in world.tiny.responses}) > 1


def _notes(world: World) -> tuple[str, ...]:
    notes = []
    if world.bonus:
        notes.append("the entropy is that of each visited state")
    if world.values.get("drop_zero_variance") and not world.values.get("scale_by_std"):
        notes.append("each prompt has its own factor: one whose groups rarely vary counts more")
    if world.case.algorithm == "sft":
        notes.append("of the rows' log-likelihood" + (", with the KL of each of their states" if world.beta else ""))
    if world.case.situation.truncated == "penalty":
        notes.append("J is the expected score less the penalty")
    return tuple(notes)


def refused(case: Case) -> str | None:
    """Why the combination cannot be built, in the words of the error; None where it can."""
    try:
        case.build()
    except ValueError as error:
        return " ".join(str(error).split())
    return None
