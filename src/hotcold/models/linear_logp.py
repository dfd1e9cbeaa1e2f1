"""log pi of chosen tokens straight from hidden states: the head, the softmax and their gradient, a chunk at a time.

    z = head(h W^T + b) / temperature,   logp = z_id - L,   L = log sum_v exp(z_v)
    d logp / d z_v = [v = id] - exp(z_v - L)

Kept for the backward pass: h and L. A chunk's logits are computed anew there and become their own gradient in place, so
that nothing of size [tokens, V] is ever whole, and no chunk has more than one buffer beside it. The same numbers as
`equations.selected_logp` and `equations.state_entropy` of the logits, which a test holds it to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hotcold.equations.logprobs import state_entropy
from hotcold.models.chunks import parts, rows_at_once
from hotcold.models.reading import Head

HEAD = Head()  # the product and no more

SLICE_ELEMENTS = 2**19  # logits that the steps between two products take at once: what a CPU's cache holds


def linear_logp(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, head: Head = HEAD, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(logp [N], entropy [N]) in nats from hidden [N, H], weight [V, H], ids [N]. The entropy carries no gradient.

    `head` is what its model's family does to the logits after the product.
    """
    logp, entropy = _LinearLogp.apply(hidden, weight, bias, ids, head, temperature)
    return logp, entropy


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, head: Head, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, total = (hidden.new_empty(len(hidden)) for _ in range(3))
        for rows in parts(0, len(hidden), rows_at_once(weight.shape[0])):
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            for part in parts(rows.start, rows.stop, max(1, SLICE_ELEMENTS // weight.shape[0])):
                z = _scaled_(logits[part.start - rows.start : part.stop - rows.start], head, temperature)
                logp[part], entropy[part], total[part] = _scores(z, ids[part])
        ctx.save_for_backward(hidden, weight, bias, ids, total)
        ctx.after = head, temperature
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
        for rows in parts(0, len(hidden), rows_at_once(weight.shape[0])):
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            for part in parts(rows.start, rows.stop, max(1, SLICE_ELEMENTS // weight.shape[0])):
                z = _scaled_(logits[part.start - rows.start : part.stop - rows.start], *ctx.after)
                _gradient_(z, ids[part], total[part], grad[part], *ctx.after)
            if of_hidden is not None:
                torch.mm(logits, weight, out=of_hidden[rows])
            if of_weight is not None:
                of_weight.addmm_(logits.t(), hidden[rows])
            if of_bias is not None:
                of_bias += logits.sum(0)
        return of_hidden, of_weight, of_bias, None, None, None


def _scaled_(logits: Tensor, head: Head, temperature: float) -> Tensor:
    """z, in place."""
    if head.scale != 1.0:
        logits.mul_(head.scale)
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap)
    return logits if temperature == 1.0 else logits.div_(temperature)


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


def _gradient_(z: Tensor, ids: Tensor, total: Tensor, grad: Tensor, head: Head, temperature: float) -> None:
    """z [n, V] becomes the gradient with respect to the head's product."""
    slope = None if head.softcap is None else 1.0 - (z * (temperature / head.softcap)).square()  # of the softcap
    z.sub_(total[:, None]).exp_().mul_(-grad[:, None])
    z.scatter_add_(-1, ids[:, None], grad[:, None])
    if not bool(total.isfinite().all()):  # a state without a distribution: its logp is NaN, and it sends no gradient
        z.masked_fill_(~total.isfinite()[:, None], 0.0)
    if slope is not None:
        z.mul_(slope)
    if head.scale != temperature:
        z.mul_(head.scale / temperature)
