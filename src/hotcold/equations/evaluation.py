"""Estimates of what a policy can do, from samples."""

import math

from hotcold.equations.checks import check_whole


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of k samples is correct, estimated from num_samples of which num_correct are.

    pass@k = 1 - C(n - c, k) / C(n, k),  n = num_samples, c = num_correct

    Whole numbers, 1 <= k <= n, 0 <= c <= n; a float in [0, 1]. C(n - c, k)/C(n, k) is the share of the k-subsets of the
    samples without a correct one, whose mean is (1 - p)^k: unbiased, unlike 1 - (1 - c/n)^k.
    Source: Chen et al. 2021 (Codex), eq. 1.

    >>> pass_at_k(num_samples=4, num_correct=1, k=2)
    0.5
    """
    n = check_whole("num_samples", num_samples, low=1)
    c = check_whole("num_correct", num_correct, low=0, high=n)
    k = check_whole("k", k, low=1, high=n)
    return 1 - math.comb(n - c, k) / math.comb(n, k)
