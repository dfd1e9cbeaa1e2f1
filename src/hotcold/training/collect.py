"""Where a step's rows come from: prompts that are sampled and scored, or rows that were recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from hotcold.algorithms.base import Algorithm, Plan
from hotcold.batch import Batch, Rollout, collate
from hotcold.errors import RewardError
from hotcold.prompts import Prompt, PromptOrder
from hotcold.rewards.base import Scorable, Score, Scorer
from hotcold.sampling.base import Request, Response, Sampler, SamplingOptions
from hotcold.training.truncation import KEEP, Truncation

Notify = Callable[[str, int, int], None]  # stage, done, in all


@dataclass(frozen=True)
class Collected:
    rollouts: list[Rollout]
    position: int  # in the prompt order (or the recorded steps) after this step
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    num_refilled: int = 0  # groups that were sampled in place of rejected ones
    reward_counts: dict[str, int] = field(default_factory=dict)  # what went wrong in scoring, by metric

    def about(self) -> dict[str, Any]:
        """What is kept beside the rows, in JSON."""
        return {
            "position": self.position,
            "num_refilled": self.num_refilled,
            "reward_counts": self.reward_counts,
        }

    @classmethod
    def restored(cls, rollouts: list[Rollout], about: dict[str, Any]) -> Collected:
        seconds = {"sample": 0.0, "score": 0.0}
        return cls(rollouts, about["position"], seconds, about["num_refilled"], about.get("reward_counts", {}))


class RolloutSource(Protocol):
    def collect(self, algorithm: Algorithm, position: int, version: int, notify: Notify) -> Collected:
        """The scored rows of one step. The same position and parameters give the same rows."""


def step_batch(rollouts: Sequence[Rollout], truncation: Truncation = KEEP) -> Batch:
    """The rows of a step as tensors, with the rule for truncated responses applied."""
    return truncation.apply(collate(rollouts))


def kept(batch: Batch, algorithm: Algorithm) -> Tensor:
    """[B] the rows that take part: scored, and not rejected by the algorithm."""
    return batch.keep & algorithm.keep(batch)


@dataclass(frozen=True)
class ReplayedRollouts:
    """Recorded rows; position n is the n-th recorded step (from 0)."""

    recorded: Callable[[int], list[Rollout]]

    def collect(self, algorithm: Algorithm, position: int, version: int, notify: Notify) -> Collected:
        return Collected(self.recorded(position + 1), position + 1)


@dataclass(frozen=True)
class PromptedRollouts:
    """Samples and scores responses to the next prompts of the order."""

    prompts: Sequence[Prompt]
    prompt_ids: Sequence[tuple[int, ...]]
    order: PromptOrder
    sampler: Sampler
    scorer: Scorer
    options: SamplingOptions
    prompts_per_step: int
    truncation: Truncation = KEEP

    def collect(self, algorithm: Algorithm, position: int, version: int, notify: Notify) -> Collected:
        plan = algorithm.plan
        assert plan is not None
        seconds = {"sample": 0.0, "score": 0.0}
        rollouts: list[Rollout] = []
        start = position
        self.scorer.take_counts()  # of an evaluation before
        wanted, num_refilled = self.prompts_per_step, 0
        for attempt in range(1 + plan.refill):
            rollouts += self._sample_groups(plan, range(position, position + wanted), version, seconds, notify)
            position += wanted
            num_refilled += wanted if attempt else 0
            wanted = self.prompts_per_step - self._num_accepted_groups(rollouts, algorithm) if plan.refill else 0
            if wanted <= 0:
                break
        if start == 0 and all(rollout.reward is None for rollout in rollouts):
            raise RewardError(f"no score (None) for any of the first {len(rollouts)} responses: is a `return` missing?")
        return Collected(rollouts, position, seconds, num_refilled, self.scorer.take_counts())

    def _sample_groups(
        self, plan: Plan, draws: range, version: int, seconds: dict[str, float], notify: Notify
    ) -> list[Rollout]:
        requests = [
            Request(self.prompt_ids[self.order.at(draw)], draw, sample)
            for draw in draws
            for sample in range(plan.group_size)
        ]
        greedy_requests = [Request(self.prompt_ids[self.order.at(draw)], draw) for draw in draws if plan.greedy]
        start = time.perf_counter()
        responses = self.sampler.sample(requests, self.options, lambda done, of: notify("sampling", done, of))
        greedy = self.sampler.sample(greedy_requests, replace(self.options, greedy=True)) if greedy_requests else []
        seconds["sample"] += time.perf_counter() - start
        start = time.perf_counter()
        notify("scoring", 0, len(requests))
        scores = self._score([*requests, *greedy_requests], [*responses, *greedy])
        seconds["score"] += time.perf_counter() - start
        baselines = {r.draw: s.with_steps for r, s in zip(greedy_requests, scores[len(requests) :], strict=True)}
        return [
            self._rollout(*row, version, baselines, plan.group_size)
            for row in zip(requests, responses, scores[: len(requests)], strict=True)
        ]

    def _num_accepted_groups(self, rollouts: list[Rollout], algorithm: Algorithm) -> int:
        batch = step_batch(rollouts, self.truncation)
        return int(batch.group[kept(batch, algorithm)].unique().numel())

    def _score(self, requests: Sequence[Request], responses: Sequence[Response]) -> list[Score]:
        rows = [self.prompts[self.order.at(request.draw)] for request in requests]
        return self.scorer.score([scorable(*row) for row in zip(rows, requests, responses, strict=True)])

    def _rollout(
        self,
        request: Request,
        response: Response,
        score: Score,
        version: int,
        baselines: dict[int, float | None],
        group_size: int,
    ) -> Rollout:
        prompt = self.prompts[self.order.at(request.draw)]
        return Rollout(
            prompt_ids=request.prompt_ids,
            response_ids=response.ids,
            group=request.draw,
            episode=request.draw * group_size + request.sample,
            reward=score.total,
            steps=score.steps,
            logp_sampler=response.logp,
            truncated=response.finish_reason == "length",
            version=version,
            greedy_reward=baselines.get(request.draw),
            parts=score.parts,
            text=response.text,
            prompt_text=as_text(prompt.content),
            finish_reason=response.finish_reason,
            prompt_index=prompt.index,
            draw=request.draw,
        )


def scorable(prompt: Prompt, request: Request, response: Response) -> Scorable:
    return Scorable(
        prompt=prompt.content,
        completion=response.text,
        prompt_ids=request.prompt_ids,
        completion_ids=response.ids,
        columns=prompt.columns,
        truncated=response.finish_reason == "length",
        row=prompt.index,
    )


def as_text(content: Any) -> str:
    """A prompt for the record: text as it is, one user message as its text, other messages as JSON."""
    if isinstance(content, str):
        return content
    if len(content) == 1 and isinstance(content[0].get("content"), str):
        return content[0]["content"]
    return json.dumps(content, ensure_ascii=False)
