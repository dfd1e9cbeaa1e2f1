"""Losses of single tokens: what is differentiated so that descent raises the reward.

Every one is minus an objective, [B, T], not reduced. log_ratio = logp - logp_old in nats; r = exp(log_ratio), taken
in log space because a quotient of small probabilities has no digits left. Advantages are constants for the gradient.
All entries are filled; a loop removes those that are not trained with torch.where, and nothing that stands there (NaN,
inf, an overflowing ratio) then reaches a gradient.
"""

import torch
from torch import Tensor

from hotcold.equations.checks import check_number, exp, finite_gradient, masked, per_token


def policy_gradient(logp: Tensor, advantages: Tensor) -> Tensor:
    """The REINFORCE loss of each token.

    loss = -A logp

    logp: [B, T] in nats; advantages A: [B, T]; result [B, T]. For tokens sampled from the policy the mean gradient,
    summed over a response, is minus grad J: grad p = p grad log p. Only for the policy that sampled the tokens: after
    a step on the batch use a ratio. Source: Williams 1992.

    >>> policy_gradient(torch.tensor([[-0.5, -1.0]]), torch.tensor([[2.0, -1.0]]))
    tensor([[ 1., -1.]])
    """
    logp, A = _with_constant(logp=logp, advantages=advantages)
    return -A * logp


def importance_weighted(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """The unclipped surrogate: the advantage under the new policy, from tokens of the old one.

    loss = -r A

    log_ratio, advantages A: [B, T]; result [B, T]. E_old[r f] = E_new[f] for one token; the distribution of states
    stays the old one. At r = 1 its gradient is that of policy_gradient. Source: Kakade and Langford 2002;
    Schulman et al. 2015 (TRPO), eq. 14.

    >>> importance_weighted(torch.tensor([[0.0, 0.5]]), torch.tensor([[2.0, -1.0]]))
    tensor([[-2.0000,  1.6487]])
    """
    log_ratio, A = _with_constant(log_ratio=log_ratio, advantages=advantages)
    return -_ratio(log_ratio, A) * A


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """The PPO loss: no gain from moving a token's probability further than the band in the direction A asks for.

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A);  for A < 0 and dual clip c: at most -c A

    log_ratio, advantages A: [B, T]; result [B, T]. The min is a pessimistic bound: the gradient stops once r has left
    the band upwards for A > 0 or downwards for A < 0, and never blocks the way back. It is unbounded only for A < 0
    and large r; dual_clip (> 1) bounds that too. Source: Schulman et al. 2017, eq. 7; dual clip: Ye et al. 2020;
    clip_high apart from clip_low: Yu et al. 2025 (DAPO).

    >>> log_ratio = torch.tensor([[1.1, 1.5, 0.6, 1.5]]).log()
    >>> clipped_surrogate(log_ratio, torch.tensor([[2.0, 2.0, -1.0, -1.0]]))
    tensor([[-2.2000, -2.4000,  0.8000,  1.5000]])
    """
    clip_low, clip_high = _check_clips(clip_low, clip_high)
    if dual_clip is not None:
        dual_clip = check_number("dual_clip", dual_clip, low=1, above=True, finite=False)
    log_ratio, A = _with_constant(log_ratio=log_ratio, advantages=advantages)
    r = _ratio(log_ratio, A)
    objective = torch.minimum(r * A, r.clamp(1 - clip_low, 1 + clip_high) * A)
    if dual_clip is not None:
        objective = torch.where((A < 0) & (objective < dual_clip * A), dual_clip * A, objective)
    return -objective


def clip_selected(log_ratio: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """Where clipped_surrogate has stopped a token: its clipped branch is strictly the smaller one.

    selected = clip(r, 1 - clip_low, 1 + clip_high) A < r A

    log_ratio, advantages A: [B, T]; result [B, T] bool. Its mean over the trained tokens is the clip fraction. A ratio
    outside the band on the side where the min takes the unclipped branch still trains and does not count.
    Source: Schulman et al. 2017, figure 1.

    >>> clip_selected(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[1.0, -1.0, 1.0]]))
    tensor([[ True, False, False]])
    """
    clip_low, clip_high = _check_clips(clip_low, clip_high)
    log_ratio, A = _with_constant(log_ratio=log_ratio, advantages=advantages)
    r = _ratio(log_ratio.detach(), A)
    return r.clamp(1 - clip_low, 1 + clip_high) * A < r * A


def sequence_log_ratio(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """The response's mean log-ratio, at each of its tokens (GSPO).

    s_t = (1/T) sum_(u in response) log_ratio_u

    log_ratio, response_mask: [B, T]; result [B, T] in nats, 0 outside the mask. In place of log_ratio it makes any
    surrogate clip whole responses; exp(s) is the geometric mean of the ratios, so length does not inflate it. The
    gradient flows through the mean, to every token alike. Meant for advantages that are constant over a row.
    Source: Zheng et al. 2025 (GSPO), eq. 7.

    >>> sequence_log_ratio(torch.tensor([[0.1, 0.3, 7.0]]), torch.tensor([[True, True, False]]))
    tensor([[0.2000, 0.2000, 0.0000]])
    """
    response_mask, log_ratio = masked(response_mask, log_ratio=log_ratio)
    mean = log_ratio.sum(1) / response_mask.sum(1).clamp(min=1)
    return torch.where(response_mask, mean[:, None], 0.0)


def truncated_is_policy_gradient(
    logp: Tensor, log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """REINFORCE with a truncated importance weight (CISPO): no token ever loses its gradient.

    loss = -stop(clip(r, 1 - clip_low, 1 + clip_high)) A logp

    logp, log_ratio: [B, T] in nats; advantages A: [B, T]; result [B, T]. The clipped ratio is a constant weight, so
    clipping bounds the step of a token instead of stopping it. clip_low = 1 means no lower bound.
    Source: MiniMax 2025 (M1), eq. 4.

    >>> logp, log_ratio = torch.tensor([[-1.0, -1.0]]), torch.tensor([[3.5, 0.9]]).log()
    >>> truncated_is_policy_gradient(logp, log_ratio, torch.ones(1, 2), clip_low=0.2, clip_high=0.28)
    tensor([[1.2800, 0.9000]])
    """
    clip_low, clip_high = _check_clips(clip_low, clip_high)
    logp, log_ratio, advantages = per_token(logp=logp, log_ratio=log_ratio, advantages=advantages)
    weight = log_ratio.detach().exp().clamp(1 - clip_low, 1 + clip_high)
    return policy_gradient(logp, weight * advantages)


def _with_constant(**tensors: Tensor) -> tuple[Tensor, Tensor]:
    """A quantity with gradient and the advantages without, checked. No gradient where either is not finite."""
    x, advantages = per_token(**tensors)
    A = advantages.detach()
    return finite_gradient(x, A), A


def _check_clips(clip_low: float, clip_high: float) -> tuple[float, float]:
    return check_number("clip_low", clip_low, low=0, high=1), check_number("clip_high", clip_high, low=0, finite=False)


def _ratio(log_ratio: Tensor, A: Tensor) -> Tensor:
    """r, at most 1 where A is 0: there the objective is 0 however large r is, while inf * 0 would be NaN."""
    return exp(torch.where(A == 0, log_ratio.clamp(max=0), log_ratio))
