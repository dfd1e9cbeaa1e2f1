"""Optimisers, the learning rate of a step, and optimiser state as plain named tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotcold.errors import InputError

NamedParameters = Sequence[tuple[str, nn.Parameter]]


def make_optimizer(kind: str, named: NamedParameters, rate: float) -> torch.optim.Optimizer:
    """`adamw`: betas (0.9, 0.999), eps 1e-8, no decay. `sgd`: a plain step, after = before - rate * gradient.

    A tied weight stands once in `named` (as in `Module.named_parameters`), so it is stepped once.
    """
    parameters = [parameter for _, parameter in named]
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=rate)
    raise InputError(f"optimizer={kind!r} is unknown: adamw or sgd.")


def rate_at(step: int, base: float, warmup_steps: int) -> float:
    """Linear over the first `warmup_steps` steps (step counts from 1), then constant."""
    return base if step >= warmup_steps else base * step / warmup_steps


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: NamedParameters) -> dict[str, Tensor]:
    """The state of every parameter as `<parameter name>.<state name>`: tensors only, no pickle."""
    out = {}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                out[f"{name}.{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return out


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, named: NamedParameters, saved: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`, bit for bit."""
    known = set()
    for name, parameter in named:
        state = {k.removeprefix(f"{name}."): k for k in saved if k.rpartition(".")[0] == name}
        known |= set(state.values())
        if state:
            # torch keeps `step` on the CPU and the moments beside the parameter
            optimizer.state[parameter] = {
                key: saved[full].clone() if key == "step" else saved[full].clone().to(parameter.device)
                for key, full in state.items()
            }
    if unknown := sorted(set(saved) - known):
        raise InputError(f"the checkpoint's optimiser has state for {unknown[0]}, which this model does not have.")
