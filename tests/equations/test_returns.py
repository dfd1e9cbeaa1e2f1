import pytest
import torch

from hotcold.equations import (
    gae,
    kl_shaped_rewards,
    reward_to_go,
    soft_overlong_penalty,
    td_errors,
    terminal_rewards,
    token_logp,
)

from .exact_policies import EXACT, assert_equal, f64

LAYOUT = EXACT["layout_by_hand"]
MASK = torch.tensor(LAYOUT["response_mask"])
NAN = float("nan")


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


@pytest.mark.parametrize("case", EXACT["gae"]["cases"])
def test_the_gae_cases_of_exact_gae_A04(case):
    r, V, mask = f64([case["token_rewards"]]), f64([case["values"]]), ones(1, len(case["values"]))
    assert_equal(td_errors(r, V, mask, case["gamma"]), [case["td_errors"]])
    A = gae(r, V, mask, case["gamma"], case["lam"])
    assert_equal(A, [case["advantages"]])
    assert_equal(A + V, [case["returns"]])
    assert_equal(reward_to_go(r, mask, case["gamma"]), [case["reward_to_go"]])


def test_the_batch_laid_out_by_hand():
    rewards, V = f64(LAYOUT["rewards"]), f64(LAYOUT["values"])  # V holds 9 outside the mask
    r = terminal_rewards(rewards, MASK)
    assert_equal(r, LAYOUT["terminal_rewards"])
    assert_equal(td_errors(r, V, MASK, LAYOUT["gamma"]), LAYOUT["td_errors"])
    A = gae(r, V, MASK, LAYOUT["gamma"], LAYOUT["lam"])
    assert_equal(A, LAYOUT["advantages"])
    assert_equal(torch.where(MASK, A + V, 0.0), LAYOUT["returns"])
    assert_equal(reward_to_go(r, MASK, LAYOUT["gamma"]), LAYOUT["reward_to_go"])
    tokens = torch.tensor(LAYOUT["tokens"])
    logp, ref = (token_logp(f64(LAYOUT[name]), tokens) for name in ("logits", "logits_ref"))
    assert_equal(kl_shaped_rewards(rewards, logp, ref, MASK, LAYOUT["beta"]), LAYOUT["kl_shaped_rewards"])


def test_the_terminal_reward_is_on_the_last_token_of_each_row_A02():
    T, F = True, False
    mask = torch.tensor([[T, T, T, F, F], [T, T, T, T, T], [T, F, F, F, F]])
    r = terminal_rewards(f64([1.0, 1.0, 1.0]), mask)
    assert r.nonzero().tolist() == [[0, 2], [1, 4], [2, 0]]
    A = gae(r, torch.zeros_like(r), mask, gamma=1.0, lam=0.95)
    assert_equal(A[0], [0.9025, 0.95, 1.0, 0.0, 0.0])
    assert torch.where(mask, r, 0.0).sum(1).tolist() == [1.0, 1.0, 1.0]
    assert (A != 0).sum(1).tolist() == [3, 5, 1]
    for b in range(3):  # each row alone gives the same
        assert_equal(terminal_rewards(f64([1.0]), mask[b : b + 1]), r[b : b + 1])


@pytest.mark.parametrize("garbage", [100.0, NAN, 1e9, float("inf")])
def test_values_in_the_padding_never_enter_A05(garbage):
    mask = torch.tensor([[True, True, False]])
    r, V = f64([[0.0, 1.0, garbage]]), f64([[0.0, 0.0, garbage]])
    A = gae(r, V, mask, gamma=1.0, lam=0.95)
    assert_equal(A, [[0.95, 1.0, 0.0]])
    assert_equal(torch.where(mask, A + V, 0.0), [[0.95, 1.0, 0.0]])
    assert_equal(td_errors(r, V, mask), [[0.0, 1.0, 0.0]])
    assert_equal(reward_to_go(r, mask), [[1.0, 1.0, 0.0]])


def test_a_gap_is_jumped_over_and_takes_no_discount():
    # Response tokens 1, 2 | tool output 3, 4 | response token 5, reward 1 on the last, gamma 1/2, lam 1/2:
    # the same numbers as for three tokens in a row with V = .5, .25, .75.
    mask = torch.tensor([[False, True, True, False, False, True]])
    r, V = f64([[7.0, 0.0, 0.0, NAN, 7.0, 1.0]]), f64([[9.0, 0.5, 0.25, NAN, 9.0, 0.75]])
    delta = [0.5 * 0.25 - 0.5, 0.5 * 0.75 - 0.25, 1 - 0.75]  # -.375, .125, .25
    assert_equal(td_errors(r, V, mask, gamma=0.5), [[0, delta[0], delta[1], 0, 0, delta[2]]])
    A = [delta[0] + 0.25 * (delta[1] + 0.25 * delta[2]), delta[1] + 0.25 * delta[2], delta[2]]
    assert_equal(gae(r, V, mask, gamma=0.5, lam=0.5), [[0, A[0], A[1], 0, 0, A[2]]])
    assert_equal(reward_to_go(r, mask, gamma=0.5), [[0, 0.25, 0.5, 0, 0, 1.0]])


def test_a_row_without_a_response_token_is_all_zero():
    mask = torch.tensor([[False, False], [True, True]])
    rewards, x = f64([NAN, 1.0]), f64([[NAN, NAN], [0.0, 0.0]])
    assert_equal(terminal_rewards(rewards, mask), [[0, 0], [0, 1]])
    assert_equal(kl_shaped_rewards(rewards, x, x, mask, beta=0.1), [[0, 0], [0, 1]])
    assert_equal(gae(x, x, mask), [[0, 0], [0, 0]])


def test_a_nan_reward_stays_visible_in_its_row_and_leaves_the_others():
    r = terminal_rewards(f64([NAN, 2.0]), ones(2, 2))
    assert r[0, 1].isnan() and r[0, 0] == 0
    assert reward_to_go(r, ones(2, 2))[0].isnan().all()
    assert_equal(reward_to_go(r, ones(2, 2))[1], [2.0, 2.0])


def test_a_lam_of_one_telescopes_to_the_return_minus_the_value():
    case = EXACT["chapter"]["check_your_understanding"]["gae_lam_1_gamma_1"]
    r, V = f64([case["token_rewards"]]), f64([case["values"]])
    assert_equal(gae(r, V, ones(1, 3), gamma=1.0, lam=1.0), [case["advantages"]])
    assert_equal(reward_to_go(r, ones(1, 3)) - V, [case["reward_to_go_minus_values"]])


def test_the_shaped_rewards_and_gae_of_the_chapter():
    case = EXACT["chapter"]["shaped_rewards_and_gae"]
    logp, ref = f64([case["logp"]]), f64([case["logp_ref"]])
    r = kl_shaped_rewards(f64([case["reward"]]), logp, ref, ones(1, 3), case["beta"])
    assert_equal(r, [case["token_rewards"]])
    A = gae(r, f64([case["values"]]), ones(1, 3), case["gamma"], case["lam"])
    assert_equal(A, [case["advantages"]])
    assert_equal(A + f64([case["values"]]), [case["returns"]])


def test_without_a_critic_every_token_gets_the_reward_minus_the_baseline():
    expected = EXACT["chapter"]["check_your_understanding"]["reward_2_baseline_0.5_three_tokens"]
    assert_equal(reward_to_go(terminal_rewards(f64([2.0]), ones(1, 3)), ones(1, 3)) - 0.5, [expected])


def test_gae_of_0_95_forgets_a_late_reward():
    for length, weight in EXACT["gae"]["weight_of_the_last_reward_0.95"].items():
        mask = ones(1, int(length) + 1)
        r = terminal_rewards(f64([1.0]), mask)
        assert_equal(gae(r, torch.zeros_like(r), mask)[0, 0] / weight, 1.0)


def test_the_kl_in_the_reward_carries_no_gradient():
    logp = f64([[-1.0]]).requires_grad_()
    score = f64([1.0]).requires_grad_()
    assert not kl_shaped_rewards(score, logp, logp * 2, ones(1, 1), beta=0.5).requires_grad


def test_the_gradient_of_gae_flows_to_the_values():
    # A_0 = r_0 + V_1 - V_0 + lam (r_1 - V_1), lam = 1/2: dA_0/dV = (-1, 1 - lam)
    V = f64([[0.2, 0.4, NAN]]).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    gae(torch.zeros_like(V), V, mask, lam=0.5)[0, 0].backward()
    assert_equal(V.grad, [[-1.0, 0.5, 0.0]])


def test_whole_number_rewards_are_taken_as_floats():
    r = terminal_rewards(torch.tensor([3]), ones(1, 2))
    assert r.dtype == torch.float32 and r.tolist() == [[0.0, 3.0]]


def test_the_soft_overlong_penalty():
    case = EXACT["overlong_penalty"]
    lengths = torch.tensor([int(n) for n in case["penalty"]] + [30000])
    penalty = soft_overlong_penalty(lengths, case["max_length"], case["buffer"])
    assert_equal(penalty, [*case["penalty"].values(), -1.0])
    # the smallest limit: nothing is free, one token is at the limit
    assert soft_overlong_penalty(torch.tensor([0, 1, 2]), max_tokens=1, buffer=1).tolist() == [0.0, -1.0, -1.0]


@pytest.mark.parametrize("name, value", [("gamma", 1.1), ("gamma", -0.1), ("gamma", NAN), ("lam", 1.1), ("lam", NAN)])
def test_gamma_and_lam_lie_between_zero_and_one(name, value):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=name):
        gae(x, x, ones(1, 1), **{name: value})
    if name == "gamma":
        with pytest.raises(ValueError, match=name):
            reward_to_go(x, ones(1, 1), gamma=value)
        with pytest.raises(ValueError, match=name):
            td_errors(x, x, ones(1, 1), gamma=value)


def test_out_of_range_penalties_are_errors():
    lengths = torch.tensor([1, 2])
    for max_tokens, buffer in ((10, 0), (10, 11), (0, 1), (10, NAN), (10, 2.5)):
        with pytest.raises(ValueError):
            soft_overlong_penalty(lengths, max_tokens, buffer)
    with pytest.raises(ValueError, match="none negative"):
        soft_overlong_penalty(torch.tensor([-1]), 10, 5)
    with pytest.raises(ValueError, match="beta"):
        kl_shaped_rewards(torch.ones(1), torch.zeros(1, 1), torch.zeros(1, 1), ones(1, 1), beta=-0.1)
