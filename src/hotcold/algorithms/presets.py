"""The named algorithms, each a class and its values, in one table. Light: names resolve to code when one is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    cls: str  # "module:Class"
    about: str
    values: dict[str, Any] = field(default_factory=dict)  # keys as on the command line; each is printed by --dry-run
    kl: tuple[str | None, str] = ("reward", "k1")  # placement and estimator when beta is above 0
    general: dict[str, Any] = field(default_factory=dict)  # defaults of keys that are not the algorithm's own


_ONE_STEP = {"beta": 0.0, "entropy_bonus": 0.0, "epochs_per_batch": 1, "minibatches": 1}
_RETURNS = {"group_size": 8, "objective": "policy_gradient", "weighting": "sum_per_response", "gamma": 1.0}
_GROUP = {
    "group_size": 8,
    "scale_by_std": True,
    "objective": "clipped_surrogate",
    "weighting": "mean_per_response",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "drop_zero_variance": False,
    "refill": 0,
    **_ONE_STEP,
}
_GRPO, _GRPO_KL = "hotcold.algorithms.grpo:GRPO", ("loss", "k3")

PRESETS: dict[str, Preset] = {
    "reinforce": Preset(
        "hotcold.algorithms.reinforce:REINFORCE",
        "policy gradient with a baseline of your choice (none, batch_mean, leave_one_out, greedy)",
        {**_RETURNS, "baseline": "batch_mean", "whiten": False, **_ONE_STEP},
    ),
    "rloo": Preset(
        "hotcold.algorithms.rloo:RLOO",
        "each response against the mean of the others to the same prompt; unbiased",
        {**_RETURNS, **_ONE_STEP},
    ),
    "grpo": Preset(_GRPO, "scores centred and scaled within the group, clipped surrogate", _GROUP, _GRPO_KL),
    "dr_grpo": Preset(
        _GRPO,
        "grpo without its two biases: no division by the std, one fixed length",
        {**_GROUP, "scale_by_std": False, "weighting": "fixed_length"},
        _GRPO_KL,
    ),
    "dapo": Preset(
        _GRPO,
        "grpo that drops groups without signal, clips higher, averages tokens, and charges overlong responses",
        {**_GROUP, "weighting": "mean_per_token", "clip_high": 0.28, "drop_zero_variance": True, "refill": 3},
        _GRPO_KL,
        {"truncated": "penalty"},
    ),
    "gspo": Preset(
        _GRPO,
        "grpo with one ratio per response, clipped very close to 1",
        {**_GROUP, "objective": "sequence_clipped_surrogate", "clip_low": 3e-4, "clip_high": 4e-4},
        _GRPO_KL,
    ),
    "cispo": Preset(
        _GRPO,
        "grpo whose ratios are truncated weights: no token loses its gradient",
        {
            **_GROUP,
            "objective": "truncated_is_policy_gradient",
            "weighting": "mean_per_token",
            "clip_low": 1.0,
            "clip_high": 4.0,
        },
        _GRPO_KL,
    ),
    "reinforce_pp": Preset(
        "hotcold.algorithms.reinforce:REINFORCE",
        "returns whitened over the whole step, clipped surrogate; no critic and no groups needed",
        {
            **_RETURNS,
            "baseline": "none",
            "objective": "clipped_surrogate",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "weighting": "mean_per_token",
            "whiten": True,
            **_ONE_STEP,
        },
    ),
    "ppo": Preset(
        "hotcold.algorithms.ppo:PPO",
        "a critic says how good each token was (GAE); clipped surrogate over several passes",
        {
            "group_size": 8,
            "gamma": 1.0,
            "lam": 1.0,
            "whiten": True,
            "weighting": "mean_per_token",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "value_clip": "off",
            "critic.lam": "off",
            "critic.warmup": 0,
            **_ONE_STEP,
        },
    ),
    "expert_iteration": Preset(
        "hotcold.algorithms.expert_iteration:ExpertIteration",
        "keep the good responses and imitate them",
        {
            "group_size": 8,
            "keep_rule": "threshold",
            "threshold": 1.0,
            "start_from": "current",
            "weighting": "mean_per_token",
            **_ONE_STEP,
        },
        (None, "exact"),
    ),
    "sft": Preset(
        "hotcold.algorithms.sft:SFT",
        "imitate the responses of a data set (the stage before most others)",
        {"weighting": "mean_per_token", "beta": 0.0, "entropy_bonus": 0.0, "minibatches": 1},
        (None, "exact"),
    ),
}

NOT_BUILT = ("reward_model",)
