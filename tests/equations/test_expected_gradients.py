"""What each estimator is on average: real functions over all responses of T1, against exact.json."""

import pytest
import torch

from hotcold.equations import (
    approx_kl,
    batch_mean,
    clip_selected,
    clipped_surrogate,
    group_mean,
    group_std,
    importance_weighted,
    kl_exact,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_shaped_rewards,
    leave_one_out,
    mean_per_response,
    policy_gradient,
    reward_to_go,
    sequence_log_ratio,
    sum_per_response,
    td_errors,
    terminal_rewards,
    token_logp,
    truncated_is_policy_gradient,
)

from .exact_policies import EXACT, T1, assert_equal, expected_gradient, f64, probabilities, table

KL = EXACT["kl_on_T1"]
GRAD_J = EXACT["T1"]["grad_J"]


def per_token(x):
    return x[:, None].expand(len(x), T1.tokens.shape[1])


def logp_of(table_):
    return token_logp(T1.logits(table_), T1.tokens)


# ------------------------------------------------------------------ baselines and advantages


def advantages_with(baseline):
    """[B, T] advantages under each kind of credit in `baselines_on_T1`."""
    value = f64(EXACT["T1"]["state_value"])[T1.rows.roll(1, 1)]  # V of the state in which token t was chosen
    if baseline == "state_value":
        return T1.rewards[:, None] - value
    if baseline == "exact_advantage":
        return td_errors(terminal_rewards(T1.rewards, T1.mask), value, T1.mask)
    return per_token(T1.rewards - EXACT["baselines_on_T1"][baseline]["baseline"])


@pytest.mark.parametrize("baseline", EXACT["baselines_on_T1"])
def test_baselines_leave_the_gradient_exact_and_change_its_variance(baseline):
    theta = table("theta")
    loss = policy_gradient(logp_of(theta), advantages_with(baseline))
    P = probabilities("theta")
    mean = -expected_gradient(theta, loss, T1.mask, P)
    assert_equal(mean, GRAD_J)
    second = f64(0.0)
    for b in range(len(P)):
        row = torch.where(T1.mask[b], loss[b], 0.0).sum()
        (gradient,) = torch.autograd.grad(row, theta, retain_graph=True)
        second += P[b] * (gradient**2).sum()
    case = EXACT["baselines_on_T1"][baseline]
    assert_equal(second - (mean**2).sum(), case["trace_variance"])


def test_one_td_error_with_the_true_value_is_the_exact_advantage():
    A, (root, after_0, after_1) = advantages_with("exact_advantage"), EXACT["T1"]["advantage"]
    expected = [[0, root[0], after_0[0]], [0, root[0], after_0[1]], [0, root[1], after_1[0]], [0, root[1], after_1[1]]]
    assert_equal(A, expected)


def group_estimate(group_size, credit):
    """Mean over all groups of (1/G) sum_i A_i grad log pi(y_i)."""
    theta = table("theta")
    member, group = T1.members(group_size)
    rewards, mask = T1.rewards[member], T1.mask[member]
    P = probabilities("theta")[member].reshape(-1, group_size).prod(1)[group]
    A = credit(rewards, group)[:, None].expand(mask.shape)
    loss = policy_gradient(logp_of(theta)[member], A) * sum_per_response(mask) * len(mask) / group_size
    return -expected_gradient(theta, loss, mask, P)


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_leave_one_out_is_exact_and_the_group_mean_shrinks(group_size):
    loo = group_estimate(group_size, lambda r, g: r - leave_one_out(r, g))
    assert_equal(loo, EXACT["group_estimators_on_T1"]["leave_one_out"][str(group_size)]["gradient"])
    assert_equal(loo, GRAD_J)
    case = EXACT["group_estimators_on_T1"]["group_mean"][str(group_size)]
    mean = group_estimate(group_size, lambda r, g: r - group_mean(r, g))
    assert_equal(mean, case["gradient"])
    assert_equal(mean, case["factor"] * f64(GRAD_J))


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("key", EXACT["group_estimators_on_T1"]["group_mean_over_std"]["2"])
def test_dividing_by_the_std_is_no_uniform_scale(group_size, key):
    case = EXACT["group_estimators_on_T1"]["group_mean_over_std"][str(group_size)][key]
    correction, eps = (0 if key == "population_std" else 1), (float(key.split("_")[-1]) if "eps" in key else 0.0)

    def credit(r, g):
        std = group_std(r, g, correction)
        return torch.where(std == 0, 0.0, (r - group_mean(r, g)) / (std + eps))

    gradient = group_estimate(group_size, credit)
    assert_equal(gradient, case["gradient"])
    assert_equal(gradient[:, 0] / f64(GRAD_J)[:, 0], case["ratio_to_grad_J_per_row"], tolerance=1e-11)


def test_the_batch_mean_shrinks_the_gradient_by_its_own_share():
    """Batches of two: factor 1/2, the group factor with G = 2, but with all rows in one batch at a time."""
    theta, total = table("theta"), 0.0
    logp, P = logp_of(theta), probabilities("theta")
    for i in range(4):
        for j in range(4):
            rows = torch.tensor([i, j])
            rewards = T1.rewards[rows]
            A = (rewards - batch_mean(rewards))[:, None].expand(2, 3)
            loss = policy_gradient(logp[rows], A) * sum_per_response(T1.mask[rows])
            total = total + P[i] * P[j] * loss.sum()
    assert_equal(-torch.autograd.grad(total, theta)[0], 0.5 * f64(GRAD_J))


# ------------------------------------------------------------------ surrogates


def surrogates(theta):
    """Per-token losses under `surrogates_on_T1`: responses from mu, which is the old policy; A = R - 1."""
    logp, A = logp_of(theta), per_token(T1.rewards - 1)
    log_ratio = logp - logp_of(table("mu"))
    sequence = sequence_log_ratio(log_ratio, T1.mask)
    per_response = mean_per_response(T1.mask) * len(A)
    return {
        "policy_gradient": policy_gradient(logp, A),
        "importance_weighted": importance_weighted(log_ratio, A),
        "clipped_0.2_0.2": clipped_surrogate(log_ratio, A),
        "clipped_0.2_0.28": clipped_surrogate(log_ratio, A, clip_low=0.2, clip_high=0.28),
        "cispo_0.2_0.28": truncated_is_policy_gradient(logp, log_ratio, A, clip_low=0.2, clip_high=0.28),
        "gspo_0.1_0.1_mean_per_response": clipped_surrogate(sequence, A, 0.1, 0.1) * per_response,
    }


@pytest.mark.parametrize("key", [k for k, case in EXACT["surrogates_on_T1"].items() if isinstance(case, dict)])
def test_the_expected_loss_and_gradient_of_each_surrogate(key):
    theta, case = table("theta"), EXACT["surrogates_on_T1"][key]
    loss = surrogates(theta)[key]
    expected_loss = probabilities("mu") @ torch.where(T1.mask, loss, 0.0).sum(1)
    assert_equal(expected_loss, case["expected_loss"])
    assert_equal(expected_gradient(theta, loss, T1.mask, probabilities("mu")), case["expected_gradient"])


def test_the_expected_clip_share_and_movement():
    log_ratio = logp_of(table("theta")) - logp_of(table("mu"))
    P = probabilities("mu")
    selected = torch.where(T1.mask, clip_selected(log_ratio, per_token(T1.rewards - 1)), False)
    share = P @ selected.double().sum(1) / 2
    assert_equal(share, EXACT["surrogates_on_T1"]["expected_share_of_clipped_tokens_0.2_0.2"])
    moved = P @ torch.where(T1.mask, approx_kl(log_ratio), 0.0).sum(1)
    assert_equal(moved, EXACT["surrogates_on_T1"]["expected_approx_kl_per_response"])


# ------------------------------------------------------------------ where to put the KL


def later_states(kl):
    """At each token the KL of the states after the one in which it was chosen."""
    return reward_to_go(kl, T1.mask) - torch.where(T1.mask, kl, 0.0)


def kl_losses(theta):
    """Each way to use a KL estimate, as a per-token loss whose expected gradient exact.json gives."""
    logp, ref, logits, logits_ref = logp_of(theta), logp_of(table("ref")), T1.logits(theta), T1.logits(table("ref"))
    zero = torch.zeros_like(ref)
    total, ratio = (logp - ref).sum(1, keepdim=True), (logp - logp.detach()).exp()
    last = T1.mask & ~T1.mask.roll(-1, 1)  # a quantity of the whole response, counted at its last token

    def per_sequence(estimate):
        return torch.where(last, estimate(total.expand_as(ref), zero), 0.0)

    def in_reward(cost, gamma=1.0):
        return policy_gradient(logp, -reward_to_go(cost, T1.mask, gamma))

    exact = kl_exact(logits, logits_ref)
    shaped = kl_shaped_rewards(torch.zeros(4, dtype=torch.float64), logp, ref, T1.mask, beta=1.0)
    return {
        "k1_in_loss_per_token": kl_k1(logp, ref),
        "k2_in_loss_per_token": kl_k2(logp, ref),
        "k2_in_loss_per_sequence": per_sequence(kl_k2),
        "k3_in_loss_per_token": kl_k3(logp, ref),
        "k3_in_loss_per_sequence": per_sequence(kl_k3),
        "ratio_times_k3_in_loss_per_token": ratio * kl_k3(logp, ref),
        "ratio_times_k1_in_loss_per_token": ratio * kl_k1(logp, ref),
        "exact_in_loss_per_state": exact,
        "k1_in_reward_to_go": policy_gradient(logp, reward_to_go(shaped, T1.mask)),
        "k1_in_reward_gamma_0": in_reward(kl_k1(logp, ref), gamma=0.0),
        "k2_in_reward_to_go": in_reward(kl_k2(logp, ref)),
        "k3_in_reward_to_go": in_reward(kl_k3(logp, ref)),
        "exact_in_reward_to_go": in_reward(exact),
        "exact_in_loss_and_later_states_in_reward": exact + policy_gradient(logp, -later_states(exact)),
        "wrong_k3_upside_down_in_loss_per_token": kl_k3(ref, logp),
    }


@pytest.mark.parametrize("key", KL["placements"])
def test_the_expected_gradient_of_each_placement_of_the_kl(key):
    theta, case = table("theta"), KL["placements"][key]
    gradient = expected_gradient(theta, kl_losses(theta)[key], T1.mask, probabilities("theta"))
    assert_equal(gradient, case["expected_gradient"])
    if case["is_gradient_of"] in ("reverse KL", "forward KL"):
        assert_equal(gradient, KL[f"grad_{case['is_gradient_of'].replace(' KL', '')}_kl"])


def test_the_expected_values_of_the_estimates():
    logp, ref = logp_of(table("theta")), logp_of(table("ref"))
    P = probabilities("theta")
    exact = kl_exact(T1.logits(table("theta")), T1.logits(table("ref")))
    for key, kl in (("k1", kl_k1(logp, ref)), ("k2", kl_k2(logp, ref)), ("k3", kl_k3(logp, ref))):
        expected = KL["placements"][f"{key}_in_loss_per_token"]["expected_value"]
        assert_equal(P @ torch.where(T1.mask, kl, 0.0).sum(1), expected)
    assert_equal(P @ torch.where(T1.mask, exact, 0.0).sum(1), KL["reverse_kl"])
    forward = probabilities("ref") @ torch.where(T1.mask, kl_k1(ref, logp), 0.0).sum(1)
    assert_equal(forward, KL["forward_kl"])


# ------------------------------------------------------------------ the chapter's one-token policy


def one_token_gradients(baseline):
    """The gradient of the reward-weighted log-probability for each of the responses A, B, C; reward 1 for A."""
    z = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 0], [0, 1], [0, 2]])
    logp = token_logp(z.expand(3, 2, 3), tokens)
    loss = policy_gradient(logp, f64([[0, 1 - baseline], [0, -baseline], [0, -baseline]]))
    rows = [torch.autograd.grad(loss[b].sum(), z, retain_graph=True)[0] for b in range(3)]
    return -torch.stack(rows)


@pytest.mark.parametrize("key", EXACT["chapter"]["softmax_reinforce"])
def test_reinforce_by_hand(key):
    """Variances 8/81 without and 2/81 with the baseline 1/3."""
    case = EXACT["chapter"]["softmax_reinforce"][key]
    gradients = one_token_gradients(case["baseline"])
    assert_equal(gradients, case["gradient_if_A_B_C"])
    assert_equal(gradients.mean(0), case["expected_gradient"])
    assert_equal(gradients[:, 0].var(correction=0), {"without_baseline": 8 / 81, "with_baseline": 2 / 81}[key])
    assert_equal(gradients[:, 0].var(correction=0), case["variance_of_first_component"])


def test_the_expected_score_is_zero():
    z = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    logp = token_logp(z.expand(3, 2, 3), torch.tensor([[0, 0], [0, 1], [0, 2]]))
    score = torch.autograd.grad(logp.sum() / 3, z)[0]
    assert_equal(score, EXACT["chapter"]["check_your_understanding"]["expected_score"])


def test_the_first_exact_step_of_the_toy_training():
    case = EXACT["chapter"]["toy_training"]
    z = f64(case["logits_start"]) + 0.5 * one_token_gradients(0.0).mean(0)
    assert_equal(z.softmax(0), case["exact_step_at_lr_0.5"])
