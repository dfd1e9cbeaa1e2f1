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
        # one pass over the memory: four times faster than the loop on a CPU, and no temporary of the model's size
        fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
        return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=fused)
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
    by_name: dict[str, dict[str, Tensor]] = {}
    for full, value in saved.items():
        name, _, key = full.rpartition(".")
        by_name.setdefault(name, {})[key] = value
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    for name, parameter in named:
        state = by_name.pop(name, {})
        for key, value in state.items():
            if key != "step" and value.shape != parameter.shape:
                raise InputError(
                    f"the checkpoint's {name}.{key} has shape {list(value.shape)}, "
                    f"the parameter {list(parameter.shape)}: it belongs to another model."
                )
        if state:
            # torch keeps `step` on the CPU unless the update is fused, and the moments beside the parameter
            optimizer.state[parameter] = {
                key: value.clone() if key == "step" and not is_fused else value.clone().to(parameter.device)
                for key, value in state.items()
            }
    if by_name:
        unknown = min(f"{name}.{key}" for name, state in by_name.items() for key in state)
        raise InputError(f"the checkpoint's optimiser has state for {unknown}, which this model does not have.")
