"""How a forward is computed: in bf16 around float32 parameters, and with activations computed again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hotcold.errors import InputError

DTYPES = ("fp32", "bf16")
FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"  # transformers' names, on each layer


def default_dtype(device: str) -> str:
    """bf16 on a CUDA device that computes it in hardware, else fp32."""
    return "bf16" if torch.device(device).type == "cuda" and supports_bf16(device) else "fp32"


def compute_context(dtype: str, device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the context of every forward. "fp32": nothing; "bf16": matrix products in bf16.

    Parameters, gradients, log-probabilities and losses stay float32.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype}: needed is one of {', '.join(DTYPES)}.")
    if dtype == "fp32":
        return nullcontext
    if not supports_bf16(device):
        raise InputError(f"dtype=bf16: the device {device} does not compute in bf16. Use dtype=fp32.")
    # Without the cache of cast weights: it does not see that a parameter's data were exchanged, as is done where the
    # starting adapter is the reference; the reference would answer as the policy.
    return partial(torch.autocast, torch.device(device).type, dtype=torch.bfloat16, cache_enabled=False)


def supports_bf16(device: str) -> bool:
    kind = torch.device(device).type
    if kind == "cuda":
        if not torch.cuda.is_available():
            return False
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    if kind == "mps":
        return torch.backends.mps.is_available() and torch.backends.mps.is_macos_or_newer(14, 0)
    return torch.amp.is_autocast_available(kind)


def check_recomputing(module: nn.Module) -> None:
    """Raises InputError where the layers of the module cannot be computed again."""
    model = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), module)
    if not getattr(model, "supports_gradient_checkpointing", False) or not _layers(module):
        raise InputError(
            f"gradient_checkpointing: transformers does not support it in a {type(model).__name__}.\n"
            "Leave it out; a smaller tokens_per_microbatch saves memory too."
        )


@contextmanager
def recomputing(module: nn.Module, on: bool) -> Iterator[None]:
    """Inside, a forward with gradient keeps each layer's input alone, and the backward runs the layer again.

    For the time of one forward and backward. Only what has the flag goes into train mode, which transformers asks for;
    attention, routers and dropout below it stay in eval mode, so the numbers are the same. Afterwards every flag is as
    it was and sampling has its cache.
    """
    if not on:
        yield
        return
    check_recomputing(module)
    layers = _layers(module)
    before = [(layer.training, getattr(layer, FLAG), getattr(layer, FUNCTION, None)) for layer in layers]
    try:
        for layer in layers:
            _set(layer, True, True, partial(checkpoint, use_reentrant=False))
        yield
    finally:
        for layer, (training, flag, function) in zip(layers, before, strict=True):
            _set(layer, training, flag, function)


def _layers(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if hasattr(part, FLAG)]


def _set(layer: nn.Module, training: bool, flag: bool, function: Callable[..., Any] | None) -> None:
    layer.training = training
    setattr(layer, FLAG, flag)
    if function is not None:
        setattr(layer, FUNCTION, function)
    elif hasattr(layer, FUNCTION):
        delattr(layer, FUNCTION)
