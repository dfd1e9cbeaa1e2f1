"""What a causal LM says of the tokens of a batch: log-probabilities, entropies, KL at trained positions only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotcold.algorithms.base import Forward
from hotcold.batch import Batch
from hotcold.equations.logprobs import selected_logp, state_entropy, state_kl
from hotcold.models.hf import supports_logits_to_keep
from hotcold.models.linear_logp import linear_logp
from hotcold.models.reading import NOTHING_BEFORE, PLAIN, Reading, in_chunks, padded_rows, read_hidden
from hotcold.models.reference import Reference


@dataclass(frozen=True)
class Measured:
    forward: Forward
    entropy: Tensor | None  # [B, T] without gradient, for the record of a pass that trains


def measure(
    module: nn.Module,
    batch: Batch,
    needs: frozenset[str],
    temperature: float,
    reference: Reference | None = None,
    reading: Reading = PLAIN,
    reading_of_reference: Reading = PLAIN,
) -> Measured:
    """One forward over the rows, and one of the reference where "kl" is needed.

    Entry t of every result concerns token t; 0 outside `batch.trained`. `reading` says what may be shared and left out
    on the way; it changes no result beyond rounding.
    """
    assert "kl" not in needs or reference is not None, "a KL needs a reference"
    trained = batch.trained
    row, at = trained.nonzero(as_tuple=True)
    if not len(row):
        return _nothing(trained, needs)
    with_kl, with_entropy = "kl" in needs, "entropy" in needs
    inputs = [read_states(module, batch, row, at, reading), batch.tokens[row, at]]
    product = plain_product(module, reading)
    if product is not None and reading.head is not None and not with_kl and not with_entropy:
        states, ids = inputs
        logp, recorded = linear_logp(states, product.weight, product.bias, ids, reading.head, temperature)
        return Measured(Forward(logp=scatter(logp, trained)), scatter(recorded, trained))
    if with_kl and reference is not None:
        with torch.no_grad(), reference.module() as frozen:
            inputs.append(read_states(frozen, batch, row, at, reading_of_reference))
    records_entropy = with_entropy or torch.is_grad_enabled()

    def scores(states: Tensor, ids: Tensor, *states_ref: Tensor) -> tuple[Tensor, ...]:
        logits = to_logits(module, states, reading)
        out = [selected_logp(logits, ids, temperature)]
        if records_entropy:
            with torch.set_grad_enabled(torch.is_grad_enabled() and with_entropy):
                out.append(state_entropy(logits, temperature))
        if with_kl and reference is not None:
            with torch.no_grad(), reference.module() as frozen:
                logits_ref = to_logits(frozen, states_ref[0], reading_of_reference)
            out.append(state_kl(logits, logits_ref, temperature))
        return tuple(out)

    results = [scatter(value, trained) for value in in_chunks(scores, num_logits(module), *inputs)]
    logp = results.pop(0)
    entropy = results.pop(0) if records_entropy else None
    kl = results.pop(0) if with_kl else None
    forward = Forward(logp=logp, entropy=entropy if with_entropy else None, kl=kl)
    return Measured(forward, None if entropy is None else entropy.detach())


def plain_product(module: Any, reading: Reading) -> nn.Linear | None:
    """The head if it is one product in float32 or wider and no more: no adapter on it, no arithmetic in bf16."""
    if reading.head is None:
        return None
    head = module.get_output_embeddings()
    wide = type(head) is nn.Linear and head.weight.dtype in (torch.float32, torch.float64)
    return head if wide and not torch.is_autocast_enabled(head.weight.device.type) else None


def read_states(module: Any, batch: Batch, row: Tensor, at: Tensor, reading: Reading) -> Tensor:
    """[N, H] the hidden states before the tokens at (row, at), or where the head does not stand alone [N, V] logits."""
    if reading.head is None:
        return trained_logits(module, batch, row, at)
    return read_hidden(module.base_model, batch, row, at, reading.laying)


def to_logits(module: Any, states: Tensor, reading: Reading) -> Tensor:
    return states if reading.head is None else reading.head(module, states)


def num_logits(module: Any) -> int:
    """A chunk's width; small modules without an embedding are read at once."""
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    return 1 if head is None else int(head.weight.shape[0])


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


def _nothing(trained: Tensor, needs: frozenset[str]) -> Measured:
    zero = torch.zeros(trained.shape, device=trained.device)
    asked = {name: zero for name in ("entropy", "kl") if name in needs}
    return Measured(Forward(logp=zero, **asked), zero)


def scatter(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T] with `values` [N] where `mask` is True, in row order, 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
