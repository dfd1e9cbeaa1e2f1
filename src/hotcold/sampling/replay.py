"""Training on given ids and rewards: rows that some sampler, or a person, recorded."""

from __future__ import annotations

from hotcold.batch import Rollout
from hotcold.errors import InputError
from hotcold.sampling.rollout_files import read_rollouts


class ReplayRollouts:
    """The rows of a parquet file by step. They are scored already; nothing is sampled."""

    def __init__(self, path: str):
        self.path = path
        self._by_step = read_rollouts(path)
        self.steps = sorted(self._by_step)  # the file's own step numbers

    def rollouts(self, number: int) -> list[Rollout]:
        """The rows of the `number`-th recorded step, from 1."""
        if not 1 <= number <= len(self.steps):
            raise InputError(f"step {number} was asked of {self.path}, which has {len(self.steps)} steps.")
        return self._by_step[self.steps[number - 1]]
