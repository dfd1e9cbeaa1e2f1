"""Correction for tokens that another distribution sampled than the one the trainer computes."""

import torch
from torch import Tensor

from hotcold.equations.checks import check_choice, check_number, masked


def mismatch_weights(
    logp_old: Tensor,
    logp_sampler: Tensor,
    response_mask: Tensor,
    mode: str = "truncate",
    cap: float = 2.0,
    low: float = 0.5,
    high: float = 5.0,
    level: str = "token",
) -> Tensor:
    """The importance weight of the trainer's policy over the sampling engine's, truncated or masked.

    w = exp(D), D_t = logp_old_t - logp_sampler_t (level token), its sum (sequence) or mean (geometric) over a response
    truncate: min(w, cap);  mask: w if low <= w <= high else 0

    logp_old, logp_sampler, response_mask: [B, T], nats; result [B, T], constant for the gradient, 0 outside the mask.
    It multiplies the loss of each token. The full product (level sequence) makes the expected gradient exact and has
    the largest variance; tokens and geometric means are biased and tame. cap bounds the weight (truncate) and is not
    read by mask; low and high drop what lies outside (mask) and are not read by truncate. Never inf: a weight that
    would overflow is the largest float, before cap and band.
    Source: Espeholt et al. 2018 (truncation); Yao et al. 2025 (TIS); Ling Team 2025 (IcePop), for masking.

    >>> old, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -3.0]])
    >>> mismatch_weights(old, sampler, torch.ones(1, 2, dtype=torch.bool))
    tensor([[1., 2.]])
    """
    check_choice("mode", mode, ("truncate", "mask"))
    check_choice("level", level, ("token", "sequence", "geometric"))
    response_mask, logp_old, logp_sampler = masked(response_mask, logp_old=logp_old, logp_sampler=logp_sampler)
    w = _weights((logp_old - logp_sampler).detach(), response_mask, level)
    if mode == "truncate":
        w = w.clamp(max=check_number("cap", cap, low=0, above=True, finite=False))
    else:
        low = check_number("low", low, low=0)
        high = check_number("high", high, low=low, finite=False)
        w = torch.where((w < low) | (w > high), 0.0, w)  # this way round a NaN stays
    return torch.where(response_mask, w, 0.0)


def _weights(log_weight: Tensor, mask: Tensor, level: str) -> Tensor:
    if level != "token":
        total = log_weight.sum(1, keepdim=True)
        if level == "geometric":
            total = total / mask.sum(1, keepdim=True)  # a row without a token: NaN, which the caller removes
        log_weight = total.expand_as(mask)
    return log_weight.exp().clamp(max=torch.finfo(log_weight.dtype).max)
