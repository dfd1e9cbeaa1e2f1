"""The update: ratios start at 1, bad steps do no harm, steps are counted, rates and seeds arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.base import Objective
from hotcold.algorithms.baselines import leave_one_out_baseline, no_baseline
from hotcold.algorithms.expert_iteration import ExpertIteration, Threshold
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.losses import ClippedLoss, policy_gradient_loss
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Batch, Rollout, collate
from hotcold.engines.base import Pass, StepResult
from hotcold.engines.local import LocalEngine, Trainee
from hotcold.equations import mean_per_response, mean_per_token, sum_per_response
from hotcold.training import update as update_module
from hotcold.training.record import UpdateRecord
from tests.toy_policies import (
    T2,
    TINY,
    Custom,
    RecordingEngine,
    gradient,
    ragged_rollouts,
    run_update,
    settings,
    t2_rollouts,
    tiny_llama,
)

# ------------------------------------------------------------------ ratios (A25, E01)


class Spy:
    """A local engine on a real optimiser that notes what each pass saw."""

    def __init__(self, model: Any, rate_of_adam: float = 1e-3, remember_start: bool = False):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate_of_adam, weight_decay=0.0)
        self.engine = LocalEngine({"policy": Trainee(model, optimizer, remember_start)}, 1.0)
        self.passes: list[tuple[int, Batch, Pass]] = []  # (optimiser steps before it, rows, what was seen)
        self.num_steps = 0
        self.asked: list[int] = []  # rows of each request for log pi_old
        self.rates: list[tuple[float, float | None]] = []

    def read(self, batch: Batch, names: frozenset[str]) -> dict[str, Tensor]:
        self.asked.append(len(batch))
        return self.engine.read(batch, names)

    def discard(self, model: str) -> None:
        self.engine.discard(model)

    def backward(self, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
        done = self.engine.backward(batch, weights, objective)
        self.passes.append((self.num_steps, batch, done))
        return done

    def step(self, model: str, rate: float, max_norm: float | None) -> StepResult:
        self.num_steps += 1
        self.rates.append((rate, max_norm))
        return self.engine.step(model, rate, max_norm)

    def restart(self, model: str) -> None:
        self.engine.restart(model)

    def gap(self, step: int) -> float:
        """max |ratio - 1| over what was seen between `step` optimiser steps and the next."""
        gaps = [(p.logp - p.logp_old).exp().sub(1).abs()[b.trained].max() for n, b, p in self.passes if n == step]
        return float(torch.stack(gaps).max())


MANY = GRPO(group_size=4, epochs_per_batch=2, minibatches=3)


@pytest.mark.parametrize("model", list(TINY))
@pytest.mark.parametrize("budget", [16, 10**6])
def test_ratios_are_one_while_the_policy_has_not_moved(model: str, budget: int) -> None:
    """A25: 2 epochs x 3 minibatches at rate 0, mixed lengths; GPT-2 has dropout 0.1 in its config.

    In the first epoch the micro-batches are those of log pi_old: exactly 1. Later ones are cut anew: float32 rounding.
    """
    spy = Spy(TINY[model]())
    _, record = run_update(ragged_rollouts(), MANY, spy, dtype=torch.float32, rate=0.0, tokens_per_microbatch=budget)
    assert spy.num_steps == 6
    assert [spy.gap(step) for step in (0, 1, 2)] == [0.0, 0.0, 0.0]
    assert max(spy.gap(step) for step in (3, 4, 5)) < 1e-5
    summary = record.summary()
    assert summary["approx_kl"] is not None and 0 <= summary["approx_kl"] < 1e-8
    assert summary["clip_fraction"] == 0.0 and summary["ratio/max"] == pytest.approx(1.0, abs=1e-5)


def test_before_the_first_update_the_ratio_is_exactly_one_and_then_it_moves() -> None:
    """A25, with a rate."""
    spy = Spy(tiny_llama())
    run_update(ragged_rollouts(), MANY, spy, dtype=torch.float32, rate=0.01)
    assert spy.gap(0) == 0.0
    assert spy.gap(1) > 1e-3 and spy.gap(5) > 1e-3


def test_an_algorithm_that_reads_old_log_probs_starts_at_ratio_one_too() -> None:
    objective = Objective(ClippedLoss(), sum_per_response, epochs=2)
    algorithm = Custom((objective,), advantages=tuple([1.0, 0.0] * 6), reads=frozenset({"logp_old"}))
    spy = Spy(tiny_llama())
    batch, _ = run_update(ragged_rollouts(), algorithm, spy, dtype=torch.float32, rate=0.01)
    assert spy.gap(0) == 0.0 and batch.logp_old is not None
    assert sum(spy.asked) == 12  # once, all rows: credit may look at any of them


def test_old_log_probs_are_recomputed_once_and_only_where_they_are_needed() -> None:
    for algorithm, rows in ((GRPO(group_size=4), 0), (MANY, 12), (GRPO(group_size=4, epochs_per_batch=4), 12)):
        spy = Spy(tiny_llama())
        run_update(ragged_rollouts(), algorithm, spy, dtype=torch.float32)
        assert sum(spy.asked) == rows
    spy = Spy(tiny_llama())  # not for rows that no pass will see
    run_update([replace(r, reward=0.0) if r.group else r for r in ragged_rollouts()], MANY, spy, dtype=torch.float32)
    assert sum(spy.asked) == 4


def test_one_step_on_a_batch_has_no_clip_fraction_approx_kl_or_ratio() -> None:
    """Null, not 0: the ratio is 1 by construction."""
    _, record = run_update(ragged_rollouts(), GRPO(group_size=4), Spy(tiny_llama()), dtype=torch.float32)
    summary = record.summary()
    assert [summary[key] for key in ("clip_fraction", "approx_kl", "ratio/max")] == [None, None, None]
    assert summary["entropy"] is not None and summary["entropy"] > 0


def _pair(lengths: tuple[int, int]) -> list[Rollout]:
    """G = 2, rewards [1, 0]."""
    responses = [tuple(range(3 + 8 * i, 3 + 8 * i + n)) for i, n in enumerate(lengths)]
    return [Rollout((1, 2), y, 0, i, reward=1.0 - i) for i, y in enumerate(responses)]


def test_a_loss_of_zero_has_a_gradient() -> None:
    """E01: advantages +a and -a cancel in the value. Advantage 1/sqrt 2 by sample std; 4 and 6 tokens per token mean:
    at ratio 1 the loss is -(4 a - 6 a)/10 = 0.2 a."""
    a = math.sqrt(0.5)
    for lengths, weighting, value in (
        ((5, 5), mean_per_response, 0.0),
        ((5, 5), mean_per_token, 0.0),
        ((4, 6), mean_per_response, 0.0),
        ((4, 6), mean_per_token, 0.2 * a),
    ):
        algorithm = GRPO(group_size=2, weighting=weighting)
        _, record = run_update(_pair(lengths), algorithm, Spy(tiny_llama()), dtype=torch.float32)
        assert record.policy.losses[0] == pytest.approx(value, abs=1e-7)
        assert record.policy.grad_norms[0] > 0.1


def test_several_epochs_at_a_large_rate_clip() -> None:
    """E01: clip fraction above 0 by the last of 4 epochs, and equal to a recount from the passes' log-probs."""
    spy = Spy(tiny_llama())
    algorithm = GRPO(group_size=4, epochs_per_batch=4)
    _, record = run_update(ragged_rollouts(), algorithm, spy, dtype=torch.float32, rate=0.05)
    fractions, ratios, count = [], [], 0.0
    for _, batch, done in spy.passes:
        ratio = (done.logp - done.logp_old).exp()[batch.trained]
        assert batch.advantages is not None
        gain = batch.advantages[batch.trained] > 0
        clipped = (gain & (ratio > 1.2)) | (~gain & (ratio < 0.8))
        fractions.append(float(clipped.float().mean()))
        ratios.append(float(ratio.max()))
        count += float(clipped.sum())
    assert fractions[0] == 0.0 and fractions[-1] > 0.1
    summary = record.summary()
    assert summary["clip_fraction"] == pytest.approx(count / record.policy.num_tokens, abs=1e-6)
    assert summary["ratio/max"] == pytest.approx(max(ratios), rel=1e-6)
    assert summary["approx_kl"] is not None and summary["approx_kl"] > 1e-3


# ------------------------------------------------------------------ steps


class PoisonedOnce:
    """A spy whose gradient holds one bad value at the given optimiser step."""

    def __init__(self, spy: Spy, at: int, value: float):
        self.spy, self.at, self.value = spy, at, value
        self.before: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.spy, name)

    def step(self, model: str, rate: float, max_norm: float | None) -> StepResult:
        parameters = self.spy.engine.policy.parameters
        if self.spy.num_steps == self.at:
            gradient = parameters[0].grad
            assert gradient is not None
            gradient.view(-1)[0] = self.value
            self.before = [p.detach().clone() for p in parameters]
        result = self.spy.step(model, rate, max_norm)
        if self.before and not result.applied:
            assert all(torch.equal(p, b) for p, b in zip(parameters, self.before, strict=True))
        return result


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(value: float) -> None:
    """D18: step 3 of 6 (2 epochs x 3 minibatches)."""
    spy = Spy(tiny_llama())
    _, record = run_update(
        ragged_rollouts(), MANY, PoisonedOnce(spy, 2, value), dtype=torch.float32, rate=0.01, max_grad_norm=1.0
    )
    summary = record.summary()
    assert (summary["optimizer_steps"], summary["optimizer_steps/nonfinite"]) == (5, 1)
    assert spy.num_steps == 6 and all(bool(p.isfinite().all()) for p in spy.engine.policy.parameters)


def test_rate_and_clip_norm_reach_every_step() -> None:
    spy = Spy(tiny_llama())
    run_update(ragged_rollouts(), MANY, spy, dtype=torch.float32, rate=0.25, max_grad_norm=0.5)
    assert spy.rates == [(0.25, 0.5)] * 6


def test_from_the_starting_model_each_batch_trains_it_anew() -> None:
    """STaR: after a second batch the parameters are those of the second batch alone."""
    algorithm = ExpertIteration(group_size=4, keep_rule=Threshold(0.5), from_starting=True, epochs_per_batch=2)
    first, second = ragged_rollouts(seed=1), ragged_rollouts(seed=2)
    ends = []
    for batches in ([first, second], [second]):
        spy = Spy(tiny_llama(), remember_start=True)
        for rows in batches:
            run_update(rows, algorithm, spy, dtype=torch.float32, rate=0.01)
        ends.append([p.detach().clone() for p in spy.engine.policy.parameters])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    spy = Spy(tiny_llama())  # and from the current model they are not
    for rows in (first, second):
        run_update(rows, replace(algorithm, from_starting=False), spy, dtype=torch.float32, rate=0.01)
    assert not all(torch.equal(a, b) for a, b in zip(ends[0], spy.engine.policy.parameters, strict=True))


def test_an_objective_waits_until_it_starts() -> None:
    objective = Objective(policy_gradient_loss, sum_per_response, start=2)
    algorithm = Custom((objective,), advantages=(1.0,) * 12)
    counts = []
    for step in (1, 2, 3):
        engine = RecordingEngine(T2.policy())
        run_update(t2_rollouts(), algorithm, engine, step=step)
        counts.append(len(engine.gradients))
    assert counts == [0, 0, 1]  # two steps of warm-up


@pytest.mark.parametrize("num_rows", [20, 19, 7])
def test_odd_sizes_train_every_row(num_rows: int) -> None:
    """D15: 5 prompts x 4 responses, some lost, in 3 minibatches and micro-batches of about 3 rows."""
    rows = ragged_rollouts(num_groups=5, group_size=4)[:num_rows]
    algorithm = REINFORCE(group_size=4, baseline=no_baseline, objective=ClippedLoss(), minibatches=3)
    rows = [replace(r, reward=1.0 + r.episode) for r in rows]
    spy = Spy(tiny_llama())
    _, record = run_update(rows, algorithm, spy, dtype=torch.float32, tokens_per_microbatch=45)
    assert sorted(int(e) for _, b, _ in spy.passes for e in b.episode) == list(range(num_rows))
    assert record.summary()["optimizer_steps"] == 3


def test_the_sampler_difference_is_measured_before_the_first_update_only() -> None:
    """Log-probs of the sampler off by 0.25 on one token: that is the largest, whatever the later steps do."""
    engine = RecordingEngine(tiny_llama())
    rows = ragged_rollouts()
    batch, _ = run_update(rows, replace(MANY, epochs_per_batch=1), engine, dtype=torch.float32)
    assert batch.logp_old is not None

    def sampled(index: int, r: Rollout) -> Rollout:
        logp = batch.logp_old[index, len(r.prompt_ids) : len(r.prompt_ids) + len(r.response_ids)].tolist()  # type: ignore[index]
        return replace(r, logp_sampler=tuple(v + 0.25 * (i == 0) for i, v in enumerate(logp)))

    rows = [sampled(i, r) for i, r in enumerate(rows)]
    _, record = run_update(
        rows, GRPO(group_size=4, epochs_per_batch=4), Spy(tiny_llama()), dtype=torch.float32, rate=0.05
    )
    summary = record.summary()
    assert summary["mismatch/max_abs"] == pytest.approx(0.25, abs=1e-5)
    num_tokens = sum(sum(r.response_mask or ()) for r in rows)
    assert summary["mismatch/mean_abs"] == pytest.approx(0.25 * 12 / num_tokens, abs=1e-5)


def test_a_restarted_model_is_not_compared_with_the_sampler() -> None:
    """The sampler used the current model; training starts from another one: their difference is no error."""
    rows = [replace(r, logp_sampler=(-1.0,) * len(r.response_ids)) for r in ragged_rollouts()]
    algorithm = ExpertIteration(group_size=4, keep_rule=Threshold(0.5))
    for from_starting in (False, True):
        spy = Spy(tiny_llama(), remember_start=True)
        chosen = replace(algorithm, from_starting=from_starting)
        _, record = run_update(rows, chosen, spy, dtype=torch.float32)
        assert (record.summary()["mismatch/max_abs"] is None) == from_starting


def test_credit_sees_no_gradient_and_the_state_comes_back() -> None:
    @dataclass(frozen=True)
    class Counting:
        inner: Custom

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
            assert not torch.is_grad_enabled()
            return self.inner.credit(batch, state)[0], {"steps": state.get("steps", 0.0) + 1}

    algorithm = Counting(Custom((Objective(policy_gradient_loss, sum_per_response),), advantages=(1.0,) * 12))

    batch = collate(t2_rollouts(), dtype=torch.float64)
    _, state, record = update_module.update(
        batch, algorithm, {"steps": 4.0}, RecordingEngine(T2.policy()), settings(), 1, lambda _: 0.0
    )
    assert state == {"steps": 5.0} and isinstance(record, UpdateRecord)


def test_leave_one_out_in_reinforce_is_rloo() -> None:
    rows = ragged_rollouts()
    a = gradient(tiny_llama(), rows, REINFORCE(group_size=4, baseline=leave_one_out_baseline))
    b = gradient(tiny_llama(), rows, RLOO(group_size=4))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
