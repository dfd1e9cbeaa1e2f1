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
from hotcold.errors import RewardError
from hotcold.models.reading import Laying
from hotcold.optim import make_optimizer
from hotcold.rewards.base import Scorable, Score
from hotcold.sampling.base import Request, Response
from hotcold.training.collect import PromptedRollouts, kept, scorable, step_batch
from hotcold.training.update import UpdateSettings, update

GROUPS = (8, 4, 2, 1)  # prompts that are tried, most first
MOST_GROUPS = 16
FEW_TOKENS = 16  # a response cut shorter says little of its score
PILOT = 4  # tokens of the responses that tell how long decoding takes
SAMPLING = 0.4  # of what is left of the budget
SCORING = 0.4
UPDATE = 0.7

T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    rollouts: tuple[Rollout, ...] = ()
    cut: int = 0  # most tokens of a response
    seconds_sampling: float = 0.0
    seconds_scoring: float = 0.0
    num_scored: int = 0
    failure: str | None = None  # of the score
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


def sample_and_score(ready: Assembled, source: PromptedRollouts, budget: Budget, per_score: float) -> Trial:
    """The prompts, and the random numbers, with which training would begin. `per_score`: seconds that a score takes."""
    algorithm_plan = ready.algorithm.plan
    assert algorithm_plan is not None
    size, max_tokens = algorithm_plan.group_size, source.options.max_tokens
    prompt = _seconds_of_a_prompt(source)
    trial = Trial(per_token=prompt / len(source.prompt_ids[source.order.at(0)]))
    short = min(PILOT, max_tokens)
    if budget.left < 3 * size * prompt:
        return trial
    pilot, _ = _timed(lambda: _sample(source, range(1), size, short))
    seconds = SAMPLING * budget.left
    groups, cut = plan(
        seconds, prompt, max(pilot - prompt, pilot / 2) / short, max_tokens, min(GROUPS[0], len(source.prompts))
    )
    trial, end, last, done = replace(trial, cut=cut), budget.spent + seconds, 0.0, 0
    while groups and (not done or budget.spent + last < end):
        if done >= min(MOST_GROUPS, len(source.prompts)):
            break
        mark = budget.spent
        trial = _add(source, trial, range(done, done + groups), size)
        last, done = budget.spent - mark, done + groups
    try:
        return _scored(source, trial, size, per_score, SCORING * budget.left)
    except RewardError as error:
        return replace(trial, failure=" ".join(str(error).split()))


def _seconds_of_a_prompt(source: PromptedRollouts) -> float:
    """And of one token after it; the first call may be slower than any later one."""
    first, _ = _timed(lambda: _sample(source, range(1), 1, 1))
    again, _ = _timed(lambda: _sample(source, range(1), 1, 1)) if first < 2 else (first, None)
    return min(first, again)


def _sample(source: PromptedRollouts, draws: range, size: int, cut: int) -> list[tuple[Request, Response]]:
    requests = [Request(source.prompt_ids[source.order.at(d)], d, sample) for d in draws for sample in range(size)]
    responses = source.sampler.sample(requests, replace(source.options, max_tokens=cut))
    return list(zip(requests, responses, strict=True))


def _add(source: PromptedRollouts, trial: Trial, draws: range, size: int) -> Trial:
    """Without a score."""
    seconds, pairs = _timed(lambda: _sample(source, draws, size, trial.cut))
    rows = [
        Rollout(
            prompt_ids=request.prompt_ids,
            response_ids=response.ids,
            group=request.draw,
            episode=request.draw * size + request.sample,
            truncated=response.finish_reason == "length",
            text=response.text,
            prompt_index=source.prompts[source.order.at(request.draw)].index,
            finish_reason=response.finish_reason,
            draw=request.draw,
        )
        for request, response in pairs
    ]
    return replace(trial, rollouts=(*trial.rollouts, *rows), seconds_sampling=trial.seconds_sampling + seconds)


def _scored(source: PromptedRollouts, trial: Trial, size: int, per_score: float, seconds: float) -> Trial:
    """As many of the first responses as should be scored in time: a group, then two, four, ... at a call."""
    rows, scores, took = trial.rollouts, list[Score](), 0.0
    num = size
    while len(scores) < len(rows):
        fits = int((seconds - took) / per_score) if per_score > 0 else len(rows)
        items = [_item(source, row) for row in rows[len(scores) : len(scores) + min(num, fits)]]
        if not items:
            break
        last, found = _timed(lambda items=items: source.scorer.score(items))  # type: ignore[misc]
        scores, took, num = [*scores, *found], took + last, 2 * num
        per_score = last / len(items)
    scored = [replace(row, reward=s.total, steps=s.steps) for row, s in zip(rows, scores, strict=False)]
    return replace(trial, rollouts=(*scored, *rows[len(scored) :]), num_scored=len(scored), seconds_scoring=took)


def _item(source: PromptedRollouts, row: Rollout) -> Scorable:
    prompt = source.prompts[source.order.at(row.draw)]
    response = Response(row.response_ids, (), row.finish_reason, row.text)
    return scorable(prompt, Request(row.prompt_ids, row.draw), response)


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


def shares_prompts(ready: Assembled) -> bool:
    return ready.laying is not Laying.ROWS


def time_update(ready: Assembled, rows: Sequence[Rollout], budget: Budget, per_token: float) -> UpdateTime | None:
    """Of few rows, then of four times as many, as long as that should end in time; the last one counts. The first is
    slower than any later one. None where even the fewest rows should take too long."""
    least = max([2, *(objective.minibatches for objective in ready.algorithm.objectives)])
    if not rows or len(rows) < least:
        return None
    engine, end, num = TimedEngine(_engine(ready)), budget.spent + UPDATE * budget.left, least
    expected = 3 * num_passes(ready) * per_token * tokens_of(rows[:num], shares_prompts(ready))
    timed = None
    while budget.spent + expected < end:
        timed = _update(ready, rows[:num], engine) or timed
        if num == len(rows):
            break
        num = min(4 * num, len(rows))
        if timed is not None:
            expected = timed.of(tokens_of(rows[:num], shares_prompts(ready)))
    return timed


def _update(ready: Assembled, rows: Sequence[Rollout], engine: TimedEngine) -> UpdateTime | None:
    """One update at rate 0, with made-up scores that all differ, so that every row counts.

    None where the algorithm keeps too few of them.
    """
    algorithm, config = ready.algorithm, ready.config
    assert config.tokens_per_microbatch is not None
    if algorithm.plan is not None:
        rows = [
            replace(row, reward=float(i), steps=(), greedy_reward=0.5, truncated=False, logp_sampler=None)
            for i, row in enumerate(rows)
        ]
    batch = step_batch(rows, ready.truncation)
    batch = batch.select(kept(batch, algorithm))
    if len(batch) < max(objective.minibatches for objective in algorithm.objectives):
        return None
    settings = UpdateSettings(config.tokens_per_microbatch, {}, config.seed, laying=ready.laying)
    number = 1 + max(objective.start for objective in algorithm.objectives)
    engine.seconds = 0.0
    seconds, _ = _timed(
        lambda: update(batch, algorithm, algorithm.state(), engine, settings, number, rate=lambda objective: 0.0)
    )
    return UpdateTime(seconds, engine.seconds, len(batch), tokens_of(rows, settings.laying is not Laying.ROWS))


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
