"""Sampled gradients beside exact ones: right estimators stay within 4 standard errors, wrong claims do not."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from hotcold.algorithms.baselines import no_baseline
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.algorithms.rloo import RLOO
from hotcold.lab import sampled
from hotcold.lab.expectation import Setting, expected_update
from hotcold.lab.sampled import Drawn, Estimator, SampledCheck, draw, estimators, sampled_check, table_sampler
from hotcold.lab.tiny import FIXED
from hotcold.lab.truth import truth
from hotcold.sampling import transformers_engine

T1 = json.loads((Path(__file__).parents[1] / "vectors" / "exact.json").read_text(encoding="utf-8"))["T1"]
RESPONSES = [(0, 0), (0, 1), (1, 0), (1, 1)]  # the order of T1's numbers
ALL = estimators()
OWN = [e for e in ALL if e.setting.sampler is None]
OTHER = [e for e in ALL if e.setting.sampler is not None]
GRAD_J = truth(FIXED).grad_J


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return draw(FIXED, table_sampler(FIXED, FIXED.logits), 100_000, seed=0)


@pytest.fixture(scope="module")
def drawn_by_another() -> Drawn:
    return draw(FIXED, table_sampler(FIXED, FIXED.sampler), 30_000, seed=1)


def test_the_real_sampler_draws_t1_with_its_probabilities_and_reports_its_log_probabilities(drawn: Drawn) -> None:
    counts, n = Counter(drawn.responses), len(drawn.responses)
    assert n == 100_000 and drawn.greedy == (0, 0)
    for response, p, logp in zip(RESPONSES, T1["prob"]["theta"], T1["logp_per_token"]["theta"], strict=True):
        assert abs(counts[response] / n - p) < 4 * math.sqrt(p * (1 - p) / n)
        assert drawn.logp[response] == pytest.approx(logp, abs=1e-6)


@pytest.mark.parametrize("estimator", ALL, ids=lambda e: e.name)
def test_the_exact_gradient_of_each_estimator_is_its_enumerated_one(estimator: Estimator) -> None:
    """The known scales (3/4 for the batch mean of 4 ...) against the sum over every group."""
    found = expected_update(estimator.algorithm, FIXED, estimator.setting).gradient
    torch.testing.assert_close(found, estimator.exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", OWN, ids=lambda e: e.name)
def test_the_mean_of_sampled_gradients_is_the_exact_one(estimator: Estimator, drawn: Drawn) -> None:
    check = sampled_check(estimator, drawn)
    assert check.passed, check.text
    assert check.num_responses == 100_000
    assert check.num_distinct <= 35  # 4 responses; 10 pairs; 35 groups of four


@pytest.mark.parametrize("estimator", OTHER, ids=lambda e: e.name)
def test_responses_of_another_policy_are_corrected_by_their_weights(
    estimator: Estimator, drawn_by_another: Drawn
) -> None:
    assert sampled_check(estimator, drawn_by_another).passed
    uncorrected = Estimator("uncorrected", estimator.algorithm, estimator.exact, Setting(sampler=FIXED.sampler))
    assert not sampled_check(uncorrected, drawn_by_another).passed


def test_a_wrong_claim_of_scale_or_of_leash_is_found(drawn: Drawn) -> None:
    by_name = {e.name: e.algorithm for e in OWN}
    wrong = [
        Estimator("the batch mean is unbiased", by_name["reinforce, batch mean of 4: 3/4"], GRAD_J),
        Estimator("the leash does nothing", by_name["rloo, KL in the reward, beta 0.3"], GRAD_J),
        Estimator("the std is a scale", by_name["grpo, 4 responses"], GRAD_J / 2),
    ]
    for claim in wrong:
        check = sampled_check(claim, drawn)
        assert not check.passed and "NOT within" in check.text, check.text


def test_random_numbers_that_are_not_uniform_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = transformers_engine.uniforms
    monkeypatch.setattr(transformers_engine, "uniforms", lambda *given: original(*given) ** 1.1)
    biased = draw(FIXED, table_sampler(FIXED, FIXED.logits), 10_000, seed=0)
    assert not sampled_check(Estimator("x", RLOO(2), GRAD_J), biased).passed


def test_the_largest_distance_is_in_standard_errors_of_the_mean() -> None:
    """Eight responses by hand: the gradient of R log pi is R (onehot - p) in the rows of the prefixes visited."""
    responses = [(0, 0)] * 3 + [(1, 1)] * 4 + [(1, 0)]
    p = [np.exp(row) / np.exp(row).sum() for row in np.array(FIXED.logits)]
    gradients = []
    for y in responses:
        g = np.zeros((3, 2))
        for row, token in ((0, y[0]), (1 + y[0], y[1])):
            g[row] += FIXED.reward[y] * (np.eye(2)[token] - p[row])
        gradients.append(g)
    mean, error = np.mean(gradients, 0), np.std(gradients, 0, ddof=1) / math.sqrt(8)
    drawn = Drawn(tuple(responses), {y: [0.0, 0.0] for y in responses}, (0, 0))
    check = sampled_check(Estimator("x", REINFORCE(1, baseline=no_baseline), GRAD_J), drawn)
    assert check.largest == pytest.approx(np.max(np.abs(mean - GRAD_J.numpy()) / error), rel=1e-9)
    assert (check.num_steps, check.num_distinct) == (8, 3)


def test_an_entry_that_never_varies_is_right_to_rounding_or_wrong() -> None:
    same = Drawn(((0, 0),) * 6, {(0, 0): [0.0, 0.0]}, (0, 0))
    # two equal rewards: leave-one-out gives 0 everywhere, always
    assert sampled_check(Estimator("x", RLOO(2), torch.full((3, 2), 1e-12)), same).passed
    assert not sampled_check(Estimator("x", RLOO(2), GRAD_J), same).passed
    assert not SampledCheck("x", 6, 3, 1, math.nan, 0.0).passed


def test_all_checks_together_draw_once_from_each_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(*given: object) -> Drawn:
        calls.append(1)
        return draw(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(sampled, "draw", counted)
    names: list[str] = []
    checks = sampled.sampled_checks(num_responses=2_000, seed=3, progress=names.append)
    assert names == [c.name for c in checks] == [e.name for e in ALL] and len(calls) == 2
    assert all(c.as_dict()["passed"] == c.passed for c in checks)
