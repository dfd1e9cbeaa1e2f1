"""Linear layers for a few rows at a time, as in decoding, on a CPU.

For x [rows, in] and a weight [out, in], MKL's x W^T runs at half the rate of W x^T when there are 8 to 56 rows; with
fewer or more rows x W^T is the faster one. The two differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

FEW = range(8, 57)  # rows


@contextmanager
def for_few_rows(module: nn.Module) -> Iterator[None]:
    """Inside, the linear layers of a module on a CPU choose the product by the number of rows. Without gradients."""
    layers = [m for m in module.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    layers = [m for m in layers if m.weight.device.type == "cpu" and m.weight.dtype == torch.float32]
    for layer in layers:
        layer.forward = partial(linear, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    rows = x.numel() // x.shape[-1]
    if rows not in FEW or torch.is_autocast_enabled("cpu") or torch.is_grad_enabled():
        return nn.functional.linear(x, layer.weight, layer.bias)
    out = (layer.weight @ x.reshape(rows, -1).t()).t().contiguous()  # attention kernels want it so
    return (out if layer.bias is None else out + layer.bias).reshape(*x.shape[:-1], -1)
