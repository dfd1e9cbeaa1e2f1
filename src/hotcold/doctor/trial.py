"""A few groups sampled and scored, and one update timed: as much as the budget allows. No parameter changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from hotcold.algorithms.base import Objective
from hotcold.assemble import Assembled
from hotcold.batch import Batch, Rollout
from hotcold.doctor.budget import Budget
from hotcold.engines.base import Engine, Pass, StepResult
from hotcold.engines.local import LocalEngine, Trainee
from hotcold.optim import make_optimizer
from hotcold.sampling.base import Request, Response
from hotcold.training.collect import PromptedRollouts, kept, scorable, step_batch
from hotcold.training.update import UpdateSettings, update

GROUPS = (8, 4, 2, 1)  # prompts that are tried, most first
MOST_GROUPS = 16
FEW_TOKENS = 16  # a response cut shorter says little of its score
PILOT = 4  # tokens of the responses that tell how long decoding takes
SAMPLING = 0.45  # of what is left of the budget
UPDATE = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    rollouts: tuple[Rollout, ...] = ()
    cut: int = 0  # most tokens of a response
    seconds_sampling: float = 0.0
    seconds_scoring: float = 0.0
    per_token: float = 0.0  # seconds of a forward of one prompt token, one prompt at a time

    @property
    def num_tokens(self) -> int:
        return sum(len(row.response_ids) for row in self.rollouts)

    @property
    def num_cut(self) -> int:
        return sum(row.truncated for row in self.rollouts)

    def groups(self) -> list[list[Rollout]]:
        found: dict[int, list[Rollout]] = {}
        for row in self.rollouts:
            found.setdefault(row.group, []).append(row)
        return list(found.values())


# ---- sampling


def plan(seconds: float, prompt: float, step: float, max_tokens: int, most: int) -> tuple[int, int]:
    """(groups, tokens of a response) that fit into `seconds`; (0, 0) where nothing does.

    `prompt`: seconds that a prompt takes; `step`: seconds that one more token of each response of a group takes.
    """
    for groups in (min(number, most) for number in GROUPS):
        tokens = int((seconds - groups * prompt) / (groups * max(step, 1e-9)))
        if tokens >= min(max_tokens, FEW_TOKENS) or (groups == 1 and tokens >= 1):
            return groups, min(max_tokens, tokens)
    return 0, 0


def sample_and_score(ready: Assembled, source: PromptedRollouts, budget: Budget) -> Trial:
    """The prompts, and the random numbers, with which training would begin."""
    algorithm_plan = ready.algorithm.plan
    assert algorithm_plan is not None
    size, max_tokens = algorithm_plan.group_size, source.options.max_tokens
    prompt, _ = _timed(lambda: _sample(source, range(1), 1, 1))
    per_token = prompt / len(source.prompt_ids[source.order.at(0)])
    short = min(PILOT, max_tokens)
    if budget.left < 3 * size * prompt:
        return Trial(per_token=per_token)
    pilot, _ = _timed(lambda: _sample(source, range(1), size, short))
    seconds = SAMPLING * budget.left
    most = min(GROUPS[0], len(source.prompts))
    groups, cut = plan(seconds, prompt, max(pilot - prompt, pilot / 2) / short, max_tokens, most)
    trial = Trial(cut=cut, per_token=per_token)
    last, done = 0.0, 0
    while groups and (not done or trial.seconds_sampling + trial.seconds_scoring + last < seconds):
        if done >= min(MOST_GROUPS, len(source.prompts)):
            break
        start = time.perf_counter()
        trial = _add(source, trial, range(done, done + groups), size)
        last, done = time.perf_counter() - start, done + groups
    return trial


def _sample(source: PromptedRollouts, draws: range, size: int, cut: int) -> list[tuple[Request, Response]]:
    requests = [Request(source.prompt_ids[source.order.at(d)], d, sample) for d in draws for sample in range(size)]
    responses = source.sampler.sample(requests, replace(source.options, max_tokens=cut))
    return list(zip(requests, responses, strict=True))


def _add(source: PromptedRollouts, trial: Trial, draws: range, size: int) -> Trial:
    sampling, pairs = _timed(lambda: _sample(source, draws, size, trial.cut))
    prompts = [source.prompts[source.order.at(request.draw)] for request, _ in pairs]
    items = [scorable(prompt, *pair) for prompt, pair in zip(prompts, pairs, strict=True)]
    scoring, scores = _timed(lambda: source.scorer.score(items))
    rows = [
        Rollout(
            prompt_ids=request.prompt_ids,
            response_ids=response.ids,
            group=request.draw,
            episode=request.draw * size + request.sample,
            reward=score.total,
            steps=score.steps,
            truncated=response.finish_reason == "length",
            text=response.text,
            prompt_index=prompt.index,
            draw=request.draw,
        )
        for prompt, (request, response), score in zip(prompts, pairs, scores, strict=True)
    ]
    return replace(
        trial,
        rollouts=(*trial.rollouts, *rows),
        seconds_sampling=trial.seconds_sampling + sampling,
        seconds_scoring=trial.seconds_scoring + scoring,
    )


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


# ---- the update


@dataclass(frozen=True)
class UpdateTime:
    seconds: float
    seconds_stepping: float  # of them in optimiser steps, whose number does not depend on the rows
    num_rows: int
    num_tokens: int  # as `tokens_of` counts them

    def of(self, tokens: float) -> float:
        """Seconds of an update with so many tokens."""
        return self.seconds_stepping + (self.seconds - self.seconds_stepping) * tokens / self.num_tokens


def tokens_of(rows: Sequence[Rollout], shares: bool) -> int:
    """Where rows share a prompt it is computed once."""
    prompts = {row.group: len(row.prompt_ids) for row in rows} if shares else {}
    ours = sum(prompts.values()) if shares else sum(len(row.prompt_ids) for row in rows)
    return ours + sum(len(row.response_ids) for row in rows)


def num_passes(ready: Assembled) -> int:
    return sum(objective.epochs for objective in ready.algorithm.objectives) + len(ready.algorithm.reads)


def rows_that_fit(ready: Assembled, rows: Sequence[Rollout], seconds: float, per_token: float) -> list[Rollout]:
    """As many of the first rows as an update may have; none where even the fewest take too long."""
    shares, least = shares_prompts(ready), max([2, *(o.minibatches for o in ready.algorithm.objectives)])
    for num in sorted({len(rows), len(rows) // 2, len(rows) // 4, least}, reverse=True):
        if least <= num <= len(rows):
            if 3 * num_passes(ready) * per_token * tokens_of(rows[:num], shares) < seconds:
                return list(rows[:num])
    return []


def shares_prompts(ready: Assembled) -> bool:
    return ready.models.reading["policy"].shares_prompts and not ready.config.gradient_checkpointing


def time_update(ready: Assembled, rows: Sequence[Rollout]) -> UpdateTime | None:
    """One update at rate 0, with made-up scores, so that every row counts."""
    algorithm, config = ready.algorithm, ready.config
    assert config.tokens_per_microbatch is not None
    if algorithm.plan is not None:
        rows = [
            replace(row, reward=float(i % 2), steps=(), greedy_reward=0.5, truncated=False, logp_sampler=None)
            for i, row in enumerate(rows)
        ]
    batch = step_batch(rows, ready.truncation)
    batch = batch.select(kept(batch, algorithm))
    if len(batch) < max(objective.minibatches for objective in algorithm.objectives):
        return None
    engine = TimedEngine(_engine(ready))
    settings = UpdateSettings(config.tokens_per_microbatch, {}, config.seed, shares_prompts=shares_prompts(ready))
    number = 1 + max(objective.start for objective in algorithm.objectives)
    seconds, _ = _timed(
        lambda: update(batch, algorithm, algorithm.state(), engine, settings, number, rate=lambda objective: 0.0)
    )
    return UpdateTime(seconds, engine.seconds, len(batch), tokens_of(rows, settings.shares_prompts))


def _engine(ready: Assembled) -> LocalEngine:
    """As the run's, with an optimiser that has a state of its size."""
    config, models = ready.config, ready.models
    restarted = {objective.model for objective in ready.algorithm.objectives if objective.restart}
    modules = {"policy": models.policy.module, **({} if models.critic is None else {"critic": models.critic})}
    trainees = {}
    for name, module in modules.items():
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        trainees[name] = Trainee(module, make_optimizer(config.optimizer, named, 0.0), name in restarted)
    recompute = config.gradient_checkpointing
    return LocalEngine(trainees, config.temperature, models.reference, models.compute, recompute, models.reading)


@dataclass
class TimedEngine:
    """An engine that counts the seconds of its optimiser steps."""

    inner: Engine
    seconds: float = 0.0

    def read(self, batch: Batch, names: frozenset[str]) -> dict[str, Tensor]:
        return self.inner.read(batch, names)

    def backward(self, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
        return self.inner.backward(batch, weights, objective)

    def step(self, model: str, rate: float, max_norm: float | None) -> StepResult:
        seconds, result = _timed(lambda: self.inner.step(model, rate, max_norm))
        self.seconds += seconds
        return result

    def discard(self, model: str) -> None:
        self.inner.discard(model)

    def restart(self, model: str) -> None:
        self.inner.restart(model)
