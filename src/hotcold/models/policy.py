"""What a causal LM says of the tokens of a batch: log-probabilities and entropies at trained positions only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hotcold.algorithms.base import Forward
from hotcold.batch import Batch
from hotcold.equations.logprobs import selected_logp, state_entropy
from hotcold.models.hf import position_kwargs, supports_logits_to_keep


@dataclass(frozen=True)
class Measured:
    forward: Forward
    entropy: Tensor | None  # [B, T] without gradient, for the record of a pass that trains


def measure(module: nn.Module, batch: Batch, needs: frozenset[str], temperature: float) -> Measured:
    """One forward over right-padded rows. Entry t of every result concerns token t; 0 outside `batch.trained`."""
    trained = batch.trained
    row, at = trained.nonzero(as_tuple=True)
    if not len(row):
        zero = torch.zeros(trained.shape, device=trained.device)
        return Measured(Forward(logp=zero, entropy=zero if "entropy" in needs else None), zero)
    logits = trained_logits(module, batch, row, at)
    logp = _scatter(selected_logp(logits, batch.tokens[row, at], temperature), trained)
    if "entropy" not in needs and not torch.is_grad_enabled():
        return Measured(Forward(logp=logp), None)
    with torch.set_grad_enabled(torch.is_grad_enabled() and "entropy" in needs):
        entropy = _scatter(state_entropy(logits, temperature), trained)
    return Measured(Forward(logp=logp, entropy=entropy if "entropy" in needs else None), entropy.detach())


def trained_logits(module: nn.Module, batch: Batch, row: Tensor, at: Tensor) -> Tensor:
    """[N, V] the logits that chose the tokens at (row, at): those of the position before.

    Positions and attention come from lengths, so right padding and its content change nothing.
    """
    width = batch.tokens.shape[1]
    positions = torch.arange(width, device=batch.tokens.device)
    attention = (positions[None, :] < batch.lengths[:, None]).long()
    first = int(at.min()) - 1
    assert first >= 0, "a trained token needs at least one token before it"
    extra = {}
    if supports_logits_to_keep(module):  # the head runs from the first needed position on, not over the prompts
        extra = {"logits_to_keep": positions[first:]}
    else:
        first = 0
    out = module(
        input_ids=batch.tokens,
        attention_mask=attention,
        use_cache=False,
        **position_kwargs(module, positions[None, :].expand_as(batch.tokens)),
        **extra,
    )
    return out.logits[row, at - 1 - first]


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T] with `values` [N] where `mask` is True, in row order, 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
