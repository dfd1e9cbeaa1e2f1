"""Rewards by token, what follows from each token on, and advantages from a critic.

All run over the response tokens of a row in order. Tokens outside the mask (prompt, tool output, padding) are not
steps: they are jumped over, take no discount, and nothing that stands there enters.
"""

import torch
from torch import Tensor

from hotcold.equations.checks import as_float, check_number, check_whole, masked, per_row, per_token_mask


def _last_token(mask: Tensor) -> Tensor:
    """[B, T] bool: the last True of each row."""
    remaining = mask.long().flip(1).cumsum(1).flip(1)
    return mask & (remaining == 1)


def terminal_rewards(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """The score of each response, arriving at its last token.

    r_t = R if t is the last response token, else 0

    rewards R: [B]; response_mask: [B, T]; result [B, T] in the unit of the score. The last token is found in the mask,
    never by looking for padding. A row without a response token gets zeros.

    >>> terminal_rewards(torch.tensor([5.0]), torch.tensor([[False, True, True, False]]))
    tensor([[0., 0., 5., 0.]])
    """
    response_mask = per_token_mask(response_mask)
    rewards = per_row(rewards, response_mask)
    return torch.where(_last_token(response_mask), rewards[:, None], 0.0)


def kl_shaped_rewards(rewards: Tensor, logp: Tensor, logp_ref: Tensor, response_mask: Tensor, beta: float) -> Tensor:
    """The score at the last token, and at each token the price of leaving the reference.

    r_t = -beta (logp_t - logp_ref_t) + R [t is the last response token]

    rewards R: [B]; logp, logp_ref: [B, T] in nats; beta: reward per nat; result [B, T]. The sum over a response is
    R - beta k1, whose mean is the KL-regularised objective; credited as reward-to-go its gradient is exact. Constant
    for the gradient: the KL is a reward here, not a loss. Source: Ziegler et al. 2019, eq. 2.

    >>> logp, ref = torch.tensor([[-1.0, -0.5, -0.2]]), torch.tensor([[-1.2, -0.5, -0.4]])
    >>> kl_shaped_rewards(torch.tensor([1.0]), logp, ref, torch.ones(1, 3, dtype=torch.bool), beta=0.05)
    tensor([[-0.0100,  0.0000,  0.9900]])
    """
    beta = check_number("beta", beta, low=0)
    response_mask, logp, logp_ref = masked(response_mask, logp=logp, logp_ref=logp_ref)
    k1 = (logp - logp_ref).detach()
    return -beta * k1 + terminal_rewards(as_float("rewards", rewards).detach(), response_mask)


def _discounted_sum(x: Tensor, mask: Tensor, decay: float) -> Tensor:
    """S_t = x_t + decay S_(next response token), computed backwards; x is 0 outside the mask."""
    running = x.new_zeros(len(x))
    columns = []
    for t in reversed(range(x.shape[1])):
        running = torch.where(mask[:, t], x[:, t] + decay * running, running)
        columns.append(running)
    sums = torch.stack(columns[::-1], dim=1) if columns else x
    return torch.where(mask, sums, 0.0)


def reward_to_go(token_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """The discounted sum of the rewards from each response token on.

    G_t = r_t + gamma G_next(t)

    token_rewards r: [B, T]; result [B, T] in the unit of the reward. next(t) is the next response token; G after the
    last is 0. A token cannot change earlier rewards, so leaving them out keeps the gradient and lowers its variance.
    Source: Sutton and Barto 2018, section 13.3.

    >>> reward_to_go(torch.tensor([[0.0, 1.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool), gamma=0.5)
    tensor([[1., 2., 2.]])
    """
    gamma = check_number("gamma", gamma, low=0, high=1)
    response_mask, token_rewards = masked(response_mask, token_rewards=token_rewards)
    return _discounted_sum(token_rewards, response_mask, gamma)


def _next_value(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: the value at the next response token after t; 0 after the last."""
    width = values.shape[1]
    position = torch.where(mask, torch.arange(width, device=mask.device), width)
    after = torch.full_like(position[:, :1], width)
    upcoming = torch.cat([position, after], dim=1).flip(1).cummin(1).values.flip(1)
    return torch.cat([values, torch.zeros_like(values[:, :1])], dim=1).gather(1, upcoming[:, 1:])


def td_errors(token_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """How much better each step turned out than the critic predicted.

    delta_t = r_t + gamma V_next(t) - V_t

    token_rewards r, values V: [B, T]; result [B, T] in the unit of the reward. V_t is the value of the state in which
    token t was chosen; next(t) is the next *response* token, so tool output between two turns is jumped over; V after
    the last is 0. With V the true value its mean is the advantage. Source: Sutton and Barto 2018, eq. 6.5.

    >>> mask = torch.tensor([[True, False, True]])
    >>> td_errors(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.75]]), mask)
    tensor([[0.2500, 0.0000, 0.2500]])
    """
    gamma = check_number("gamma", gamma, low=0, high=1)
    response_mask, token_rewards, values = masked(response_mask, token_rewards=token_rewards, values=values)
    delta = token_rewards + gamma * _next_value(values, response_mask) - values
    return torch.where(response_mask, delta, 0.0)


def gae(token_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """Generalised advantage estimates: a decaying sum of TD errors.

    A_t = delta_t + gamma lam A_next(t)

    token_rewards, values: [B, T]; result [B, T] in the unit of the reward. lam = 0 is the TD error (little variance,
    biased by the critic's errors); lam = 1 is reward_to_go - V (no bias). The critic's target is A + V under the mask.
    Source: Schulman et al. 2015, eq. 16.

    >>> mask = torch.ones(1, 3, dtype=torch.bool)
    >>> gae(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.4, 0.6]]), mask)
    tensor([[0.7510, 0.5800, 0.4000]])
    """
    lam = check_number("lam", lam, low=0, high=1)
    delta = td_errors(token_rewards, values, response_mask, gamma)
    return _discounted_sum(delta, per_token_mask(response_mask), float(gamma) * lam)


def soft_overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """A penalty that grows over the last `buffer` tokens before the limit, so that length is not punished abruptly.

    penalty = clip((max_tokens - buffer - n) / buffer, -1, 0)

    lengths n: [B] in response tokens; result [B], in reward: 0 up to max_tokens - buffer, then linear to -1 at
    max_tokens, -1 beyond. Source: Yu et al. 2025 (DAPO), eq. 13.

    >>> soft_overlong_penalty(torch.tensor([80, 90, 100, 120]), max_tokens=100, buffer=20)
    tensor([ 0.0000, -0.5000, -1.0000, -1.0000])
    """
    max_tokens = check_whole("max_tokens", max_tokens, low=1)
    buffer = check_whole("buffer", buffer, low=1, high=max_tokens)
    n = as_float("lengths", lengths)
    if n.dim() != 1 or bool((n < 0).any()):
        raise ValueError(f"lengths has shape {list(n.shape)}; needed [B], numbers of response tokens, none negative.")
    return ((max_tokens - buffer - n) / buffer).clamp(-1, 0)
