"""Policies so small that every response is enumerated: a table with one row of logits for each prefix.

They go through the real batch, engine and update. A row is one prompt token, then the response; ids from the vocabulary
size on (the prompt, a tool's output) are no part of a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hotcold.batch import Rollout
from hotcold.errors import InputError
from hotcold.models.critic import Critic

Response = tuple[int, ...]
Table = Sequence[Sequence[float]]
MOST_TOKENS, MOST_VOCABULARY = 4, 5


@dataclass(frozen=True)
class Tiny:
    """A world: the policy, its reference, another policy that may sample, and what each response earns."""

    name: str
    prefixes: tuple[Response, ...]  # one row of each table
    responses: tuple[Response, ...]
    logits: Table  # the policy that is trained
    reference: Table
    sampler: Table  # another policy of the same shape: pi_old or a sampling engine that differs
    reward: Mapping[Response, float]
    steps: Mapping[Response, tuple[tuple[int, float], ...]] = field(default_factory=dict)  # rewards on the way
    cut: frozenset[Response] = frozenset()  # the length limit came before EOS
    gap: int = 0  # tokens of a tool's output after the first chosen token

    @property
    def vocabulary(self) -> int:
        return len(self.logits[0])

    @property
    def max_tokens(self) -> int:
        return max(map(len, self.responses))

    @property
    def has_fixed_length(self) -> bool:
        return len({len(y) for y in self.responses}) == 1

    def total(self, response: Response) -> float:
        return self.reward[response] + sum(value for _, value in self.steps.get(response, ()))

    def greedy(self) -> Response:
        """The response of the likeliest token at each step, the first of equal ones."""
        prefix: Response = ()
        while prefix not in self.responses:
            row = list(self.logits[self.prefixes.index(prefix)])
            prefix = (*prefix, row.index(max(row)))
        return prefix

    def rollout(
        self, response: Response, group: int, episode: int, logp_sampler: Sequence[float] | None = None
    ) -> Rollout:
        """The row that a sampler would have recorded; with a gap, tool tokens that are not trained stand in it."""
        ids, mask, place = _with_gap(response, self.gap, self.vocabulary + 1)
        sampled = None if logp_sampler is None else _spread(logp_sampler, mask)
        return Rollout(
            prompt_ids=(self.vocabulary,),
            response_ids=ids,
            group=group,
            episode=episode,
            response_mask=None if self.gap == 0 else mask,
            reward=self.reward[response],
            steps=tuple((place[position], value) for position, value in self.steps.get(response, ())),
            logp_sampler=sampled,
            truncated=response in self.cut,
            greedy_reward=self.total(self.greedy()),
        )


def _with_gap(response: Response, gap: int, tool: int) -> tuple[Response, tuple[bool, ...], list[int]]:
    """Ids, mask, and where each chosen token stands."""
    after_first = (tool,) * (gap if len(response) > 1 else 0)
    ids = (*response[:1], *after_first, *response[1:])
    mask = (True,) * len(response[:1]) + (False,) * len(after_first) + (True,) * len(response[1:])
    return ids, mask, [i for i, chosen in enumerate(mask) if chosen]


def _spread(values: Sequence[float], mask: Sequence[bool]) -> tuple[float, ...]:
    rest = iter(values)
    return tuple(next(rest) if chosen else 0.0 for chosen in mask)


class TablePolicy(nn.Module):
    """The policy as a module: the logits at a position are the row of the response's tokens up to there."""

    def __init__(self, logits: Table, prefixes: Sequence[Response], dtype: torch.dtype = torch.float64):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(logits, dtype=dtype))
        self._row_of = {prefix: row for row, prefix in enumerate(prefixes)}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.table[rows_of(input_ids, self._row_of, self.table.shape[1])])


def rows_of(input_ids: Tensor, row_of: Mapping[Response, int], vocabulary: int) -> Tensor:
    """[b, T] the table's row at each position.

    After a whole response, and in padding, there is no prefix: any row will do, nothing may read it.
    """
    rows = []
    for ids in input_ids.tolist():
        prefix: Response = ()
        row = []
        for token in ids:
            prefix = (*prefix, token) if token < vocabulary else prefix
            row.append(row_of.get(prefix, 0))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.long).reshape(input_ids.shape)


class PrefixTrunk(nn.Module):
    """A critic's trunk whose hidden state is the one-hot vector of the prefix: the head's weights are the values."""

    def __init__(self, prefixes: Sequence[Response], vocabulary: int, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.one = nn.Parameter(torch.eye(len(prefixes), dtype=dtype), requires_grad=False)
        self._row_of, self._vocabulary = {prefix: row for row, prefix in enumerate(prefixes)}, vocabulary

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(last_hidden_state=self.one[rows_of(input_ids, self._row_of, self._vocabulary)])


def table_critic(tiny: Tiny, values: Sequence[float], dtype: torch.dtype = torch.float64) -> Critic:
    """The product's critic with a value for each prefix."""
    critic = Critic(PrefixTrunk(tiny.prefixes, tiny.vocabulary, dtype), len(tiny.prefixes))
    with torch.no_grad():
        critic.head.weight.copy_(torch.tensor([list(values)], dtype=dtype))
    return critic


def tiny_policy(
    name: str,
    vocabulary: int,
    max_tokens: int,
    logits: Mapping[Response, Sequence[float]],
    reference: Mapping[Response, Sequence[float]],
    sampler: Mapping[Response, Sequence[float]],
    reward: Mapping[Response, float],
    eos: int | None = None,
    **more: Any,
) -> Tiny:
    """All responses of a policy: of exactly `max_tokens`; with `eos` of at most that many, cut where it is missing."""
    if not (1 <= vocabulary <= MOST_VOCABULARY and 1 <= max_tokens <= MOST_TOKENS):
        raise InputError(
            f"{name}: {vocabulary} tokens and responses of up to {max_tokens} are too many to enumerate; "
            f"at most {MOST_VOCABULARY} and {MOST_TOKENS}."
        )
    prefixes: list[Response] = []
    responses: list[Response] = []
    open_prefixes: list[Response] = [()]
    while open_prefixes:
        prefix = open_prefixes.pop(0)
        prefixes.append(prefix)
        for token in range(vocabulary):
            longer = (*prefix, token)
            if token == eos or len(longer) == max_tokens:
                responses.append(longer)
            else:
                open_prefixes.append(longer)
    cut = frozenset(y for y in responses if eos is not None and y[-1] != eos)
    policy, frozen, other = ([list(table[prefix]) for prefix in prefixes] for table in (logits, reference, sampler))
    return Tiny(name, tuple(prefixes), tuple(responses), policy, frozen, other, reward, cut=cut, **more)


FIXED = tiny_policy(
    "two tokens, always",
    vocabulary=2,
    max_tokens=2,
    logits={(): (0.3, -0.2), (0,): (0.5, 0.1), (1,): (-0.4, 0.6)},
    reference={(): (0.0, 0.0), (0,): (0.2, -0.1), (1,): (0.1, 0.3)},
    sampler={(): (0.1, 0.2), (0,): (0.4, 0.0), (1,): (0.2, 0.3)},
    reward={(0, 0): 1.0, (0, 1): 0.0, (1, 0): 0.5, (1, 1): 2.0},
)

VARIABLE = tiny_policy(
    "up to three tokens, 0 ends",
    vocabulary=2,
    max_tokens=3,
    eos=0,
    logits={(): (0.0, 0.4), (1,): (0.0, -0.3), (1, 1): (0.0, 0.8)},
    reference={(): (0.0, 0.1), (1,): (0.2, 0.0), (1, 1): (0.0, 0.3)},
    sampler={(): (0.0, 0.2), (1,): (0.0, 0.1), (1, 1): (0.1, 0.5)},
    reward={(0,): 1.0, (1, 0): 0.2, (1, 1, 0): 0.0, (1, 1, 1): -1.0},
)


def with_steps(tiny: Tiny) -> Tiny:
    """The same with rewards on the way: 1.5 for a first token 1, -0.7 for a second token 0."""
    steps = {y: tuple([(0, 1.5)] * (y[0] == 1) + [(1, -0.7)] * (len(y) > 1 and y[1] == 0)) for y in tiny.responses}
    return Tiny(**{**vars(tiny), "name": f"{tiny.name}; rewards on the way", "steps": steps})


def with_gap(tiny: Tiny, gap: int = 2) -> Tiny:
    """The same with a tool's output after the first token."""
    return Tiny(**{**vars(tiny), "name": f"{tiny.name}; a tool answers after the first", "gap": gap})


def wide(max_tokens: int = 3, vocabulary: int = 4, seed: int = 0) -> Tiny:
    """A larger world with tables and rewards drawn from a seed; token 0 ends."""
    random = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> float:
        return scale * float(torch.randn((), generator=random, dtype=torch.float64))

    prefixes = [p for n in range(max_tokens) for p in _words(range(1, vocabulary), n)]
    policy, reference, sampler = ({p: [draw(0.7) for _ in range(vocabulary)] for p in prefixes} for _ in range(3))
    ended = [(*p, 0) for p in prefixes]
    cut = [(*p, token) for p in prefixes if len(p) == max_tokens - 1 for token in range(1, vocabulary)]
    reward = {y: round(draw(1.0), 3) for y in [*ended, *cut]}
    name = f"{vocabulary} tokens, up to {max_tokens}, 0 ends"
    return tiny_policy(name, vocabulary, max_tokens, policy, reference, sampler, reward, eos=0)


def _words(letters: Sequence[int], length: int) -> list[Response]:
    words: list[Response] = [()]
    for _ in range(length):
        words = [(*word, letter) for word in words for letter in letters]
    return words


def log_probability(table: Tensor, tiny: Tiny, response: Response) -> Tensor:
    """[T] log pi of each token, written out from the table: what the product is compared with."""
    rows = [tiny.prefixes.index(response[:t]) for t in range(len(response))]
    return torch.stack([table[row].log_softmax(0)[token] for row, token in zip(rows, response, strict=True)])


def probabilities(tiny: Tiny, logits: Table) -> dict[Response, float]:
    table = torch.tensor(logits, dtype=torch.float64)
    return {y: math.exp(float(log_probability(table, tiny, y).sum())) for y in tiny.responses}
