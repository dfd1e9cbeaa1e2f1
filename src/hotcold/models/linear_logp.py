"""log pi of chosen tokens straight from hidden states: the head, the softmax and their gradient, a chunk at a time.

    z = post(h W^T + b) / temperature,   logp = z_id - L,   L = log sum_v exp(z_v)
    d logp / d z_v = [v = id] - exp(z_v - L)

Kept for the backward pass: h and L. A chunk's logits are computed anew there and become their own gradient in place, so
that nothing of size [tokens, V] is ever whole, and no chunk has more than one buffer beside it. The same numbers as
`equations.selected_logp` and `equations.state_entropy` of the logits, which a test holds it to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hotcold.equations.logprobs import state_entropy

CHUNK_ELEMENTS = 2**24  # logits in one product: 64 MB in float32
SLICE_ELEMENTS = 2**19  # logits that the steps between two products take at once: what a CPU's cache holds


@dataclass(frozen=True)
class Post:
    """What follows a head's product: logits * scale, then softcap * tanh(. / softcap), then / temperature."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def apply_(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def pull_back_(self, gradient: Tensor, z: Tensor | None) -> Tensor:
        """The gradient with respect to the product, from that of z; z is needed where there is a softcap."""
        if self.softcap is not None:
            assert z is not None
            gradient.mul_(1.0 - (z * (self.temperature / self.softcap)).square())
        factor = self.scale / self.temperature
        return gradient if factor == 1.0 else gradient.mul_(factor)


def linear_logp(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, post: Post) -> tuple[Tensor, Tensor]:
    """(logp [N], entropy [N]) in nats from hidden [N, H], weight [V, H], ids [N]. The entropy carries no gradient."""
    logp, entropy = _LinearLogp.apply(hidden, weight, bias, ids, post)
    return logp, entropy


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, post: Post
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, total = (hidden.new_empty(len(hidden)) for _ in range(3))
        for rows in _chunks(len(hidden), weight.shape[0]):
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            for part in _slices(rows, weight.shape[0]):
                z = post.apply_(logits[part.start - rows.start : part.stop - rows.start])
                logp[part], entropy[part], total[part] = _scores(z, ids[part])
        ctx.save_for_backward(hidden, weight, bias, ids, total)
        ctx.post = post
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, total = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight) if wants_weight else None
        of_bias = torch.zeros_like(bias) if wants_bias else None
        for rows in _chunks(len(hidden), weight.shape[0]):
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            for part in _slices(rows, weight.shape[0]):
                z = ctx.post.apply_(logits[part.start - rows.start : part.stop - rows.start])
                _gradient_(z, ids[part], total[part], grad[part], ctx.post)
            if of_hidden is not None:
                torch.mm(logits, weight, out=of_hidden[rows])
            if of_weight is not None:
                of_weight.addmm_(logits.t(), hidden[rows])
            if of_bias is not None:
                of_bias += logits.sum(0)
        return of_hidden, of_weight, of_bias, None, None


def _scores(z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logp, entropy and L of the states z [n, V], which is overwritten."""
    top = z.amax(-1, keepdim=True)
    z.sub_(top)  # before the sum: the larger part of a difference of two large numbers would be rounding
    chosen = z.gather(-1, ids[:, None])[:, 0]
    weights = z.exp()
    mass = weights.sum(-1)
    entropy = mass.log() - weights.mul_(z).sum(-1) / mass
    if bool(entropy.isnan().any()):  # 0 times -inf: a token outside a kept set
        entropy = state_entropy(z)
    below = mass.log()
    valid = top[:, 0].isfinite()
    return (
        torch.where(valid, chosen - below, float("nan")),
        entropy,
        torch.where(valid, top[:, 0] + below, float("nan")),
    )


def _gradient_(z: Tensor, ids: Tensor, total: Tensor, grad: Tensor, post: Post) -> None:
    """z [n, V] becomes the gradient with respect to the head's product."""
    kept = z.clone() if post.softcap is not None else None
    z.sub_(total[:, None]).exp_().mul_(-grad[:, None])
    z.scatter_add_(-1, ids[:, None], grad[:, None])
    if not bool(total.isfinite().all()):  # a state without a distribution: its logp is NaN, and it sends no gradient
        z.masked_fill_(~total.isfinite()[:, None], 0.0)
    post.pull_back_(z, kept)


def _chunks(num: int, width: int) -> Iterator[slice]:
    return _parts(0, num, max(1, CHUNK_ELEMENTS // width))


def _slices(rows: slice, width: int) -> Iterator[slice]:
    return _parts(rows.start, rows.stop, max(1, SLICE_ELEMENTS // width))


def _parts(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
