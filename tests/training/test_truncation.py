"""Truncated responses: kept, left out, or charged for their length, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm
from hotcold.algorithms.baselines import no_baseline
from hotcold.algorithms.build import build_algorithm
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Batch, Rollout, collate
from hotcold.equations import mean_per_token
from hotcold.training.collect import kept, step_batch
from hotcold.training.truncation import KEEP, Truncation
from tests.toy_engines import RecordingEngine
from tests.toy_policies import EXACT, T2, assert_close, run_update

CHARGE = Truncation("penalty", max_tokens=10, buffer=4, penalty=1.0)  # 6 tokens are free, 10 cost 1


def row(length: int, reward: float | None, episode: int = 0, group: int = 0, cut: bool = False, **more: Any) -> Rollout:
    return Rollout((1, 2), (3,) * length, group, episode, reward=reward, truncated=cut, **more)


def batch_of(*rows: Rollout, dtype: torch.dtype = torch.float64) -> Batch:
    return collate(rows, dtype=dtype)


def advantages(algorithm: Algorithm, batch: Batch) -> dict[int, float]:
    """By episode, of the rows that take part: the advantage of the last trained token."""
    batch = batch.select(kept(batch, algorithm))
    out, _ = algorithm.credit(batch, {})
    assert out.advantages is not None
    last = batch.lengths - 1
    return dict(zip(out.episode.tolist(), out.advantages[range(len(out)), last].tolist(), strict=True))


# ------------------------------------------------------------------ keep


def test_kept_as_it_is_a_truncated_response_counts_like_any_other() -> None:
    batch = batch_of(row(3, 1.0, 0), row(10, 0.0, 1, cut=True))
    out = Truncation("keep", max_tokens=10, buffer=4).apply(batch)
    assert torch.equal(out.token_rewards, batch.token_rewards) and out.keep.tolist() == [True, True]
    assert out.penalties is None and KEEP.rule == "keep"
    assert advantages(RLOO(group_size=2), out) == {0: 1.0, 1: -1.0}


# ------------------------------------------------------------------ mask


def test_masked_out_a_truncated_response_leaves_the_statistics_of_its_group() -> None:
    """Scores 1, 0, 0.5 and a truncated 9: the mean is 0.5, the others' means are 0.25, 0.75, 0.5."""
    rows = [row(2, 1.0, 0), row(10, 9.0, 1, cut=True), row(3, 0.0, 2), row(4, 0.5, 3)]
    batch = Truncation("mask").apply(batch_of(*rows))
    assert batch.keep.tolist() == [True, False, True, True]
    assert advantages(GRPO(scale_by_std=False), batch) == {0: 0.5, 2: -0.5, 3: 0.0}
    assert advantages(RLOO(), batch) == {0: 0.75, 2: -0.75, 3: 0.0}


def test_masked_out_it_leaves_the_denominators_too() -> None:
    """The gradient is that of the step without the row."""
    rows = [T2.rollout(y, 0, i) for i, y in enumerate(T2.responses)]
    assert [r.truncated for r in rows] == [False, False, False, True]
    algorithm = REINFORCE(1, no_baseline, weighting=mean_per_token)
    gradients: list[Tensor] = []
    for chosen, rule in ((rows, Truncation("mask")), (rows[:3], KEEP), (rows, KEEP)):
        engine = RecordingEngine(T2.policy())
        run_update(chosen, algorithm, engine, change=rule.apply)
        gradients.append(engine.gradients[0][0])
    assert torch.equal(gradients[0], gradients[1])
    assert float((gradients[0] - gradients[2]).abs().max()) > 1e-2


def test_a_mask_rejects_no_response_that_ended_by_itself_and_revives_no_unscored_one() -> None:
    batch = batch_of(row(10, 1.0, 0), row(10, None, 1), row(10, None, 2, cut=True))
    assert Truncation("mask", max_tokens=10).apply(batch).keep.tolist() == [True, False, False]


def test_with_everything_truncated_a_mask_leaves_nothing_and_takes_no_step() -> None:
    """E02: counted, not a division by zero."""
    engine = RecordingEngine(T2.policy())
    rows = [T2.rollout((1, 1, 1), 0, i) for i in range(4)]
    _, record = run_update(rows, RLOO(group_size=4), engine, change=Truncation("mask").apply)
    assert engine.gradients == [] and record.summary()["optimizer_steps/empty"] == 1


# ------------------------------------------------------------------ penalty


def test_the_penalty_of_each_length_is_that_of_the_vectors() -> None:
    """overlong_penalty: limit 20480, buffer 4096; charged at the last token, whether or not it was cut there."""
    exact = EXACT["overlong_penalty"]
    rows = [row(int(n), 0.75, i, cut=i % 2 > 0) for i, n in enumerate(exact["penalty"])]
    rule = Truncation("penalty", exact["max_length"], exact["buffer"])
    batch = rule.apply(batch_of(*rows))
    expected = list(exact["penalty"].values())
    assert_close(batch.token_rewards.sum(1), [0.75 + p for p in expected])
    last = batch.token_rewards[range(len(rows)), batch.lengths - 1]
    assert_close(last, [0.75 + p for p in expected])
    assert batch.penalties is not None
    assert_close(batch.penalties.sum(1), [-p for p in expected])
    assert batch.rewards.tolist() == [0.75] * len(rows)  # the score is the score
    assert bool(batch.keep.all())


def test_the_penalty_is_scaled_and_moves_advantages() -> None:
    """Lengths 6, 8, 10 at a penalty of 3: 0, -1.5, -3. Scores 1, 1, 1 become 1, -0.5, -2; their mean is -0.5."""
    batch = replace(CHARGE, penalty=3.0).apply(batch_of(*(row(n, 1.0, i) for i, n in enumerate((6, 8, 10)))))
    assert_close(list(advantages(GRPO(scale_by_std=False), batch).values()), [1.5, 0.0, -1.5])


def test_the_penalty_lands_on_the_last_trained_token_and_counts_every_token_of_the_response() -> None:
    """Ten tokens of which the last two are a tool's: the charge of 1 stands at the eighth, beside the score."""
    mask = (True,) * 8 + (False,) * 2
    batch = CHARGE.apply(batch_of(row(10, 0.25, response_mask=mask, steps=((0, 0.5),))))
    assert batch.token_rewards[0].tolist() == [0, 0, 0.5, 0, 0, 0, 0, 0, 0, -0.75, 0, 0]


def test_an_unscored_response_is_not_charged() -> None:
    batch = CHARGE.apply(batch_of(row(10, None, 0), row(10, 1.0, 1)))
    assert batch.penalties is not None
    assert batch.penalties.sum(1).tolist() == [0.0, 1.0]
    assert batch.token_rewards.sum(1).tolist() == [0.0, 0.0] and batch.keep.tolist() == [False, True]
    assert math.isnan(float(batch.rewards[0]))


@pytest.mark.parametrize("rule", ["keep", "mask", "penalty"])
def test_b09_an_empty_response_has_its_score_and_no_charge(rule: Any) -> None:
    """Group: [] with score 1, one token with 0, and one of ten with 0.5; means 0.5 (0.1667 with a charge of 1)."""
    rows = [row(0, 1.0, 0), row(1, 0.0, 1), row(10, 0.5, 2)]
    batch = replace(CHARGE, rule=rule).apply(batch_of(*rows))
    algorithm = GRPO(scale_by_std=False)
    out, _ = algorithm.credit(batch, {})
    assert out.advantages is not None
    mean = (1.0 + 0.0 - 0.5) / 3 if rule == "penalty" else 0.5
    assert_close(out.advantages[1, 2], 0.0 - mean)
    assert_close(out.advantages[2, 11], (-0.5 if rule == "penalty" else 0.5) - mean)
    assert bool((out.advantages[0] == 0).all())


def test_the_loop_applies_the_rule_to_the_rows_of_a_step() -> None:
    rows = [row(10, 1.0, 0, cut=True), row(1, 0.0, 1)]
    assert step_batch(rows).keep.tolist() == [True, True]
    assert step_batch(rows, Truncation("mask")).keep.tolist() == [False, True]
    assert step_batch(rows, CHARGE).token_rewards.sum(1).tolist() == [0.0, 0.0]


# ------------------------------------------------------------------ dapo looks at the scores as they were given

DAPO = build_algorithm("dapo", {}, 10)


def test_dapo_drops_a_group_that_only_the_charge_tells_apart() -> None:
    """Group 0: equal scores, lengths 6 and 10. Group 1: scores 0.5 and 0, lengths 8 and 6, both 0 after the charge."""
    rows = [row(6, 1.0, 0, 0), row(10, 1.0, 1, 0), row(8, 0.5, 2, 1), row(6, 0.0, 3, 1)]
    batch = CHARGE.apply(batch_of(*rows))
    assert kept(batch, DAPO).tolist() == [False, False, True, True]
    assert advantages(DAPO, batch) == {2: 0.0, 3: 0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [0.1, 1 / 3, 0.7, 1.0, -1.3])
@pytest.mark.parametrize("buffer", [3, 7])
def test_dapo_sees_equal_scores_as_equal_whatever_was_charged(score: float, buffer: int, dtype: torch.dtype) -> None:
    """Taking a charge off and adding it again rounds: a difference in the last bit would be no signal."""
    rule = Truncation("penalty", max_tokens=10, buffer=buffer, penalty=0.9)
    batch = rule.apply(batch_of(*(row(n, score, n) for n in range(1, 11)), dtype=dtype))
    assert not kept(batch, DAPO).any()


def test_dapo_counts_rewards_on_the_way_as_part_of_the_score() -> None:
    rows = [row(6, 1.0, 0, steps=((0, 0.5),)), row(10, 1.0, 1, steps=((3, 0.25),))]
    assert kept(CHARGE.apply(batch_of(*rows)), DAPO).tolist() == [True, True]
    rows = [row(6, 1.0, 0, steps=((0, 0.5),)), row(10, 1.0, 1, steps=((3, 0.5),))]
    assert kept(CHARGE.apply(batch_of(*rows)), DAPO).tolist() == [False, False]


def test_dapo_looks_at_whole_episodes_and_at_empty_responses() -> None:
    """Episode 0 has two rows, 0.25 + 0.75; episode 1 one row with 1; episode 2 no token and a score of 1: all equal."""
    rows = [row(2, 0.25, 0), row(9, 0.75, 0), row(10, 1.0, 1), row(0, 1.0, 2)]
    assert kept(CHARGE.apply(batch_of(*rows)), DAPO).tolist() == [False] * 4
    rows[3] = row(0, 0.5, 2)
    assert kept(CHARGE.apply(batch_of(*rows)), DAPO).tolist() == [True] * 4
