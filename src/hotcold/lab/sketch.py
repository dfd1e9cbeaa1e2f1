"""A gradient of millions of numbers in a few hundred, by which variances and inner products keep their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
BLOCK = 2**22  # numbers that are handled at once


@dataclass(frozen=True)
class CountSketch:
    """y_k = sum of s_i x_i over the numbers i that fall into bucket k (Charikar, Chen and Farach-Colton 2002).

    Buckets and signs s are drawn from the seed, independently for every number. E[s_i s_j] = 0 for i != j, so the
    expected value of y . y' is x . x', of |y|^2 it is |x|^2, and the same holds for every variance, a mean of squares.
    The standard deviation of |y|^2 is at most sqrt(2 / dims) |x|^2. A gradient with no more than `dims` numbers is left
    as it is.
    """

    dims: int
    seed: int = 0

    def of(self, gradient: Sequence[Tensor]) -> Array:
        """[dims] float64, or all numbers where there are no more."""
        flat = [g.detach().flatten() for g in gradient]
        if self.is_exact(sum(len(g) for g in flat)):
            return torch.cat(flat).double().cpu().numpy()
        out = torch.zeros(self.dims, dtype=torch.float64)
        for number, values in enumerate(flat):
            random = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            for block in values.split(BLOCK):
                drawn = torch.randint(2 * self.dims, (len(block),), generator=random)
                signed = torch.where(drawn < self.dims, block.cpu(), -block.cpu()).double()
                out += torch.bincount(drawn % self.dims, weights=signed, minlength=self.dims)
        return out.numpy()

    def is_exact(self, num_numbers: int) -> bool:
        return num_numbers <= self.dims
