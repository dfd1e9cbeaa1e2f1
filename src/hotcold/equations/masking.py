"""Sums, means and whitening over the True entries of a mask. x and mask have one shape, any shape."""

import torch
from torch import Tensor

from hotcold.equations.checks import masked


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """The sum of x over the mask.

    sum = sum_i x_i [mask_i]

    x and mask: one shape, usually [B, T]; scalar in the unit of x. Entries outside the mask are removed before the
    sum, not multiplied by 0, so that a NaN there enters neither the sum nor its gradient. Empty mask: 0.

    >>> masked_sum(torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([True, True, False]))
    tensor(3.)
    """
    mask, x = masked(mask, num_dims=None, x=x)
    return x.sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean of x over the mask.

    mean = sum_i x_i [mask_i] / sum_i [mask_i]

    x and mask: one shape, usually [B, T]; scalar in the unit of x. The divisor counts the mask, not the width, so
    padding does not dilute it. Empty mask: 0.

    >>> masked_mean(torch.tensor([1.0, 2.0, 99.0]), torch.tensor([True, True, False]))
    tensor(1.5000)
    """
    mask, x = masked(mask, num_dims=None, x=x)
    return x.sum() / mask.sum().clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """The population variance of x over the mask.

    var = sum_i (x_i - mean)^2 [mask_i] / sum_i [mask_i]

    x and mask: one shape, usually [B, T]; scalar in the squared unit of x. Divided by n and not by n - 1, so that one
    entry gives 0 instead of 0/0. Empty mask: 0.

    >>> masked_var(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]))
    tensor(1.)
    """
    mask, x = masked(mask, num_dims=None, x=x)
    deviation = torch.where(mask, x - masked_mean(x, mask), 0.0)
    return (deviation**2).sum() / mask.sum().clamp(min=1)


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """x with mean 0 and standard deviation 1 over the mask.

    whitened = (x - mean) / sqrt(var + 1e-8),  plus mean if not shift_mean

    x and mask: one shape, usually [B, T]; the result has it too, without unit, 0 outside the mask. Mean and population
    variance are constants for the gradient: they set a scale and are not to be learnt through. One valid entry gives 0
    (var is 0, and 1e-8 keeps the quotient finite). Source: the advantage normalisation of PPO implementations
    (Huang et al. 2022, "The 37 Implementation Details of PPO").

    >>> whiten(torch.tensor([[1.0, 2.0, 3.0, 999.0]]), torch.tensor([[True, True, True, False]]))
    tensor([[-1.2247,  0.0000,  1.2247,  0.0000]])
    """
    mask, x = masked(mask, num_dims=None, x=x)
    mean, var = masked_mean(x.detach(), mask), masked_var(x.detach(), mask)
    whitened = (x - mean) / torch.sqrt(var + 1e-8)
    return torch.where(mask, whitened if shift_mean else whitened + mean, 0.0)
