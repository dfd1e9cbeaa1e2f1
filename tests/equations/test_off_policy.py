import math

import pytest
import torch

from hotcold.equations import mismatch_weights, policy_gradient, token_logp

from .exact_policies import EXACT, T1, assert_equal, expected_gradient, f64, probabilities, table

CASE = EXACT["off_policy_on_T1"]
NAN = float("nan")

WEIGHTS = {
    "token": {"cap": 1e9},
    "sequence": {"cap": 1e9, "level": "sequence"},
    "geometric": {"cap": 1e9, "level": "geometric"},
    "token_truncate_cap_1.2": {"cap": 1.2},
    "token_mask_0.8_1.25": {"mode": "mask", "low": 0.8, "high": 1.25},
    "sequence_truncate_cap_1.2": {"cap": 1.2, "level": "sequence"},
    "sequence_mask_0.8_1.25": {"mode": "mask", "low": 0.8, "high": 1.25, "level": "sequence"},
    "geometric_mask_0.9_1.1": {"mode": "mask", "low": 0.9, "high": 1.1, "level": "geometric"},
}


@pytest.mark.parametrize("key", WEIGHTS)
def test_the_expected_gradient_under_each_weight(key):
    """Responses from mu, estimator R w grad log pi at theta: the gradient of J only with the full product."""
    theta = table("theta")
    logp, logp_mu = (token_logp(T1.logits(x), T1.tokens) for x in (theta, table("mu")))
    loss = policy_gradient(logp, T1.rewards[:, None].expand_as(logp)) * mismatch_weights(
        logp, logp_mu, T1.mask, **WEIGHTS[key]
    )
    gradient = -expected_gradient(theta, loss, T1.mask, probabilities("mu"))
    assert_equal(gradient, CASE["estimators"][key]["gradient"])
    exact = (gradient - f64(EXACT["T1"]["grad_J"])).abs().max() < 1e-12
    assert bool(exact) == (key == "sequence")


def test_the_ratios_of_each_response():
    logp, logp_mu = (token_logp(T1.logits(table(name)), T1.tokens) for name in ("theta", "mu"))
    token = mismatch_weights(logp, logp_mu, T1.mask, cap=1e9)
    assert_equal(token[:, 1:], list(CASE["token_ratio"].values()))
    sequence = mismatch_weights(logp, logp_mu, T1.mask, cap=1e9, level="sequence")
    assert_equal(sequence[:, 2], list(CASE["sequence_ratio"].values()))


def test_the_levels_by_hand_with_a_gap():
    # log-weights log 2, (gap), log 8 | product 16, geometric mean 4
    old = f64([[math.log(2), NAN, math.log(8), NAN]])
    mask = torch.tensor([[True, False, True, False]])
    for level, expected in (("token", [2, 0, 8, 0]), ("sequence", [16, 0, 16, 0]), ("geometric", [4, 0, 4, 0])):
        assert_equal(mismatch_weights(old, torch.zeros_like(old), mask, cap=100.0, level=level), [expected])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_extreme_differences_stay_finite_in_float32(level):
    old = torch.tensor([[100.0, 100.0], [-100.0, -100.0]])
    mask, zero = torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2)
    truncated = mismatch_weights(old, zero, mask, level=level)
    assert truncated[0].tolist() == [2.0, 2.0]
    assert truncated[1].max() < 1e-40  # exp(-100), or exp(-200) for the product
    assert mismatch_weights(old, zero, mask, mode="mask", level=level).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert mismatch_weights(old, zero, mask, cap=float("inf"), level=level).isfinite().all()


def test_the_bounds_of_the_band_are_inside():
    old = f64([[math.log(0.51), 0.0, math.log(4.9), math.log(5.1), math.log(0.49)]])
    mask = torch.ones(1, 5, dtype=torch.bool)
    w = mismatch_weights(old, torch.zeros_like(old), mask, mode="mask")
    assert_equal(w, [[0.51, 1.0, 4.9, 0.0, 0.0]])
    w = mismatch_weights(old, torch.zeros_like(old), mask, mode="mask", low=1.0, high=1.0)
    assert w.tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0]]


def test_a_cap_below_one_and_a_response_of_one_token():
    old, mask = f64([[math.log(4.0), 0.0]]), torch.tensor([[True, False]])
    assert_equal(mismatch_weights(old, torch.zeros_like(old), mask, cap=0.5), [[0.5, 0.0]])
    for level in ("token", "sequence", "geometric"):
        assert_equal(mismatch_weights(old, torch.zeros_like(old), mask, cap=9.0, level=level), [[4.0, 0.0]])


def test_the_weights_are_constants():
    x = f64([[0.1]]).requires_grad_()
    assert not mismatch_weights(x, 2 * x, torch.ones(1, 1, dtype=torch.bool)).requires_grad


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_nan_inside_the_mask_stays_visible(mode):
    old = f64([[NAN, 0.0]])
    w = mismatch_weights(old, torch.zeros_like(old), torch.ones(1, 2, dtype=torch.bool), mode=mode)
    assert w[0, 0].isnan() and w[0, 1] == 1


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "clip"},
        {"level": "word"},
        {"cap": 0.0},
        {"cap": -1.0},
        {"cap": NAN},
        {"mode": "mask", "low": -0.1},
        {"mode": "mask", "low": NAN},
        {"mode": "mask", "high": 0.4},
        {"mode": "mask", "high": NAN},
    ],
)
def test_unknown_modes_and_bounds_out_of_range_are_errors(options):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=list(options)[-1]):
        mismatch_weights(x, x, torch.ones(1, 1, dtype=torch.bool), **options)
