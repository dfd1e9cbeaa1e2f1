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
from hotcold.errors import OutOfMemory
from hotcold.models.reading import Laying
from hotcold.training import batching
from hotcold.training.batching import Cut, Room, _probes, _together, layout, micro_batches, minibatch_rows, skippable

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


def test_the_longest_row_of_a_unit_and_then_its_first_row_decide_where_it_stands() -> None:
    """Longest rows 9 and 5; alike in length, the unit of row 0 comes first. A micro-batch never cuts a unit."""
    mixed = batch_of_lengths([5, 2, 9, 5], unit=[1, 0, 0, 1])
    assert micro_batches(mixed, range(4), Cut(1)) == [[1, 2], [0, 3]]
    alike = batch_of_lengths([4, 4, 4, 4], unit=[0, 1, 1, 0])
    assert micro_batches(alike, range(4), Cut(1)) == [[0, 3], [1, 2]]


def test_the_longest_row_of_a_unit_counts_in_the_budget() -> None:
    """Two units of rows 9 and 2: 4 x 9 = 36."""
    batch = batch_of_lengths([9, 2, 9, 2], unit=[0, 0, 1, 1])
    assert micro_batches(batch, range(4), Cut(36)) == [[0, 1, 2, 3]]
    assert micro_batches(batch, range(4), Cut(35)) == [[0, 1], [2, 3]]


# ------------------------------------------------------------------ micro-batches whose rows share their prompts


def with_prompts(rows: list[tuple[tuple[int, ...], int]], unit: list[int] | None = None) -> Batch:
    """Prompt and response length of each row; no two responses begin alike."""
    units = unit or list(range(len(rows)))
    return collate(
        [
            Rollout(prompt, (99 - i, *(9,) * (length - 1)), 0, i, reward=1.0, unit=units[i])
            for i, (prompt, length) in enumerate(rows)
        ]
    )


def by_prompt(batch: Batch, budget: int) -> list[list[int]]:
    return micro_batches(batch, range(len(batch)), Cut(budget, Laying.PROMPTS))


def test_longer_prompts_stand_first_and_rows_of_one_prompt_together_by_length() -> None:
    batch = with_prompts([((1, 2), 1), ((3,), 2), ((1, 2), 3), ((4, 5), 2), ((1, 3), 2), ((4, 5), 2)])
    assert by_prompt(batch, 1) == [[2], [0], [4], [3], [5], [1]]


def test_the_first_row_of_a_unit_names_its_prompt_and_its_longest_response_its_length() -> None:
    lengths_of_prompts = with_prompts([((1, 2), 1), ((1,), 1), ((1, 2), 1), ((1,), 1)], unit=[0, 1, 1, 0])
    prompts = with_prompts([((1,), 1), ((2,), 1), ((1,), 1), ((2,), 1)], unit=[0, 1, 1, 0])
    responses = with_prompts([((1,), 3), ((1,), 1), ((1,), 5), ((1,), 3)], unit=[0, 1, 1, 0])
    alike = with_prompts([((1,), 3), ((1,), 3), ((1,), 3), ((1,), 3)], unit=[0, 1, 1, 0])
    assert [by_prompt(b, 1) for b in (lengths_of_prompts, prompts, alike)] == [[[0, 3], [1, 2]]] * 3
    assert by_prompt(responses, 1) == [[1, 2], [0, 3]]


P, Q = (1, 2, 3), (1, 2, 4)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (22, [[1, 2, 3, 0]]),  # 2 prompts x 3 + 4 rows x 4
        (21, [[1, 2, 3], [0]]),  # 2 x 3 + 3 x 4 = 18
        (18, [[1, 2, 3], [0]]),
        (17, [[1, 2], [3, 0]]),
        (11, [[1, 2], [3, 0]]),  # 1 x 3 + 2 x 4 each
        (10, [[1], [2], [3], [0]]),
    ],
)
def test_a_prompt_counts_once_in_the_budget(budget: int, expected: list[list[int]]) -> None:
    assert by_prompt(with_prompts([(Q, 3), (P, 4), (P, 2), (Q, 4)]), budget) == expected


def test_the_longest_prompt_and_the_longest_response_count_in_the_budget() -> None:
    prompts = with_prompts([((1, 1, 1, 1), 1), ((2,), 1)])  # 2 x 4 + 2 x 1
    assert by_prompt(prompts, 10) == [[0, 1]] and by_prompt(prompts, 9) == [[0], [1]]
    responses = with_prompts([((1,), 1), ((2,), 4)])  # 2 x 1 + 2 x 4
    assert by_prompt(responses, 10) == [[0, 1]] and by_prompt(responses, 9) == [[0], [1]]
    # A unit of two prompts, the longer one last; with the third row 2 prompts x 4 + 3 rows x 1.
    of_unit = with_prompts([((2,), 1), ((1, 1, 1, 1), 1), ((2,), 1)], unit=[0, 0, 1])
    assert by_prompt(of_unit, 11) == [[0, 1, 2]] and by_prompt(of_unit, 10) == [[0, 1], [2]]


@pytest.fixture
def no_padding_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "CHEAP", 0)


@pytest.mark.usefixtures("no_padding_is_cheap")
def test_a_row_whose_padding_is_more_than_its_prompt_begins_a_micro_batch() -> None:
    """Prompt 3: paddings 2 + 1 are as much, 2 + 2 are more."""
    assert by_prompt(with_prompts([(P, 4), (P, 2), (Q, 4), (Q, 3)]), 1000) == [[0, 1, 2, 3]]
    assert by_prompt(with_prompts([(P, 4), (P, 2), (Q, 4), (Q, 2)]), 1000) == [[0, 1, 2], [3]]


@pytest.mark.usefixtures("no_padding_is_cheap")
def test_a_tenth_of_the_response_columns_may_be_padding() -> None:
    """A tenth of 4 rows x 10."""
    whole = [batch_of_lengths([10, 10, 10, n]) for n in (6, 5)]  # without sharing: of all columns
    assert [micro_batches(b, range(4), Cut(1000)) for b in whole] == [[[0, 1, 2, 3]], [[0, 1, 2], [3]]]
    assert by_prompt(with_prompts([((1,), n) for n in (10, 10, 10, 6)]), 1000) == [[0, 1, 2, 3]]
    assert by_prompt(with_prompts([((1,), n) for n in (10, 10, 10, 5)]), 1000) == [[0, 1, 2], [3]]


def test_64_tokens_of_padding_are_cheaper_than_another_micro_batch() -> None:
    for laying in (Laying.ROWS, Laying.PROMPTS):
        for length, expected in ((36, [[0, 1]]), (35, [[0], [1]])):  # 100 - 36 = 64
            batch = batch_of_lengths([100, length])
            assert micro_batches(batch, range(2), Cut(1000, laying)) == expected


def test_ragged_rows_are_padded_by_a_tenth_at_most() -> None:
    """Lengths from 8 to 256 in one group, and 64 tokens of padding in each micro-batch at most where that is more."""
    lengths = [8 + (37 * i) % 249 for i in range(64)]
    for laying in (Laying.ROWS, Laying.PROMPTS):
        batch = batch_of_lengths(lengths)
        micro = micro_batches(batch, range(64), Cut(1024, laying))
        columns = [len(rows) * max(lengths[r] for r in rows) for rows in micro]
        padding = [n - sum(lengths[r] for r in rows) for n, rows in zip(columns, micro, strict=True)]
        assert all(pad <= max(64, 0.1 * n) for pad, n in zip(padding, columns, strict=True))
        assert sum(padding) < 0.1 * sum(columns)


@pytest.mark.usefixtures("no_padding_is_cheap")
def test_a_wider_row_pads_those_that_are_there() -> None:
    """The longer prompt stands first, with three responses of 10; one of 16 makes it 3 x 6 = 18 columns of padding."""
    prompts = [((1, 2), 10)] * 3
    assert by_prompt(with_prompts([*prompts, ((3,), 11)]), 1000) == [[0, 1, 2, 3]]  # 3 of 44, a prompt has 2
    assert by_prompt(with_prompts([*prompts, ((3,), 16)]), 1000) == [[0, 1, 2], [3]]  # 18 of 64


@pytest.mark.usefixtures("no_padding_is_cheap")
def test_the_padding_inside_the_first_unit_counts_too() -> None:
    units = [0, 0, 1, 1]
    whole = [batch_of_lengths([5, 4, 5, n], units) for n in (4, 3)]  # 2 of 20, 3 of 20
    assert [micro_batches(b, range(4), Cut(1000)) for b in whole] == [[[0, 1, 2, 3]], [[0, 1], [2, 3]]]
    assert by_prompt(with_prompts([(P, 4), (P, 2), (P, 4), (P, 3)], units), 1000) == [[0, 1, 2, 3]]
    assert by_prompt(with_prompts([(P, 4), (P, 2), (P, 4), (P, 2)], units), 1000) == [[0, 1], [2, 3]]


def test_skipped_rows_count_but_are_not_computed() -> None:
    skipped = torch.tensor([False, True, False])
    (step,) = layout(batch_of_lengths([3, 3, 3]), PLAIN, skipped, Cut(100), [0])
    assert step.rows == [0, 1, 2] and step.micro_batches == [[0, 2]]


# ------------------------------------------------------------------ micro-batches without padding


def packed(batch: Batch, budget: int) -> list[list[int]]:
    return micro_batches(batch, range(len(batch)), Cut(budget, Laying.PACKED))


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (19, [[1, 2, 0, 3]]),  # 2 prompts x 3 + 4 + 2 + 3 + 4 tokens of responses
        (18, [[1, 2], [0, 3]]),  # 9 and 10; three rows in the first would be 15 and 7
        (10, [[1, 2], [0, 3]]),
        (9, [[1, 2], [0], [3]]),  # 9, 6, 7
        (1, [[1], [2], [0], [3]]),
    ],
)
def test_packed_rows_count_their_tokens_and_each_prompt_once(budget: int, expected: list[list[int]]) -> None:
    assert packed(with_prompts([(Q, 3), (P, 4), (P, 2), (Q, 4)]), budget) == expected


def test_packed_rows_of_a_unit_stay_together() -> None:
    batch = with_prompts([(P, 4), (P, 4), (Q, 4), (Q, 4)], unit=[0, 1, 1, 0])
    assert packed(batch, 1) == [[0, 3], [1, 2]]
    assert packed(batch, 100) == [[0, 3, 1, 2]]


def test_packed_parts_are_even_and_as_few_as_fit() -> None:
    """Lengths from 8 to 256: no part is more than a row larger than another."""
    lengths = [8 + (37 * i) % 249 for i in range(64)]
    batch = batch_of_lengths(lengths)  # all rows have the same prompt of one token
    micro = packed(batch, 1024)
    sizes = [1 + sum(lengths[r] - 1 for r in rows) for rows in micro]
    assert max(sizes) <= 1024 and len(micro) == -(-sum(n - 1 for n in lengths) // 1000)
    assert max(sizes) - min(sizes) <= 256
    assert sorted(r for rows in micro for r in rows) == list(range(64))


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


def _nothing(forward: Forward, batch: Batch) -> TokenLoss:
    return TokenLoss(_logp(forward) * 0)


def test_rows_with_an_advantage_are_not_asked() -> None:
    assert skippable(with_advantages(ROWS), Objective(_nothing, sum_per_response)).tolist() == [
        True,
        False,
        False,
        True,
    ]


def _of_other_tokens(forward: Forward, batch: Batch) -> TokenLoss:
    """At each token the sum of what stands outside the response, which is 0; on the prompt 1."""
    assert batch.logp_old is not None
    outside = torch.where(batch.trained, 0.0, _logp(forward) + batch.logp_old).sum(1, keepdim=True)
    return TokenLoss(torch.where(batch.trained, outside, 1.0))


def test_only_the_trained_tokens_are_asked() -> None:
    assert skippable(with_advantages([[0.0, 0.0]]), Objective(_of_other_tokens, sum_per_response)).tolist() == [True]


def test_the_smallest_gradient_counts() -> None:
    def loss(forward: Forward, batch: Batch) -> TokenLoss:
        return TokenLoss((_logp(forward) - _logp(forward).detach()) * 1.4e-45)

    assert skippable(with_advantages([[0.0, 0.0]]), Objective(loss, sum_per_response)).tolist() == [False]


def test_a_small_batch_is_asked_everything_in_one_call() -> None:
    """All 25 pairs of levels, and 3 pairs at random between -5 and 0, for each of 2 rows."""
    calls = []

    def loss(forward: Forward, batch: Batch) -> TokenLoss:
        calls.append(len(batch))
        return _nothing(forward, batch)

    assert skippable(with_advantages([[0.0, 0.0]] * 2), Objective(loss, sum_per_response)).all()
    assert calls == [2 * 28]


def test_the_probes_are_every_pair_of_levels_and_random_log_probs() -> None:
    probes = list(_probes(batch_of_lengths([3])))
    levels = {(float(logp[0, 0]), float(old[0, 0])) for logp, old in probes[:25]}
    assert len(levels) == 25 and len(probes) == 28
    for side in (side for pair in probes[25:] for side in pair):
        assert -5 <= side.min() < side.max() <= 0


def test_a_large_batch_is_asked_in_parts() -> None:
    """2^18 tokens at most in a call: 2 probes of 2^17 tokens, one of more than that, one of any size."""
    probes = [(torch.tensor(float(i)), torch.tensor(0.0)) for i in range(4)]
    sizes = [[len(part) for part in _together(probes, n)] for n in (2**16, 2**17, 2**17 + 1, 2**19)]
    assert sizes == [[4], [2, 2], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert [len(part) for part in _together(probes[:3], 2**17)] == [2, 1]
    assert [float(logp) for part in _together(probes, 2**17) for logp, _ in part] == [0, 1, 2, 3]


# ------------------------------------------------------------------ out of memory


def attempts(lengths: list[int], room: Room, fits: int) -> list[list[list[int]]]:
    """The micro-batches that `work` is given; more than `fits` rows at once run out of memory."""
    batch, tried = batch_of_lengths(lengths), []

    def work(micro: list[list[int]]) -> None:
        tried.append(micro)
        if max(map(len, micro)) > fits:
            raise OutOfMemory("full")

    room.run(batch, micro_batches(batch, range(len(lengths)), room.cut), work)
    return tried


def test_a_cut_that_is_larger_than_the_batch_is_halved_until_it_cuts() -> None:
    """Twelve rows of 17 tokens, 204 in all, in one micro-batch of 4096: 128, which holds seven, is the first to cut."""
    room = Room(Cut(4096))
    assert attempts([17] * 12, room, fits=8) == [[list(range(12))], [list(range(7)), list(range(7, 12))]]
    assert room.cut.tokens_per_microbatch == 128 and room.num_halved == 5


def test_a_cut_is_halved_as_often_as_it_takes_and_down_to_single_rows() -> None:
    """100 tokens: five rows of 17; 50: two; 25: one."""
    room = Room(Cut(100))
    sizes = [[len(rows) for rows in micro] for micro in attempts([17] * 6, room, fits=1)]
    assert sizes == [[5, 1], [2, 2, 2], [1] * 6]
    assert room.cut.tokens_per_microbatch == 25 and room.num_halved == 2
    room = Room(Cut(3))
    assert attempts([1, 1], room, fits=1) == [[[0, 1]], [[0], [1]]] and room.cut.tokens_per_microbatch == 1


def test_a_row_that_does_not_fit_alone_is_named_by_the_longest() -> None:
    for cut in (Cut(40), Cut(1)):
        with pytest.raises(OutOfMemory, match="a single row of 17 tokens"):
            attempts([5, 17, 9], Room(cut), fits=0)
