"""Rows of a step: as lists (`Rollout`), then as tensors (`Batch`). The only place that builds masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    """One row, usually one response.

    Example: the prompt [7, 8], the response "5 <eos>", scored 1:
    `Rollout(prompt_ids=(7, 8), response_ids=(5, 2), group=0, episode=0, reward=1.0)`
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    group: int  # which prompt instance of the step
    episode: int  # which response; several rows may form one episode
    response_mask: tuple[bool, ...] | None = None  # over response_ids; None: the policy chose every one of them
    reward: float | None = None  # None: no score
    steps: tuple[tuple[int, float], ...] = ()  # intermediate rewards: (index of the response token, value)
    logp_sampler: tuple[float, ...] | None = None  # over response_ids, nats
    truncated: bool = False
    version: int = 0  # parameter version that sampled it
    greedy_reward: float | None = None  # score of the greedy response to the same prompt
    unit: int | None = None  # rows that must share a micro-batch; None: alone
    parts: dict[str, float | None] = field(default_factory=dict)  # score of each reward function
    text: str = ""  # the response as it was scored
    prompt_text: str = ""
    finish_reason: str = ""  # "stop" or "length"
    prompt_index: int = -1  # row of the data file
    draw: int = -1  # position in the prompt order
    demonstration: bool = False  # a row of a data set: it takes part without a score

    @property
    def score(self) -> float | None:
        """All that the response earned: the score at its end and the intermediate rewards."""
        return None if self.reward is None else self.reward + sum(value for _, value in self.steps)


@dataclass(frozen=True)
class Batch:
    """Rows as tensors, right-padded. Every [B, T] tensor is aligned with `tokens`: entry t concerns token t itself.

    Example: the rollout above in a batch with a longer row:
    tokens [[7, 8, 5, 2, 0, 0], ...], response_mask [[F, F, T, T, F, F], ...], lengths [4, ...], prompt_lengths [2, ...]
    """

    tokens: Tensor  # [B, T] int64
    response_mask: Tensor  # [B, T] bool
    lengths: Tensor  # [B] int64, prompt and response
    prompt_lengths: Tensor  # [B] int64
    group: Tensor  # [B] int64
    episode: Tensor  # [B] int64
    unit: Tensor  # [B] int64
    rewards: Tensor  # [B] float, NaN where there is no score
    token_rewards: Tensor  # [B, T] float: intermediate rewards and the score on the last trained token
    keep: Tensor  # [B] bool
    truncated: Tensor  # [B] bool
    version: Tensor  # [B] int64
    logp_sampler: Tensor | None = None  # [B, T]
    logp_old: Tensor | None = None
    logp_ref: Tensor | None = None
    kl_old: Tensor | None = None
    values_old: Tensor | None = None
    greedy_rewards: Tensor | None = None  # [B]
    penalties: Tensor | None = None  # [B, T] what was taken from token_rewards for length; `rewards` are without it
    uncharged: Tensor | None = None  # [B, T] token_rewards before that: to add the penalties again would round
    advantages: Tensor | None = None  # [B, T]
    returns: Tensor | None = None  # [B, T]
    extras: dict[str, Tensor] = field(default_factory=dict)  # an algorithm's own [B] or [B, T] columns
    metrics: dict[str, float] = field(default_factory=dict)  # what credit reports of the whole step

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def replace(self, **changes: Any) -> Batch:
        return replace(self, **changes)

    def select(self, rows: Tensor | Sequence[int]) -> Batch:
        """The batch of these rows (indices or a bool [B]), trimmed to its longest row."""
        if isinstance(rows, Tensor) and rows.dtype == torch.bool:
            rows = rows.nonzero().flatten()
        index = torch.as_tensor(rows, dtype=torch.long, device=self.tokens.device)
        width = int(self.lengths[index].max()) if len(index) else 0
        full = self.tokens.shape[1]

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            taken = value[index]
            return taken[:, :width] if taken.dim() >= 2 and taken.shape[1] == full else taken

        changes = {f.name: cut(getattr(self, f.name)) for f in fields(self) if f.name not in ("extras", "metrics")}
        return replace(self, **changes, extras={name: cut(value) for name, value in self.extras.items()})

    def to(self, device: torch.device | str) -> Batch:
        changes: dict[str, Any] = {
            f.name: value.to(device) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **changes, extras={name: value.to(device) for name, value in self.extras.items()})

    @property
    def trained(self) -> Tensor:
        """[B, T] bool: tokens that enter the loss: chosen by the policy, in a row that takes part."""
        return self.response_mask & self.keep[:, None]


def collate(rollouts: Sequence[Rollout], pad_id: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """Rollouts as one right-padded batch. Masks come from lengths; `pad_id` only fills.

    An intermediate reward on a token that is not trained moves to the last trained token before it; where there is
    none, to the first trained token, so that no reward is lost.
    """
    num_rows = len(rollouts)
    width = max((len(r.prompt_ids) + len(r.response_ids) for r in rollouts), default=0)
    tokens = torch.full((num_rows, width), pad_id, dtype=torch.long)
    mask = torch.zeros((num_rows, width), dtype=torch.bool)
    token_rewards = torch.zeros((num_rows, width), dtype=dtype)
    has_sampler = num_rows > 0 and all(r.logp_sampler is not None for r in rollouts)
    logp_sampler = torch.zeros((num_rows, width), dtype=dtype) if has_sampler else None
    for row, r in enumerate(rollouts):
        start, end = len(r.prompt_ids), len(r.prompt_ids) + len(r.response_ids)
        tokens[row, :end] = torch.tensor([*r.prompt_ids, *r.response_ids], dtype=torch.long)
        mask[row, start:end] = torch.tensor(_row_mask(r), dtype=torch.bool)
        token_rewards[row] = _row_rewards(r, mask[row], dtype)
        if logp_sampler is not None:
            logp_sampler[row, start:end] = torch.tensor(r.logp_sampler, dtype=dtype)
    greedy = [r.greedy_reward for r in rollouts]
    nan = float("nan")
    return Batch(
        tokens=tokens,
        response_mask=mask,
        lengths=torch.tensor([len(r.prompt_ids) + len(r.response_ids) for r in rollouts], dtype=torch.long),
        prompt_lengths=torch.tensor([len(r.prompt_ids) for r in rollouts], dtype=torch.long),
        group=torch.tensor([r.group for r in rollouts], dtype=torch.long),
        episode=torch.tensor([r.episode for r in rollouts], dtype=torch.long),
        unit=torch.tensor([i if r.unit is None else r.unit for i, r in enumerate(rollouts)], dtype=torch.long),
        rewards=torch.tensor([nan if r.reward is None else r.reward for r in rollouts], dtype=dtype),
        token_rewards=token_rewards,
        keep=torch.tensor([r.reward is not None or r.demonstration for r in rollouts], dtype=torch.bool),
        truncated=torch.tensor([r.truncated for r in rollouts], dtype=torch.bool),
        version=torch.tensor([r.version for r in rollouts], dtype=torch.long),
        logp_sampler=logp_sampler if logp_sampler is None else torch.where(mask, logp_sampler, 0.0),
        greedy_rewards=None
        if all(g is None for g in greedy)
        else torch.tensor([nan if g is None else g for g in greedy], dtype=dtype),
    )


def _row_mask(r: Rollout) -> list[bool]:
    if r.response_mask is None:
        return [True] * len(r.response_ids)
    assert len(r.response_mask) == len(r.response_ids), (len(r.response_mask), len(r.response_ids))
    return list(r.response_mask)


def _row_rewards(r: Rollout, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """[T] rewards by token of one row; all zero where no token is trained or there is no score."""
    out = torch.zeros(mask.shape[0], dtype=dtype)
    trained = mask.nonzero().flatten().tolist()
    if not trained or r.reward is None:
        return out
    for position, value in r.steps:
        at = len(r.prompt_ids) + position
        earlier = [t for t in trained if t <= at]
        out[earlier[-1] if earlier else trained[0]] += value
    out[trained[-1]] += r.reward
    return out


def episode_totals(batch: Batch) -> Tensor:
    """[B] the sum of the rewards of the row's whole episode (an episode may have several rows)."""
    row = torch.where(batch.response_mask, batch.token_rewards, 0.0).sum(1)
    # An empty response has no token for its score to stand on, and yet its score belongs to its group.
    row = torch.where(batch.response_mask.any(1), row, batch.rewards.nan_to_num(nan=0.0).to(row.dtype))
    _, index = torch.unique(batch.episode, return_inverse=True)
    totals = torch.zeros(int(index.max()) + 1 if len(index) else 0, dtype=row.dtype, device=row.device)
    return totals.index_add(0, index, row)[index]


def along_episodes(batch: Batch, of: Callable[..., Tensor], *per_token: Tensor) -> Tensor:
    """`of(*per_token, mask)` with the trained tokens of an episode's rows one after the other; [B, T] as the batch.

    The rows of an episode stand in the batch in time order. Where every episode is one row this is a plain call.
    """
    mask = batch.response_mask
    if len(batch.episode.unique()) == len(batch):
        return of(*per_token, mask)
    episode, column = _places(batch)
    shape = (int(batch.episode.unique().numel()), int(column.max()) + 1 if len(column) else 0)

    def joined(values: Tensor) -> Tensor:
        out = torch.zeros(shape, dtype=values.dtype, device=values.device)
        out[episode, column] = values
        return out

    result = of(*(joined(x[mask]) for x in per_token), joined(torch.ones_like(column, dtype=torch.bool)))
    out = torch.zeros(mask.shape, dtype=result.dtype, device=result.device)
    out[mask] = result[episode, column]
    return out


def _places(batch: Batch) -> tuple[Tensor, Tensor]:
    """Of every trained token, in row order: which episode it belongs to, and its place in it."""
    _, episode = torch.unique(batch.episode, return_inverse=True)
    num_before: dict[int, int] = {}  # trained tokens of an episode in the rows so far
    first = []
    for e, length in zip(episode.tolist(), batch.response_mask.sum(1).tolist(), strict=True):
        first.append(num_before.get(e, 0))
        num_before[e] = first[-1] + length
    row, _ = batch.response_mask.nonzero(as_tuple=True)
    in_row = batch.response_mask.cumsum(1)[batch.response_mask] - 1
    return episode[row], torch.tensor(first, device=row.device)[row] + in_row
