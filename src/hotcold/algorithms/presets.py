"""The named algorithms, each a class and its values, in one table. Light: names resolve to code when one is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    cls: str  # "module:Class"
    about: str
    values: dict[str, Any] = field(default_factory=dict)  # keys as on the command line; each is printed by --dry-run


PRESETS: dict[str, Preset] = {
    "reinforce": Preset(
        "hotcold.algorithms.reinforce:REINFORCE",
        "policy gradient with a baseline of your choice (none, batch_mean, leave_one_out, greedy)",
        {
            "group_size": 8,
            "baseline": "batch_mean",
            "objective": "policy_gradient",
            "weighting": "sum_per_response",
            "gamma": 1.0,
            "epochs_per_batch": 1,
            "minibatches": 1,
        },
    ),
    "rloo": Preset(
        "hotcold.algorithms.rloo:RLOO",
        "each response against the mean of the others to the same prompt; unbiased",
        {
            "group_size": 8,
            "objective": "policy_gradient",
            "weighting": "sum_per_response",
            "gamma": 1.0,
            "epochs_per_batch": 1,
            "minibatches": 1,
        },
    ),
    "grpo": Preset(
        "hotcold.algorithms.grpo:GRPO",
        "scores centred and scaled within the group, clipped surrogate",
        {
            "group_size": 8,
            "scale_by_std": True,
            "weighting": "mean_per_response",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "epochs_per_batch": 1,
            "minibatches": 1,
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
            "epochs_per_batch": 1,
            "minibatches": 1,
        },
    ),
}

NOT_BUILT = ("ppo", "sft", "reward_model", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp")
