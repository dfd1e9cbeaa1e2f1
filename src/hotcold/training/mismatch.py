"""The difference between the policy and what sampled its responses: corrected by importance weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hotcold.batch import Batch, along_episodes
from hotcold.equations import mismatch_weights
from hotcold.errors import InputError


@dataclass(frozen=True)
class Mismatch:
    """`weights` multiply the loss of each token; the denominators stay as they are."""

    mode: Literal["truncate", "mask"]
    level: Literal["token", "sequence", "geometric"] = "token"
    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0

    def weights(self, batch: Batch) -> Tensor:
        """[B, T] pi_old over the sampler, by its own report, truncated or masked; 0 where not trained.

        A product or mean is taken over the whole response, whose tokens may stand in several rows.
        """
        if batch.logp_sampler is None:
            raise InputError(
                f"mismatch={self.mode} compares with the sampler's log-probabilities, and these rows have none: "
                "give the column logp_sampler, or leave mismatch out."
            )
        assert batch.logp_old is not None
        return along_episodes(batch, self._of_responses, batch.logp_old, batch.logp_sampler)

    def _of_responses(self, logp_old: Tensor, logp_sampler: Tensor, mask: Tensor) -> Tensor:
        return mismatch_weights(logp_old, logp_sampler, mask, self.mode, self.cap, self.low, self.high, self.level)
