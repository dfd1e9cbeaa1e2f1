"""From logits and one uniform number per row to a token and its log-probability."""

from __future__ import annotations

import torch
from torch import Tensor

SLICE = 2**19  # logits handled at once on a CPU: temporaries that fit its cache are far faster than one big one


def choose(
    logits: Tensor,
    uniforms: Tensor | None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(ids [B], logp [B] float32) from logits [B, V] and uniforms [B] in [0, 1); None takes the most likely token.

    The id is the first whose cumulative probability exceeds the uniform number. The cumulative sum is not divided by
    its total; the uniform number is multiplied by it instead, so that rounding of the total cannot leave the last
    token out, and a token of probability 0, which adds nothing to the sum, is never chosen. Of equally likely tokens
    the greedy choice is the lowest id.

    logp is log softmax(logits / temperature) of the chosen token, of the whole distribution: top-k, top-p and min-p
    restrict the choice and not the number.
    """
    rows = max(1, SLICE // logits.shape[-1]) if logits.device.type == "cpu" else max(1, len(logits))
    points = [None] * -(-len(logits) // rows) if uniforms is None else uniforms.split(rows)
    parts = [
        _choose(part, point, temperature, top_k, top_p, min_p)
        for part, point in zip(logits.split(rows), points, strict=True)
    ]
    return torch.cat([ids for ids, _ in parts]), torch.cat([logp for _, logp in parts])


def _choose(
    logits: Tensor, uniforms: Tensor | None, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    scaled = logits.float() / temperature
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    if not bool(torch.isfinite(total).all()):
        raise ValueError("a logit is NaN or infinite: the model's parameters or activations are not finite")
    if uniforms is None:
        ids = scaled.argmax(-1, keepdim=True)
    else:
        kept = cumulative if top_k == 0 and top_p >= 1 and min_p == 0 else _kept_sum(weights, top_k, top_p, min_p)
        point = uniforms.to(kept)[:, None] * kept[:, -1:]
        ids = torch.searchsorted(kept, point, right=True)
    logp = (scaled.gather(-1, ids) - top).double() - total.log()
    return ids[:, 0], logp[:, 0].float()


def _kept_sum(weights: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    kept = torch.where(keep_mask(weights, top_k, top_p, min_p), weights, 0.0)
    return kept.cumsum(-1, dtype=torch.float64)


def keep_mask(weights: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """[B, V] bool: the tokens that may be chosen, given weights [B, V] proportional to the probabilities.

    The k most likely; of these, renormalised, the fewest most likely whose probabilities reach p; of these, the ones
    with at least min_p times the probability of the most likely. Of equally likely tokens the lower id comes first.
    The most likely token always stays.
    """
    order = weights.argsort(dim=-1, descending=True, stable=True)
    ranked = weights.gather(-1, order).double()
    rank = torch.arange(weights.shape[-1], device=weights.device)
    keep = (rank < top_k) if top_k > 0 else torch.ones_like(rank, dtype=torch.bool)
    ranked = torch.where(keep, ranked, 0.0)
    before = ranked.cumsum(-1) - ranked
    if top_p < 1:
        keep = keep & (before < top_p * ranked.sum(-1, keepdim=True))
    keep = (keep & (ranked >= min_p * ranked[:, :1])) | (rank == 0)
    return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order, keep.expand_as(ranked))
