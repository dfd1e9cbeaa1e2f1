"""What a sampling engine is asked and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class SamplingOptions:
    temperature: float = 1.0
    max_tokens: int = 128
    greedy: bool = False  # the most likely token at each step; log-probs are those of temperature 1
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    stream: int = 0  # separates the random numbers of training (0), evaluation (1) and `sample` (2)


@dataclass(frozen=True)
class Request:
    prompt_ids: tuple[int, ...]
    draw: int  # position in the prompt order; with `sample` and the seed it names the random numbers
    sample: int = 0  # which of the responses to this draw


@dataclass(frozen=True)
class Response:
    ids: tuple[int, ...]  # what was sampled, a final EOS included
    logp: tuple[float, ...]  # nats, at the sampling temperature, of the unfiltered distribution
    finish_reason: str  # "stop" (EOS or a stop string) or "length"
    text: str  # decoded without special tokens, cut before a stop string: for scoring only


class Sampler(Protocol):
    def sample(
        self,
        requests: Sequence[Request],
        options: SamplingOptions,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Response]:
        """One response for each request, in order. `progress` hears (responses done, responses in all)."""

    def refresh(self, version: int) -> None:
        """The policy's parameters have changed; drop everything computed with the old ones."""
