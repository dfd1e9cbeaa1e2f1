"""Policies so small that every response is enumerated, and the expected update of the real code on them.

The logits at a position are the table's row of the response tokens up to there, as tests/vectors describes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hotcold.algorithms.base import Algorithm, Objective, Plan
from hotcold.batch import Batch, Rollout, collate
from hotcold.models.critic import Critic
from hotcold.training.collect import kept
from hotcold.training.record import UpdateRecord
from hotcold.training.update import update
from tests.toy_engines import RecordingEngine, settings

EXACT = json.loads((Path(__file__).parent / "vectors" / "exact.json").read_text(encoding="utf-8"))
PROMPT, TOOL = 8, 9  # ids outside the toys' vocabularies: they are no part of a prefix
Response = tuple[int, ...]


class TablePolicy(nn.Module):
    """One row of logits for each prefix of a response."""

    def __init__(self, logits: Sequence[Sequence[float]], prefixes: Sequence[Response]):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(logits, dtype=torch.float64))
        self.row_of = {prefix: row for row, prefix in enumerate(prefixes)}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.table[_rows(input_ids, self.table.shape[1], self.row_of)])


def _rows(input_ids: Tensor, vocabulary: int, row_of: dict[Response, int]) -> Tensor:
    """[B, T] the number of the prefix that ends at each position."""
    texts = input_ids.tolist()
    prefixes = [[tuple(t for t in ids[: i + 1] if t < vocabulary) for i in range(len(ids))] for ids in texts]
    # After a whole response, and in padding, there is no prefix: any row will do, nothing reads it.
    return torch.tensor([[row_of.get(prefix, 0) for prefix in row] for row in prefixes])


class PrefixTrunk(nn.Module):
    """The trunk of a critic whose hidden state is the prefix itself, as a unit vector: any value can be said of it."""

    def __init__(self, vocabulary: int, prefixes: Sequence[Response]):
        super().__init__()
        self.units = nn.Parameter(torch.eye(len(prefixes), dtype=torch.float64), requires_grad=False)
        self.vocabulary = vocabulary
        self.row_of = {prefix: row for row, prefix in enumerate(prefixes)}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(last_hidden_state=self.units[_rows(input_ids, self.vocabulary, self.row_of)])


@dataclass(frozen=True)
class Toy:
    prefixes: list[Response]
    logits: list[list[float]]
    responses: list[Response]
    reward: dict[Response, float]
    cut: frozenset[Response] = frozenset()  # truncated: the length limit came before EOS

    def policy(self, logits: Sequence[Sequence[float]] | None = None) -> TablePolicy:
        return TablePolicy(self.logits if logits is None else logits, self.prefixes)

    def critic(self, values: Sequence[float] | None = None) -> Critic:
        """The product's critic on a table; it starts at zero unless `values` (one for each prefix) are given."""
        critic = Critic(PrefixTrunk(len(self.logits[0]), self.prefixes), len(self.prefixes))
        if values is not None:
            critic.head.weight.data[0] = torch.tensor(values, dtype=torch.float64)
        return critic

    def states(self, response: Response) -> list[int]:
        """The numbers of the prefixes in which the tokens of a response were chosen."""
        return [self.prefixes.index(response[:t]) for t in range(len(response))]

    def logps(self, table: Tensor, response: Response) -> Tensor:
        """[T] log pi of each token under a table of logits, written out anew."""
        rows = zip(self.states(response), response, strict=True)
        return torch.stack([table[row].log_softmax(0)[token] for row, token in rows])

    def logp(self, table: Tensor, response: Response) -> Tensor:
        """log pi(response): the sum of its tokens' log-probabilities."""
        return self.logps(table, response).sum()

    def probabilities(self, logits: Sequence[Sequence[float]] | None = None) -> dict[Response, float]:
        table = torch.tensor(self.logits if logits is None else logits, dtype=torch.float64)
        return {y: math.exp(float(self.logp(table, y))) for y in self.responses}

    def rollout(self, response: Response, group: int, episode: int) -> Rollout:
        return Rollout(
            prompt_ids=(PROMPT,),
            response_ids=response,
            group=group,
            episode=episode,
            reward=self.reward[response],
            truncated=response in self.cut,
        )


def _responses(texts: Sequence[str]) -> list[Response]:
    return [tuple(int(c) for c in text) for text in texts]


def _toy(key: str, logits: str, prefixes: list[Response]) -> Toy:
    entry = EXACT[key]
    responses = _responses(entry["responses"])
    truncated = entry.get("truncated", [False] * len(responses))
    return Toy(
        prefixes,
        entry[logits],
        responses,
        dict(zip(responses, entry["reward"], strict=True)),
        frozenset(y for y, cut in zip(responses, truncated, strict=True) if cut),
    )


T1 = _toy("T1", "theta", [(), (0,), (1,)])  # two tokens, always
T2 = _toy("T2", "logits", [(), (1,), (1, 1)])  # 0 is EOS, at most three tokens


def run_update(
    rollouts: Sequence[Rollout],
    algorithm: Algorithm,
    engine: Any,
    pad_id: int = 0,
    dtype: torch.dtype = torch.float64,
    change: Callable[[Batch], Batch] = lambda batch: batch,
    rate: float = 0.0,
    step: int = 1,
    **options: Any,
) -> tuple[Batch, UpdateRecord]:
    """Collate, keep and update as the loop does. `change` sees the batch before the rejected rows leave it."""
    batch = change(collate(rollouts, pad_id, dtype))
    batch = batch.select(kept(batch, algorithm))
    batch, _, record = update(batch, algorithm, algorithm.state(), engine, settings(**options), step, lambda _: rate)
    return batch, record


@dataclass
class Expected:
    """Means over every ordered choice of responses, each weighted by its exact probability."""

    gradient: Tensor  # of the loss, [prefixes, V]; summed over the optimiser steps
    of_critic: Tensor  # [prefixes], of the value of each state
    mean_square: float = 0.0  # of the gradient
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


def expected_update(
    toy: Toy,
    algorithm: Algorithm,
    group: Sequence[int],
    sampled_by: Sequence[Sequence[float]] | None = None,
    rows_of: Callable[[Response, int, int], list[Rollout]] | None = None,
    old: Sequence[Sequence[float]] | None = None,
    reference: Sequence[Sequence[float]] | None = None,
    critic: Critic | None = None,
    reported: bool = False,
    **options: Any,
) -> Expected:
    """The mean gradient that the real code obtains from len(group) responses; response i belongs to group[i].

    `sampled_by`: logits of another policy that samples. It is log pi_old too, unless its log-probabilities are
    `reported` as those of the sampler; log pi_old is then `old`, or the policy itself. `rows_of`: the rows of a
    response.
    """
    make = rows_of or (lambda y, g, e: [_reported(toy, toy.rollout(y, g, e), sampled_by if reported else None)])
    probability = toy.probabilities(sampled_by)
    out = Expected(torch.zeros_like(toy.policy().table.data), torch.zeros(len(toy.prefixes), dtype=torch.float64))
    tables = (toy.logits, old if reported else sampled_by, reference)
    policy, before, frozen = (None if table is None else toy.policy(table) for table in tables)
    assert policy is not None
    engine = RecordingEngine(policy, before, frozen, critic)
    for chosen in itertools.product(toy.responses, repeat=len(group)):
        weight = math.prod(probability[y] for y in chosen)
        rows = [row for i, (y, g) in enumerate(zip(chosen, group, strict=True)) for row in make(y, g, i)]
        engine.gradients.clear()
        engine.of_critic.clear()
        _, record = run_update(rows, algorithm, engine, **options)
        for (gradient,) in engine.gradients:
            out.gradient += weight * gradient
            out.mean_square += weight * float(gradient.square().sum())
        for head, bias in engine.of_critic:
            assert_close(bias[0], head.sum())  # every state has the same bias
            out.of_critic += weight * head[0]
        for name, value in record.summary().items():
            out.metrics[name] = out.metrics.get(name, 0.0) + weight * (value or 0.0)
    out.loss = out.metrics["loss"]
    return out


def _reported(toy: Toy, row: Rollout, logits: Sequence[Sequence[float]] | None) -> Rollout:
    if logits is None:
        return row
    table = torch.tensor(logits, dtype=torch.float64)
    return replace(row, logp_sampler=tuple(toy.logps(table, row.response_ids).tolist()))


def enumerated_gradient(
    toy: Toy,
    size: int,
    objective: Callable[[Tensor, tuple[Response, ...]], Any],
    sampled_by: Sequence[Sequence[float]] | None = None,
) -> Tensor:
    """Autograd of the mean of objective(table, chosen) over every ordered choice; the probabilities are constants."""
    table = torch.tensor(toy.logits, dtype=torch.float64, requires_grad=True)
    probability = toy.probabilities(sampled_by)
    total = 0.0 * table.sum()
    for chosen in itertools.product(toy.responses, repeat=size):
        total = total + math.prod(probability[y] for y in chosen) * objective(table, chosen)
    (gradient,) = torch.autograd.grad(total, table)
    return gradient


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Within the tolerance, relative to max(1, |expected|)."""
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    gap = (actual - expected).abs() / expected.abs().clamp(min=1)
    assert bool((gap <= tolerance).all()), f"largest gap {float(gap.max()):.3e}\n{actual}\n{expected}"


@dataclass(frozen=True)
class Custom:
    """A user's algorithm: given advantages by row, any objectives."""

    objectives: tuple[Objective, ...]
    advantages: tuple[float, ...] | None = None
    reads: frozenset[str] = frozenset()
    extras: dict[str, Tensor] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return Plan()

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch.keep)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        if self.advantages is None:
            return batch.replace(extras=self.extras), state
        values = torch.tensor(self.advantages, dtype=batch.token_rewards.dtype)[:, None]
        return batch.replace(advantages=torch.where(batch.response_mask, values, 0.0), extras=self.extras), state


def gradient(
    model: Any, rollouts: Sequence[Rollout], algorithm: Algorithm, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Tensor]:
    engine = RecordingEngine(model)
    run_update(rollouts, algorithm, engine, dtype=dtype, **options)
    (gradients,) = engine.gradients
    return gradients


def t2_rollouts(count: int = 12) -> list[Rollout]:
    return [T2.rollout(T2.responses[(i * i + i // 3) % 4], i % 3, i) for i in range(count)]


# ------------------------------------------------------------------ tiny models of real architectures, float32


def tiny_llama(seed: int = 0) -> Any:
    """Two layers, rotary positions, 24 tokens; wide initial weights, so that no distribution is flat."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def tiny_gpt2(seed: int = 0) -> Any:
    """Two layers, learned positions, and the dropout of 0.1 that is in every GPT-2 config."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=24,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    assert config.resid_pdrop == 0.1
    return GPT2LMHeadModel(config)


TINY = {"llama": tiny_llama, "gpt2": tiny_gpt2}


def ragged_rollouts(num_groups: int = 3, group_size: int = 4, seed: int = 0) -> list[Rollout]:
    """Prompts of 1 to 9 tokens, responses of 1 to 8, some with a gap; graded scores; groups interleaved."""
    random = torch.Generator().manual_seed(seed)

    def ids(n: int) -> Response:
        return tuple(torch.randint(1, 24, (n,), generator=random).tolist())

    prompts = [ids(1 + 4 * g) for g in range(num_groups)]
    rows = []
    for episode in range(num_groups * group_size):
        length = 1 + (3 * episode) % 8
        mask = tuple(i != 1 or length < 4 or episode % 3 > 0 for i in range(length))
        score = float(torch.randint(0, 4, (1,), generator=random)) / 3
        group = episode % num_groups
        rows.append(Rollout(prompts[group], ids(length), group, episode, response_mask=mask, reward=score))
    return rows


def relative_gap(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Relative L2 distance of two gradients over all parameters."""
    difference = math.sqrt(sum(float(((x - y).double() ** 2).sum()) for x, y in zip(a, b, strict=True)))
    return difference / math.sqrt(sum(float((y.double() ** 2).sum()) for y in b))
