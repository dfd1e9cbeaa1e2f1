"""Randomness by counter: a uniform number depends on (seed, stream, draw, sample, position) alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_STREAM, MAX_DRAW, MAX_SAMPLE = 2**4, 2**40, 2**20  # 64 bits in all


def uniforms(
    seed: int, stream: int, draws: Sequence[int], samples: Sequence[int], num_tokens: int
) -> NDArray[np.float64]:
    """[B, num_tokens] in [0, 1), float64: row b belongs to (seed, stream, draws[b], samples[b]), column t to token t.

    Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") turns a 128-bit key and a counter
    into random words. The key is two 64-bit words: the seed modulo 2^64, and

        stream * 2^60 + draw * 2^20 + sample        (stream < 2^4, draw < 2^40, sample < 2^20)

    so that two different rows never share a key. The counter is the position of the token; a row is the same whatever
    the length asked for. A word's upper 53 bits, times 2^-53, are the uniform number.
    """
    out = np.empty((len(draws), num_tokens))
    for row, (draw, sample) in enumerate(zip(draws, samples, strict=True)):
        words = np.random.Philox(key=key(seed, stream, draw, sample)).random_raw(num_tokens)
        out[row] = (words >> np.uint64(11)) * 2.0**-53
    return out


def key(seed: int, stream: int, draw: int, sample: int) -> NDArray[np.uint64]:
    assert 0 <= stream < MAX_STREAM and 0 <= draw < MAX_DRAW and 0 <= sample < MAX_SAMPLE, (stream, draw, sample)
    return np.array([seed % 2**64, stream << 60 | draw << 20 | sample], dtype=np.uint64)
