"""Rows of a data set in place of sampled ones: demonstrations as ids, taken in an order; their loss when held out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm
from hotcold.batch import Batch, Rollout, collate
from hotcold.chat import TrainOn, encode_demonstration, fit_demonstrations, has_template
from hotcold.prompts import Demonstration, PromptOrder
from hotcold.training.batching import Cut, micro_batches
from hotcold.training.collect import Collected, Notify, as_text


@dataclass(frozen=True)
class EncodedDemonstrations:
    demonstrations: Sequence[Demonstration]  # those that fit
    rows: Sequence[Rollout]  # one for each, in the same order
    notes: tuple[str, ...] = ()  # what the user should know of them


def encode_demonstrations(
    tokenizer: Any,
    demonstrations: Sequence[Demonstration],
    eos_ids: Sequence[int],
    context_length: int | None,
    chat: bool | None = None,
    train_on: TrainOn = "assistant",
    too_long: Literal["error", "drop"] = "error",
) -> EncodedDemonstrations:
    """Every demonstration as a row of ids. One that is longer than the context is refused or left out, never cut."""
    rows = [_row(tokenizer, d, eos_ids, chat, train_on) for d in demonstrations]
    notes = []
    if chat is None and any(isinstance(d.response, str) for d in demonstrations) and has_template(tokenizer):
        notes.append("rows are plain text and the model has a chat template: chat=true wraps them in it")
    if context_length is not None:
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
        numbers = [d.prompt.index for d in demonstrations]
        fitting = fit_demonstrations(lengths, context_length, too_long, rows=numbers)
        if dropped := len(rows) - len(fitting):
            notes.append(f"{dropped} rows are longer than the context of {context_length} tokens and were dropped")
        demonstrations, rows = [demonstrations[i] for i in fitting], [rows[i] for i in fitting]
    partly = sum(_num_spans(row) < len(d.turns) for d, row in zip(demonstrations, rows, strict=True))
    if partly and train_on == "assistant":
        notes.append(
            f"{partly} rows: the chat template writes earlier assistant turns differently once others follow; "
            "only the turns that stay as they were said are trained"
        )
    return EncodedDemonstrations(demonstrations, rows, tuple(notes))


def _row(
    tokenizer: Any, demonstration: Demonstration, eos_ids: Sequence[int], chat: bool | None, train_on: TrainOn
) -> Rollout:
    prompt = demonstration.prompt
    prompt_ids, response_ids, mask = encode_demonstration(
        tokenizer, demonstration, eos_ids, chat, train_on, where=f"row {prompt.index}"
    )
    return Rollout(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_mask=mask,
        group=0,
        episode=0,
        demonstration=True,
        text=demonstration.last_text,
        prompt_text=as_text(prompt.content),
        prompt_index=prompt.index,
    )


def _num_spans(row: Rollout) -> int:
    """How many runs of trained tokens it has. Between two responses there is always a header."""
    mask = row.response_mask or ()
    return sum(now and not before for before, now in zip((False, *mask), mask, strict=False))


@dataclass(frozen=True)
class DatasetRows:
    """The next rows of the order at each step; the position is the draw, as with prompts."""

    rows: Sequence[Rollout]
    order: PromptOrder  # of as many as there are rows
    rows_per_step: int

    def collect(self, algorithm: Algorithm, position: int, version: int, notify: Notify) -> Collected:
        end = position + self.rows_per_step
        rows = [
            replace(self.rows[self.order.at(draw)], group=draw, episode=draw, draw=draw, version=version)
            for draw in range(position, end)
        ]
        return Collected(rows, end)


def held_out_loss(engine_logp: Callable[[Batch], Tensor], rows: Sequence[Rollout], tokens_per_microbatch: int) -> float:
    """Mean of -log pi over the trained tokens of all rows, in nats: a row counts by its tokens, as in mean_per_token.

    `engine_logp` gives [b, T] of the current policy. Of rows without a trained token it is NaN.
    """
    batch = collate(rows)
    sums, count = [], 0
    for part in micro_batches(batch, range(len(batch)), Cut(tokens_per_microbatch)):
        cut = batch.select(part)
        logp = engine_logp(cut)
        trained = cut.trained.to(logp.device)
        sums.append(torch.where(trained, -logp.double(), 0.0).sum().item())
        count += int(trained.sum())
    return math.fsum(sums) / count if count else math.nan
