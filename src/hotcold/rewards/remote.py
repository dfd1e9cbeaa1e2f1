"""`reward=http://HOST:PORT/PATH`: a server that scores, asked as OpenRLHF asks it.

The request is {"query": [...], "prompts": [...], "labels": [...]}, the answer {"rewards": [...]}, {"scores": [...]} or
the list itself. Options stand after a `#`, which no request contains: `http://127.0.0.1:5000/reward#batch=32&timeout=30`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hotcold.errors import InputError, RewardError
from hotcold.rewards.base import Scorable
from hotcold.rewards.dialects import Column, prompt_text
from hotcold.rewards.failures import Failure, Ledger, Limits
from hotcold.rewards.requests import Client, Failed, address_of, key_of
from hotcold.rewards.scores import Part, part, rows

COUNTS = ("remote/calls", "remote/failed", "remote/retries")
LABEL = Column(("label", "labels", "answer"), str)


def make_remote(
    url: str,
    batch: int = 64,
    timeout: float = 60.0,
    retries: int = 3,
    concurrency: int = 4,
    max_failures: float = 0.5,
    key_env: str | None = None,
) -> Remote:
    if batch < 1 or timeout <= 0 or concurrency < 1 or retries < 0 or not 0 <= max_failures <= 1:
        raise InputError(
            f"reward={url}: batch and concurrency are at least 1, timeout is above 0, retries at least 0, "
            "max_failures from 0 to 1."
        )
    address = address_of(url, "reward=http...")
    key = key_of(key_env, address, f"reward={url}")
    return Remote(Client(address, key, timeout, retries, concurrency), batch, max_failures)


class Remote:
    columns: tuple[str, ...] = ()

    def __init__(self, client: Client, batch: int, max_failures: float) -> None:
        self.client, self.batch = client, batch
        self.ledger = Ledger(Limits(max_failures=max_failures))

    def __call__(self, items: Sequence[Scorable]) -> list[float | None]:
        parts = [items[start : start + self.batch] for start in range(0, len(items), self.batch)]
        replies = self.client.ask_all([content_of(batch) for batch in parts])
        answers = [one for reply, batch in zip(replies, parts, strict=True) for one in self._answers(reply, batch)]
        return [found.score for found in self.ledger.settle([[answers]])[0]]

    def _answers(self, reply: Any, batch: Sequence[Scorable]) -> list[Part | Failure]:
        if isinstance(reply, Failed):
            text = f'reward "remote" failed at {rows(batch)}.\n{self.client.address}: {reply}'
            return [Failure("remote", reply.kind, text)] * len(batch)
        values = rewards_of(reply)
        if values is None or len(values) != len(batch):
            got = "no list of rewards" if values is None else f"{len(values)} rewards"
            raise RewardError(
                f"{self.client.address} answered with {got} for {len(batch)} responses ({rows(batch)}).\n"
                'It must answer {"rewards": [...]}, one number for each query, in order.'
            )
        return [part("remote", value, item) for value, item in zip(values, batch, strict=True)]

    def listen(self, tell: Callable[[str], None], beat: Callable[[str], None], folder: Path | None) -> None:
        self.ledger.tell, self.client.beat = tell, beat
        away = "" if self.client.address.is_local else " (not this machine)"
        tell(f"remote reward: prompts and responses are sent to {self.client.address}{away}")

    def take_counts(self) -> dict[str, int]:
        found = (self.client.counts["calls"], self.ledger.counts["failed"], self.client.counts["retries"])
        self.client.counts.clear()
        self.ledger.counts.clear()
        return dict(zip(COUNTS, found, strict=True))

    def close(self) -> None:
        """Nothing is left open between calls."""


def content_of(batch: Sequence[Scorable]) -> dict[str, list[Any]]:
    return {
        "query": [prompt_text(item) + item.completion for item in batch],
        "prompts": [prompt_text(item) for item in batch],
        "labels": [LABEL.of(item) for item in batch],
    }


def rewards_of(reply: Any) -> list[Any] | None:
    """A number for each response; of a server that answers in columns, [[0.5], [1.0]], the numbers in them."""
    found = (
        next((reply[key] for key in ("rewards", "scores") if key in reply), None) if isinstance(reply, dict) else reply
    )
    if not isinstance(found, list):
        return None
    is_column = bool(found) and all(isinstance(one, list) and len(one) == 1 for one in found)
    return [one[0] for one in found] if is_column else found
