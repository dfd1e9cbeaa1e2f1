"""How the losses of single tokens are averaged: from a mask to each token's share in the loss of the step.

B counts the rows with at least one True, T_i the True of row i. Computed from the mask of the whole optimiser step,
over all micro-batches and ranks; a micro-batch takes its rows of the result. Always float64: a share such as 1/3 is
rounded once, when the loop casts it to the dtype of the loss. 0 outside the mask; all zero for a mask without True.
"""

import torch
from torch import Tensor

from hotcold.equations.checks import check_number, per_token_mask


def _num_rows(mask: Tensor) -> Tensor:
    return mask.any(1).sum().clamp(min=1)


def sum_per_response(mask: Tensor) -> Tensor:
    """The sum over each response, averaged over responses.

    w = mask / B

    mask: [B, T]; result [B, T]. log pi(y) is a sum over tokens, so this is the mean of A grad log pi(y): the only
    weighting, up to a constant, that leaves grad J exact where lengths vary.

    >>> sum_per_response(torch.tensor([[True, False], [True, True]]))
    tensor([[0.5000, 0.0000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    mask = per_token_mask(mask)
    return mask.to(torch.float64) / _num_rows(mask)


def mean_per_response(mask: Tensor) -> Tensor:
    """The mean over each response, averaged over responses.

    w = mask / (B T_i)

    mask: [B, T]; result [B, T], sum 1. Each response counts the same, so a token of a long one counts less: biased
    towards short right and long wrong answers whatever the baseline. Source: Shao et al. 2024 (GRPO), eq. 3; the bias:
    Liu et al. 2025 (Dr. GRPO).

    >>> mean_per_response(torch.tensor([[True, False], [True, True]]))
    tensor([[0.5000, 0.0000],
            [0.2500, 0.2500]], dtype=torch.float64)
    """
    mask = per_token_mask(mask)
    length = mask.sum(1, keepdim=True).clamp(min=1)
    return mask.to(torch.float64) / (_num_rows(mask) * length)


def mean_per_token(mask: Tensor) -> Tensor:
    """The mean over all trained tokens of the step.

    w = mask / sum_i T_i

    mask: [B, T]; result [B, T], sum 1. Each token counts the same. The divisor depends on the lengths that were
    sampled, a bias that shrinks with the batch. Source: Yu et al. 2025 (DAPO), eq. 8.

    >>> mean_per_token(torch.tensor([[True, True], [True, True]]))
    tensor([[0.2500, 0.2500],
            [0.2500, 0.2500]], dtype=torch.float64)
    """
    mask = per_token_mask(mask)
    return mask.to(torch.float64) / mask.sum().clamp(min=1)


def fixed_length(mask: Tensor, length: float) -> Tensor:
    """The sum over each response divided by one constant, averaged over responses.

    w = mask / (B length)

    mask: [B, T]; length in tokens, usually the length limit; result [B, T]. sum_per_response on the scale of a mean:
    the direction of grad J is exact. Source: Liu et al. 2025 (Dr. GRPO).

    >>> fixed_length(torch.tensor([[True, False], [True, True]]), length=4)
    tensor([[0.1250, 0.0000],
            [0.1250, 0.1250]], dtype=torch.float64)
    """
    return sum_per_response(mask) / check_number("length", length, low=0, above=True)
