"""Variances of baselines by enumeration: estimates from few prompts have the exact value as their mean."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotcold.algorithms.base import Algorithm
from hotcold.algorithms.baselines import no_baseline
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.kl import KLInReward
from hotcold.algorithms.ppo import PPO
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Rollout, collate
from hotcold.errors import InputError
from hotcold.lab.expectation import Setting, expected_update, multisets
from hotcold.lab.of_run import Bench, effective_sizes, measure_step
from hotcold.lab.probe import Parts, local_engine
from hotcold.lab.sketch import CountSketch
from hotcold.lab.tiny import FIXED, TablePolicy, Tiny, probabilities, table_critic, with_steps
from hotcold.lab.truth import state_values, truth
from hotcold.lab.variance import (
    BATCH,
    CRITIC,
    GREEDY,
    GROUP,
    LEAVE_ONE_OUT,
    NONE,
    OWN,
    BaselineVariance,
    Contributions,
    compare,
    effective_size,
    mean_variance,
    projection_error,
    signal_to_noise,
    squared_mean,
)
from hotcold.models.reference import FrozenReference
from hotcold.training.batching import Cut
from hotcold.training.truncation import KEEP
from hotcold.training.update import UpdateSettings
from tests.toy_policies import ragged_rollouts, tiny_llama

EXACT = json.loads((Path(__file__).parents[1] / "vectors" / "exact.json").read_text(encoding="utf-8"))
STEPPED = with_steps(FIXED)


def silent(text: str) -> None:
    pass


def bench(algorithm: Algorithm, modules: dict[str, Any], dims: int = 10**6, reference: Any = None) -> Bench:
    parts = Parts(modules, None if reference is None else FrozenReference(reference, ""))
    return Bench(
        algorithm, local_engine(parts), parts, UpdateSettings(10**6), KEEP, CountSketch(dims), 1000, algorithm.state()
    )


def of_table(tiny: Tiny, algorithm: Algorithm, groups: Sequence[Sequence[tuple[int, ...]]]) -> Contributions:
    """Of a step in which each of these groups is a prompt; nothing is projected."""
    members = enumerate(groups)
    rows = [tiny.rollout(y, group, group * 10 + i, (-1.0,) * len(y)) for group, ys in members for i, y in enumerate(ys)]
    modules: dict[str, Any] = {"policy": TablePolicy(tiny.logits, tiny.prefixes)}
    if any(o.model == "critic" for o in algorithm.objectives):
        modules["critic"] = table_critic(tiny, state_values(tiny))
    reference = TablePolicy(tiny.reference, tiny.prefixes)
    _, found = measure_step(1, rows, "", bench(algorithm, modules, reference=reference), silent)
    return found


def of_prompts(c: Contributions, chosen: Sequence[int]) -> Contributions:
    """A step that had these prompts."""
    rows = list(chosen)
    cut = {
        name: value[rows]
        for name in ("to_go", "totals", "score", "group_mean", "group_size", "greedy", "values", "own")
        if (value := getattr(c, name)) is not None
    }
    size, mean = c.group_size[rows], c.group_mean[rows]
    return replace(
        c,
        num_prompts=len(rows),
        num_responses=int(size.sum()),
        batch_mean=float((size * mean).sum() / size.sum()),
        **cut,
    )


def pairs(c: Contributions, probability: Sequence[float]) -> Iterator[tuple[float, Contributions]]:
    for i, j in itertools.product(range(len(probability)), repeat=2):
        yield probability[i] * probability[j], of_prompts(c, [i, j])


def mean_estimate(baseline: str, c: Contributions, probability: Sequence[float]) -> float:
    """Of the variance of one prompt's gradient, estimated from two prompts, over all pairs that can come."""
    total = 0.0
    for p, step in pairs(c, probability):
        gradients = step.of(baseline)
        assert gradients is not None
        total += p * mean_variance([gradients], [step]) * step.num_prompts
    return total


# ------------------------------------------------------------------ against exact numbers


def test_one_response_to_a_prompt_has_the_exact_variance_of_each_baseline() -> None:
    """exact.json, baselines_on_T1: E|g|^2 - |E g|^2 of (R - b) grad log pi. ppo takes the mean of the two tokens, half
    of it, which has a quarter of the variance."""
    groups = [[y] for y in FIXED.responses]
    p = list(probabilities(FIXED, FIXED.logits).values())
    found = of_table(FIXED, PPO(1, whiten=False), groups)
    exact = EXACT["baselines_on_T1"]
    for baseline, key in ((NONE, "none"), (GREEDY, "greedy_response"), (CRITIC, "state_value")):
        assert mean_estimate(baseline, found, p) == pytest.approx(exact[key]["trace_variance"] / 4, rel=1e-6), baseline
    assert found.of(LEAVE_ONE_OUT) is None and found.of(GROUP) is None


@pytest.mark.parametrize("tiny", [FIXED, STEPPED], ids=lambda t: t.name)
def test_groups_of_two_have_the_variance_that_the_enumerated_algorithm_has(tiny: Tiny) -> None:
    """With rewards on the way the totals and what is still to come differ."""
    every = list(multisets(tiny.responses, probabilities(tiny, tiny.logits), 2))
    groups, p = [ys for ys, _ in every], [q for _, q in every]
    found = of_table(tiny, RLOO(2), groups)
    assert (found.totals is found.to_go) == (tiny is FIXED)
    exact = {
        NONE: expected_update(REINFORCE(2, baseline=no_baseline), tiny).variance,
        LEAVE_ONE_OUT: expected_update(RLOO(2), tiny).variance,
        # half of the gradient, scaled back; sums of the tokens of two-token responses are twice their mean
        GROUP: expected_update(GRPO(2, scale_by_std=False), tiny).variance * 4 * 4,
    }
    for baseline, variance in exact.items():
        assert mean_estimate(baseline, found, p) == pytest.approx(variance, rel=1e-6), baseline
    assert mean_estimate(OWN, found, p) == pytest.approx(exact[LEAVE_ONE_OUT], rel=1e-6)


def test_the_products_of_different_prompts_have_the_squared_gradient_as_their_mean() -> None:
    groups = [[y] for y in FIXED.responses]
    found = of_table(FIXED, REINFORCE(1, baseline=no_baseline), groups)
    p = list(probabilities(FIXED, FIXED.logits).values())
    mean = math.fsum(q * squared_mean(step.to_go) for q, step in pairs(found, p))
    assert mean == pytest.approx(float((truth(FIXED).grad_J ** 2).sum()), rel=1e-6)


def test_the_run_s_own_gradient_is_that_of_its_credit_and_leash() -> None:
    """Uphill, summed over the prompts' shares: minus the gradient of the loss, written out."""
    every = [ys for ys, _ in multisets(FIXED.responses, probabilities(FIXED, FIXED.logits), 2)]
    algorithm, beta = RLOO(2, kl=KLInReward(0.3)), 0.3
    found = of_table(FIXED, algorithm, every)
    assert found.own is not None
    table = torch.tensor(FIXED.logits, dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(FIXED.reference, dtype=torch.float64).log_softmax(-1)
    for number, ys in enumerate(every):
        logp = table.log_softmax(-1)
        total = torch.zeros((), dtype=torch.float64)
        paths = [[(0, y[0]), (1 + y[0], y[1])] for y in ys]
        costs = [[beta * float((logp[at] - reference[at]).detach()) for at in path] for path in paths]
        earned = [FIXED.reward[y] - sum(cost) for y, cost in zip(ys, costs, strict=True)]
        for i, path in enumerate(paths):
            for t, at in enumerate(path):
                to_go = FIXED.reward[ys[i]] - sum(costs[i][t:])
                total = total + (to_go - earned[1 - i]) * logp[at] / 2
        (expected,) = torch.autograd.grad(total, table)
        np.testing.assert_allclose(found.own[number].reshape(3, 2), expected.numpy(), atol=1e-6)


# ------------------------------------------------------------------ the projection


def test_a_sketch_keeps_products_and_lengths_on_average() -> None:
    """Over 2000 seeds, within 4 standard errors; the spread of |y|^2 is at most sqrt(2 / dims) |x|^2."""
    random = np.random.default_rng(0)
    a, b = torch.tensor(random.normal(size=60)), torch.tensor(random.normal(size=60))
    dims, products, squares = 8, [], []
    for seed in range(2000):
        sketch = CountSketch(dims, seed)
        y, z = sketch.of([a[:25], a[25:]]), sketch.of([b[:25], b[25:]])
        products.append(float(y @ z))
        squares.append(float(y @ y))
    for drawn, exact in ((products, float(a @ b)), (squares, float(a @ a))):
        assert abs(np.mean(drawn) - exact) < 4 * np.std(drawn) / math.sqrt(len(drawn))
    assert np.std(squares) < 1.1 * math.sqrt(2 / dims) * float(a @ a)


def test_a_sketch_is_linear_and_the_same_for_the_same_seed() -> None:
    a, b = torch.arange(40.0), torch.arange(40.0) ** 2
    sketch = CountSketch(8, seed=3)
    np.testing.assert_allclose(sketch.of([2 * a - b]), 2 * sketch.of([a]) - sketch.of([b]), rtol=1e-6)
    assert not np.array_equal(sketch.of([a]), CountSketch(8, seed=4).of([a]))


def test_a_short_gradient_is_left_as_it_is() -> None:
    given = [torch.tensor([[1.0, 2.0]]), torch.tensor([3.0])]
    assert CountSketch(3).of(given).tolist() == [1.0, 2.0, 3.0]
    assert CountSketch(3).is_exact(3) and not CountSketch(3).is_exact(4)


@pytest.fixture(scope="module")
def full() -> Contributions:
    """Of a small Llama: 6 prompts of 4 ragged responses, every parameter kept."""
    _, found = measure_step(1, ragged_rollouts(6, 4), "", bench(RLOO(4), {"policy": tiny_llama()}), silent)
    assert found.is_exact
    return found


def test_projected_gradients_have_the_variance_of_whole_ones(full: Contributions) -> None:
    """Through the same code with 256 numbers: within 4 of the standard errors that it states, for every baseline."""
    _, found = measure_step(1, ragged_rollouts(6, 4), "", bench(RLOO(4), {"policy": tiny_llama()}, dims=256), silent)
    assert found.score.shape == (6, 256) and not found.is_exact and full.score.shape[1] > 4000
    for exact, projected in zip(compare([full]), compare([found]), strict=True):
        assert exact.variance and projected.variance and projected.projection_error
        assert exact.projection_error == 0.0
        assert abs(projected.variance / exact.variance - 1) < 4 * projected.projection_error, exact.baseline
        if exact.change is not None:
            assert projected.low is not None and projected.high is not None
            assert projected.low <= exact.change <= projected.high


def test_over_many_projections_variance_and_its_stated_error_are_right(full: Contributions) -> None:
    gradients = full.of(LEAVE_ONE_OUT)
    assert gradients is not None
    exact = mean_variance([gradients], [full])
    estimates, errors = [], []
    for seed in range(60):
        sketch = CountSketch(128, seed)
        small = np.stack([sketch.of([torch.tensor(row)]) for row in gradients])
        step = replace(full, is_exact=False)
        estimates.append(mean_variance([small], [step]))
        errors.append(projection_error([small], [step]))
    spread = np.std(estimates, ddof=1)
    assert abs(np.mean(estimates) - exact) < 4 * spread / math.sqrt(60)
    assert 0.6 < np.mean(errors) * exact / spread < 1.6


# ------------------------------------------------------------------ intervals and ratios


def test_the_interval_of_the_change_covers_the_exact_one() -> None:
    """T1, groups of two, 24 prompts: the exact change is var(leave-one-out) / var(none) - 1; 95 % of 120 intervals."""
    every = list(multisets(FIXED.responses, probabilities(FIXED, FIXED.logits), 2))
    found = of_table(FIXED, RLOO(2), [ys for ys, _ in every])
    none = expected_update(REINFORCE(2, baseline=no_baseline), FIXED).variance
    exact = expected_update(RLOO(2), FIXED).variance / none - 1
    random, covered = np.random.default_rng(1), 0
    for _ in range(120):
        chosen = random.choice(len(every), size=24, p=[p for _, p in every])
        rows = {row.baseline: row for row in compare([of_prompts(found, chosen.tolist())], resamples=200)}
        row = rows[LEAVE_ONE_OUT]
        assert row.low is not None and row.high is not None
        covered += row.low <= exact <= row.high
    assert 0.85 * 120 <= covered <= 120


def plain(gradients: Sequence[Sequence[float]], num_prompts: int | None = None) -> Contributions:
    """Rewards 0: the gradient without a baseline is what is given."""
    g = np.array(gradients)
    n = len(g)
    return Contributions(
        num_prompts or n, g, g, np.zeros_like(g), np.zeros(n), np.full(n, 2.0), 0.0, 2 * n, is_exact=True
    )


def test_variance_and_signal_by_hand() -> None:
    # g = 1 and 3: variance 2 of a prompt, 1 of the step; squared mean (4^2 - 1 - 9) / 2 = 3.
    step = plain([[1.0], [3.0]])
    assert mean_variance([step.to_go], [step]) == 1.0 and squared_mean(step.to_go) == 3.0
    assert signal_to_noise([step.to_go], [step]) == (3.0, None)  # no prompt can be left out
    # two of the step's eight prompts: the variance of the step is a quarter of that
    assert mean_variance([step.to_go], [plain([[1.0], [3.0]], 8)]) == 0.25
    # over two steps it is the mean of theirs
    assert mean_variance([step.to_go, step.to_go * 3], [step, step]) == 5.0
    # leaving out 1, 2, 3 of (1, 2, 3): pairs (2, 3), (1, 3), (1, 2) have 6, 3, 2 over (1/2, 2, 1/2) / 3
    three = plain([[1.0], [2.0], [3.0]])
    ratio, error = signal_to_noise([three.to_go], [three])
    assert ratio == pytest.approx((36 - 14) / 6 / (1 / 3))
    assert error == pytest.approx(math.sqrt(2 * np.var([6 / (0.5 / 3), 3 / (2 / 3), 2 / (0.5 / 3)])))


def test_the_effective_size_by_hand() -> None:
    assert effective_size(np.zeros(5)) == 1.0
    assert effective_size(np.log([3.0, 1.0])) == pytest.approx(16 / 20)
    assert effective_size(np.array([500.0, -500.0])) == 0.5  # one of two counts
    assert math.isnan(effective_size(np.zeros(0)))


def test_the_ratios_of_known_policies_have_their_effective_size() -> None:
    """T1, each response once: w = pi_theta / pi_mu of exact.json; by token the quotients of single choices."""
    t1 = EXACT["T1"]
    mu, theta = (np.array(t1["logp_per_token"][name]) for name in ("mu", "theta"))
    rows = [FIXED.rollout(y, i, i, tuple(mu[i])) for i, y in enumerate(FIXED.responses)]
    parts = Parts({"policy": TablePolicy(FIXED.logits, FIXED.prefixes)})
    for cut in (Cut(10**6), Cut(1)):
        responses, tokens = effective_sizes(collate(rows, dtype=torch.float64), local_engine(parts), cut)
        w = np.array(t1["prob"]["theta"]) / np.array(t1["prob"]["mu"])
        assert responses == pytest.approx(w.sum() ** 2 / (4 * (w**2).sum()), rel=1e-9)
        v = np.exp(theta - mu).flatten()
        assert tokens == pytest.approx(v.sum() ** 2 / (8 * (v**2).sum()), rel=1e-9)
    assert effective_sizes(collate([FIXED.rollout((0, 0), 0, 0)]), local_engine(parts), Cut(9)) == (None, None)


# ------------------------------------------------------------------ what does not exist


def test_a_baseline_that_does_not_exist_is_none_and_says_so() -> None:
    rows = {r.baseline: r for r in compare([of_table(FIXED, REINFORCE(1), [[y] for y in FIXED.responses])])}
    assert rows[LEAVE_ONE_OUT] == BaselineVariance(LEAVE_ONE_OUT, *[None] * 7)
    assert CRITIC not in rows and rows[BATCH].variance is not None
    assert rows[NONE].change is None and rows[OWN].change is None


def test_unscored_rows_are_left_out_and_informative_prompts_are_counted() -> None:
    rows = [
        FIXED.rollout((0, 0), 5, 0),  # scores 1 and 2
        FIXED.rollout((1, 1), 5, 1),
        FIXED.rollout((0, 0), 7, 2),  # equal
        FIXED.rollout((0, 0), 7, 3),
        replace(FIXED.rollout((1, 0), 9, 4), reward=None),
        FIXED.rollout((0, 1), 9, 5),  # alone
    ]
    table = bench(RLOO(2), {"policy": TablePolicy(FIXED.logits, FIXED.prefixes)})
    figures, found = measure_step(4, rows, "as it was", table, silent)
    assert (figures.num_prompts, figures.num_responses, figures.num_informative) == (3, 5, 1)
    assert found.group_size.tolist() == [2, 2, 1] and found.of(LEAVE_ONE_OUT) is None
    few = replace(table, most_prompts=2)
    figures, found = measure_step(4, rows, "as it was", few, silent)
    assert (figures.num_used, found.num_prompts, len(found.score)) == (2, 3, 2)
    assert found.batch_mean == pytest.approx((1 + 2 + 1 + 1 + 0) / 5)


def test_one_prompt_has_no_variance() -> None:
    table = bench(RLOO(2), {"policy": TablePolicy(FIXED.logits, FIXED.prefixes)})
    rows: list[Rollout] = [FIXED.rollout(y, 0, i) for i, y in enumerate(FIXED.responses)]
    with pytest.raises(InputError, match="1 prompt: at least 2"):
        measure_step(1, rows, "", table, silent)


def test_prompts_are_drawn_with_the_step_s_other_prompts_in_mind() -> None:
    """expected_update's variance of a step of two prompts is half of that of one."""
    one = expected_update(RLOO(2), FIXED).variance
    two = expected_update(RLOO(2), FIXED, Setting(num_groups=2)).variance
    assert two == pytest.approx(one / 2)
