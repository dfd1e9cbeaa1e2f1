"""The update: cuts, padding, order and skipping leave the gradient alone; ratios start at 1; bad steps do no harm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Forward, Objective, Plan, TokenLoss, Weighting
from hotcold.algorithms.baselines import leave_one_out_baseline, no_baseline
from hotcold.algorithms.expert_iteration import BestOfGroup, ExpertIteration, Threshold, TopFraction
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.losses import ClippedLoss, Loss, importance_weighted_loss, policy_gradient_loss
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Batch, Rollout, collate
from hotcold.engines.base import Pass, StepResult
from hotcold.engines.local import LocalEngine
from hotcold.equations import fixed_length, mean_per_response, mean_per_token, sum_per_response
from hotcold.training import batching
from hotcold.training import update as update_module
from hotcold.training.metrics import UpdateRecord
from tests.toy_policies import (
    T1,
    T2,
    TINY,
    RecordingEngine,
    assert_close,
    ragged_rollouts,
    relative_gap,
    run_update,
    settings,
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


@dataclass(frozen=True)
class Custom:
    """A user's algorithm: given advantages by row, any objectives."""

    objectives: tuple[Objective, ...]
    advantages: tuple[float, ...] | None = None
    reads: frozenset[str] = frozenset()
    extras: dict[str, Tensor] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return Plan()

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch.keep)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        if self.advantages is None:
            return batch.replace(extras=self.extras), state
        values = torch.tensor(self.advantages, dtype=batch.token_rewards.dtype)[:, None]
        return batch.replace(advantages=torch.where(batch.response_mask, values, 0.0), extras=self.extras), state


def gradient(
    model: Any, rollouts: Sequence[Rollout], algorithm: Algorithm, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Tensor]:
    engine = RecordingEngine(model)
    run_update(rollouts, algorithm, engine, dtype=dtype, **options)
    (gradients,) = engine.gradients
    return gradients


def t2_rollouts(count: int = 12) -> list[Rollout]:
    return [T2.rollout(T2.responses[(i * i + i // 3) % 4], i % 3, i) for i in range(count)]


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
        assert record.losses == [1.0] and engine.rows_computed == 2


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
    assert engine.rows_computed == 1 and (record.num_rows, record.num_skipped_rows) == (2, 1)
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


# ------------------------------------------------------------------ ratios (A25, E01)


class Spy:
    """A local engine on a real optimiser that notes what each pass saw."""

    def __init__(self, model: Any, rate_of_adam: float = 1e-3, remember_start: bool = False):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate_of_adam, weight_decay=0.0)
        self.engine = LocalEngine(model, optimizer, 1.0, remember_start)
        self.passes: list[tuple[int, Batch, Pass]] = []  # (optimiser steps before it, rows, what was seen)
        self.num_steps = 0
        self.asked: list[int] = []  # rows of each request for log pi_old
        self.rates: list[tuple[float, float | None]] = []

    def logp(self, batch: Batch) -> Tensor:
        self.asked.append(len(batch))
        return self.engine.logp(batch)

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
        assert record.losses[0] == pytest.approx(value, abs=1e-7)
        assert record.grad_norms[0] > 0.1


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
    assert summary["clip_fraction"] == pytest.approx(count / record.num_tokens, abs=1e-6)
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
        parameters = self.spy.engine.parameters
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
    assert spy.num_steps == 6 and all(bool(p.isfinite().all()) for p in spy.engine.parameters)


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
        ends.append([p.detach().clone() for p in spy.engine.parameters])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    spy = Spy(tiny_llama())  # and from the current model they are not
    for rows in (first, second):
        run_update(rows, replace(algorithm, from_starting=False), spy, dtype=torch.float32, rate=0.01)
    assert not all(torch.equal(a, b) for a, b in zip(ends[0], spy.engine.parameters, strict=True))


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
