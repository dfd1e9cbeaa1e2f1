"""Probabilities, scores and KLs of a tiny world, and the rewards of its tokens, in plain numbers (no autograd)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hotcold.lab.tiny import Response, Table, Tiny

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Policy:
    """One table of logits, in the shapes of the world."""

    tiny: Tiny
    logits: tuple[tuple[float, ...], ...]

    @cached_property
    def log_probability(self) -> Array:
        """[prefixes, V]"""
        table = np.array(self.logits, dtype=np.float64)
        table = table - table.max(1, keepdims=True)
        return table - np.log(np.exp(table).sum(1, keepdims=True))

    @cached_property
    def probability(self) -> Array:
        return np.exp(self.log_probability)

    def logp(self, response: Response) -> list[float]:
        """[T] of each token."""
        return [float(self.log_probability[row, y]) for row, y in zip(self.rows(response), response, strict=True)]

    def rows(self, response: Response) -> list[int]:
        """[T] the state in which each token was chosen."""
        return [self.tiny.prefixes.index(response[:t]) for t in range(len(response))]

    def of_response(self, response: Response) -> float:
        return math.exp(math.fsum(self.logp(response)))

    def score(self, row: int, token: int) -> Array:
        """[V] the gradient of log pi(token) in this state: 1[token] - pi."""
        out = -self.probability[row]
        out[token] += 1
        return out

    def scores(self, response: Response) -> Array:
        """[prefixes, V] the gradient of log pi of the whole response."""
        out = np.zeros_like(self.probability)
        for row, token in zip(self.rows(response), response, strict=True):
            out[row] += self.score(row, token)
        return out

    def entropy(self, row: int) -> float:
        return -float(self.probability[row] @ self.log_probability[row])

    def grad_entropy(self, row: int) -> Array:
        return -self.probability[row] * (self.log_probability[row] + self.entropy(row))

    def kl(self, other: Policy, row: int) -> float:
        """KL(pi || other) of one state."""
        return float(self.probability[row] @ (self.log_probability[row] - other.log_probability[row]))

    def grad_kl(self, other: Policy, row: int) -> Array:
        return self.probability[row] * (self.log_probability[row] - other.log_probability[row] - self.kl(other, row))

    def moved(self, step: Array) -> Policy:
        return policy_of(self.tiny, (np.array(self.logits) + step).tolist())


def policy_of(tiny: Tiny, table: Table) -> Policy:
    return Policy(tiny, tuple(tuple(float(x) for x in row) for row in table))


def visited(policy: Policy, sampled: Policy, gradient: Callable[[int], Array]) -> Array:
    """[prefixes, V] the gradient of one state, summed over the states that the responses of `sampled` visit."""
    out = np.zeros_like(policy.probability)
    for y in policy.tiny.responses:
        for row in policy.rows(y):
            out[row] += sampled.of_response(y) * gradient(row)
    return out


def plain_rewards(tiny: Tiny, response: Response) -> list[float]:
    """[T] rewards on the way, and the score at the last token."""
    rewards = [0.0] * len(response)
    for position, value in tiny.steps.get(response, ()):
        rewards[position] += value
    rewards[-1] += tiny.reward[response]
    return rewards


def to_go(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """[T] r_t + gamma r_(t+1) + ..."""
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
