"""`hotcold verify` on real models: loads what the laboratory checks. Nothing is written and nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hotcold.algorithms.base import Algorithm
from hotcold.assemble import (
    TRAIN_STREAM,
    Assembled,
    assemble,
    decide_algorithm,
    make_mismatch,
    make_truncation,
    pick_device,
    sampling_options,
)
from hotcold.batch import Rollout
from hotcold.checkpoint import newest_checkpoint, read_state, read_tensors, verify
from hotcold.config.checks import check_run_folder
from hotcold.config.schema import Config, train_config
from hotcold.errors import InputError
from hotcold.lab.of_run import Bench, RunReport, StepFigures, effective_sizes, measure_step, scored
from hotcold.lab.on_model import Check, Subject, check_model
from hotcold.lab.probe import OneStep, Parts, local_engine
from hotcold.lab.sketch import CountSketch
from hotcold.lab.telling import with_variance
from hotcold.lab.variance import compare
from hotcold.lineup import Lineup, line_up
from hotcold.models.adapters import load_adapter_tensors
from hotcold.models.loading import load_model
from hotcold.sampling.rollout_files import read_rollouts
from hotcold.training.collect import PromptedRollouts
from hotcold.training.console import near
from hotcold.training.dataset import DatasetRows
from hotcold.training.update import UpdateSettings, objective_of

Say = Callable[[str], None]
MOST_TOKENS = 16  # of a sampled response
MOST_ROWS = 16  # of recorded or given rows
FEW = 8  # prompts


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
    other = ""
    if models.reference is not None and models.reference.sha256 != models.policy.sha256:
        other = "the reference is not the starting model"
    return Subject(
        algorithm=ready.algorithm,
        parts=parts_of(config, models),
        rollouts=rollouts,
        dtype=config.dtype,
        mismatch=ready.mismatch,
        other_reference=other,
        sampler=ready.sampler,
        options=few_tokens(ready),
        not_sampled=_not_sampled(ready),
    )


def parts_of(config: Config, models: Lineup) -> Parts:
    modules = {"policy": models.policy.module, **({} if models.critic is None else {"critic": models.critic})}
    recompute = config.gradient_checkpointing
    return Parts(modules, models.reference, config.temperature, models.compute, recompute, models.reading)


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


# ---- a run


def verify_run(
    folder: str | Path, steps: int = 2, prompts: int = 16, dims: int = 1024, seed: int = 0, progress: Say | None = None
) -> RunReport:
    """What other baselines would have done to the gradients of a run: of `steps` steps, `prompts` prompts each.

    Steps are those whose sampling parameters are still there: the starting model's first step, and the step after each
    checkpoint that was kept. Where there are too few of them the nearest checkpoint stands in.
    """
    say = progress or (lambda text: None)
    path = Path(folder)
    config, algorithm = _run_config(path)
    models = _start(path, config, algorithm)
    bench = _bench(config, algorithm, models, prompts, dims, seed)
    chosen, skipped = _chosen(path, steps)
    figures, contributions, rows = [], [], {}
    for step, at, checkpoint in chosen:
        state = _load(checkpoint, models, config, algorithm)
        rows[step] = read_rollouts(path / "rollouts" / f"step_{step:06d}.parquet")[step]
        one, found = measure_step(step, rows[step], _in_words(step, at), replace(bench, state=state), say)
        figures.append(one)
        contributions.append(found)
    newest, _ = newest_checkpoint(path / "checkpoints")
    if newest is not None and newest != chosen[-1][2]:
        say(f"ratios of {newest.name} to the sampler")
        _load(newest, models, config, algorithm)
        figures = [_with_newest(one, rows[one.step], bench) for one in figures]
    return RunReport(
        folder=near(path),
        steps=tuple(figures),
        baselines=tuple(compare(contributions, seed)),
        weighting=_name(objective_of(algorithm, "policy").weighting),
        num_parameters=sum(p.numel() for p in bench.parts.parameters("policy")),
        dims=dims,
        newest="" if newest is None else newest.name,
        notes=(*skipped, *_notes(figures)),
    )


def _run_config(path: Path) -> tuple[Config, Algorithm]:
    check_run_folder(str(path))
    config = train_config([f"resume={path}"])
    device = config.device
    if not is_there(device):
        device = "auto"
    device = pick_device(device)
    algorithm, config = decide_algorithm(config, device)
    if algorithm.plan is None:
        raise InputError(
            f"{path} is a run of {config.algorithm}: its rows are given and no reward weights them, so there is no "
            "baseline to compare."
        )
    return config, algorithm


def is_there(device: str) -> bool:
    """A run may have been made on another machine."""
    return not device.startswith("cuda") or torch.cuda.is_available()


def _start(path: Path, config: Config, algorithm: Algorithm) -> Lineup:
    policy = load_model(config.model, config.device)
    try:
        recorded = json.loads((path / "env.json").read_text(encoding="utf-8"))["attempts"][-1].get("model_sha256")
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        recorded = None
    if recorded not in (None, policy.sha256):
        raise InputError(
            f"model={config.model} has changed since {path} was made: its weights are not those that the run began "
            "with.\nPut the model of that time there."
        )
    return line_up(config, algorithm, policy)


def _bench(config: Config, algorithm: Algorithm, models: Lineup, prompts: int, dims: int, seed: int) -> Bench:
    assert config.tokens_per_microbatch is not None
    parts = parts_of(config, models)
    settings = UpdateSettings(config.tokens_per_microbatch, {}, config.seed, make_mismatch(config), parts.laying)
    sketch = CountSketch(dims, seed)
    return Bench(algorithm, local_engine(parts), parts, settings, make_truncation(config), sketch, prompts)


Source = tuple[int, int, Path | None]  # step of the rollouts, step after which the parameters were saved, where


def _chosen(path: Path, number: int) -> tuple[list[Source], list[str]]:
    """The steps to look at, in order, and what was skipped."""
    saved: dict[int, Path | None] = {0: None}
    skipped = []
    for folder in sorted((path / "checkpoints").glob("step_*")):
        if (reason := verify(folder)) is None:
            saved[int(folder.name.removeprefix("step_"))] = folder
        else:
            skipped.append(f"checkpoint {folder.name} is not whole ({reason}) and was skipped")
    steps = sorted(int(file.stem.removeprefix("step_")) for file in (path / "rollouts").glob("step_*.parquet"))
    if not steps:
        raise InputError(f"{path}/rollouts holds no step: the run has sampled nothing yet.")
    nearest = {n: min(saved, key=lambda c: (abs(n - 1 - c), c)) for n in steps}
    exact = [n for n in steps if nearest[n] == n - 1]
    others = sorted((n for n in steps if nearest[n] != n - 1), key=lambda n: (abs(n - 1 - nearest[n]), -n))
    if len(exact) > number:
        places = [round(i * (len(exact) - 1) / max(number - 1, 1)) for i in range(number)]
        exact = [exact[-1]] if number == 1 else [exact[place] for place in dict.fromkeys(places)]
    picked = sorted([*exact, *others[: number - len(exact)]], key=lambda n: (nearest[n], n))
    return [(n, nearest[n], saved[nearest[n]]) for n in picked], skipped


def _in_words(step: int, at: int) -> str:
    what = "the starting model" if at == 0 else f"the checkpoint of step {at}"
    apart = step - 1 - at
    if apart == 0:
        return f"{what}, which sampled the responses"
    return (
        f"{what}, {abs(apart)} step{'s' * (abs(apart) > 1)} {'before' if apart > 0 else 'after'} the one that sampled"
    )


def _load(checkpoint: Path | None, models: Lineup, config: Config, algorithm: Algorithm) -> dict[str, float]:
    """Parameters into the models, as a continued run does it; the algorithm's state. None: the models as they start."""
    if checkpoint is None:
        return algorithm.state()
    module = models.policy.module
    if models.trains_adapter:
        load_adapter_tensors(module, read_tensors(checkpoint, "adapter"))
    else:
        module.load_state_dict(load_model(str(checkpoint), config.device).module.state_dict())
    if models.critic is not None:
        tensors = read_tensors(checkpoint, "critic")
        with torch.no_grad():
            for name, parameter in models.critic.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(tensors[name])
    return read_state(checkpoint)["progress"]["algorithm"]


def _with_newest(figures: StepFigures, rollouts: list[Rollout], bench: Bench) -> StepFigures:
    responses, tokens = effective_sizes(scored(rollouts, bench), bench.engine, bench.cut)
    return replace(figures, ess_responses_now=responses, ess_tokens_now=tokens)


def _name(weighting: Any) -> str:
    if isinstance(weighting, partial):
        return f"{_name(weighting.func)}({', '.join(f'{k}={v}' for k, v in weighting.keywords.items())})"
    return getattr(weighting, "__name__", type(weighting).__name__)


def _notes(figures: list[StepFigures]) -> tuple[str, ...]:
    notes = []
    if min(one.num_used for one in figures) < FEW:
        notes.append(f"fewer than {FEW} prompts in a step: the intervals are rough")
    if any(one.num_used < one.num_prompts for one in figures):
        notes.append("gradients of the first prompts of a step stand for all; prompts=N takes more")
    return tuple(notes)
