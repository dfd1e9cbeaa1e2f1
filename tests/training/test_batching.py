"""Cutting a step's rows: which optimiser step, which forward, and which need no forward at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from hotcold.algorithms.base import Forward, Objective, TokenLoss
from hotcold.algorithms.losses import ClippedLoss, importance_weighted_loss, policy_gradient_loss
from hotcold.batch import Batch, Rollout, collate
from hotcold.equations import policy_gradient, sum_per_response
from hotcold.training.batching import Cut, layout, micro_batches, minibatch_rows, skippable

PLAIN = Objective(policy_gradient_loss, sum_per_response)


def batch_of_lengths(lengths: list[int], unit: list[int] | None = None) -> Batch:
    """One prompt token and length - 1 response tokens for each row."""
    rows = [Rollout((1,), (3,) * (n - 1), 0, i, reward=1.0) for i, n in enumerate(lengths)]
    if unit:
        rows = [replace(r, unit=u) for r, u in zip(rows, unit, strict=True)]
    return collate(rows)


# ------------------------------------------------------------------ minibatches


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"), [(12, 3, [4, 4, 4]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (2, 3, [1, 1, 0])]
)
def test_minibatches_take_every_row_once_and_are_nearly_equal(rows: int, parts: int, sizes: list[int]) -> None:
    """D15: no number of rows is cut badly or lost, though scores may have been lost or groups dropped."""
    out = minibatch_rows(batch_of_lengths([3] * rows), parts, [0, 1, 0])
    assert [len(part) for part in out] == sizes
    assert sorted(row for part in out for row in part) == list(range(rows))


def test_one_minibatch_keeps_the_order() -> None:
    assert minibatch_rows(batch_of_lengths([3] * 4), 1, [0]) == [[0, 1, 2, 3]]


def test_minibatches_are_a_function_of_seed_step_and_epoch() -> None:
    batch = batch_of_lengths([3] * 12)
    first = minibatch_rows(batch, 3, [0, 1, 0])
    assert minibatch_rows(batch, 3, [0, 1, 0]) == first
    others = [minibatch_rows(batch, 3, seed) for seed in ([1, 1, 0], [0, 2, 0], [0, 1, 1])]
    assert all(other != first for other in others)


def test_every_epoch_shuffles_anew_and_goes_over_all_rows() -> None:
    objective = replace(PLAIN, epochs=3, minibatches=2)
    steps = list(layout(batch_of_lengths([3] * 6), objective, torch.zeros(6, dtype=torch.bool), Cut(100), [0, 1]))
    assert [s.epoch for s in steps] == [0, 0, 1, 1, 2, 2]
    assert Counter(row for s in steps for row in s.rows) == dict.fromkeys(range(6), 3)
    assert len({tuple(s.rows) for s in steps[::2]}) > 1


def test_rows_of_a_unit_share_a_minibatch_and_a_micro_batch() -> None:
    batch = batch_of_lengths([9, 2, 3, 9, 2, 3], unit=[0, 1, 2, 0, 1, 2])
    for part in minibatch_rows(batch, 3, [0]):
        assert len(set(batch.unit[part].tolist())) == 1 and len(part) == 2
    for micro in micro_batches(batch, range(6), Cut(1)):
        assert sorted(batch.unit[micro].tolist()) in ([0, 0], [1, 1], [2, 2])


# ------------------------------------------------------------------ micro-batches


def test_micro_batches_hold_rows_of_like_length_within_the_budget() -> None:
    """Budget 12: 6 + 5 take 2 x 6 = 12; 4 + 3 take 2 x 4 = 8, a third row 3 x 4 = 12 fits; 1 is left."""
    batch = batch_of_lengths([3, 6, 1, 4, 5, 2])
    assert micro_batches(batch, range(6), Cut(12)) == [[1, 4], [3, 0, 5], [2]]


def test_a_row_longer_than_the_budget_stands_alone() -> None:
    batch = batch_of_lengths([3, 9, 2])
    assert micro_batches(batch, range(3), Cut(4)) == [[1], [0], [2]]
    assert micro_batches(batch, range(3), Cut(10**6)) == [[1, 0, 2]]


@pytest.mark.parametrize("budget", [1, 7, 20, 33, 1000])
def test_micro_batches_take_every_row_once(budget: int) -> None:
    """D15: 5 prompts x 4 responses with any budget."""
    lengths = [2 + (7 * i) % 11 for i in range(20)]
    out = micro_batches(batch_of_lengths(lengths), range(20), Cut(budget))
    assert sorted(row for micro in out for row in micro) == list(range(20))
    assert all(len(micro) == 1 or len(micro) * max(lengths[r] for r in micro) <= budget for micro in out)


def test_skipped_rows_count_but_are_not_computed() -> None:
    skipped = torch.tensor([False, True, False])
    (step,) = layout(batch_of_lengths([3, 3, 3]), PLAIN, skipped, Cut(100), [0])
    assert step.rows == [0, 1, 2] and step.micro_batches == [[0, 2]]


# ------------------------------------------------------------------ rows whose loss is identically 0


def with_advantages(rows: list[list[float]]) -> Batch:
    batch = batch_of_lengths([3] * len(rows))
    return batch.replace(advantages=torch.tensor([[0.0, *row] for row in rows]))


ROWS = [[0.0, 0.0], [0.0, 1.0], [-1.0, -1.0], [0.0, -0.0]]


@pytest.mark.parametrize("loss", [policy_gradient_loss, importance_weighted_loss, ClippedLoss(), ClippedLoss(1.0, 0.0)])
def test_rows_without_any_advantage_are_skipped(loss: object) -> None:
    batch = with_advantages(ROWS)
    assert skippable(batch, Objective(loss, sum_per_response)).tolist() == [True, False, False, True]  # type: ignore[arg-type]


def test_advantages_outside_the_mask_do_not_count() -> None:
    batch = with_advantages([[0.0, 0.0], [0.0, 0.0]])
    assert batch.advantages is not None
    poisoned = batch.advantages.clone()
    poisoned[:, 0] = float("nan")
    assert skippable(batch.replace(advantages=poisoned), PLAIN).tolist() == [True, True]


def test_rows_without_a_trained_token_are_skipped_whatever_the_loss() -> None:
    batch = with_advantages([[1.0, 1.0], [1.0, 1.0]])
    batch = batch.replace(response_mask=batch.response_mask & torch.tensor([[True], [False]]))
    objective = replace(PLAIN, needs=frozenset({"logp", "entropy"}))
    assert skippable(batch, objective).tolist() == [False, True]
    assert skippable(batch.replace(advantages=None), PLAIN).tolist() == [False, True]


def test_a_loss_that_needs_more_than_log_probs_is_never_skipped() -> None:
    objective = replace(PLAIN, needs=frozenset({"logp", "entropy"}))
    assert not skippable(with_advantages(ROWS), objective).any()


def _logp(forward: Forward) -> torch.Tensor:
    assert forward.logp is not None
    return forward.logp


def _imitate(forward: Forward, batch: Batch) -> TokenLoss:
    return TokenLoss(-_logp(forward))


def _leash(forward: Forward, batch: Batch) -> TokenLoss:
    assert batch.advantages is not None and batch.logp_old is not None
    return TokenLoss(policy_gradient(_logp(forward), batch.advantages) + (_logp(forward) - batch.logp_old) ** 2)


def _constant(forward: Forward, batch: Batch) -> TokenLoss:
    """No gradient, but a value that is reported."""
    return TokenLoss(torch.ones_like(_logp(forward)))


def _gradient_without_value(forward: Forward, batch: Batch) -> TokenLoss:
    return TokenLoss(_logp(forward) - _logp(forward).detach())


def _hinge_above(at: float) -> object:
    """Nothing but where a token is more likely than exp(at)."""
    return lambda forward, batch: TokenLoss((_logp(forward) - at).relu())


def _hinge_below(at: float) -> object:
    """Nothing but where a token is less likely than exp(at)."""
    return lambda forward, batch: TokenLoss((at - _logp(forward)).relu())


def _hinge_on_ratio(at: float) -> object:
    """Nothing but where the ratio has grown beyond exp(at)."""
    return lambda forward, batch: TokenLoss((_logp(forward) - batch.logp_old - at).relu())


@pytest.mark.parametrize(
    "loss",
    [_imitate, _leash, _constant, _gradient_without_value]
    + [_hinge_above(at) for at in (-0.01, -0.1, -1.0, -5.0)]
    + [_hinge_below(at) for at in (-0.1, -1.0, -6.0, -20.0)]
    + [_hinge_on_ratio(at) for at in (0.0, 0.2, 2.0, 8.0)],
)
def test_a_loss_that_works_without_an_advantage_is_never_skipped(loss: object) -> None:
    """A row of one token, where chance would miss a hinge most easily, and a longer one."""
    for length in (2, 9):
        batch = batch_of_lengths([length] * 20)
        batch = batch.replace(advantages=torch.zeros(batch.tokens.shape))
        assert not skippable(batch, Objective(loss, sum_per_response)).any(), length  # type: ignore[arg-type]
