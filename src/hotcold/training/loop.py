"""The one loop: collect, score, credit, update, record. It names no algorithm, engine or sampler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from hotcold.algorithms.base import Algorithm, Objective
from hotcold.batch import Batch, Rollout
from hotcold.engines.base import Engine
from hotcold.errors import InputError, RewardError
from hotcold.memory import GB, PeakMemory
from hotcold.optim import rate_at
from hotcold.stopping import Stopping
from hotcold.training.batching import Room
from hotcold.training.collect import Collected, RolloutSource, kept, step_batch
from hotcold.training.console import Console, duration
from hotcold.training.evaluate import Evaluates, Evaluation, timed
from hotcold.training.health import first_step_note, notes
from hotcold.training.metrics import rollout_metrics
from hotcold.training.truncation import KEEP, Truncation
from hotcold.training.update import UpdateSettings, update

MAX_NONFINITE = 5  # steps in a row whose update had to be skipped, before the run stops


@dataclass(frozen=True)
class LoopSettings:
    steps: int
    learning_rate: Mapping[str, float]  # by model
    warmup_steps: int
    update: UpdateSettings
    save_every: int  # 0: only at the end
    eval_every: int  # 0: only before and after
    truncation: Truncation = KEEP
    stop_at: float | None = None  # end early once the held-out greedy score reaches it


@dataclass(frozen=True)
class Progress:
    """Where a run is: everything beside parameters and optimiser that a resumed run needs. JSON in the checkpoint."""

    step: int = 0  # steps done
    position: int = 0  # in the prompt order
    version: int = 0  # optimiser steps taken, as the version of the parameters
    algorithm: dict[str, float] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)  # summary of the evaluation before the first step
    greedy: float | None = None  # held-out greedy score of this very state; None: not evaluated
    best: float | None = None  # best held-out greedy score so far
    best_step: int | None = None
    tokens_per_microbatch: int | None = None  # once memory did not suffice for what was configured


class Record(Protocol):
    """What the loop writes to; the run folder."""

    attempt: int

    def append_metrics(self, row: dict[str, Any]) -> None: ...
    def write_rollouts(self, step: int, rollouts: Sequence[Rollout], about: dict[str, Any]) -> None: ...
    def read_rollouts(self, step: int, key: str) -> tuple[list[Rollout], dict[str, Any]] | None: ...
    def write_eval(self, name: str, content: Any) -> None: ...


@dataclass
class Loop:
    algorithm: Algorithm
    engine: Engine
    source: RolloutSource
    evaluator: Evaluates | None
    record: Record
    settings: LoopSettings
    console: Console
    refresh: Callable[[int], None]  # hands new parameters to the sampler
    save: Callable[[Progress], None]  # a checkpoint of this state
    reward_names: Sequence[str] = ()
    key_of_rollouts: Callable[[Progress], str] | None = None  # what decides a step's rows; None: they are not sampled
    stopping: Stopping = field(default_factory=Stopping)
    saved: Progress | None = None  # the last state of which there is a checkpoint
    memory: PeakMemory = field(default_factory=PeakMemory)
    seconds_evaluating: float = 0.0  # of the last evaluation
    seconds_saving: float = 0.0  # of the checkpoint after the last step, reported with the next one

    def run(self, progress: Progress) -> tuple[Progress, Evaluation | None]:
        """Steps from `progress` to the end; the last state and the last evaluation."""
        history: list[dict[str, Any]] = []
        evaluation: Evaluation | None = None
        if progress.step == 0 and self.evaluator is not None:
            evaluation, progress = self._evaluate(progress)
            progress = replace(progress, before=evaluation.summary())
            took = duration(self.seconds_evaluating)
            self.console.say(f"held-out before training: {evaluation}  [{took}]")
        first = progress.step + 1
        while progress.step < self.settings.steps and not self._reached(progress):
            progress, metrics, evaluation = self._step(progress)
            history = [*history[-20:], metrics]
            self._report(history, metrics, first)
        if progress.step > 0 and evaluation is None and self.evaluator is not None:
            evaluation, _ = self._evaluate(progress)
        return progress, evaluation

    def _step(self, progress: Progress) -> tuple[Progress, dict[str, Any], Evaluation | None]:
        start = time.perf_counter()
        number = progress.step + 1
        with self._saved_if_stopped(progress):
            collected = self._rollouts(progress)
            batch = step_batch(collected.rollouts, self.settings.truncation)
            batch = batch.select(kept(batch, self.algorithm))
            self.console.stage("updating", 0, 0)
            mark = time.perf_counter()
            _, state, done = update(
                batch,
                self.algorithm,
                progress.algorithm,
                self.engine,
                self._update_settings(progress),
                number,
                lambda objective: self._rate(objective, number),
                self.memory,
                self.stopping.hold,
            )
        progress = self._after_out_of_memory(progress, number, done.room)
        for fault in done.faults:
            self.console.warn(f"step {number}: an update was skipped, since it is not finite ({fault})")
        seconds = {**collected.seconds, "logp": done.seconds_reading, "update": time.perf_counter() - mark}
        progress = replace(
            progress,
            step=number,
            position=collected.position,
            version=progress.version + done.policy.num_applied_steps,
            algorithm=state,
            greedy=None,
        )
        self.refresh(progress.version)
        metrics = self._metrics(number, collected, batch, seconds, time.perf_counter() - start)
        metrics.update(done.summary())
        metrics |= self._memory_metrics("sample" in collected.seconds, done.room)
        self.stopping.release()
        evaluation = None
        if self._due(self.settings.eval_every, number) and self.evaluator is not None:
            evaluation, progress = self._evaluate(progress, metrics)
            metrics |= {**evaluation.summary(), "time/eval": self.seconds_evaluating}
            metrics["time/step"] += self.seconds_evaluating
        with self._saved_if_stopped(progress), self.stopping.saving():
            self.record.append_metrics(metrics)
            self.seconds_saving = 0.0
            is_best = evaluation is not None and progress.best_step == number
            due = self._due(self.settings.save_every, number) or is_best or self._reached(progress)
            if due or self.stopping.is_due:
                self._save(progress)
        self.stopping.check()
        return progress, metrics, evaluation

    def _save(self, progress: Progress) -> None:
        """After the step's metrics, so that a checkpoint never knows a step that the record does not."""
        mark = time.perf_counter()
        with self.stopping.saving():
            self.save(progress)
        self.saved = progress
        self.seconds_saving = time.perf_counter() - mark

    def _rollouts(self, progress: Progress) -> Collected:
        """The scored rows of the next step: those that an earlier attempt left, if the same parameters sampled them."""
        number, key = progress.step + 1, None
        if self.key_of_rollouts is not None:
            key = self.key_of_rollouts(progress)
            if (found := self.record.read_rollouts(number, key)) is not None:
                self.console.say(f"step {number}: its scored responses were written before the stop and are used again")
                return Collected.restored(*found)
        with self.memory.part("sample"):
            collected = self.source.collect(self.algorithm, progress.position, progress.version, self.console.stage)
        self.stopping.check()
        self.record.write_rollouts(number, collected.rollouts, {"key": key, **collected.about()})
        return collected

    def _evaluate(self, progress: Progress, metrics: dict[str, Any] | None = None) -> tuple[Evaluation, Progress]:
        """`metrics`: of the step before it, which are recorded even if the evaluation fails."""
        assert self.evaluator is not None
        with self._saved_if_stopped(progress, metrics):
            self.stopping.check()
            evaluation, self.seconds_evaluating = timed(self.evaluator, self.console.stage)
        self.console.quiet_stage()
        return evaluation, self._evaluated(progress, evaluation)

    @contextmanager
    def _saved_if_stopped(self, progress: Progress, metrics: dict[str, Any] | None = None) -> Iterator[None]:
        """The steps that are done are not lost to a fault in a score, nor to a signal before parameters change."""
        try:
            yield
        except (RewardError, KeyboardInterrupt):
            self.console.quiet_stage()
            if self.stopping.holds:  # in the middle of an update: the last checkpoint and the scored rows count
                raise
            if metrics is not None:
                self.record.append_metrics(metrics)
            if progress.step > 0 and progress != self.saved:
                self._save(progress)
            raise

    def _metrics(
        self, number: int, collected: Collected, batch: Batch, seconds: dict[str, float], total: float
    ) -> dict[str, Any]:
        rollouts = collected.rollouts
        penalties = {} if batch.penalties is None else {"rewards/penalty": -_per_row(batch.penalties)}
        rates = {o.model: self._rate(o, number) for o in self.algorithm.objectives}
        num_tokens = sum(len(r.response_ids) for r in rollouts)
        return {
            "step": number,
            "attempt": self.record.attempt,
            **rollout_metrics(rollouts, self.reward_names),
            **penalties,
            "rows/dropped": len(rollouts) - len(batch),
            "groups/refilled": collected.num_refilled,
            **collected.reward_counts,
            "learning_rate": rates.get("policy"),
            **({"value/learning_rate": rates["critic"]} if "critic" in rates else {}),
            "tokens_per_second": num_tokens / total if total > 0 else None,
            **{f"time/{name}": value for name, value in seconds.items()},
            "time/save": self.seconds_saving,
            "time/step": total,
        }

    def _update_settings(self, progress: Progress) -> UpdateSettings:
        tokens = progress.tokens_per_microbatch
        return self.settings.update if tokens is None else replace(self.settings.update, tokens_per_microbatch=tokens)

    def _after_out_of_memory(self, progress: Progress, number: int, room: Room) -> Progress:
        """The smaller micro-batches stay, in a resumed run too."""
        if not room.num_halved:
            return progress
        tokens = room.cut.tokens_per_microbatch
        self.console.warn(
            f"step {number}: out of memory; the optimiser step was computed again with tokens_per_microbatch={tokens}, "
            "which stays (same update, to rounding)"
        )
        return replace(progress, tokens_per_microbatch=tokens)

    def _memory_metrics(self, samples: bool, room: Room) -> dict[str, Any]:
        peak = self.memory.take()
        parts = ("sample", "reads", "update") if samples else ("reads", "update")
        return {
            **{f"memory/{part}": peak[part] / GB if part in peak else None for part in parts},
            "tokens_per_microbatch": room.cut.tokens_per_microbatch,
            "out_of_memory": room.num_halved,
        }

    def _rate(self, objective: Objective, number: int) -> float:
        """The warm-up counts from the first step in which the model is trained; 0 before it."""
        if number <= objective.start:
            return 0.0
        base = self.settings.learning_rate[objective.model]
        return rate_at(number - objective.start, base, self.settings.warmup_steps)

    def _report(self, history: Sequence[dict[str, Any]], metrics: dict[str, Any], first: int) -> None:
        left = self._seconds_left(history)
        self.console.step(metrics, self.settings.steps, left)
        if metrics["step"] == first:
            step = metrics["time/step"] - metrics.get("time/eval", 0.0)
            evaluating = f", {duration(self.seconds_evaluating)} an evaluation" if self.seconds_evaluating else ""
            self.console.say(f"expected: {duration(step)} a step{evaluating}, {duration(left)} for what remains")
            if note := first_step_note(metrics):
                self.console.say(note)
        for text in notes(history):
            self.console.warn(text)
        if metrics["optimizer_steps/nonfinite"]:
            if all(m["optimizer_steps/nonfinite"] for m in history[-MAX_NONFINITE:]) and len(history) >= MAX_NONFINITE:
                raise InputError(
                    f"{MAX_NONFINITE} steps in a row had a loss or gradient that is not finite: nothing is learnt.\n"
                    "Lower learning_rate; look at the rewards and, for an algorithm of your own, at its advantages."
                )

    def _seconds_left(self, history: Sequence[dict[str, Any]]) -> float:
        """At the pace of the last steps, with the evaluations that are still due."""
        step = sum(m["time/step"] - m.get("time/eval", 0.0) for m in history) / len(history)
        done, steps = history[-1]["step"], self.settings.steps
        evaluations = sum(self._due(self.settings.eval_every, number) for number in range(done + 1, steps + 1))
        return step * (steps - done) + self.seconds_evaluating * evaluations

    def _evaluated(self, progress: Progress, evaluation: Evaluation) -> Progress:
        content = {"step": progress.step, **evaluation.summary(), "rows": evaluation.rows}
        self.record.write_eval(f"step_{progress.step:06d}", content)
        mean = evaluation.greedy.mean if evaluation.greedy else None
        progress = replace(progress, greedy=mean)
        if mean is not None and (progress.best is None or mean > progress.best):
            return replace(progress, best=mean, best_step=progress.step)
        return progress

    def _due(self, every: int, number: int) -> bool:
        return number == self.settings.steps or (every > 0 and number % every == 0)

    def _reached(self, progress: Progress) -> bool:
        stop_at = self.settings.stop_at
        return stop_at is not None and progress.greedy is not None and progress.greedy >= stop_at


def _per_row(values: Tensor) -> float:
    return float(values.sum()) / max(len(values), 1)
