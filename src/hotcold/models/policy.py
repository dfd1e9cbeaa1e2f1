"""What a causal LM says of the tokens of a batch: log-probabilities, entropies, KL at trained positions only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotcold.algorithms.base import Forward
from hotcold.batch import Batch
from hotcold.equations.logprobs import selected_logp, state_entropy, state_kl
from hotcold.models.hf import position_kwargs, supports_logits_to_keep
from hotcold.models.reference import Reference

NOTHING_BEFORE = "a trained token needs at least one token before it"


@dataclass(frozen=True)
class Measured:
    forward: Forward
    entropy: Tensor | None  # [B, T] without gradient, for the record of a pass that trains


def measure(
    module: nn.Module, batch: Batch, needs: frozenset[str], temperature: float, reference: Reference | None = None
) -> Measured:
    """One forward over right-padded rows, and one of the reference where "kl" is needed.

    Entry t of every result concerns token t; 0 outside `batch.trained`.
    """
    assert "kl" not in needs or reference is not None, "a KL needs a reference"
    trained = batch.trained
    row, at = trained.nonzero(as_tuple=True)
    if not len(row):
        return _nothing(trained, needs)
    logits = trained_logits(module, batch, row, at)
    logp = scatter(selected_logp(logits, batch.tokens[row, at], temperature), trained)
    kl = None
    if "kl" in needs and reference is not None:
        with torch.no_grad(), reference.module() as frozen:
            logits_ref = trained_logits(frozen, batch, row, at)
        kl = scatter(state_kl(logits, logits_ref, temperature), trained)
    if "entropy" not in needs and not torch.is_grad_enabled():
        return Measured(Forward(logp=logp, kl=kl), None)
    with torch.set_grad_enabled(torch.is_grad_enabled() and "entropy" in needs):
        entropy = scatter(state_entropy(logits, temperature), trained)
    return Measured(Forward(logp=logp, entropy=entropy if "entropy" in needs else None, kl=kl), entropy.detach())


def trained_logits(module: nn.Module, batch: Batch, row: Tensor, at: Tensor) -> Tensor:
    """[N, V] the logits that chose the tokens at (row, at): those of the position before."""
    first = int(at.min()) - 1
    assert first >= 0, NOTHING_BEFORE
    extra = {}
    if supports_logits_to_keep(module):  # the head runs from the first needed position on, not over the prompts
        extra = {"logits_to_keep": torch.arange(first, batch.tokens.shape[1], device=batch.tokens.device)}
    else:
        first = 0
    out = module(**padded_rows(module, batch), **extra)
    return out.logits[row, at - 1 - first]


def padded_rows(module: nn.Module, batch: Batch) -> dict[str, Any]:
    """The arguments of a forward over the whole rows of a batch.

    Positions and attention come from lengths, so right padding and its content change nothing.
    """
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return {
        "input_ids": batch.tokens,
        "attention_mask": (positions[None, :] < batch.lengths[:, None]).long(),
        "use_cache": False,
        **position_kwargs(module, positions[None, :].expand_as(batch.tokens)),
    }


def _nothing(trained: Tensor, needs: frozenset[str]) -> Measured:
    zero = torch.zeros(trained.shape, device=trained.device)
    asked = {name: zero for name in ("entropy", "kl") if name in needs}
    return Measured(Forward(logp=zero, **asked), zero)


def scatter(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T] with `values` [N] where `mask` is True, in row order, 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
