"""Rows of one episode as one sequence: a response may come in several rows (turns with other tokens between them)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hotcold.batch import Batch


def along_episodes(batch: Batch, of: Callable[..., Tensor], *per_token: Tensor) -> Tensor:
    """`of(*per_token, mask)` with the trained tokens of an episode's rows one after the other; [B, T] as the batch.

    The rows of an episode stand in the batch in time order. Where every episode is one row this is a plain call.
    """
    mask = batch.response_mask
    if len(batch.episode.unique()) == len(batch):
        return of(*per_token, mask)
    episode, column = _places(batch)
    shape = (int(batch.episode.unique().numel()), int(column.max()) + 1 if len(column) else 0)

    def joined(values: Tensor) -> Tensor:
        out = torch.zeros(shape, dtype=values.dtype, device=values.device)
        out[episode, column] = values
        return out

    result = of(*(joined(x[mask]) for x in per_token), joined(torch.ones_like(column, dtype=torch.bool)))
    out = torch.zeros(mask.shape, dtype=result.dtype, device=result.device)
    out[mask] = result[episode, column]
    return out


def _places(batch: Batch) -> tuple[Tensor, Tensor]:
    """Of every trained token, in row order: which episode it belongs to, and its place in it."""
    _, episode = torch.unique(batch.episode, return_inverse=True)
    num_before: dict[int, int] = {}  # trained tokens of an episode in the rows so far
    first = []
    for e, length in zip(episode.tolist(), batch.response_mask.sum(1).tolist(), strict=True):
        first.append(num_before.get(e, 0))
        num_before[e] = first[-1] + length
    row, _ = batch.response_mask.nonzero(as_tuple=True)
    in_row = batch.response_mask.cumsum(1)[batch.response_mask] - 1
    return episode[row], torch.tensor(first, device=row.device)[row] + in_row
