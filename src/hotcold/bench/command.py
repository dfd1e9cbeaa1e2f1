"""`hotcold bench`: a few steps of a training run, timed by the loop itself. The run is forgotten afterwards."""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hotcold.assemble import Assembled, algorithm_name, assemble
from hotcold.attempt import Attempt
from hotcold.bench.report import MEMORY, Measured, Setting, parts_of, verdict, whole_step
from hotcold.bench.watch import Seen, Watch, WatchedEngine, WatchedRecord, WatchedSampler
from hotcold.bench.work import Size, size_of
from hotcold.config.schema import Config, decided
from hotcold.config.show import to_yaml
from hotcold.errors import InputError
from hotcold.launch import matrix_rate
from hotcold.memory import record_bytes
from hotcold.models.reference import FrozenReference
from hotcold.runs import RunFolder
from hotcold.sampling.replay import ReplayRollouts
from hotcold.sizing import sized
from hotcold.stopping import Stopping
from hotcold.training.collect import PromptedRollouts
from hotcold.training.console import Console
from hotcold.training.loop import Progress

STEPS = 3
GIVEN = "given on the command line"
VOID = ("run", "resume", "save_every", "keep_checkpoints", "stop_at", "eval.every", "eval.samples", "eval.prompts")
TRIES = 5
MATRIX = {"cpu": 2048}  # rows of the product whose rate is measured
MATRIX_OF_A_GPU = 8192  # a smaller one would measure how long a launch takes
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OF_A_STEP = ("step", "tokens_per_second", "completions/mean_length", "rows/trained", "rows/skipped")


def bench(config: Config, say: Callable[[str], None]) -> Measured:
    """`say` hears of each step while it is measured."""
    void = [key for key in VOID if config.reasons.get(key) == GIVEN]
    ready = sized(assemble(planned(config)))
    before = rate_of(ready.config)
    with tempfile.TemporaryDirectory(prefix="hotcold-bench-") as place:
        steps, sizes, reads = measured_steps(ready, Path(place) / "run", say)
    rates = before, rate_of(ready.config)
    setting = _setting(ready, reads)
    parts = parts_of(steps, max(rates))
    speeds = [s.metrics["tokens_per_second"] for s in steps if s.metrics["tokens_per_second"]]
    notes = [f"{', '.join(void)}: no effect on a bench, which keeps no run and evaluates nothing"] if void else []
    return Measured(
        setting=setting,
        num_steps=len(steps),
        parts=parts,
        step=whole_step(steps, max(rates)),
        tokens_per_second=median(speeds) if speeds else None,
        peak_memory=peak_memory(ready.config.device, steps),
        rates=rates,
        notes=(*notes, *_notes(steps, sizes)),
        verdict=verdict(parts, setting),
        per_step=tuple(_of_step(seen) for seen in steps),
    )


def planned(config: Config) -> Config:
    """One step more than are measured. A recipe's `steps` are those of a training run."""
    wanted = config.steps if config.reasons.get("steps") == GIVEN else STEPS
    if config.replay_file:
        there = len(ReplayRollouts(config.replay_file).steps)
        most = there - 1
        if most < 1 or (wanted > most and config.reasons.get("steps") == GIVEN):
            hint = f"use steps={most}" if most > 0 else "record one more"
            raise InputError(
                f"steps={wanted}, and one more to warm up, but {config.replay_file} has {there} steps: {hint}."
            )
        wanted = min(wanted, most)
    return decided(
        config, {"steps": (1 + wanted, "one to warm up, then those that are measured"), "stop_at": (None, "")}
    )


def measured_steps(
    ready: Assembled, place: Path, say: Callable[[str], None]
) -> tuple[list[Seen], dict[str, Size], tuple[str, ...]]:
    """All steps but the first; rows and metrics are written to `place` as a run writes them, since that takes time."""
    sizes = sizes_of(ready)
    watch = Watch(sizes)
    console = Console(say)
    for note in ready.notes:
        console.warn(note)
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder.open(place, to_yaml(ready.config), False, {}))
        stack.callback(console.quiet_stage)
        for trunk in trunks_of(ready):
            stack.callback(trunk.register_forward_pre_hook(watch.count, with_kwargs=True).remove)
        record = WatchedRecord(folder, watch)
        source = ready.source
        if isinstance(source, PromptedRollouts):
            source = replace(source, sampler=WatchedSampler(source.sampler, watch))
        attempt = Attempt(ready, folder, console, Stopping())
        loop = replace(
            attempt.loop(),
            source=source,
            engine=WatchedEngine(attempt.engine, watch),
            record=record,
            evaluator=None,
            save=lambda progress: None,
        )
        loop.run(Progress(algorithm=ready.algorithm.state()))
    reads = dict.fromkeys(model for seen in record.steps for model in seen.models_read)
    return record.steps[1:], sizes, tuple(reads)


def sizes_of(ready: Assembled) -> dict[str, Size]:
    models = ready.models
    sizes = {"policy": size_of(models.policy.module)}
    if models.critic is not None:
        sizes["critic"] = size_of(models.critic)
    if models.reference is not None:
        frozen = models.reference.frozen_module if isinstance(models.reference, FrozenReference) else None
        sizes["reference"] = sizes["policy"] if frozen is None else size_of(frozen)
    return sizes


def trunks_of(ready: Assembled) -> list[Any]:
    """What every token goes through, each module once."""
    models = ready.models
    trunks = [models.policy.module.base_model]
    if models.critic is not None:
        trunks.append(models.critic.trunk)
    if isinstance(models.reference, FrozenReference):
        reference: Any = models.reference.frozen_module
        trunks.append(reference.base_model)
    return list({id(trunk): trunk for trunk in trunks}.values())


def rate_of(config: Config) -> float:
    """Of the dtype in which the run computes. bf16 on a GPU; on a CPU usually float32."""
    assert config.dtype is not None
    size = MATRIX.get(torch.device(config.device).type, MATRIX_OF_A_GPU)
    return matrix_rate(config.device, size, TRIES, DTYPES[config.dtype])


def peak_memory(device: str, steps: list[Seen]) -> int:
    """Bytes: on a GPU of tensors there, else of the whole process since it began."""
    if torch.device(device).type == "cuda":  # the loop counts each part of a step anew
        parts = [seen.metrics.get(key) or 0.0 for seen in steps for key in MEMORY.values()]
        return max(torch.cuda.max_memory_allocated(device), *(int(1e9 * part) for part in parts))
    if (record := record_bytes()) is not None:
        return record
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _setting(ready: Assembled, reads: tuple[str, ...]) -> Setting:
    config = ready.config
    assert config.dtype is not None
    return Setting(
        algorithm=algorithm_name(config),
        model=config.model,
        device=config.device,
        dtype=config.dtype,
        threads=torch.get_num_threads(),
        recomputes=config.gradient_checkpointing,
        laying=ready.laying,
        reads=reads,
        tokens_per_microbatch=config.tokens_per_microbatch or 0,
    )


def _notes(steps: list[Seen], sizes: dict[str, Size]) -> list[str]:
    notes = [note for size in sizes.values() for note in size.notes]
    rows = [(s.metrics.get("rows/skipped") or 0, s.metrics.get("rows/trained") or 0) for s in steps]
    skipped, trained = sum(s for s, _ in rows), sum(t for _, t in rows)
    if skipped:
        notes.append(
            f"{skipped} of {skipped + trained} rows had no signal and were not computed in the update: with a reward "
            "that varies in each group it takes longer"
        )
    return list(dict.fromkeys(notes))


def _of_step(seen: Seen) -> dict[str, Any]:
    keys = (*OF_A_STEP, *(key for key in seen.metrics if key.startswith(("time/", "memory/"))))
    metrics = {key: seen.metrics[key] for key in keys if key in seen.metrics}
    return {**metrics, "work": seen.work, "needed_tokens": seen.needed, "computed_tokens": seen.computed}
