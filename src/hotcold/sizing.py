"""How many tokens a micro-batch may have: from a model of peak memory that is measured once, before the first step.

peak(tokens) = what is held + the optimiser's state + gradients + fixed + tokens x per_token

The last two come from the run's own objectives, taken forward and backward on a few made-up rows whose tensors are
counted (`memory.LiveBytes`). A count is the same each time, so the same config gives the same size on the same machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hotcold.algorithms.base import Algorithm, Objective
from hotcold.assemble import UNMEASURED, Assembled
from hotcold.batch import Batch, Rollout, collate
from hotcold.config.schema import decided
from hotcold.engines.local import LocalEngine, Trainee
from hotcold.errors import InputError, OutOfMemory
from hotcold.memory import GB, LESS, LiveBytes, as_out_of_memory, free_bytes, held_bytes
from hotcold.models.chunks import rows_at_once
from hotcold.models.reading import Laying
from hotcold.training.collect import ReplayedRollouts
from hotcold.training.dataset import EncodedDemonstrations

SHARE = 0.8  # of what is free, that a run takes where nobody says how much
MARGIN = 0.85  # of the limit: operations take memory within themselves, and allocators keep some
LONGEST = 256  # tokens of a made-up row; longer rows are extrapolated from two lengths
LEAST = 64  # trained tokens in a measured micro-batch
MOST = 1024  # tokens in it, prompts included, above which it has two rows
MOST_CHUNK = 640  # trained tokens, up to which a whole chunk of the head is measured
MADE_UP = {"logp_old": -1.0, "logp_ref": -1.5, "kl_old": 0.25, "values_old": 0.125}


@dataclass(frozen=True)
class Shape:
    """A row: tokens of its prompt and response. `shares`: rows of one prompt have its forward once."""

    prompt: int
    response: int
    shares: bool

    @property
    def tokens(self) -> int:
        return self.prompt + self.response

    @property
    def counted(self) -> int:
        """Tokens that a further row adds to a micro-batch, as `tokens_per_microbatch` counts them."""
        return self.response if self.shares else self.tokens

    def scaled(self, longest: int) -> Shape:
        scale = min(1.0, longest / self.tokens)
        return replace(self, prompt=max(1, int(self.prompt * scale)), response=max(1, int(self.response * scale)))


@dataclass(frozen=True)
class Line:
    """Bytes of one objective's forward and backward, beside what is held: fixed + per_token x tokens."""

    fixed: float
    per_token: float

    def bytes(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens

    def most_tokens(self, bytes_left: float) -> int:
        return max(0, math.floor((bytes_left - self.fixed) / self.per_token))


@dataclass(frozen=True)
class Limit:
    """Bytes that a run may add to what it holds when it is measured."""

    bytes: float
    words: str


# ---- the choice


def sized(ready: Assembled, stored: int | None = None) -> Assembled:
    """With tokens_per_microbatch decided. `stored`: that of the run which is continued; it is never measured again."""
    config = ready.config
    given = config.reasons.get("tokens_per_microbatch") != UNMEASURED
    if stored is not None:
        return _continued(ready, stored, given)
    if given and config.max_memory is None:
        return ready
    limit = limit_of(config.max_memory, config.device)
    if limit is None:
        return ready  # nothing is known of this device's memory
    shape = longest_row(ready)
    lines = measured(ready, shape)
    line = Line(max(line.fixed for line in lines), max(line.per_token for line in lines))
    if given:
        _check_fits(ready, line, limit)
        return ready
    # more than the usual number is no faster: it is taken only by who says how much memory there is
    caps = [power_above(step_tokens(ready, shape))]
    if config.max_memory is None and config.tokens_per_microbatch is not None:
        caps.append(config.tokens_per_microbatch)
    tokens = choose(line, limit, shape, caps)
    why = f"measured: {line.fixed / GB:.2f} GB and {line.per_token / 1e6:.3g} MB a token, in {limit.words}"
    return _with_tokens(ready, tokens, why)


def _continued(ready: Assembled, stored: int, given: bool) -> Assembled:
    config = ready.config
    if config.max_memory is not None and config.reasons.get("max_memory", "").startswith("given"):
        note = (
            f"max_memory={config.max_memory:g} has no effect on a run that is continued: its micro-batches stay as "
            "they began. tokens_per_microbatch=N changes them."
        )
        ready = replace(ready, notes=(*ready.notes, note))
    return ready if given else _with_tokens(ready, stored, "as the run began")


def choose(line: Line, limit: Limit, shape: Shape, caps: Sequence[int]) -> int:
    """The largest power of two that fits and is not above a cap. A micro-batch has at least one row, which must fit."""
    fits = line.most_tokens(MARGIN * limit.bytes)
    if fits < shape.tokens:
        raise OutOfMemory(
            f"a row of {shape.tokens} tokens (prompt {shape.prompt}, response {shape.response}) needs "
            f"{line.bytes(shape.tokens) / MARGIN / GB:.2f} GB beside the models, and there is {limit.words}.\n{LESS}\n"
            "A larger max_memory, if there is more."
        )
    return min(power_below(fits), *caps)


def power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def power_above(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _check_fits(ready: Assembled, line: Line, limit: Limit) -> None:
    tokens = ready.config.tokens_per_microbatch
    assert tokens is not None
    if line.bytes(tokens) > limit.bytes:
        raise InputError(
            f"tokens_per_microbatch={tokens} needs {line.bytes(tokens) / GB:.2f} GB beside the models, and there is "
            f"{limit.words}.\nLeave it out to have it chosen, or raise max_memory."
        )


def _with_tokens(ready: Assembled, tokens: int, why: str) -> Assembled:
    return replace(ready, config=decided(ready.config, {"tokens_per_microbatch": (tokens, why)}))


def limit_of(max_memory: float | None, device: str) -> Limit | None:
    """`max_memory` in GB, of the whole process (on a GPU: of its tensors); None: a share of what is free."""
    if max_memory is None:
        if (free := free_bytes(device)) is None:
            return None
        return Limit(SHARE * free, f"{SHARE * free / GB:.1f} GB ({SHARE:.0%} of what is free)")
    held = held_bytes(device) or 0
    left = max(0.0, max_memory * GB - held)
    return Limit(left, f"{left / GB:.2f} GB (max_memory={max_memory:g} GB less {held / GB:.2f} GB held already)")


# ---- the run's rows


def longest_row(ready: Assembled) -> Shape:
    """The longest row that a step can have."""
    config = ready.config
    shares = ready.laying is not Laying.ROWS
    assert config.max_tokens is not None
    if isinstance(ready.source, ReplayedRollouts):
        rows = [row for step in range(1, config.steps + 1) for row in ready.source.recorded(step)]
    elif isinstance(ready.train, EncodedDemonstrations):
        rows = list(ready.train.rows)
    else:
        assert ready.train is not None
        return Shape(max(map(len, ready.train.ids)), config.max_tokens, shares)
    sizes = [(len(row.prompt_ids), len(row.response_ids)) for row in rows] or [(1, 2)]
    return Shape(*max(sizes, key=sum), shares)


def step_tokens(ready: Assembled, shape: Shape) -> int:
    """At most so many tokens are in a step."""
    config, plan = ready.config, ready.algorithm.plan
    if isinstance(ready.source, ReplayedRollouts):
        rows = max(len(ready.source.recorded(step)) for step in range(1, config.steps + 1))
    else:
        rows = config.prompts_per_step * (1 if plan is None else plan.group_size * (1 + plan.refill))
    return max(1, rows) * shape.tokens


# ---- the measured model


def measured(ready: Assembled, shape: Shape) -> list[Line]:
    """For each objective what its update takes beside what is held now. Parameters and random numbers stay."""
    engine, state = _engine(ready), 0
    for name, trainee in engine.models.items():
        moments = 2 if ready.config.optimizer == "adamw" else 0
        copies = any(o.restart for o in ready.algorithm.objectives if o.model == name)
        state += (moments + copies) * _size(trainee.parameters)
    lines = []
    for objective in ready.algorithm.objectives:
        line = _line(engine, ready, objective, shape)
        gradients = _size(engine.models[objective.model].parameters)
        lines.append(replace(line, fixed=line.fixed + state + gradients))
    return lines


def _size(parameters: Sequence[Any]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _engine(ready: Assembled) -> LocalEngine:
    """As the run's; its optimisers never step."""
    config, models = ready.config, ready.models
    modules = {"policy": models.policy.module, **({} if models.critic is None else {"critic": models.critic})}
    trainees = {
        name: Trainee(module, torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0))
        for name, module in modules.items()
    }
    recompute = config.gradient_checkpointing
    return LocalEngine(trainees, config.temperature, models.reference, models.compute, recompute, models.reading)


def _line(engine: LocalEngine, ready: Assembled, objective: Objective, shape: Shape) -> Line:
    """Upper bound for rows as long as `shape`: what a further row adds, over the tokens that it counts."""
    trainee = engine.models[objective.model]
    with as_out_of_memory("the gradient of all parameters"):
        for parameter in trainee.parameters:  # as in every micro-batch but the first
            parameter.grad = torch.zeros_like(parameter)
    try:
        near = shape.scaled(LONGEST)
        fixed, a_row = _pair(engine, ready, objective, near)
        if near != shape:
            far = shape.scaled(LONGEST // 2)
            _, shorter = _pair(engine, ready, objective, far)
            a_row = extrapolated((far.tokens, shorter), (near.tokens, a_row), shape.tokens)
    finally:
        engine.discard(objective.model)
    return Line(fixed, a_row / shape.counted)


def extrapolated(short: tuple[int, float], long: tuple[int, float], length: int) -> float:
    """Bytes of a row of `length` tokens from two (tokens, bytes): a x tokens + b x tokens^2, the square for what holds
    every pair of positions (attention that is written out, masks)."""
    (n1, m1), (n2, m2) = short, long
    square = max(0.0, (m2 / n2 - m1 / n1) / (n2 - n1))
    return (m2 / n2 - square * n2) * length + square * length**2


def _pair(engine: LocalEngine, ready: Assembled, objective: Objective, shape: Shape) -> tuple[float, float]:
    """(fixed, bytes of a further row) from two micro-batches that differ by one row."""
    chunk = rows_at_once(ready.model.module.get_input_embeddings().num_embeddings)
    wanted = chunk + 2 if objective.model == "policy" and chunk <= MOST_CHUNK else LEAST
    few = max(2, min(math.ceil(wanted / shape.response), MOST // shape.tokens))
    batch = made_up(ready.algorithm, ready.model.module, shape, few + 1)
    (peak, of_rows), (more, more_of_rows) = (_count(engine, objective, batch, n) for n in (few, few + 1))
    a_row = max(more - peak, more_of_rows - of_rows, 0)
    return max(0.0, peak - few * a_row), float(a_row)


def _count(engine: LocalEngine, objective: Objective, batch: Batch, rows: int) -> tuple[int, int]:
    part = batch.select(list(range(rows)))
    weights = objective.weighting(batch.trained)[:rows, : part.tokens.shape[1]]
    parameters = engine.models[objective.model].parameters
    with LiveBytes(apart={p.numel() * p.element_size() for p in parameters if p.numel() > 2**20}) as count:
        engine.backward(part, weights, objective)
    return count.peak, count.peak_of_rows


def made_up(algorithm: Algorithm, module: Any, shape: Shape, rows: int) -> Batch:
    """At least so many rows of one prompt, with credit: all as long as `shape` but the first, which is padded."""
    size = algorithm.plan.group_size if algorithm.plan else 2
    vocabulary = module.get_input_embeddings().num_embeddings
    random = torch.Generator().manual_seed(0)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocabulary, (number,), generator=random).tolist())

    prompt = ids(shape.prompt)
    batch = collate(
        [
            Rollout(
                prompt,
                ids(max(1, shape.response - (i == 0))),
                group=i // size,
                episode=i,
                reward=float(i % 2) + 0.125 * (i // size) if algorithm.plan else None,
                greedy_reward=0.5 if algorithm.plan else None,
                demonstration=algorithm.plan is None,
            )
            for i in range(size * max(2, math.ceil(rows / size)))
        ]
    )
    names = set(algorithm.reads)
    if any("kl" in objective.needs for objective in algorithm.objectives):
        names.add("kl_old")
    reads = {name: torch.where(batch.trained, level, 0.0) for name, level in MADE_UP.items() if name in names}
    with torch.no_grad():
        batch, _ = algorithm.credit(batch.replace(**reads), algorithm.state())
    return batch
