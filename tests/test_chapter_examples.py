"""The worked examples of the course chapter, its questions and its derivations, through the public equations.

Every number is worked out in a comment or stands in tests/vectors/exact.json. T1 is its policy of two tokens, small
enough to sum over all four responses.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.kl import KLInReward
from hotcold.algorithms.ppo import PPO
from hotcold.batch import Rollout, collate
from hotcold.equations import (
    batch_mean,
    clip_selected,
    clipped_surrogate,
    gae,
    importance_weighted,
    kl_shaped_rewards,
    policy_gradient,
    reward_to_go,
    sum_per_response,
    td_errors,
    terminal_rewards,
    token_logp,
    value_loss,
)
from tests.equations.exact_policies import T1, probabilities, table

EXACT = json.loads((Path(__file__).parent / "vectors" / "exact.json").read_text(encoding="utf-8"))
CHAPTER = EXACT["chapter"]
TOKENS = torch.tensor([[0, 0], [0, 1], [0, 2]])  # one prompt token, then the response A, B or C
MASK = torch.tensor([[False, True]]).expand(3, 2)


def f64(x: object) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def close(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(actual.detach(), torch.as_tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def uphill(z: Tensor, rewards: Tensor, baseline: float, shares: Tensor) -> Tensor:
    """The gradient of sum_y share(y) (R(y) - b) log pi(y) with respect to the three logits."""
    logp = token_logp(z.expand(3, 2, 3), TOKENS)
    advantages = torch.where(MASK, (rewards - baseline)[:, None], 0.0)
    loss = torch.where(MASK, policy_gradient(logp, advantages), 0.0).sum(1)
    (gradient,) = torch.autograd.grad((shares * loss).sum(), z)
    return -gradient


def per_sample(baseline: float) -> Tensor:
    """[3, 3] the gradient if the sample is A, B, C, for p = (1/3, 1/3, 1/3) and reward 1 for A."""
    z = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    rewards = f64([1.0, 0.0, 0.0])
    return torch.stack([uphill(z, rewards, baseline, share) for share in torch.eye(3, dtype=torch.float64)])


def test_reinforce_by_hand_without_a_baseline() -> None:
    # A: 1 (e_A - p) = (2/3, -1/3, -1/3); B and C: reward 0, gradient 0. Mean of the three (2/9, -1/9, -1/9);
    # first component: E[g^2] - E[g]^2 = 4/27 - 4/81 = 8/81.
    gradients = per_sample(0.0)
    close(gradients, [[2 / 3, -1 / 3, -1 / 3], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    close(gradients.mean(0), [2 / 9, -1 / 9, -1 / 9])
    close(gradients[:, 0].var(correction=0), 8 / 81)


def test_reinforce_by_hand_with_the_expected_reward_as_baseline() -> None:
    # A: 2/3 (e_A - p); B: -1/3 (e_B - p); C: -1/3 (e_C - p). The same mean; variance 6/81 - 4/81 = 2/81.
    gradients = per_sample(1 / 3)
    close(gradients, [[4 / 9, -2 / 9, -2 / 9], [1 / 9, -2 / 9, 1 / 9], [1 / 9, 1 / 9, -2 / 9]])
    close(gradients.mean(0), per_sample(0.0).mean(0))
    close(gradients[:, 0].var(correction=0), 2 / 81)


def test_the_baseline_cuts_the_variance_by_four() -> None:
    variance = [per_sample(b)[:, 0].var(correction=0) for b in (0.0, 1 / 3)]
    close(variance[0] / variance[1], 4.0)
    for found, key in zip(variance, ("without_baseline", "with_baseline"), strict=True):
        close(found, CHAPTER["softmax_reinforce"][key]["variance_of_first_component"])


# advantage, ratio, ratio A, clip(ratio) A, the smaller, does the gradient flow
CLIPPING = [
    (2.0, 1.1, 2.2, 2.2, 2.2, True),
    (2.0, 1.5, 3.0, 2.4, 2.4, False),
    (-1.0, 0.6, -0.6, -0.8, -0.8, False),
    (-1.0, 1.5, -1.5, -1.2, -1.5, True),
]


@pytest.mark.parametrize("advantage, ratio, unclipped, clipped, objective, flows", CLIPPING)
def test_the_clipping_table(
    advantage: float, ratio: float, unclipped: float, clipped: float, objective: float, flows: bool
) -> None:
    log_ratio, A = f64([[ratio]]).log().requires_grad_(), f64([[advantage]])
    close(-importance_weighted(log_ratio, A), [[unclipped]])
    close(f64([[ratio]]).clamp(0.8, 1.2) * A, [[clipped]])
    loss = clipped_surrogate(log_ratio, A)
    close(-loss, [[objective]])
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    close(gradient, [[-unclipped if flows else 0.0]])  # d(r A)/d log r = r A
    assert clip_selected(log_ratio, A).item() is not flows


def test_shaped_rewards_and_gae() -> None:
    # logp - logp_ref = (0.2, 0, 0.2), beta 0.05: r = (-0.01, 0, -0.01 + 1). V = (0.5, 0.6, 0.8):
    # delta = (-0.01 + 0.6 - 0.5, 0.8 - 0.6, 0.99 - 0.8) = (0.09, 0.2, 0.19);
    # A_3 = 0.19, A_2 = 0.2 + 0.95 * 0.19 = 0.3805, A_1 = 0.09 + 0.95 * 0.3805 = 0.451475.
    mask = torch.ones(1, 3, dtype=torch.bool)
    logp, ref, values = f64([[-1.0, -0.5, -0.2]]), f64([[-1.2, -0.5, -0.4]]), f64([[0.5, 0.6, 0.8]])
    rewards = kl_shaped_rewards(f64([1.0]), logp, ref, mask, beta=0.05)
    close(rewards, [[-0.01, 0.0, 0.99]])
    advantages = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    close(advantages, [[0.451475, 0.3805, 0.19]])
    close(advantages + values, [[0.951475, 0.9805, 0.99]])


def test_ppo_with_its_kl_in_the_reward_credits_the_same_example() -> None:
    # The numbers of the test above, through the algorithm: one response of three tokens after one prompt token.
    batch = collate([Rollout((7,), (1, 2, 3), group=0, episode=0, reward=1.0)], dtype=torch.float64)
    batch = batch.replace(
        logp_old=f64([[0.0, -1.0, -0.5, -0.2]]),
        logp_ref=f64([[0.0, -1.2, -0.5, -0.4]]),
        values_old=f64([[0.0, 0.5, 0.6, 0.8]]),
    )
    credited, _ = PPO(group_size=1, lam=0.95, whiten=False, kl=KLInReward(0.05)).credit(batch, {})
    assert credited.advantages is not None and credited.returns is not None
    close(credited.token_rewards, [[0.0, -0.01, 0.0, 0.99]])
    close(credited.advantages, [[0.0, 0.451475, 0.3805, 0.19]])
    close(credited.returns, [[0.0, 0.951475, 0.9805, 0.99]])


def test_a_constant_baseline_adds_nothing_to_the_mean_gradient() -> None:
    # E[b grad log pi] = b grad sum_y pi(y) = b grad 1 = 0, at any policy.
    z = f64([0.3, -1.0, 2.0]).requires_grad_()
    constant = torch.ones(3, dtype=torch.float64)
    close(uphill(z, 7.0 * constant, 0.0, z.detach().softmax(0)), [0.0, 0.0, 0.0])


def test_without_a_critic_every_token_has_the_same_advantage() -> None:
    # R = 2, b = 0.5: 1.5 at each of the three tokens.
    mask = torch.ones(1, 3, dtype=torch.bool)
    close(reward_to_go(terminal_rewards(f64([2.0]), mask), mask) - 0.5, [[1.5, 1.5, 1.5]])


def test_a_good_token_that_has_grown_by_more_than_the_band_is_left_alone() -> None:
    # A = 1, ratio 1.3: min(1.3, 1.2) = 1.2, constant in the parameters.
    log_ratio = f64([[1.3]]).log().requires_grad_()
    loss = clipped_surrogate(log_ratio, f64([[1.0]]), clip_low=0.2, clip_high=0.2)
    close(-loss, [[1.2]])
    close(torch.autograd.grad(loss.sum(), log_ratio)[0], [[0.0]])


def test_gae_with_lam_and_gamma_one_is_the_return_minus_the_value() -> None:
    # Returns from each token on: (0.98, 0.99, 0.99); minus V = (0.5, 0.6, 0.8).
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards, values = f64([[-0.01, 0.0, 0.99]]), f64([[0.5, 0.6, 0.8]])
    close(gae(rewards, values, mask, gamma=1.0, lam=1.0), [[0.48, 0.39, 0.19]])
    close(reward_to_go(rewards, mask) - values, [[0.48, 0.39, 0.19]])


def sampled_loss(z: Tensor, actions: Tensor) -> Tensor:
    """The REINFORCE loss of one-token responses with the batch mean as baseline; reward 1 for token 0."""
    n = len(actions)
    tokens = torch.stack([torch.zeros_like(actions), actions], dim=1)
    mask = torch.tensor([[False, True]]).expand(n, 2)
    rewards = (actions == 0).to(torch.float64)
    advantages = torch.where(mask, (rewards - batch_mean(rewards))[:, None], 0.0)
    loss = policy_gradient(token_logp(z.expand(n, 2, 3), tokens), advantages)
    return (torch.where(mask, loss, 0.0) * sum_per_response(mask)).sum()


def test_the_toy_run_climbs_to_the_rewarded_token() -> None:
    # 50 steps of 16 samples at rate 0.5, from P(A) = 1/3.
    z = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    random = torch.Generator().manual_seed(0)
    climbed = []
    for _ in range(50):
        climbed.append(float(z.detach().softmax(0)[0]))
        actions = torch.multinomial(z.detach().softmax(0), 16, replacement=True, generator=random)
        (gradient,) = torch.autograd.grad(sampled_loss(z, actions), z)
        with torch.no_grad():
            z -= 0.5 * gradient
    assert climbed[0] == pytest.approx(1 / 3)
    assert climbed[10] > 0.5 and climbed[49] > 0.85
    assert climbed[0] < climbed[10] < climbed[20] < climbed[30] < climbed[40]


def test_the_first_exact_step_of_the_toy_run() -> None:
    # The expected gradient (2/9, -1/9, -1/9) at rate 0.5: logits (1/9, -1/18, -1/18).
    z = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    step = uphill(z, f64([1.0, 0.0, 0.0]), 1 / 3, z.detach().softmax(0))
    after = (z.detach() + 0.5 * step).softmax(0)
    close(after[0], 0.37133812569243685)
    close(after, CHAPTER["toy_training"]["exact_step_at_lr_0.5"])


# ------------------------------------------------------------------ the derivations, on T1


def response_logp(logits: Tensor) -> Tensor:
    """[4] log pi(y|x): the sum over the tokens of each response."""
    return torch.where(T1.mask, token_logp(T1.logits(logits), T1.tokens), 0.0).sum(1)


def test_the_expected_reward_is_a_sum_over_all_responses() -> None:
    # J = sum_y p(y) R(y), p from the sum of token log-probabilities.
    close((response_logp(table("theta")).exp() * T1.rewards).sum(), EXACT["T1"]["J"])


def test_the_three_forms_of_the_gradient_are_one() -> None:
    theta = table("theta")
    logp = response_logp(theta)
    p = logp.detach().exp()
    # sum_y R grad p: the sum itself is differentiated
    (direct,) = torch.autograd.grad((logp.exp() * T1.rewards).sum(), theta, retain_graph=True)
    # sum_y p R grad log p: grad p = p grad log p
    (by_log,) = torch.autograd.grad((p * T1.rewards * logp).sum(), theta, retain_graph=True)
    # E[R sum_t grad log pi(y_t|s_t)]: token by token, as training does it
    advantages = torch.where(T1.mask, T1.rewards[:, None], 0.0)
    per_token = policy_gradient(token_logp(T1.logits(theta), T1.tokens), advantages)
    (by_token,) = torch.autograd.grad((p[:, None] * torch.where(T1.mask, per_token, 0.0)).sum(), theta)
    for gradient in (direct, by_log, -by_token):
        close(gradient, EXACT["T1"]["grad_J"])


def test_a_ratio_turns_a_mean_under_the_old_policy_into_one_under_the_new() -> None:
    # E_old[ratio f(a)] = E_new[f(a)] for the first token, f its action value: under the new policy that mean is J.
    new, old = (token_logp(T1.logits(table(name)), T1.tokens) for name in ("theta", "mu"))
    f = f64(EXACT["T1"]["action_value"][0])[T1.tokens[:, 1:2]]
    weighted = -importance_weighted((new - old)[:, 1:2], f)[:, 0]
    close((probabilities("mu") * weighted).sum(), EXACT["T1"]["J"])


def test_the_value_loss_is_least_at_the_expected_reward_of_each_state() -> None:
    # d/dV E[(V - R)^2 / 2] = E[V - R] = 0 where V is the mean of R over the responses that pass the state.
    values = f64(EXACT["T1"]["state_value"]).requires_grad_()
    per_state = values[T1.rows[:, :2]]  # the state before the first and before the second token
    loss = value_loss(per_state, T1.rewards[:, None].expand(4, 2)).sum(1)
    (gradient,) = torch.autograd.grad((probabilities("theta") * loss).sum(), values)
    close(gradient, [0.0, 0.0, 0.0])


def test_gae_is_the_decaying_sum_of_td_errors() -> None:
    # delta (0.09, 0.2, 0.19): A_1 = 0.09 + 0.95 * 0.2 + 0.9025 * 0.19 = 0.09 + 0.19 + 0.171475 = 0.451475.
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards, values = f64([[-0.01, 0.0, 0.99]]), f64([[0.5, 0.6, 0.8]])
    close(td_errors(rewards, values, mask), [[0.09, 0.2, 0.19]])
    close(gae(rewards, values, mask, lam=0.95)[0, 0], 0.451475)
    close(gae(rewards, values, mask, lam=0.0), [[0.09, 0.2, 0.19]])


def test_the_kl_in_the_reward_is_at_rest_where_theory_puts_the_optimum() -> None:
    # max E[R] - beta KL(pi || ref) has the solution ref exp(R / beta) / Z: with ref (.4, .3, .2, .1), R (1, 0, 0, 1),
    # beta 0.5: (.4 e^2, .3, .2, .1 e^2) / 4.1945. There the mean gradient is 0; at ref itself it is not.
    ref, rewards = f64([0.4, 0.3, 0.2, 0.1]), f64([1.0, 0.0, 0.0, 1.0])
    best = ref * (rewards / 0.5).exp()
    best /= best.sum()
    tokens, mask = torch.tensor([[0, a] for a in range(4)]), torch.tensor([[False, True]]).expand(4, 2)

    def mean_gradient(p: Tensor) -> Tensor:
        z = p.log().requires_grad_()
        logp = token_logp(z.expand(4, 2, 4), tokens)
        logp_ref = token_logp(ref.log().expand(4, 2, 4), tokens)
        shaped = kl_shaped_rewards(rewards, logp, logp_ref, mask, beta=0.5)
        loss = torch.where(mask, policy_gradient(logp, reward_to_go(shaped, mask)), 0.0).sum(1)
        return torch.autograd.grad((p * loss).sum(), z)[0]

    torch.testing.assert_close(best, f64([0.705, 0.072, 0.048, 0.176]), rtol=0, atol=6e-4)
    close(mean_gradient(best), [0.0] * 4)
    assert float(mean_gradient(ref).abs().max()) > 0.1
