"""`hotcold verify` on real models: loads what the laboratory checks. Nothing is written and nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hotcold.assemble import TRAIN_STREAM, Assembled, assemble, sampling_options
from hotcold.batch import Rollout
from hotcold.config.schema import Config
from hotcold.lab.on_model import Check, Subject, check_model, with_variance
from hotcold.lab.probe import OneStep, Parts
from hotcold.training.collect import PromptedRollouts
from hotcold.training.dataset import DatasetRows

Say = Callable[[str], None]
MOST_TOKENS = 16  # of a sampled response
MOST_ROWS = 24  # of recorded or given rows


def verify_on_model(config: Config, progress: Say | None = None) -> list[Check]:
    """The update of the config's model on a few rows: cut, padded, ordered, sampled and recomputed in other ways."""
    ready = assemble(config)
    rollouts, made_up = with_variance(few_rows(ready), ready.algorithm)
    if made_up and progress is not None:
        progress("the scores of these rows are all equal or keep none of them: made-up scores are used")
    return check_model(subject_of(ready, rollouts), progress)


def subject_of(ready: Assembled, rollouts: list[Rollout]) -> Subject:
    config, models = ready.config, ready.models
    assert config.dtype is not None
    modules = {"policy": models.policy.module, **({} if models.critic is None else {"critic": models.critic})}
    parts = Parts(modules, models.reference, config.temperature, models.compute, config.gradient_checkpointing)
    other = ""
    if models.reference is not None and models.reference.sha256 != models.policy.sha256:
        other = "the reference is not the starting model"
    return Subject(
        algorithm=ready.algorithm,
        parts=parts,
        rollouts=rollouts,
        dtype=config.dtype,
        mismatch=ready.mismatch,
        other_reference=other,
        sampler=ready.sampler,
        options=few_tokens(ready),
        not_sampled=_not_sampled(ready),
    )


def few_rows(ready: Assembled) -> list[Rollout]:
    """Of the run's own source: the first prompts with all their responses, or the first rows."""
    algorithm, source = OneStep(ready.algorithm), ready.source
    if isinstance(source, PromptedRollouts):
        assert algorithm.plan is not None
        num_prompts = max(2, min(4, MOST_ROWS // algorithm.plan.group_size))
        few: Any = replace(source, options=few_tokens(ready), prompts_per_step=num_prompts)
        # Not from position 0, where a step without any score is an error: short responses may well have none.
        return few.collect(algorithm, 1, 0, _nobody).rollouts
    if isinstance(source, DatasetRows):
        return replace(source, rows_per_step=4).collect(algorithm, 0, 0, _nobody).rollouts
    return _whole_groups(source.collect(algorithm, 0, 0, _nobody).rollouts)


def few_tokens(ready: Assembled) -> Any:
    options = sampling_options(ready.config, TRAIN_STREAM)
    return replace(options, max_tokens=min(options.max_tokens, MOST_TOKENS))


def _whole_groups(rollouts: list[Rollout]) -> list[Rollout]:
    """The first groups, as many as fit, and at least one."""
    chosen: list[int] = []
    for group in dict.fromkeys(r.group for r in rollouts):
        if chosen and sum(r.group in (*chosen, group) for r in rollouts) > MOST_ROWS:
            break
        chosen.append(group)
    return [r for r in rollouts if r.group in chosen]


def _not_sampled(ready: Assembled) -> str:
    if ready.config.replay_file:
        return "the rows are replayed, not sampled"
    return "the rows are given, not sampled" if ready.algorithm.plan is None else ""


def _nobody(stage: str, done: int, of: int) -> None:
    """Sampling a few tokens needs no progress."""
