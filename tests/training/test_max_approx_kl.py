"""The limit on approx KL: a minibatch that lies further from the old policy takes no step, and the epochs end there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Objective
from hotcold.algorithms.baselines import no_baseline
from hotcold.algorithms.build import build_algorithm
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.losses import ClippedLoss
from hotcold.algorithms.ppo import PPO
from hotcold.algorithms.presets import PRESETS
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.errors import InputError
from tests.toy_engines import Watched, local_engine
from tests.toy_policies import T2, ragged_rollouts, run_update, t2_rollouts, tiny_llama

RATE = 0.4
FREE = REINFORCE(1, no_baseline, ClippedLoss(), epochs_per_batch=4, minibatches=3)


def train(algorithm: Algorithm, **options: Any) -> tuple[Watched, dict[str, Any]]:
    engine = Watched(local_engine(T2.policy(), critic=T2.critic()))
    _, record = run_update(t2_rollouts(), algorithm, engine, rate=RATE, **options)
    return engine, record.summary()


def distances(engine: Watched) -> dict[int, float]:
    """By hand, of each optimiser step's minibatch: the mean over its tokens of r - 1 - log r."""
    sums: dict[int, tuple[float, int]] = {}
    for step, batch, done in engine.passes:
        assert done.logp is not None and done.logp_old is not None
        d = (done.logp - done.logp_old)[batch.trained]
        total, count = sums.get(step, (0.0, 0))
        sums[step] = (total + float((d.exp() - 1 - d).sum()), count + len(d))
    return {step: total / count for step, (total, count) in sums.items()}


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("budget", [8, 10**6])
def test_the_minibatch_beyond_the_limit_takes_no_step_and_no_later_one_does(budget: int) -> None:
    """The limit is put between two distances of the free run: it stops at the first one above it, bit for bit where
    the free run was before that step. In micro-batches of two rows the distance is still that of the minibatch."""
    free, summary = train(FREE, tokens_per_microbatch=budget)
    far = distances(free)
    assert len(far) == 12 and summary["optimizer_steps/stopped"] == 0 and far[0] == 0.0
    tried = 0
    for at in range(1, 12):
        if far[at] <= max(far[n] for n in range(at)):
            continue  # an earlier one is as far away
        tried += 1
        limit = (far[at] + max(far[n] for n in range(at))) / 2
        engine, summary = train(replace(FREE, max_approx_kl=limit), tokens_per_microbatch=budget)
        assert engine.num_steps["policy"] == at
        assert equal(engine.parameters(), free.after[at])
        assert (summary["optimizer_steps"], summary["optimizer_steps/stopped"]) == (at, 1)
        assert max(step for step, _, _ in engine.passes) == at  # the one that was looked at and given up
        assert all(p.grad is None for p in engine.engine.policy.parameters)
    assert tried >= 3


def test_a_limit_that_is_never_reached_changes_no_bit() -> None:
    free, summary = train(FREE)
    held, same = train(replace(FREE, max_approx_kl=1.01 * max(distances(free).values())))
    assert equal(free.parameters(), held.parameters()) and held.num_steps == free.num_steps
    assert same == summary and summary["optimizer_steps/stopped"] == 0


def test_at_the_limit_itself_the_step_is_taken() -> None:
    """Further than the limit is what stops."""
    free, _ = train(FREE)
    highest = max(distances(free).values())
    engine, summary = train(replace(FREE, max_approx_kl=highest * (1 + 1e-9)))
    assert summary["optimizer_steps/stopped"] == 0
    engine, summary = train(replace(FREE, max_approx_kl=highest * (1 - 1e-9)))
    assert summary["optimizer_steps/stopped"] == 1 and engine.num_steps["policy"] < 12


def test_the_numbers_of_a_stopped_step_are_those_of_what_was_seen() -> None:
    """The loss is that of the steps that were taken; approx KL and ratio include the minibatch that was given up."""
    free, _ = train(FREE)
    far = distances(free)
    at = next(n for n in range(1, 12) if far[n] > 1.5 * max(far[k] for k in range(n)))
    limit = (far[at] + max(far[n] for n in range(at))) / 2
    engine, summary = train(replace(FREE, max_approx_kl=limit))
    tokens = [(n, int(b.trained.sum())) for n, b, _ in engine.passes]
    mean = sum(far[n] * count for n, count in tokens) / sum(count for _, count in tokens)
    assert summary["approx_kl"] == pytest.approx(mean, abs=1e-12)
    losses = [sum(p.loss for n, _, p in engine.passes if n == step) for step in range(at)]
    assert summary["loss"] == pytest.approx(sum(losses) / at, abs=1e-12)


def test_the_first_step_on_a_batch_is_always_taken() -> None:
    """Its ratios are 1: on a real model in float32 too, however small the limit."""
    engine = Watched(local_engine(tiny_llama()))
    algorithm = GRPO(group_size=4, epochs_per_batch=4, max_approx_kl=1e-12)
    _, record = run_update(ragged_rollouts(), algorithm, engine, dtype=torch.float32, rate=0.05)
    summary = record.summary()
    assert (summary["optimizer_steps"], summary["optimizer_steps/stopped"]) == (1, 1)


def test_only_the_policys_epochs_end_the_critic_goes_on() -> None:
    algorithm = PPO(group_size=1, epochs_per_batch=4, minibatches=3, max_approx_kl=1e-9)
    engine, summary = train(algorithm)
    assert engine.num_steps == {"policy": 1, "critic": 12}
    assert (summary["optimizer_steps/stopped"], summary["value/optimizer_steps"]) == (1, 12)


def test_a_new_batch_starts_anew() -> None:
    """The next update compares with the policy as it then is."""
    engine = Watched(local_engine(T2.policy()))
    for count in (1, 2):
        run_update(t2_rollouts(), replace(FREE, max_approx_kl=1e-9), engine, rate=RATE)
        assert engine.num_steps["policy"] == count


def test_the_key_reaches_the_policys_objective_of_every_preset_that_has_it() -> None:
    for name in PRESETS:
        options: dict[str, Any] = {"minibatches": 2, "max_approx_kl": 0.02}
        if name in ("expert_iteration", "sft"):
            with pytest.raises(InputError, match="max_approx_kl has no effect"):
                build_algorithm(name, options, 16)
            continue
        if name in ("reinforce", "rloo"):
            options["objective"] = "clipped_surrogate"
        limits = {o.model: o.max_approx_kl for o in _objectives(name, options)}
        assert limits.pop("policy") == 0.02 and set(limits.values()) <= {None}
        for value in (0, -0.1):
            with pytest.raises(InputError, match=r"max_approx_kl=.*above 0"):
                _objectives(name, {**options, "max_approx_kl": value})


def _objectives(name: str, options: dict[str, Any]) -> tuple[Objective, ...]:
    return build_algorithm(name, options, 16).objectives
