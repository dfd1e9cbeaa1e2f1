"""How a causal LM is read: each prompt once for all of its responses, the head in chunks that are computed anew.

Economies, each proven at load on the model at hand, else left out:
- A batch is one row without padding, each distinct prompt once (`packing`).
- Where that is not the model's own result, rows with the same prompt share its forward. The prompt runs once with a
  key-value cache that keeps the autograd graph; keys and values are repeated for the responses, which are ordinary rows
  from there on.
- The head runs on trained positions only, a chunk at a time; the backward pass computes a chunk's logits anew, so that
  no [tokens, V] tensor is ever whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hotcold.batch import Batch, Rollout, collate
from hotcold.models.chunks import parts, rows_at_once
from hotcold.models.hf import cache_of, forward_kwargs, has_row_cache, position_kwargs
from hotcold.models.kv_cache import select_rows
from hotcold.models.packing import may_pack, packed_hidden

NOTHING_BEFORE = "a trained token needs at least one token before it"
SAME = 1e-4  # relative: how far two ways to the same logits may lie apart in float32
APART = 1e-5  # the same for rows beside each other, whose products experts do together


@dataclass(frozen=True)
class Head:
    """What makes logits of the trunk's last hidden states: the module's own head, and what its family does after it."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, module: Any, hidden: Tensor) -> Tensor:
        logits = module.get_output_embeddings()(hidden)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Laying(StrEnum):
    """How the tokens of a batch go through a trunk."""

    ROWS = "padded rows"
    PROMPTS = "each prompt once, the responses as padded rows"
    PACKED = "each prompt once, all tokens side by side"


@dataclass(frozen=True)
class Reading:
    """What holds for a model. `head` None: only the whole module knows its logits."""

    head: Head | None = None
    laying: Laying = Laying.ROWS


PLAIN = Reading()


def laying_of(reading: Mapping[str, Reading], recompute: bool) -> Laying:
    """How a run lays its rows: as its policy reads them. `recompute`: activations, in the backward pass."""
    laying = reading.get("policy", PLAIN).laying
    return Laying.ROWS if recompute and laying is Laying.PROMPTS else laying


def choose_reading(module: Any) -> Reading:
    """The economies that give this model's own logits, tried on made-up rows."""
    if not has_trunk(module):
        return PLAIN
    rows = _trial(module)
    row, at = rows.trained.nonzero(as_tuple=True)
    with torch.no_grad():
        expected = module(**padded_rows(module, rows)).logits[row, at - 1]
        head = _matching_head(module, plain_hidden(module.base_model, rows, row, at), expected)
    return PLAIN if head is None else Reading(head, choose_laying(module.base_model))


def choose_laying(trunk: Any) -> Laying:
    """The least work that gives the plain hidden states."""
    if may_pack(trunk) and _is_exact(trunk, packed_hidden):
        return Laying.PACKED
    return Laying.PROMPTS if has_row_cache(trunk) and _is_exact(trunk, shared_hidden) else Laying.ROWS


def _is_exact(trunk: Any, hidden_of: Callable[..., Tensor]) -> bool:
    """It gives the plain hidden states, and what one response says reaches no other.

    To the bit, but for experts: they take the tokens of all rows together, and the size of a product moves last bits.
    """
    rows = _trial(trunk)
    row, at = rows.trained.nonzero(as_tuple=True)
    tokens, start, end = rows.tokens.clone(), int(rows.prompt_lengths[0]), int(rows.lengths[0])
    tokens[0, start:end] = tokens[0, start:end].roll(1)
    try:
        with torch.no_grad():
            plain = plain_hidden(trunk, rows, row, at)
            shared = hidden_of(trunk, rows, row, at)
            changed = hidden_of(trunk, rows.replace(tokens=tokens), row, at)
    except Exception:  # whatever a family's cache or attention cannot do
        return False
    others = row != 0
    a, b = shared[others], changed[others]
    apart = torch.equal(a, b) or (has_experts(trunk) and close(a, b, APART))
    return close(shared, plain) and apart and not close(shared, changed)


def has_experts(module: Any) -> bool:
    config = module.config.get_text_config()
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def has_trunk(module: Any) -> bool:
    return module.base_model is not module and module.get_output_embeddings() is not None


def _matching_head(module: Any, hidden: Tensor, expected: Tensor) -> Head | None:
    config = module.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    scales = [1.0]
    if scaling := getattr(config, "logits_scaling", None):
        scales.append(1.0 / scaling)
    if scaling := getattr(config, "logit_scale", None):
        scales.append(float(scaling))
    for scale in scales:
        for cap in dict.fromkeys((None, softcap)):
            head = Head(scale, cap)
            if close(head(module, hidden), expected):
                return head
    return None


def close(a: Tensor, b: Tensor, relative: float = SAME) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= relative * max(1.0, float(b.abs().max()))


def _trial(module: Any) -> Batch:
    """Two prompts with three responses each, longer than a small sliding window, one with a gap."""
    vocabulary = module.get_input_embeddings().num_embeddings
    device = next(module.parameters()).device
    random = torch.Generator().manual_seed(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocabulary, (n,), generator=random).tolist())

    prompts, rows = [ids(9), ids(4)], []
    for episode, length in enumerate((12, 5, 1, 9, 3, 7)):
        mask = tuple(i != 2 for i in range(length))
        rows.append(Rollout(prompts[episode % 2], ids(length), episode % 2, episode, response_mask=mask, reward=0.0))
    return collate(rows).to(device)


# ---- the two forwards


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


def plain_hidden(trunk: nn.Module, batch: Batch, row: Tensor, at: Tensor) -> Tensor:
    """[N, H] the hidden states from which the tokens at (row, at) were chosen: those of the position before."""
    assert int(at.min()) > 0, NOTHING_BEFORE
    return trunk(**padded_rows(trunk, batch)).last_hidden_state[row, at - 1]


def shared_hidden(trunk: nn.Module, batch: Batch, row: Tensor, at: Tensor) -> Tensor:
    """The same, each distinct prompt once. Prompts stand left-padded, so that a response follows its own at once."""
    prompts, prompt_of = distinct_prompts(batch)
    lengths = batch.prompt_lengths
    width = int(lengths.max())
    room = int((batch.lengths - lengths).max()) - 1  # the last token of a row is never read
    prompt_tokens, prompt_mask = _left_aligned(batch, prompts, width)
    out = trunk(
        input_ids=prompt_tokens,
        attention_mask=prompt_mask,
        **position_kwargs(trunk, (prompt_mask.cumsum(1) - 1).clamp(min=0)),
        **forward_kwargs(trunk, None),
    )
    last = out.last_hidden_state[:, -1][prompt_of]
    if room < 1:
        return last[row]
    cache = cache_of(out)
    select_rows(cache, prompt_of)
    place = torch.arange(room, device=batch.tokens.device)
    positions = lengths[:, None] + place[None, :]
    tokens = batch.tokens.gather(1, positions.clamp(max=batch.tokens.shape[1] - 1))
    inside = (positions < batch.lengths[:, None]).long()
    hidden = trunk(
        input_ids=tokens,
        attention_mask=torch.cat([prompt_mask[prompt_of], inside], 1),
        **position_kwargs(trunk, positions),
        **forward_kwargs(trunk, cache),
    ).last_hidden_state
    states = torch.cat([last[:, None], hidden], 1)
    return states[row, at - lengths[row]]


def distinct_prompts(batch: Batch) -> tuple[list[int], Tensor]:
    """For each distinct prompt a row that has it, and for each row which prompt is its own."""
    seen: dict[tuple[int, ...], int] = {}
    first: list[int] = []
    prompt_of: list[int] = []
    for i, (tokens, length) in enumerate(zip(batch.tokens.tolist(), batch.prompt_lengths.tolist(), strict=True)):
        number = seen.setdefault(tuple(tokens[:length]), len(seen))
        if number == len(first):
            first.append(i)
        prompt_of.append(number)
    return first, torch.tensor(prompt_of, device=batch.tokens.device)


def _left_aligned(batch: Batch, rows: list[int], width: int) -> tuple[Tensor, Tensor]:
    """[P, width] the prompts of these rows, each ending at the last column, and 1 where one stands."""
    index = torch.tensor(rows, device=batch.tokens.device)
    lengths = batch.prompt_lengths[index]
    source = torch.arange(width, device=index.device)[None, :] - (width - lengths)[:, None]
    return batch.tokens[index].gather(1, source.clamp(min=0)), (source >= 0).long()


HIDDEN = {Laying.ROWS: plain_hidden, Laying.PROMPTS: shared_hidden, Laying.PACKED: packed_hidden}


def read_hidden(trunk: nn.Module, batch: Batch, row: Tensor, at: Tensor, laying: Laying) -> Tensor:
    return HIDDEN[laying](trunk, batch, row, at)


# ---- chunks


def in_chunks(of: Callable[..., tuple[Tensor, ...]], width: int, *inputs: Tensor) -> list[Tensor]:
    """`of(*inputs)` on chunks of the first dimension, joined; each chunk is computed anew in the backward pass.

    `width`: elements that one entry needs while it is computed.
    """
    num, size, found = len(inputs[0]), rows_at_once(width), []
    for rows in parts(0, num, size):
        chunk = [x[rows] for x in inputs]
        if torch.is_grad_enabled() and num > size:
            found.append(checkpoint(of, *chunk, use_reentrant=False))
        else:
            found.append(of(*chunk))
    return [torch.cat(values) for values in zip(*found, strict=True)]
