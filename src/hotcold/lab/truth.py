"""What the gradients should be: autograd of sums over every response, without any of the product's losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotcold.lab.tiny import Table, Tiny, log_probability


@dataclass(frozen=True)
class Truth:
    """Each gradient has the shape of the table and points uphill in its quantity."""

    J: float  # expected total reward
    grad_J: Tensor
    reverse_kl: float  # KL(pi || ref) over responses
    grad_reverse_kl: Tensor
    forward_kl: float  # KL(ref || pi)
    grad_forward_kl: Tensor


def truth(tiny: Tiny) -> Truth:
    table = torch.tensor(tiny.logits, dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(tiny.reference, dtype=torch.float64)
    logp = {y: log_probability(table, tiny, y).sum() for y in tiny.responses}
    logq = {y: log_probability(reference, tiny, y).sum() for y in tiny.responses}
    J = sum((logp[y].exp() * tiny.total(y) for y in tiny.responses), torch.zeros((), dtype=torch.float64))
    reverse = sum((logp[y].exp() * (logp[y] - logq[y]) for y in tiny.responses), torch.zeros((), dtype=torch.float64))
    forward = sum((logq[y].exp() * (logq[y] - logp[y]) for y in tiny.responses), torch.zeros((), dtype=torch.float64))
    return Truth(*_valued(J, table), *_valued(reverse, table), *_valued(forward, table))


def _valued(quantity: Tensor, table: Tensor) -> tuple[float, Tensor]:
    (gradient,) = torch.autograd.grad(quantity, table, retain_graph=True)
    return float(quantity.detach()), gradient


def state_values(tiny: Tiny, logits: Table | None = None, beta: float = 0.0) -> list[float]:
    """V of each prefix under the policy: the expected reward still to come, minus beta times the KL still to pay."""
    table = torch.tensor(tiny.logits if logits is None else logits, dtype=torch.float64)
    reference = torch.tensor(tiny.reference, dtype=torch.float64)
    values = []
    for prefix in tiny.prefixes:
        ahead = [y for y in tiny.responses if y[: len(prefix)] == prefix]
        total, weight = 0.0, 0.0
        for y in ahead:
            logp, logq = log_probability(table, tiny, y), log_probability(reference, tiny, y)
            p = float(logp[len(prefix) :].sum().exp())
            to_come = tiny.reward[y] + sum(value for at, value in tiny.steps.get(y, ()) if at >= len(prefix))
            weight, total = weight + p, total + p * (to_come - beta * float((logp - logq)[len(prefix) :].sum()))
        values.append(total / weight)
    return values
