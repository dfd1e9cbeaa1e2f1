"""What each verb does, from a configuration to its result."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hotcold.assemble import (
    EVAL_STREAM,
    SAMPLE_STREAM,
    Assembled,
    algorithm_name,
    assemble,
    make_evaluator,
    make_sampler,
    make_scorer,
    pick_device,
    sampling_options,
    sandbox_level,
    sandbox_notes,
    set_threads,
)
from hotcold.attempt import Attempt, arithmetic, what_models
from hotcold.batch import Rollout
from hotcold.chat import render_prompt
from hotcold.checkpoint import newest_checkpoint
from hotcold.config.checks import check_run_folder
from hotcold.config.schema import Config, EvalConfig, SampleConfig, decided
from hotcold.config.show import describe, to_yaml
from hotcold.config.sources import read_recipe
from hotcold.disk import check_disk
from hotcold.errors import DiskError, InputError
from hotcold.files import FAULTS
from hotcold.intake import EncodedPrompts, check_columns, encode, load_prompts
from hotcold.models.loading import LoadedModel, load_model
from hotcold.prompts import Prompt
from hotcold.runs import RunFolder, default_run_name
from hotcold.sampling.base import Request
from hotcold.sizing import sized
from hotcold.stopping import Stopping
from hotcold.training.collect import as_text
from hotcold.training.console import Console, duration, near
from hotcold.training.evaluate import Evaluation, Evaluator, interval_text
from hotcold.training.loop import Progress
from hotcold.training.update import READ_BY_ENGINE
from hotcold.watchdog import Watchdog

Echo = Callable[[str], None] | None
STACKS = "stacks.txt"  # of the run folder: where every thread stood when nothing moved


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    model_dir: Path
    before: dict[str, Any]  # summary of the held-out evaluation before training; empty where there was none
    after: dict[str, Any]
    evaluation: Evaluation | None
    evaluator: Evaluator | None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row for each step, as in metrics.jsonl."""
        return RunFolder.read_metrics(self.folder)

    def evaluate(self) -> Evaluation:
        """The trained model on the held-out prompts, anew."""
        if self.evaluator is None:
            raise InputError("this run has no held-out prompts: give eval.data, or enough prompts to hold some out.")
        return self.evaluator.run()


def train(config: Config, echo: Echo = print) -> Run:
    """Train to the end, or continue a run (`resume`)."""
    with Stopping().listening() as stopping:
        return _train(config, echo, stopping)


def _train(config: Config, echo: Echo, stopping: Stopping) -> Run:
    start = time.perf_counter()
    folder_path, resumed = run_path(config)
    ready = sized(assemble(config), stored_tokens(folder_path) if resumed else None)
    check_disk(ready, folder_path)
    try:
        folder = RunFolder.open(folder_path, to_yaml(ready.config), resumed, environment(ready))
    except OSError as error:
        raise as_disk_error(error, folder_path, "") from error
    watchdog = Watchdog(folder.path / STACKS, config.watchdog, lambda text: _note(text, echo, folder))
    console = Console(echo, folder.log, watchdog.beat)
    if ready.scorer is not None:
        ready.scorer.listen(console.warn, folder.log, watchdog.beat, folder.path)
    try:
        with folder, watchdog.watching():
            return _run(ready, folder, resumed, console, start, stopping)
    except KeyboardInterrupt:
        console.say(f"stopped; {how_to_go_on(folder)}")
        raise
    except OSError as error:
        raise as_disk_error(error, folder.path, how_to_go_on(folder)) from error
    except InputError:
        if not resumed and not RunFolder.read_metrics(folder.path):
            console.say(f"no step was done: {near(folder.path)} is taken away again")
            shutil.rmtree(folder.path)
        else:
            console.say(how_to_go_on(folder).replace("to go on", "to go on when this is repaired"))
        raise
    finally:
        if ready.scorer is not None:
            ready.scorer.close()
        console.quiet_stage()  # or an interrupted run leaves the terminal without a cursor


def _note(text: str, echo: Echo, folder: RunFolder) -> None:
    """From the watchdog's thread: the console's live line belongs to the main one."""
    folder.log(text)
    if echo is not None:
        echo(text)


def how_to_go_on(folder: RunFolder) -> str:
    return f"to go on: hotcold train resume={near(folder.path)}   ({saved(folder)})"


def as_disk_error(error: OSError, folder: Path, then: str) -> OSError:
    """A fault of the disk under a run says what can be done about it; any other error stays what it is."""
    if error.errno not in FAULTS:
        return error
    what = str(error.filename or folder)
    return DiskError(error.errno, f"{os.strerror(error.errno)} ({near(what)}). Repair it or make room. {then}".strip())


def saved(folder: RunFolder) -> str:
    """From where a stopped run will go on."""
    checkpoint, _ = newest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        return "no step is saved yet: it begins again"
    return f"from step {int(checkpoint.name.removeprefix('step_'))}, the last one saved"


def _run(ready: Assembled, folder: RunFolder, resumed: bool, console: Console, start: float, stopping: Stopping) -> Run:
    attempt = Attempt(ready, folder, console, stopping)
    progress = Progress(algorithm=ready.algorithm.state())
    if resumed:
        progress = attempt.resume()
        folder.write_config(to_yaml(ready.config))
    attempt.announce(progress)
    first = progress.step + 1
    progress, evaluation = attempt.loop().run(progress)
    model_dir = attempt.finish(progress, evaluation)
    after = evaluation.summary() if evaluation else {}
    _say_result(console, first, model_dir, progress, evaluation, time.perf_counter() - start)
    return Run(folder.path, model_dir, progress.before, after, evaluation, ready.evaluator)


def run_path(config: Config) -> tuple[Path, bool]:
    """Where the run is kept, and whether it continues one."""
    if config.resume not in ("no", "auto"):
        check_run_folder(config.resume)
        return Path(config.resume).absolute(), True
    name = config.run or default_run_name(algorithm_name(config), config.model)
    path = (Path(name) if "/" in name else Path("runs") / name).absolute()  # a reward may change the current folder
    return path, config.resume == "auto" and (path / "config.yaml").is_file()


def stored_tokens(folder: Path) -> int | None:
    """tokens_per_microbatch of the run that is continued; measured anew it might be another, and so the last bits."""
    given = read_recipe(str(folder / "config.yaml")).get("tokens_per_microbatch")
    return None if given is None else given.value


def environment(ready: Assembled) -> dict[str, Any]:
    """What env.json says beside versions and hardware."""
    return {
        "model_folder": ready.model.source,
        "model_sha256": ready.model.sha256,
        "data_sha256": ready.data_fingerprint,
        **({"sandbox": level} if (level := sandbox_level(ready.config)) else {}),
        "reference_sha256": None if ready.models.reference is None else ready.models.reference.sha256,
    }


def dry_run(config: Config) -> str:
    """The decided config with reasons, the first prompt as the model sees it, the batch in words, the expected time."""
    folder, resumed = run_path(config)
    ready = sized(assemble(config), stored_tokens(folder) if resumed else None)
    parts = [describe(ready.config), "", arithmetic(ready), *filter(None, [what_models(ready)])]
    if isinstance(ready.train, EncodedPrompts):
        prompt: Prompt = ready.train.prompts[0]
        shown = render_prompt(ready.model.tokenizer, prompt.content, config.data.chat)
        parts += ["", f"first prompt, {len(ready.train.ids[0])} tokens:", shown]
        parts += ["", expected_time(ready)]
    elif ready.train is not None:
        parts += ["", *first_row(ready.model.tokenizer, ready.train.rows[0])]
    return "\n".join([*parts, *(f"note: {note}" for note in ready.notes)])


def first_row(tokenizer: Any, row: Rollout) -> list[str]:
    """A demonstration as the model sees it, special tokens visible, and what of it is trained."""
    mask = row.response_mask or (True,) * len(row.response_ids)
    trained = [token for token, is_trained in zip(row.response_ids, mask, strict=True) if is_trained]

    def text(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    whole = (*row.prompt_ids, *row.response_ids)
    return [f"first row, {len(whole)} tokens:", text(whole), f"trained, {len(trained)} tokens:", text(trained)]


def expected_time(ready: Assembled) -> str:
    """From the machine's matrix rate, measured now: an order of magnitude, for responses of full length."""
    config, group = ready.config, ready.algorithm.plan.group_size if ready.algorithm.plan else 1
    assert isinstance(ready.train, EncodedPrompts) and config.max_tokens is not None
    rate = matrix_rate(ready.config.device)
    size = ready.model.module.num_parameters()
    prompt = sum(map(len, ready.train.ids)) / len(ready.train.ids)
    sampled = config.prompts_per_step * (prompt + group * config.max_tokens)
    trained = config.prompts_per_step * group * (prompt + config.max_tokens)
    # forward and backward of each trained model; one forward of each for what is read before the update
    passes = 3 * sum(objective.epochs for objective in ready.algorithm.objectives)
    passes += len(ready.algorithm.reads & READ_BY_ENGINE)
    step = 2 * size * (2 * sampled + passes * trained) / rate  # decoding runs at about half the matrix rate
    held = ready.held_out.ids if ready.held_out else []
    evaluation = 2 * size * 2 * sum(len(i) + (1 + config.eval.samples) * config.max_tokens for i in held) / rate
    count = 2 + (config.steps // config.eval.every if config.eval.every else 0)
    return (
        f"expected, if every response is {config.max_tokens} tokens long: about {duration(step)} a step, "
        f"{duration(evaluation)} an evaluation, {duration(step * config.steps + evaluation * count)} in all"
        f"{', less if stop_at is reached' if config.stop_at is not None else ''} (matrix rate {rate / 1e9:.0f} GFLOP/s)"
    )


def matrix_rate(device: str, size: int = 1024, tries: int = 3, dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations per second of a product of two square matrices, the best of `tries`."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    out, best = torch.empty_like(a), 0.0
    for _ in range(1 + tries):
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        out[0, 0].item()  # waits for a GPU
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """`hotcold eval`: scores with intervals of any model on any prompts."""
    device = pick_device(config.device)
    scorer = make_scorer(config)
    prompts = load_prompts(config.data)[: config.prompts]
    check_columns(scorer, prompts, config.data.path)
    model, config = _load_for(config, device)
    notes = sandbox_notes(config)
    encoded = encode(prompts, model, config, notes)
    assert scorer is not None
    options = sampling_options(config, EVAL_STREAM)
    evaluator = make_evaluator(encoded, make_sampler(model), scorer, options, config.samples)
    console = Console(_to_stderr)
    for note in notes:
        console.warn(note)
    scorer.listen(console.warn, _to_stderr)
    evaluation = evaluator.run(console.stage)
    scorer.close()
    console.quiet_stage()
    return {"model": config.model, "model_sha256": model.sha256, **evaluation.summary()}


def sample(config: SampleConfig) -> Iterator[dict[str, Any]]:
    """`hotcold sample`: responses to one prompt or to every prompt of a file."""
    model, config = _load_for(config, pick_device(config.device))
    prompts = [Prompt(0, config.prompt, {})] if config.prompt is not None else load_prompts(config.data)
    notes: list[str] = []
    encoded = encode(prompts, model, config, notes)
    for note in notes:
        _to_stderr(f"note: {note}")
    options = sampling_options(config.model_copy(update={"temperature": config.temperature or 1.0}), SAMPLE_STREAM)
    sampler = make_sampler(model)
    for draw, (prompt, ids) in enumerate(zip(encoded.prompts, encoded.ids, strict=True)):
        requests = [Request(ids, draw, number) for number in range(config.n)]
        greedy = config.temperature == 0
        for response in sampler.sample(requests, replace(options, greedy=greedy)):
            yield {
                "prompt": as_text(prompt.content),
                "response": response.text,
                "finish_reason": response.finish_reason,
                "num_tokens": len(response.ids),
                "logp": sum(response.logp),
            }


def _load_for(config: Any, device: str) -> tuple[LoadedModel, Any]:
    set_threads(config.threads)
    if config.max_tokens is None:
        tokens = 128 if device == "cpu" else 512
        config = decided(config, {"max_tokens": (tokens, "default on this device")})
    return load_model(config.model, device), config


def _to_stderr(text: str) -> None:
    """Standard output holds the results alone."""
    print(text, file=sys.stderr)


def _say_result(
    console: Console, first: int, model_dir: Path, progress: Progress, evaluation: Evaluation | None, took: float
) -> None:
    if progress.step >= first:
        console.say(f"steps {first} to {progress.step} in {duration(took)}")
    if evaluation is not None and progress.before.get("eval/greedy") is not None:
        console.say(f"held-out greedy: {interval_text(progress.before)} before, {evaluation.greedy} after")
    if evaluation is not None and evaluation.loss is not None and "eval/loss" in progress.before:
        before = progress.before["eval/loss"]
        console.say(f"held-out loss: {before:.4f} nats per token before, {evaluation.loss:.4f} after")
    console.say(f"model: {near(model_dir)}  (transformers and vLLM load this folder)")
