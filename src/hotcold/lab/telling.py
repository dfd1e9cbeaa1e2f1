"""What makes the checks of a model say something: scores that differ, and no tensors of zeros."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm
from hotcold.batch import Rollout, collate
from hotcold.lab.probe import Parts
from hotcold.training.collect import kept

SCORES = (0.0, 1.0, 0.25, 0.75, 0.5)  # made up


def with_variance(rollouts: Sequence[Rollout], algorithm: Algorithm) -> tuple[list[Rollout], bool]:
    """The rows, with made-up scores where theirs teach nothing: all equal, or no row kept."""
    if algorithm.plan is None or _teaches(rollouts, algorithm):
        return list(rollouts), False
    rows = list(rollouts)
    for scale in (1.0, 10.0, 100.0, 1000.0):  # a threshold of the algorithm may be anywhere
        rows = [
            replace(r, reward=scale * SCORES[i % len(SCORES)], steps=(), greedy_reward=0.4 * scale)
            for i, r in enumerate(rollouts)
        ]
        if _teaches(rows, algorithm):
            break
    return rows, True


def _teaches(rollouts: Sequence[Rollout], algorithm: Algorithm) -> bool:
    batch = collate(rollouts)
    if not bool((kept(batch, algorithm) & batch.response_mask.any(1)).any()):
        return False
    by_group: dict[int, set[float]] = {}
    for r in rollouts:
        if r.score is not None:
            by_group.setdefault(r.group if algorithm.plan and algorithm.plan.group_size > 1 else 0, set()).add(r.score)
    return any(len(scores) > 1 for scores in by_group.values())


@contextmanager
def stirred(parts: Parts) -> Iterator[None]:
    """Trained tensors that are all 0 (a critic's head, LoRA's B) get small values for the time: as long as they are 0
    they send no gradient to what lies below them, and nothing would be compared there."""
    random = torch.Generator().manual_seed(5)
    changed: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for name in parts.modules:
            for parameter in parts.parameters(name):
                if not bool(parameter.any()):
                    changed.append((parameter, parameter.detach().clone()))
                    values = 0.02 * torch.randn(parameter.shape, generator=random)
                    parameter.copy_(values.to(parameter.device, parameter.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in changed:
                tensor.copy_(before)
