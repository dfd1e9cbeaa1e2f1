"""What a step reports is what was optimised, divided once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hotcold.batch import Rollout, collate
from hotcold.engines.base import Pass, StepResult
from hotcold.training.metrics import rollout_metrics
from hotcold.training.record import ModelRecord, UpdateRecord


def rollout(length: int = 2, reward: float | None = 1.0, group: int = 0, **fields: Any) -> Rollout:
    fields = {"episode": 0, **fields}
    return Rollout((1,), (3,) * length, group, reward=reward, **fields)


def seen(
    batch: Any, loss: float, logp: float = -1.0, old: float = -1.0, entropy: float = 0.5, **metrics: float
) -> Pass:
    """A pass in which every trained token has the same numbers, and everything else is NaN."""

    def fill(value: float) -> torch.Tensor:
        return torch.full(batch.tokens.shape, math.nan).double().masked_fill(batch.trained, value)

    return Pass(
        loss, {k: fill(v) for k, v in metrics.items()}, logp=fill(logp), logp_old=fill(old), entropy=fill(entropy)
    )


# ------------------------------------------------------------------ the update


def test_one_value_for_each_optimiser_step() -> None:
    """D16 (c): windows of 3 and of 1 micro-batches, each with losses 1, 1, 1 and 5: the mean over steps is 3."""
    record, batch = ModelRecord(), collate([rollout()])
    for _ in range(3):
        record.add_pass(batch, seen(batch, loss=1 / 3), recomputed=False)  # its share of the step's loss
    record.add_step(StepResult(grad_norm=2.0, applied=True))
    record.add_pass(batch, seen(batch, loss=5.0), recomputed=False)
    record.add_step(StepResult(grad_norm=4.0, applied=True))
    assert record.losses == pytest.approx([1.0, 5.0])
    summary = UpdateRecord(models={"policy": record}).summary()
    assert summary["loss"] == pytest.approx(3.0) and summary["grad_norm"] == 3.0
    assert summary["optimizer_steps"] == 2 and summary["optimizer_steps/empty"] == 0


def test_token_means_are_one_mean_over_all_tokens() -> None:
    """D16 (b): 3 of 12 tokens and 3 of 4: 6/16 = 0.375, not the mean of means 0.5."""
    record = ModelRecord()
    for length, share in ((12, 0.25), (4, 0.75)):
        batch = collate([rollout(length)])
        record.add_pass(batch, seen(batch, 0.0, entropy=share, clip_fraction=share, mine=share), recomputed=True)
    record.add_step(StepResult(1.0, True))
    summary = UpdateRecord(models={"policy": record}).summary()
    assert summary["entropy"] == summary["clip_fraction"] == summary["mine"] == 0.375


def test_ratio_and_approx_kl_are_those_of_new_against_old() -> None:
    """log-ratio 0.1 on 2 tokens and -0.3 on 1: approx_kl = mean of e^d - 1 - d; ratio/max = e^0.1."""
    record = ModelRecord()
    for length, d in ((2, 0.1), (1, -0.3)):
        batch = collate([rollout(length)])
        record.add_pass(batch, seen(batch, 0.0, logp=-1.0 + d), recomputed=True)
        record.add_step(StepResult(1.0, True))
    summary = UpdateRecord(models={"policy": record}).summary()
    expected = (2 * (math.exp(0.1) - 1.1) + (math.exp(-0.3) - 0.7)) / 3
    assert summary["approx_kl"] == pytest.approx(expected, abs=1e-12)
    assert summary["ratio/max"] == pytest.approx(math.exp(0.1), abs=1e-12)


def test_what_exists_only_with_recomputed_log_probs_is_null_without() -> None:
    record, batch = ModelRecord(), collate([rollout()])
    record.add_pass(batch, seen(batch, 0.0, clip_fraction=0.0, mine=0.25), recomputed=False)
    record.add_step(StepResult(1.0, True))
    summary = UpdateRecord(models={"policy": record}).summary()
    assert [summary[k] for k in ("approx_kl", "clip_fraction", "ratio/max")] == [None] * 3
    assert summary["mine"] == 0.25
    assert [summary[k] for k in ("mismatch/max_abs", "mismatch/mean_abs")] == [None] * 2


def test_an_empty_record_has_nulls_and_no_division_by_zero() -> None:
    summary = UpdateRecord().summary()
    assert summary["loss"] == 0.0 and summary["grad_norm"] == 0.0
    assert summary["entropy"] is None and summary["approx_kl"] is None and summary["optimizer_steps"] == 0


def test_the_sampler_difference_counts_trained_tokens_before_the_first_step() -> None:
    """|-1 + 1.5| = 0.5 on one token, |-1 + 1.25| = 0.25 on three: max 0.5, mean 1.25/4."""
    record = ModelRecord()
    for logps in ((-1.5,), (-1.25,) * 3):
        batch = collate([rollout(len(logps), logp_sampler=logps)], dtype=torch.float64)
        record.add_pass(batch, seen(batch, 0.0), recomputed=False)
    record.add_step(StepResult(1.0, True))
    late = collate([rollout(1, logp_sampler=(-9.0,))], dtype=torch.float64)
    record.add_pass(late, seen(late, 0.0), recomputed=False)
    record.add_step(StepResult(1.0, True))
    summary = UpdateRecord(models={"policy": record}).summary()
    assert summary["mismatch/max_abs"] == 0.5 and summary["mismatch/mean_abs"] == pytest.approx(1.25 / 4)


def test_steps_that_were_not_applied_are_counted_apart() -> None:
    """D18. The norm of such a step is not finite and must not become the step's."""
    record, batch = ModelRecord(), collate([rollout()])
    for norm, applied in ((2.0, True), (math.nan, False), (math.inf, False), (4.0, True)):
        record.add_pass(batch, seen(batch, 1.0), recomputed=False)
        record.add_step(StepResult(norm, applied))
    summary = UpdateRecord(models={"policy": record}).summary()
    assert (summary["optimizer_steps"], summary["optimizer_steps/nonfinite"]) == (2, 2)
    assert summary["grad_norm"] == 3.0


# ------------------------------------------------------------------ the rollouts


def test_the_reward_is_the_weighted_total_and_parts_stand_beside_it() -> None:
    """D16 (a): rewards 1 and 0 with weights .7 and .3: .7."""
    metrics = rollout_metrics([rollout(reward=0.7, parts={"right": 1.0, "short": 0.0})], ["right", "short"])
    assert metrics["reward"] == 0.7
    assert metrics["rewards/right/mean"] == 1.0 and metrics["rewards/short/mean"] == 0.0


def test_lengths_count_every_response_the_truncated_and_unscored_ones_too() -> None:
    """D16 (d): lengths 4 and 9, the 9 truncated and excluded: mean 6.5, truncated share .5."""
    metrics = rollout_metrics([rollout(4), rollout(9, reward=None, truncated=True)], [])
    assert metrics["completions/mean_length"] == 6.5
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (4.0, 9.0)
    assert metrics["completions/truncated"] == 0.5
    assert metrics["rewards/unscored"] == 1.0 and metrics["reward"] == 1.0


def test_the_length_of_a_response_is_its_own_where_pad_is_eos() -> None:
    """A08: completions of 3 (EOS included) and 5 tokens: mean 4."""
    assert rollout_metrics([rollout(3), rollout(5)], [])["completions/mean_length"] == 4.0


def test_reward_std_is_the_mean_of_the_groups_sample_stds() -> None:
    """Groups {1, 0}: 0.7071, {1, 1, 1}: 0, {2, None}: one score, no std; half of the groups have none."""
    rewards = [(0, 1.0), (1, 1.0), (0, 0.0), (1, 1.0), (2, 2.0), (1, 1.0), (2, None)]
    metrics = rollout_metrics([rollout(reward=r, group=g) for g, r in rewards], [])
    assert metrics["reward_std"] == pytest.approx(math.sqrt(0.5) / 2, abs=1e-12)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["reward"] == 1.0  # 6 / 6


def test_groups_of_one_have_no_spread_to_report() -> None:
    metrics = rollout_metrics([rollout(group=0), rollout(group=1, reward=0.0)], [])
    assert metrics["reward_std"] is None and metrics["frac_reward_zero_std"] is None and metrics["reward"] == 0.5


def test_parts_without_a_score_leave_the_mean_of_the_part() -> None:
    rows = [rollout(parts={"a": v}) for v in (1.0, None, 0.0)]
    metrics = rollout_metrics(rows, ["a"])
    assert metrics["rewards/a/mean"] == 0.5 and metrics["rewards/a/std"] == pytest.approx(math.sqrt(0.5))
    assert rollout_metrics(rows[1:2], ["a"])["rewards/a/mean"] is None


def test_a_step_without_scores_or_rows_reports_nulls() -> None:
    assert rollout_metrics([rollout(reward=None)], ["a"])["reward"] is None
    assert rollout_metrics([], [])["completions/mean_length"] is None


@pytest.mark.parametrize(("size", "share"), [(2, 0.702375), (4, 0.449041), (8, 0.200657), (16, 0.040263)])
def test_the_share_of_groups_without_signal_is_that_of_a_coin(size: int, share: float) -> None:
    """E03: p = .1819: p^G + (1 - p)^G, simulated, within 3 standard errors."""
    groups = 2000
    wins = np.random.default_rng(size).random((groups, size)) < 0.1819
    rows = [rollout(reward=float(win), group=g) for g, group in enumerate(wins) for win in group]
    simulated = rollout_metrics(rows, [])["frac_reward_zero_std"]
    assert simulated == pytest.approx(share, abs=3 * math.sqrt(share * (1 - share) / groups))


def test_distinct_responses_are_counted_within_each_prompt() -> None:
    """E05: 0 where all responses to a prompt are the same, 1 where no two are. Prompt 0: three kinds of four, 2/3;
    prompt 1: 0; prompt 2 has one response and says nothing."""
    ids = {0: [(3, 4), (3, 4), (5,), (6,)], 1: [(3,), (3,)], 2: [(7,)]}
    rows = [Rollout((1,), y, group, 0, reward=1.0) for group, group_ids in ids.items() for y in group_ids]
    assert rollout_metrics(rows, [])["completions/distinct"] == pytest.approx((2 / 3 + 0) / 2)
    assert rollout_metrics(rows[-1:], [])["completions/distinct"] is None


def test_repeated_text_is_the_share_of_runs_of_four_that_came_before() -> None:
    """E05: 3434, 4343, 3434, 4343, 3434: two kinds of five, 0.6 repeated; 3456 once: 0; too short: 0."""
    rows = [Rollout((1,), y, 0, 0, reward=1.0) for y in ((3, 4, 3, 4, 3, 4, 3, 4), (3, 4, 5, 6), (5,))]
    assert rollout_metrics(rows, [])["completions/repeated"] == pytest.approx(0.2)


def test_what_a_critic_explains_is_null_where_the_returns_only_tremble() -> None:
    """Returns 1 and 1 + 1e-5 have a variance of 2.5e-11; 0 and 1 with values 0 and 0.5 leave a quarter unexplained."""
    batch = collate([rollout()])
    count = int(batch.trained.sum())

    def laid(values: list[float]) -> torch.Tensor:
        return torch.zeros(batch.tokens.shape).masked_scatter(batch.trained, torch.tensor(values[:count]))

    flat, apart = [1.0, 1.00001] * count, [0.0, 1.0] * count
    for returns, values, explained in ((flat, apart, None), (apart, [v / 2 for v in apart], 0.75)):
        record = UpdateRecord()
        record.add_credit(batch.replace(values_old=laid(values), returns=laid(returns)), None)
        assert record.credit["value/explained_variance"] == (explained and pytest.approx(explained))
