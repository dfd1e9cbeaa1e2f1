"""Cuts, padding, order and skipping leave the gradient alone; rejected rows leave the denominators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Forward, Objective, TokenLoss, Weighting
from hotcold.algorithms.baselines import no_baseline
from hotcold.algorithms.expert_iteration import BestOfGroup, ExpertIteration, Threshold, TopFraction
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.losses import Loss, importance_weighted_loss, policy_gradient_loss
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Batch, Rollout, collate
from hotcold.equations import fixed_length, mean_per_response, mean_per_token, sum_per_response
from hotcold.training import batching
from hotcold.training import update as update_module
from tests.toy_policies import (
    T1,
    T2,
    TINY,
    Custom,
    RecordingEngine,
    assert_close,
    gradient,
    ragged_rollouts,
    relative_gap,
    run_update,
    t2_rollouts,
    tiny_gpt2,
    tiny_llama,
)

WEIGHTINGS: dict[str, Weighting] = {
    "sum": sum_per_response,
    "response": mean_per_response,
    "token": mean_per_token,
    "fixed": partial(fixed_length, length=8),
}
ALGORITHMS: dict[str, Callable[[Weighting], Algorithm]] = {
    "reinforce": lambda w: REINFORCE(group_size=4, weighting=w),
    "reinforce_none": lambda w: REINFORCE(group_size=4, baseline=no_baseline, weighting=w),
    "rloo": lambda w: RLOO(group_size=4, weighting=w),
    "rloo_ratio": lambda w: RLOO(group_size=4, weighting=w, objective=importance_weighted_loss),
    "grpo": lambda w: GRPO(group_size=4, weighting=w),
    "grpo_no_std": lambda w: GRPO(group_size=4, weighting=w, scale_by_std=False),
    "expert_threshold": lambda w: ExpertIteration(group_size=4, keep_rule=Threshold(0.5), weighting=w),
    "expert_best": lambda w: ExpertIteration(group_size=4, keep_rule=BestOfGroup(), weighting=w),
    "expert_top": lambda w: ExpertIteration(group_size=4, keep_rule=TopFraction(0.4), weighting=w),
}


# ------------------------------------------------------------------ cuts, padding, order (A17)


@pytest.mark.parametrize("weighting", list(WEIGHTINGS))
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_micro_batches_padding_and_order_leave_the_gradient_exactly(name: str, weighting: str) -> None:
    """float64 on an enumerated policy: 1e-12."""
    algorithm, rows = ALGORITHMS[name](WEIGHTINGS[weighting]), t2_rollouts()
    (whole,) = gradient(T2.policy(), rows, algorithm, torch.float64)
    assert float(whole.abs().max()) > 1e-3
    for budget in (1, 5, 9):
        (cut,) = gradient(T2.policy(), rows, algorithm, torch.float64, tokens_per_microbatch=budget)
        assert_close(cut, whole)
    for pad_id in (1, 9):
        (padded,) = gradient(T2.policy(), rows, algorithm, torch.float64, pad_id=pad_id)
        assert_close(padded, whole)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)).tolist()
    (permuted,) = gradient(T2.policy(), [rows[i] for i in order], algorithm, torch.float64, tokens_per_microbatch=9)
    assert_close(permuted, whole)


@pytest.mark.parametrize("model", list(TINY))
@pytest.mark.parametrize("weighting", list(WEIGHTINGS))
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_micro_batches_padding_and_order_leave_the_gradient_of_a_model(name: str, weighting: str, model: str) -> None:
    """float32, ragged lengths, gaps: relative L2 1e-5."""
    algorithm, rows, module = ALGORITHMS[name](WEIGHTINGS[weighting]), ragged_rollouts(), TINY[model]()
    whole = gradient(module, rows, algorithm)
    assert math.sqrt(sum(float((g**2).sum()) for g in whole)) > 1e-3
    others = [
        gradient(module, rows, algorithm, tokens_per_microbatch=1),
        gradient(module, rows[::-1], algorithm, tokens_per_microbatch=40, pad_id=23),
    ]
    assert max(relative_gap(other, whole) for other in others) < 1e-5


def _widen(batch: Batch, columns: int, pad_id: int) -> Batch:
    def wide(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() != 2:
            return x
        fill = pad_id if x.dtype == torch.int64 else 0
        return torch.cat([x, torch.full((len(x), columns), fill).to(x.dtype)], dim=1)

    return replace(batch, **{name: wide(value) for name, value in vars(batch).items() if name != "extras"})


def test_a_wider_batch_has_the_same_gradient() -> None:
    algorithm = RLOO(group_size=4)
    (objective,) = algorithm.objectives
    for module in (tiny_llama(), tiny_gpt2()):
        engine = RecordingEngine(module)
        batch, _ = run_update(ragged_rollouts(), algorithm, engine, dtype=torch.float32)
        for columns in (1, 9):
            wide = _widen(batch, columns, pad_id=2)
            engine.backward(wide, objective.weighting(wide.trained), objective)
            engine.step("policy", 0.0, None)
            assert relative_gap(engine.gradients[-1], engine.gradients[0]) < 1e-5


def _given_loss(forward: Forward, batch: Batch) -> TokenLoss:
    """Per-token losses stand in a column; the model's log-probs scale them, so that there is a gradient."""
    assert forward.logp is not None
    return TokenLoss(batch.extras["loss"] * (1 + forward.logp - forward.logp.detach()))


def test_a_token_mean_is_one_mean_over_the_step() -> None:
    """A17: per-token losses [4] and [0, 0, 0]: 1, in one micro-batch or two; a mean of means would be 2."""
    rows = [Rollout((1,), (3,), 0, 0, reward=1.0), Rollout((1,), (3, 4, 5), 0, 1, reward=1.0)]
    losses = torch.tensor([[0.0, 4, 0, 0], [0.0, 0, 0, 0]])
    for budget in (1, 100):
        algorithm = Custom((Objective(_given_loss, mean_per_token),), extras={"loss": losses})
        engine = RecordingEngine(tiny_llama())
        _, record = run_update(rows, algorithm, engine, dtype=torch.float32, tokens_per_microbatch=budget)
        assert record.policy.losses == [1.0] and engine.rows_computed == 2


CUTS = [[8], [4, 4], [3, 5], [1] * 8]


@pytest.mark.parametrize("weighting", list(WEIGHTINGS))
def test_any_cut_of_eight_rows_has_the_same_gradient(weighting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A17: lengths 1 to 8, cut as (8), (4, 4), (3, 5), (1 x 8)."""
    rows = [Rollout((1, 2), tuple(range(3, 4 + i)), i % 2, i, reward=float(i % 3)) for i in range(8)]
    algorithm = GRPO(group_size=4, weighting=WEIGHTINGS[weighting])
    gradients = []
    for sizes in CUTS:

        def cut(batch: Batch, rows: Sequence[int], budget: int, sizes: list[int] = sizes) -> list[list[int]]:
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            return [list(rows)[start : start + n] for start, n in zip(starts, sizes, strict=True)]

        monkeypatch.setattr(batching, "micro_batches", cut)
        gradients.append(gradient(tiny_llama(), rows, algorithm))
    assert max(relative_gap(g, gradients[0]) for g in gradients[1:]) < 1e-5


@dataclass(frozen=True)
class Poisoned:
    """An algorithm whose credit leaves NaN on every token that is not trained."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        batch, state = self.inner.credit(batch, state)
        assert batch.advantages is not None
        return batch.replace(advantages=torch.where(batch.trained, batch.advantages, math.nan)), state


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_nan_outside_the_mask_changes_nothing(name: str) -> None:
    """A15: in advantages and in the sampler's log-probs, and not in what is reported either."""
    algorithm = ALGORITHMS[name](mean_per_token)
    rows = [replace(r, logp_sampler=(-1.0,) * len(r.response_ids)) for r in ragged_rollouts()]

    def poison(batch: Batch) -> Batch:
        assert batch.logp_sampler is not None
        return batch.replace(logp_sampler=torch.where(batch.trained, batch.logp_sampler, math.nan))

    module, outcomes = tiny_llama(), []
    for chosen, change in ((algorithm, lambda batch: batch), (Poisoned(algorithm), poison)):
        engine = RecordingEngine(module)
        _, record = run_update(rows, chosen, engine, dtype=torch.float32, change=change, tokens_per_microbatch=40)
        outcomes.append((engine.gradients[0], record.summary()))
    assert all(torch.equal(a, b) for a, b in zip(outcomes[0][0], outcomes[1][0], strict=True))
    assert outcomes[0][1] == outcomes[1][1]


@pytest.mark.parametrize("weighting", list(WEIGHTINGS))
def test_each_minibatch_averages_over_its_own_rows(weighting: str) -> None:
    """The gradient of a step is that of its rows alone, whatever the other minibatches hold."""
    advantages, rows = tuple(float(i - 4) for i in range(12)), t2_rollouts()
    objective = Objective(importance_weighted_loss, WEIGHTINGS[weighting])
    engine = RecordingEngine(T2.policy())
    run_update(rows, Custom((replace(objective, minibatches=3),), advantages), engine)
    parts = batching.minibatch_rows(collate(rows), 3, [0, 1, 0])
    # row 4 has advantage 0: not computed, and yet in its minibatch's denominators
    assert [sorted(step) for step in engine.episodes] == [[row for row in part if row != 4] for part in parts]
    for (step,), part in zip(engine.gradients, parts, strict=True):
        own = Custom((objective,), tuple(advantages[i] for i in part))
        (expected,) = gradient(T2.policy(), [rows[i] for i in part], own, torch.float64)
        assert_close(step, expected)


def test_minibatches_are_drawn_anew_at_every_step_and_by_the_seed() -> None:
    algorithm = Custom((Objective(importance_weighted_loss, sum_per_response, minibatches=3),), (1.0,) * 12)

    def drawn(step: int, seed: int) -> list[list[int]]:
        engine = RecordingEngine(T2.policy())
        run_update(t2_rollouts(), algorithm, engine, step=step, seed=seed)
        return [sorted(rows) for rows in engine.episodes]

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0) != drawn(2, 0) and drawn(1, 0) != drawn(1, 1)


# ------------------------------------------------------------------ skip is not drop


def _skip_nothing(batch: Batch, objective: Objective) -> Tensor:
    return ~batch.trained.any(1)


@pytest.mark.parametrize("weighting", list(WEIGHTINGS))
@pytest.mark.parametrize("name", ["rloo", "rloo_ratio", "grpo", "grpo_no_std"])
def test_skipped_rows_stay_in_the_denominators(name: str, weighting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three groups have equal scores. Computing their rows too gives the same gradient; dropping them not."""
    rows = [replace(r, reward=0.7) if r.group else r for r in t2_rollouts()]
    algorithm = ALGORITHMS[name](WEIGHTINGS[weighting])
    outcomes = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(update_module, "skippable", _skip_nothing)
        engine = RecordingEngine(T2.policy())
        run_update(rows, algorithm, engine)
        outcomes.append((engine.rows_computed, engine.gradients[0][0]))
    assert [count for count, _ in outcomes] == [4, 12]
    assert_close(outcomes[0][1], outcomes[1][1])
    (dropped,) = gradient(T2.policy(), [r for r in rows if not r.group], algorithm, torch.float64)
    assert float((dropped - outcomes[0][1]).abs().max()) > 1e-2


def test_a_skipped_row_halves_what_the_other_brings() -> None:
    """T1, rows 00 and 11, advantages 1 and 0, sum per response: half of grad log pi(00), worked out by hand.

    d log pi / d z = onehot - p at the prefixes visited: p(empty) = [.622459, .377541], p(0) = [.598688, .401312].
    """
    algorithm = Custom((Objective(policy_gradient_loss, sum_per_response),), advantages=(1.0, 0.0))
    rows = [T1.rollout((0, 0), 0, 0), T1.rollout((1, 1), 1, 1)]
    engine = RecordingEngine(T1.policy())
    _, record = run_update(rows, algorithm, engine)
    assert engine.rows_computed == 1 and (record.policy.num_rows, record.policy.num_skipped_rows) == (2, 1)
    a, b = 0.3775406687981454 / 2, 0.401312339887548 / 2
    assert_close(-engine.gradients[0][0], [[a, -a], [b, -b], [0, 0]])


def test_rejected_rows_leave_the_denominators() -> None:
    """Expert iteration on two good and two bad responses is expert iteration on the two good ones."""
    rows = [T2.rollout(y, 0, i) for i, y in enumerate(((0,), (1, 1, 1), (1, 1, 0), (1, 0)))]
    algorithm = ExpertIteration(group_size=4, keep_rule=Threshold(0.2))
    for weighting in WEIGHTINGS.values():
        (mixed,) = gradient(T2.policy(), rows, replace(algorithm, weighting=weighting), torch.float64)
        (alone,) = gradient(T2.policy(), [rows[0], rows[3]], replace(algorithm, weighting=weighting), torch.float64)
        assert_close(mixed, alone)


def test_unscored_rows_leave_the_denominators() -> None:
    rows = t2_rollouts()
    lost = [replace(r, reward=None) if r.episode in (4, 7) else r for r in rows]
    for name in ("rloo", "grpo", "reinforce"):
        algorithm = ALGORITHMS[name](mean_per_token)
        (with_lost,) = gradient(T2.policy(), lost, algorithm, torch.float64)
        (without,) = gradient(T2.policy(), [r for r in rows if r.episode not in (4, 7)], algorithm, torch.float64)
        assert_close(with_lost, without)


def _imitate(forward: Forward, batch: Batch) -> TokenLoss:
    assert forward.logp is not None
    return TokenLoss(-forward.logp)


def _hinge(forward: Forward, batch: Batch) -> TokenLoss:
    """Nothing where a token has more than half of the probability."""
    assert forward.logp is not None
    return TokenLoss((math.log(0.5) - forward.logp).relu())


@pytest.mark.parametrize("loss", [_imitate, _hinge])
def test_a_loss_that_ignores_advantages_trains_rows_without_any(loss: Loss) -> None:
    zero = Custom((Objective(loss, sum_per_response),), advantages=(0.0,) * 12)
    one = Custom((Objective(loss, sum_per_response),), advantages=(1.0,) * 12)
    engine = RecordingEngine(T2.policy())
    run_update(t2_rollouts(), zero, engine)
    assert engine.rows_computed == 12
    (expected,) = gradient(T2.policy(), t2_rollouts(), one, torch.float64)
    assert float(expected.abs().max()) > 1e-2
    assert_close(engine.gradients[0][0], expected)


def test_with_nothing_to_learn_no_step_is_taken_and_that_is_counted() -> None:
    rows = [replace(r, reward=0.7) for r in t2_rollouts()]
    for algorithm, steps in ((RLOO(group_size=4), 1), (GRPO(group_size=4, epochs_per_batch=2, minibatches=3), 6)):
        engine = RecordingEngine(T2.policy())
        _, record = run_update(rows, algorithm, engine)
        summary = record.summary()
        assert engine.gradients == [] and engine.rows_computed == 0
        assert (summary["optimizer_steps"], summary["optimizer_steps/empty"]) == (0, steps)
        assert summary["rows/skipped"] == 12 and summary["loss"] == 0.0


def test_a_step_in_which_no_row_takes_part_is_counted() -> None:
    """All rejected; all unscored; all responses empty (B09)."""
    rejected = [replace(r, reward=0.0) for r in t2_rollouts()]
    unscored = [replace(r, reward=None) for r in rejected]
    empty = [replace(r, response_ids=(), reward=float(r.episode)) for r in rejected]
    for rows, algorithm in (
        (rejected, ExpertIteration(group_size=4)),
        (unscored, RLOO(group_size=4)),
        ([], RLOO(group_size=4)),
        (empty, RLOO(group_size=4)),
    ):
        engine = RecordingEngine(T2.policy())
        _, record = run_update(rows, algorithm, engine)
        assert engine.gradients == [] and record.summary()["optimizer_steps/empty"] == 1
