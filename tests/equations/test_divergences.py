import math

import pytest
import torch

from hotcold.equations import adaptive_beta, approx_kl, kl_exact, kl_k1, kl_k2, kl_k3
from hotcold.equations.logprobs import state_kl

from .exact_policies import EXACT, T1, assert_equal, f64, table

HAND = EXACT["kl_by_hand"]
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("case", HAND["tokens"])
def test_the_three_estimators_of_single_tokens_A19(case):
    ref = f64([[case["logp_ref"]]])
    for name, estimate in (("k1", kl_k1), ("k2", kl_k2), ("k3", kl_k3)):
        logp = f64([[case["logp"]]]).requires_grad_()
        value = estimate(logp, ref)
        assert_equal(value, [[case[name]]])
        if f"d{name}_dlogp" in case:
            assert_equal(torch.autograd.grad(value.sum(), logp)[0], [[case[f"d{name}_dlogp"]]])


def test_the_estimators_over_two_outcomes_A19():
    case = HAND["two_outcomes"]
    pi, ref = f64(case["pi"]), f64(case["ref"])
    logp, logp_ref = pi.log()[None], ref.log()[None]
    assert_equal(kl_k3(logp, logp_ref)[0], case["k3_per_outcome"])
    for name, estimate in (("mean_k1", kl_k1), ("mean_k2", kl_k2), ("mean_k3", kl_k3)):
        assert_equal(pi @ estimate(logp, logp_ref)[0], case[name])
    assert_equal(state_kl(pi.log(), ref.log()), case["kl"])


def test_the_movement_since_the_rollout():
    case = HAND["approx_kl"]
    assert_equal(approx_kl(f64([case["log_ratio"]])), [case["value"]])


def test_small_differences_keep_their_digits_in_float32():
    # 4.9998e-9; exp(-d) - 1 + d gives -1.66e-8
    true = HAND["float32_at_log_ratio_1e-4"]["true_k3"]
    d = torch.tensor([[1e-4]])
    assert abs(kl_k3(d, torch.zeros(1, 1)).item() / true - 1) < 1e-3
    assert abs(approx_kl(-d).item() / true - 1) < 1e-3


@pytest.mark.parametrize("temperature", ["1.0", "0.7"])
def test_the_exact_kl_of_the_layout_by_hand(temperature):
    case = EXACT["layout_by_hand"]
    kl = kl_exact(f64(case["logits"]), f64(case["logits_ref"]), float(temperature))
    assert_equal(kl, case["kl_exact"][temperature])


def test_the_exact_kl_of_each_state_of_T1():
    assert_equal(state_kl(table("theta"), table("ref")), EXACT["kl_on_T1"]["kl_exact_per_row"])
    kl = kl_exact(T1.logits(table("theta")), T1.logits(table("ref")))
    root, after_0, after_1 = EXACT["kl_on_T1"]["kl_exact_per_row"]
    assert_equal(kl, [[0, root, after_0], [0, root, after_0], [0, root, after_1], [0, root, after_1]])


def test_equal_policies_have_no_kl_at_any_temperature_A23b():
    logits = f64([[[2.0, 0.0]] * 3])
    assert_equal(kl_exact(logits, logits, temperature=0.5), [[0.0, 0.0, 0.0]])


def test_a_kept_set_of_the_policy_enters_the_kl_as_probability_zero():
    # p = (1/2, 1/2, 0), q = (1/2, 1/4, 1/4): KL = log(2) / 2
    p = f64([0.0, 0.0, -INF]).requires_grad_()
    kl = state_kl(p, f64([0.5, 0.25, 0.25]).log())
    assert_equal(kl, math.log(2) / 2)
    (gradient,) = torch.autograd.grad(kl, p)
    # dKL/dz_v = p_v (log p_v/q_v - KL): 1/2 (0 - KL), 1/2 (log 2 - KL), 0
    assert_equal(gradient, [-math.log(2) / 4, math.log(2) / 4, 0.0])
    same = state_kl(p, p.detach())
    assert same == 0 and torch.autograd.grad(same, p)[0].tolist() == [0.0, 0.0, 0.0]


def test_a_token_that_only_the_reference_excludes_makes_the_kl_infinite_without_a_nan():
    p = f64([0.0, 0.0]).requires_grad_()
    kl = state_kl(p, f64([0.0, -INF]))
    assert kl == INF
    assert torch.autograd.grad(kl, p)[0].tolist() == [0.0, 0.0]


def test_a_broken_reference_row_is_visible_and_sends_no_nan():
    logits = torch.zeros(1, 3, 2, requires_grad=True)
    ref = torch.tensor([[[NAN, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    kl = kl_exact(logits, ref)
    assert kl[0, 1].isnan()
    torch.where(torch.tensor([[False, False, True]]), kl, 0.0).sum().backward()
    # p = (1/2, 1/2), log p/q = (c, c - 1), KL = c - 1/2: dKL/dz = p (log p/q - KL) = (1/4, -1/4)
    assert_equal(logits.grad, [[[0.0, 0.0], [0.25, -0.25], [0.0, 0.0]]], tolerance=1e-6)


@pytest.mark.parametrize("estimate", [kl_k1, kl_k2, kl_k3])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, -100.0, 100.0])
def test_garbage_that_is_masked_away_spoils_no_gradient(estimate, garbage):
    logp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    kl = estimate(logp, torch.tensor([[-2.0, garbage]]))
    torch.where(torch.tensor([[True, False]]), kl, 0.0).sum().backward()
    assert logp.grad[0, 1] == 0
    assert logp.grad[0, 0].isfinite() and logp.grad[0, 0] > 0


def test_the_adaptive_coefficient():
    case = EXACT["adaptive_kl"]
    options = {"target": case["target"], "horizon": case["horizon"], "num_responses": case["num_responses"]}
    for kl, factor in case["factor"].items():
        assert_equal(f64(adaptive_beta(1.0, float(kl), **options)), factor)
    beta = case["beta_start"]
    for kl, expected in zip((12.0, 6.0, 3.0, 6.6), case["beta_after_12_6_3_6.6"], strict=True):
        beta = adaptive_beta(beta, kl, **options)
        assert_equal(f64(beta), expected)


@pytest.mark.parametrize(
    "name, value",
    [("beta", -1.0), ("beta", NAN), ("kl", NAN), ("target", 0.0), ("horizon", 0.0), ("num_responses", -1)],
)
def test_the_adaptive_coefficient_refuses_what_makes_no_sense(name, value):
    options = {"beta": 0.1, "kl": 1.0, "target": 1.0, "horizon": 10, "num_responses": 1} | {name: value}
    with pytest.raises(ValueError, match=name):
        adaptive_beta(**options)
