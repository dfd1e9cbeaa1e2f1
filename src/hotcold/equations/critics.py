"""Losses of the value function, and how much of the returns it explains."""

import torch
from torch import Tensor

from hotcold.equations.checks import check_number, finite_gradient, masked, per_token


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """The squared error of the critic at each token.

    loss = (V - R)^2 / 2

    values V, returns R: [B, T] in the unit of the reward; result [B, T] in its square. The minimum is the mean of R in
    each state, the value. R is a constant. Source: Schulman et al. 2017, eq. 9.

    >>> value_loss(torch.tensor([[1.0]]), torch.tensor([[3.0]]))
    tensor([[2.]])
    """
    values, returns = per_token(values=values, returns=returns)
    R = returns.detach()
    return (finite_gradient(values, R) - R) ** 2 / 2


def clipped_value_loss(values: Tensor, values_old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """The squared error of the critic, which gains nothing from moving more than `clip` from its value at rollout.

    loss = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2

    values V, values_old V_old, returns R: [B, T] in the unit of the reward; result [B, T] in its square. The max is
    pessimistic, as the min in clipped_surrogate: no gradient once V has moved the whole clip towards R. V_old and R are
    constants. Source: the PPO reference implementation (Dhariwal et al. 2017, OpenAI Baselines, ppo2).

    >>> clipped_value_loss(torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.tensor([[2.0]]), clip=0.2)
    tensor([[1.6200]])
    """
    clip = check_number("clip", clip, low=0, finite=False)
    values, values_old, returns = per_token(values=values, values_old=values_old, returns=returns)
    V_old, R = values_old.detach(), returns.detach()
    V = finite_gradient(values, V_old, R)
    plain = (V - R) ** 2
    clipped = (V.clamp(V_old - clip, V_old + clip) - R) ** 2
    return torch.maximum(plain, clipped) / 2


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """The share of the variance of the returns that the critic explains.

    1 - Var(R - V) / Var(R), over the mask

    values V, returns R, mask: one shape, usually [B, T]; scalar without unit or gradient, at most 1: 1 for a critic
    that is right up to a constant, 0 for a constant one, negative for one worse than that. NaN if the returns have no
    variance: then there is nothing to explain.

    >>> one = torch.ones(1, 2, dtype=torch.bool)
    >>> explained_variance(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 2.0]]), one)
    tensor(0.7500)
    """
    mask, values, returns = masked(mask, num_dims=None, values=values, returns=returns)
    V, R = values.detach()[mask], returns.detach()[mask]
    if R.numel() == 0 or bool(R.max() == R.min()):  # rounding would leave a variance of about 1e-17
        return torch.full((), float("nan"), dtype=torch.result_type(V, R), device=R.device)
    return 1 - (R - V).var(correction=0) / R.var(correction=0)
