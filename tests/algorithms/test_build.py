"""From names and values to an algorithm, and what is refused before a run starts."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hotcold.algorithms.base import Objective, Plan
from hotcold.algorithms.baselines import greedy_baseline, leave_one_out_baseline, no_baseline
from hotcold.algorithms.build import build_algorithm, resolved_values
from hotcold.algorithms.checks import check_algorithm
from hotcold.algorithms.expert_iteration import BestOfGroup, ExpertIteration, Threshold, TopFraction
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.losses import (
    ClippedLoss,
    SequenceClippedLoss,
    TruncatedISLoss,
    importance_weighted_loss,
    policy_gradient_loss,
)
from hotcold.algorithms.ppo import PPO
from hotcold.algorithms.presets import NOT_BUILT, PRESETS
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.algorithms.rloo import RLOO
from hotcold.algorithms.sft import SFT
from hotcold.equations import fixed_length, mean_per_token, sum_per_response
from hotcold.errors import InputError, NotAvailableError

CLASSES: dict[str, Any] = {
    "reinforce": REINFORCE,
    "rloo": RLOO,
    "grpo": GRPO,
    "ppo": PPO,
    "expert_iteration": ExpertIteration,
    "sft": SFT,
}


def build(name: str, max_tokens: int = 64, **options: Any) -> Any:
    return build_algorithm(name, options, max_tokens)


def message(name: str, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        build(name, **options)
    assert str(error.value).count("\n") < 5
    return str(error.value)


# ------------------------------------------------------------------ presets


def test_every_preset_is_its_class_with_its_defaults() -> None:
    """The table that --dry-run prints and the defaults in Python are the same."""
    for name, cls in CLASSES.items():
        assert build(name) == cls()
    variants = {
        "dapo": GRPO(weighting=mean_per_token, clip_high=0.28, drop_zero_variance=True, refill=3),
        "gspo": GRPO(objective=SequenceClippedLoss, clip_low=3e-4, clip_high=4e-4),
        "cispo": GRPO(objective=TruncatedISLoss, weighting=mean_per_token, clip_low=1.0, clip_high=4.0),
        "reinforce_pp": REINFORCE(
            baseline=no_baseline, objective=ClippedLoss(0.2, 0.2), weighting=mean_per_token, whiten=True
        ),
    }
    assert set(PRESETS) == {"dr_grpo", *CLASSES, *variants}
    dr_grpo = build("dr_grpo")
    assert dr_grpo == GRPO(scale_by_std=False, weighting=dr_grpo.weighting)
    assert (dr_grpo.weighting.func, dr_grpo.weighting.keywords) == (fixed_length, {"length": 64})
    for name, algorithm in variants.items():
        assert build(name) == algorithm


def test_names_stand_for_objects() -> None:
    assert build("reinforce", baseline="greedy").baseline is greedy_baseline
    assert build("reinforce", baseline="leave_one_out").baseline is leave_one_out_baseline
    assert build("rloo", objective="importance_weighted").objective is importance_weighted_loss
    assert build("rloo", objective="clipped_surrogate").objective == ClippedLoss(0.2, 0.2)
    assert build("rloo", objective="clipped_surrogate", clip_high=0.28).objective == ClippedLoss(0.2, 0.28)
    assert build("grpo", weighting="mean_per_token").weighting is mean_per_token
    assert build("grpo", scale_by_std=False, clip_low=0.1) == GRPO(scale_by_std=False, clip_low=0.1)
    assert build("expert_iteration", keep_rule="best_of_group").keep_rule == BestOfGroup()
    assert build("expert_iteration", threshold=0.5).keep_rule == Threshold(0.5)
    assert build("expert_iteration", keep_rule="top_fraction", fraction=0.1).keep_rule == TopFraction(0.1)
    assert build("expert_iteration", start_from="starting").from_starting is True


def test_fixed_length_divides_by_its_length_or_by_the_limit() -> None:
    """One row of two tokens: each has 1/128, or 1/64."""
    mask = torch.tensor([[False, True, True]])
    for text, length in (("fixed_length:128", 128), ("fixed_length", 64)):
        weighting = build("grpo", weighting=text).weighting
        assert isinstance(weighting, partial) and weighting.func is fixed_length
        assert weighting(mask).tolist() == [[0.0, 1 / length, 1 / length]]


def test_resolved_values_name_every_key_in_use_and_no_other() -> None:
    assert "clip_low" not in resolved_values("rloo", {})
    assert resolved_values("rloo", {"objective": "clipped_surrogate"})["clip_low"] == 0.2
    assert resolved_values("expert_iteration", {})["threshold"] == 1.0
    top = resolved_values("expert_iteration", {"keep_rule": "top_fraction"})
    assert top["fraction"] == 0.25 and "threshold" not in top
    assert "threshold" not in resolved_values("expert_iteration", {"keep_rule": "best_of_group"})


# ------------------------------------------------------------------ what is refused


def test_unknown_and_unbuilt_algorithms() -> None:
    assert 'Did you mean "grpo"?' in message("grppo")
    for name in NOT_BUILT:
        with pytest.raises(NotAvailableError, match=f"{name} is not available yet"):
            build(name)


def test_an_option_without_an_effect_is_an_error() -> None:
    assert "clip_low has no effect on rloo" in message("rloo", clip_low=0.1)
    assert "objective=clipped_surrogate" in message("rloo", clip_low=0.1)
    assert "keep_rule=top_fraction" in message("expert_iteration", fraction=0.5)
    assert "keep_rule=threshold" in message("expert_iteration", keep_rule="best_of_group", threshold=1.0)
    assert "baseline has no effect on grpo" in message("grpo", baseline="greedy")
    assert 'Did you mean "group_size"?' in message("grpo", groupsize=4)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("reinforce", {"baseline": "greddy"}, ["baseline='greddy'", 'Did you mean "greedy"?']),
        ("grpo", {"weighting": "mean"}, ["weighting='mean'", "sum_per_response"]),
        ("grpo", {"weighting": "fixed_length:0"}, ["positive whole number"]),
        ("grpo", {"weighting": "fixed_length:x"}, ["positive whole number"]),
        ("grpo", {"weighting": "mean_per_token:5"}, ["only fixed_length takes a length"]),
        ("rloo", {"objective": "ppo"}, ["objective='ppo'", "clipped_surrogate"]),
        ("expert_iteration", {"keep_rule": "best"}, ["keep_rule='best'", "best_of_group"]),
        ("expert_iteration", {"threshold": "high"}, ["threshold='high'", "not a number"]),
        ("expert_iteration", {"start_from": "base"}, ["start_from='base'", "starting"]),
        ("grpo", {"group_size": "eight"}, ["group_size='eight'", "8"]),
        ("grpo", {"group_size": 4.5}, ["group_size=4.5"]),
        ("grpo", {"scale_by_std": 1}, ["scale_by_std=1"]),
        ("grpo", {"clip_low": -0.1}, ["clip_low=-0.1"]),
        ("grpo", {"clip_low": 1.1}, ["clip_low=1.1"]),
        ("grpo", {"clip_high": -1.0}, ["clip_high=-1.0"]),
        ("grpo", {"clip_high": float("nan")}, ["clip_high=nan"]),
        ("rloo", {"gamma": 1.5}, ["gamma=1.5"]),
        ("reinforce", {"gamma": float("nan")}, ["gamma=nan"]),
        ("rloo", {"group_size": 1}, ["group_size=1", "at least 2"]),
        ("reinforce", {"group_size": 1, "baseline": "leave_one_out"}, ["group_size=1", "leave_one_out"]),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(name: str, options: dict[str, Any], words: list[str]) -> None:
    text = message(name, **options)
    assert all(word in text for word in words), text


def check(algorithm: Any, prompts_per_step: int | None = 4) -> str:
    with pytest.raises(InputError) as error:
        check_algorithm(algorithm, prompts_per_step)
    assert str(error.value).count("\n") < 5
    return str(error.value)


def test_every_preset_passes_the_check() -> None:
    for cls in CLASSES.values():
        check_algorithm(cls(), 16)
    check_algorithm(ExpertIteration(epochs_per_batch=3, minibatches=2), 4)  # no advantage weights its loss
    check_algorithm(RLOO(epochs_per_batch=4, objective=ClippedLoss()), 4)
    check_algorithm(RLOO(epochs_per_batch=4, objective=importance_weighted_loss), 4)


def test_many_steps_with_policy_gradient_are_refused_with_the_way_out() -> None:
    for algorithm in (RLOO(epochs_per_batch=2), REINFORCE(minibatches=2)):
        text = check(algorithm)
        assert "2 optimiser steps" in text
        assert "objective=importance_weighted" in text and "objective=clipped_surrogate" in text


def test_minibatches_that_do_not_divide_are_refused_with_those_that_do() -> None:
    """D15: 3 prompts x 4 responses in 5 minibatches: names the numbers and the divisors of 12."""
    text = check(GRPO(group_size=4, minibatches=5), 3)
    assert "minibatches=5" in text and "12 responses" in text and "3 prompts x 4" in text
    assert "1, 2, 3, 4, 6, 12" in text
    check_algorithm(GRPO(group_size=4, minibatches=6), 3)
    check_algorithm(GRPO(group_size=4, minibatches=5), None)  # recorded rows have no such number


@dataclasses.dataclass(frozen=True)
class Mine:
    plan: Any = dataclasses.field(default_factory=Plan)
    reads: frozenset[str] = frozenset()
    objectives: tuple[Objective, ...] = (Objective(policy_gradient_loss, sum_per_response),)

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Any) -> Any:
        return batch.keep

    def credit(self, batch: Any, state: Any) -> Any:
        return batch, state


def test_a_users_algorithm_is_checked_like_ours() -> None:
    check_algorithm(Mine(), 4)
    objective = Mine().objectives[0]
    changed = dataclasses.replace
    assert "'logp_odl'" in check(Mine(reads=frozenset({"logp_odl"})))
    assert "Plan(greedy=True)" in check(Mine(reads=frozenset({"greedy_rewards"})))
    assert "no objective" in check(Mine(objectives=()))
    assert "'logits'" in check(Mine(objectives=(changed(objective, needs=frozenset({"logits"})),)))
    assert "group_size=0" in check(Mine(plan=Plan(group_size=0)))
    assert "refill=-1" in check(Mine(plan=Plan(refill=-1)))
    assert "at least 1" in check(Mine(objectives=(changed(objective, epochs=0),)))
    assert "trains no critic" in check(Mine(reads=frozenset({"values_old"})))
    assert "needs values" in check(Mine(objectives=(changed(objective, needs=frozenset({"values"})),)))
    assert "needs logp" in check(Mine(objectives=(changed(objective, model="critic"),)))
    with pytest.raises(NotAvailableError, match="not available yet"):
        check_algorithm(Mine(objectives=(changed(objective, model="reward"),)), 4)

    class Half:
        plan = Plan()
        reads: frozenset[str] = frozenset()

    assert "Half has no `objectives`" in check(Half())


# ------------------------------------------------------------------ a user's file


SOURCE = """
from dataclasses import dataclass

from hotcold.algorithms.rloo import RLOO


@dataclass(frozen=True)
class Mine(RLOO):
    strength: float = 2.0


class Needs:
    def __init__(self, size: int): self.size = size


class Takes:
    def __init__(self, **everything): self.everything = everything
"""


def user_file(folder: Path, source: str = SOURCE) -> str:
    path = folder / "mine.py"
    path.write_text(source, encoding="utf-8")
    return str(path)


def test_a_class_in_a_users_file_is_built_with_its_own_options(tmp_path: Path) -> None:
    file = user_file(tmp_path)
    mine = build(f"{file}:Mine", strength=3, group_size=4, weighting="mean_per_token")
    assert (type(mine).__name__, mine.strength, mine.plan.group_size) == ("Mine", 3, 4)
    assert mine.weighting is mean_per_token
    assert build(f"{file}:Needs", size=2).size == 2
    assert build(f"{file}:Takes", anything=1).everything == {"anything": 1}


def test_what_is_wrong_with_a_users_file_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = user_file(tmp_path)
    assert "name the class" in message(file)
    assert 'Did you mean "Mine"?' in message(f"{file}:Mien") and "RLOO" not in message(f"{file}:Mien")
    assert "strenght has no effect" in message(f"{file}:Mine", strenght=1.0)
    assert "needs size" in message(f"{file}:Needs")
    assert "strength='much'" in message(f"{file}:Mine", strength="much")
    missing = str(tmp_path / "none.py")
    assert missing in message(f"{missing}:Mine")
    broken = user_file(tmp_path, "\n\nimport nothing_of_that_name\n")
    assert "nothing_of_that_name" in message(f"{broken}:Mine") and f"{broken}:3" in message(f"{broken}:Mine")
    monkeypatch.chdir(tmp_path)
    assert "mine.py:3" in message("mine.py:Mine")
    unfinished = user_file(tmp_path, "x = (\n")
    assert unfinished in message(f"{unfinished}:Mine") and f"{unfinished}:1" in message(f"{unfinished}:Mine")


def test_a_users_file_with_the_name_of_a_library_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "json.py"
    path.write_text(SOURCE, encoding="utf-8")
    assert build(f"{path}:Mine").strength == 2.0
    assert sys.modules["json"] is json and hasattr(json, "dumps")
