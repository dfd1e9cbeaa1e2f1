"""The cases of `hotcold verify`: every algorithm, each axis one at a time, and the pairs that interact."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hotcold.algorithms.presets import PRESETS
from hotcold.lab.case import Case, Situation
from hotcold.training.mismatch import Mismatch

WORLDS = ("fixed", "variable", "fixed, steps", "variable, steps", "variable, tool", "wide")
WEIGHTINGS = ("sum_per_response", "fixed_length", "mean_per_response", "mean_per_token")
OBJECTIVES = (
    "policy_gradient",
    "importance_weighted",
    "clipped_surrogate",
    "sequence_clipped_surrogate",
    "truncated_is_policy_gradient",
)
BASELINES = ("none", "batch_mean", "leave_one_out", "greedy")
KLS: tuple[tuple[str | None, str], ...] = (
    ("reward", "k1"),
    ("loss", "k2"),
    ("loss", "k3"),
    ("loss_times_ratio", "k3"),
    (None, "exact"),
)
LEVELS: tuple[Literal["token", "sequence", "geometric"], ...] = ("token", "sequence", "geometric")
BETA, BONUS, GAMMA, LAM = 0.5, 0.3, 0.5, 0.5
AXES: dict[str, tuple[Any, ...]] = {
    "baseline": BASELINES,
    "scale_by_std": (True, False),
    "whiten": (True, False),
    "objective": OBJECTIVES,
    "weighting": WEIGHTINGS,
    "gamma": (GAMMA,),
    "lam": (LAM,),
    "entropy_bonus": (BONUS,),
    "beta": (BETA,),
    "epochs_per_batch": (2,),
    "minibatches": (2,),
    "keep_rule": ("threshold", "best_of_group", "top_fraction"),
    "start_from": ("starting",),
    "drop_zero_variance": (True, False),
    "group_size": (3, 4),
}


@dataclass(frozen=True)
class Section:
    title: str
    about: str
    cases: tuple[Case, ...]


def catalogue() -> list[Section]:
    """Each case once, where it comes first."""
    seen: set[str] = set()
    sections = []
    for title, about, cases in (
        ("named", "each algorithm as it is named, in every world", _named()),
        ("one axis", "one choice changed", _one_axis()),
        ("credit x weighting", "what a response is compared with, and how tokens are averaged", _credit_x_weighting()),
        ("KL", "where the KL enters and how it is estimated", _kl()),
        ("another engine", "sampled by another policy: the correction and its level", _corrections()),
        ("older policy", "responses of an older policy, one for each objective", _older()),
        ("critic", "how far the critic is trusted, and how good it is", _critic()),
    ):
        fresh = []
        for case in cases:
            if _key(case) not in seen:
                seen.add(_key(case))
                fresh.append(case)
        sections.append(Section(title, about, tuple(fresh)))
    return sections


def _key(case: Case) -> str:
    return f"{case.algorithm} {sorted(case.values.items(), key=str)} {case.where}"


def base(name: str, **options: Any) -> dict[str, Any]:
    """The smallest group, unless it is given; sft has none."""
    return options if name == "sft" else {"group_size": 2, **options}


def situation_of(name: str, **changes: Any) -> Situation:
    """A preset's own: dapo charges for length; rows of a data set come two in a step."""
    own = Situation(truncated=PRESETS[name].general.get("truncated", "keep"), groups=2 if name == "sft" else 1)
    return replace(own, **changes)


def case_of(name: str, world: str = "variable", situation: Mapping[str, Any] | None = None, **options: Any) -> Case:
    dotted = {key.replace("__", "."): value for key, value in options.items()}
    return Case(name, base(name, **dotted), world, situation_of(name, **(situation or {})))


# ---- sections


def _named() -> Iterator[Case]:
    for name, world in itertools.product(PRESETS, WORLDS):
        yield case_of(name, world)


def _one_axis() -> Iterator[Case]:
    for name, preset in PRESETS.items():
        for key, values in AXES.items():
            if key in preset.values:
                yield from (case_of(name, **{key: v}) for v in values if v != preset.values[key] and fits(name, key, v))
        yield case_of(name, situation={"truncated": "mask" if name != "dapo" else "keep"})
        yield case_of(name, situation={"truncated": "penalty"})
        if name != "sft":
            yield case_of(name, situation={"groups": 2})
    yield case_of("dapo", refill=0)
    yield case_of("dapo", refill=0, drop_zero_variance=False)
    yield case_of("dapo", refill=0, situation={"groups": 2})
    yield case_of("dr_grpo", drop_zero_variance=True, refill=2)
    yield case_of("dr_grpo", drop_zero_variance=True, situation={"groups": 2})


def fits(name: str, key: str, value: Any) -> bool:
    """The sequence ratio has one value per response: it goes with mean_per_response alone."""
    preset = PRESETS[name].values
    if key == "drop_zero_variance" and name == "dapo":
        return False  # refill=3 would have no effect
    if key == "objective" and value == "sequence_clipped_surrogate":
        return bool(preset["weighting"] == "mean_per_response")
    if key == "objective" and "scale_by_std" in preset:
        return value not in ("policy_gradient", "importance_weighted")
    if key in ("epochs_per_batch", "minibatches"):
        return preset.get("objective", "clipped_surrogate") != "policy_gradient" or name == "expert_iteration"
    return not (key == "weighting" and name == "gspo")


def _credit_x_weighting() -> Iterator[Case]:
    credits: tuple[tuple[str, dict[str, Any]], ...] = (
        *(("reinforce", {"baseline": b}) for b in BASELINES),
        ("reinforce", {"baseline": "none", "whiten": True}),
        ("grpo", {"scale_by_std": False}),
        ("grpo", {"scale_by_std": True}),
        ("ppo", {"whiten": False}),
    )
    for (name, options), weighting, world in itertools.product(credits, WEIGHTINGS, ("fixed", "variable")):
        yield case_of(name, world, **options, weighting=weighting)


def _kl() -> Iterator[Case]:
    of: tuple[tuple[str, dict[str, Any]], ...] = (
        ("reinforce", {"baseline": "none"}),
        ("reinforce", {"baseline": "batch_mean"}),
        ("rloo", {}),
        ("dr_grpo", {}),
        ("ppo", {"whiten": False, "weighting": "sum_per_response"}),
    )
    for (name, options), kl, world in itertools.product(of, KLS, ("fixed", "variable, steps")):
        yield case_of(name, world, **options, beta=BETA, **kl_options(kl))
    yield case_of("sft", beta=BETA, weighting="sum_per_response")


def kl_options(kl: tuple[str | None, str]) -> dict[str, Any]:
    placement, estimator = kl
    given = {"kl.estimator": estimator}
    return given if placement is None else {"kl.placement": placement, **given}


def _corrections() -> Iterator[Case]:
    rules: list[Mismatch | None] = [None]
    for level in LEVELS:
        rules += [Mismatch("truncate", level, cap=cap) for cap in (10.0, 1.2)]
        rules += [Mismatch("mask", level, low=low, high=high) for low, high in ((0.1, 10.0), (0.8, 1.25))]
    for name, rule in itertools.product(("rloo", "grpo"), rules):
        yield case_of(name, "fixed", {"sampled_by": "another engine", "mismatch": rule})
    yield case_of(
        "rloo", "variable", {"sampled_by": "another engine", "mismatch": Mismatch("truncate", "sequence", 10)}
    )
    yield case_of(
        "rloo", "fixed", {"sampled_by": "another engine", "mismatch": Mismatch("truncate", "sequence", 10)}, beta=BETA
    )


def _older() -> Iterator[Case]:
    """Two passes without a step between them: the surrogate's gradient twice, at a policy that has moved on."""
    for objective, world in itertools.product(OBJECTIVES[1:3] + OBJECTIVES[4:], ("fixed", "variable")):
        older = {"sampled_by": "older policy", "rate": 0.0}
        yield case_of("rloo", world, older, objective=objective, epochs_per_batch=2, **clips(objective))
    for world in ("fixed", "variable"):
        yield case_of("gspo", world, {"sampled_by": "older policy", "rate": 0.0}, epochs_per_batch=2)
        yield case_of("rloo", world, {"sampled_by": "older policy"})
        yield case_of("grpo", world, {"rate": 0.0}, epochs_per_batch=2, scale_by_std=False)
        older = {"sampled_by": "older policy", "rate": 0.0}
        yield case_of("grpo", world, older, epochs_per_batch=2, dual_clip=1.1, clip_low=0.1, clip_high=0.1)


def clips(objective: str) -> dict[str, Any]:
    return {} if objective in ("importance_weighted", "policy_gradient") else {"clip_low": 0.2, "clip_high": 0.2}


def _critic() -> Iterator[Case]:
    plain = {"whiten": False, "weighting": "sum_per_response"}
    for lam, critic, world in itertools.product((1.0, LAM), ("zero", "wrong", "exact"), ("fixed", "variable, steps")):
        yield case_of("ppo", world, {"critic": critic}, lam=lam, **plain)
    yield case_of("ppo", "fixed", {"critic": "exact"}, lam=LAM, beta=BETA, **plain)
    yield case_of("ppo", "variable", {"critic": "exact"}, lam=LAM, beta=BETA, **plain, **{"kl.estimator": "exact"})
    yield case_of("ppo", "variable", {"critic": "exact"}, gamma=GAMMA, **plain)


# ---- everything


def full_product() -> Iterator[Case]:
    """Every combination of the axes' values, for every algorithm, in every world: as long as it takes."""
    for name, preset in PRESETS.items():
        keys = [key for key in AXES if key in preset.values and key not in ("group_size", "beta")]
        choices = [tuple(dict.fromkeys((preset.values[key], *AXES[key]))) for key in keys]
        for values in itertools.product(*choices):
            options = dict(zip(keys, values, strict=True))
            for kl in (None, *KLS):
                leash = {} if kl is None else {"beta": BETA, **kl_options(kl)}
                for world in WORLDS:
                    yield Case(name, base(name, **options, **leash), world, situation_of(name))
