"""What each verb does, from a configuration to its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hotcold.assemble import (
    EVAL_STREAM,
    SAMPLE_STREAM,
    Assembled,
    assemble,
    check_columns,
    encode,
    load_prompts,
    make_scorer,
    pick_device,
    sampling_options,
)
from hotcold.chat import render_prompt
from hotcold.checkpoint import newest_checkpoint, prune, read_state, read_tensors, write_checkpoint
from hotcold.config.schema import Config, EvalConfig, SampleConfig, decided
from hotcold.config.show import describe, resolved, to_yaml
from hotcold.engines.local import LocalEngine
from hotcold.errors import InputError
from hotcold.models.loading import LoadedModel, export_model, load_model
from hotcold.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors
from hotcold.prompts import Prompt
from hotcold.runs import RunFolder, default_run_name
from hotcold.sampling.base import Request
from hotcold.sampling.transformers_engine import TransformersSampler
from hotcold.training.collect import as_text
from hotcold.training.console import Console, duration
from hotcold.training.evaluate import Evaluation, Evaluator
from hotcold.training.loop import Loop, LoopSettings, Progress
from hotcold.training.update import UpdateSettings

Echo = Callable[[str], None] | None


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
    start = time.perf_counter()
    folder_path, resumed = run_path(config)
    ready = assemble(config)
    with RunFolder.open(folder_path, to_yaml(ready.config), resumed, environment(ready)) as folder:
        console = Console(echo, folder.log)
        session = _Session(ready, folder, console)
        progress = session.resume() if resumed else Progress(algorithm=ready.algorithm.state())
        session.announce(progress)
        progress, evaluation = session.loop().run(progress)
        model_dir = session.finish(progress, evaluation)
        after = evaluation.summary() if evaluation else {}
        _say_result(console, folder, model_dir, progress, evaluation, time.perf_counter() - start)
        return Run(folder.path, model_dir, progress.before, after, evaluation, ready.evaluator)


def run_path(config: Config) -> tuple[Path, bool]:
    """Where the run is kept, and whether it continues one."""
    if config.resume not in ("no", "auto"):
        path = Path(config.resume)
        if not (path / "config.yaml").is_file():
            raise InputError(f"resume={config.resume} is no run folder: it has no config.yaml.")
        return path, True
    name = config.run or default_run_name(_algorithm_name(config), config.model)
    path = Path(name) if "/" in name else Path("runs") / name
    return path, config.resume == "auto" and (path / "config.yaml").is_file()


def environment(ready: Assembled) -> dict[str, Any]:
    """What env.json says beside versions and hardware."""
    return {
        "model_folder": ready.model.source,
        "model_sha256": ready.model.sha256,
        "data_sha256": ready.data_fingerprint,
    }


class _Session:
    """One attempt of a run: the parts that the loop needs, and what is saved."""

    def __init__(self, ready: Assembled, folder: RunFolder, console: Console):
        self.ready, self.folder, self.console = ready, folder, console
        config, module = ready.config, ready.model.module
        assert config.learning_rate is not None
        self.named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.optimizer = make_optimizer(config.optimizer, self.named, config.learning_rate)
        restart = any(objective.restart for objective in ready.algorithm.objectives)
        self.engine = LocalEngine(module, self.optimizer, config.temperature, remember_start=restart)

    def announce(self, progress: Progress) -> None:
        self.console.say(f"run folder: {self.folder.path}")
        for note in self.ready.notes:
            self.console.warn(note)
        if progress.step:
            self.console.say(f"continuing after step {progress.step}")
        self.console.say(arithmetic(self.ready))

    def loop(self) -> Loop:
        config = self.ready.config
        norm = None if isinstance(config.max_grad_norm, str) else config.max_grad_norm
        assert config.learning_rate is not None and config.tokens_per_microbatch is not None
        settings = LoopSettings(
            steps=config.steps,
            learning_rate=config.learning_rate,
            warmup_steps=config.warmup_steps,
            update=UpdateSettings(config.tokens_per_microbatch, norm, config.seed),
            save_every=config.save_every,
            eval_every=config.eval.every,
            stop_at=config.stop_at,
        )
        return Loop(
            algorithm=self.ready.algorithm,
            engine=self.engine,
            source=self.ready.source,
            evaluator=self.ready.evaluator,
            record=self.folder,
            settings=settings,
            console=self.console,
            refresh=self.ready.sampler.refresh,
            save=self.save,
            reward_names=self.ready.reward_names,
        )

    def save(self, progress: Progress) -> None:
        target = self.folder.checkpoints / f"step_{progress.step:06d}"
        state = {
            "progress": asdict(progress),
            "base_sha256": self.ready.model.sha256,
            "data_sha256": self.ready.data_fingerprint,
            "identity": identity(self.ready.config),
        }
        tensors = {"optimizer": optimizer_tensors(self.optimizer, self.named)}
        write_checkpoint(target, self._export, tensors, state)
        best = set() if progress.best_step is None else {f"step_{progress.best_step:06d}"}
        prune(self.folder.checkpoints, self.ready.config.keep_checkpoints, best)

    def resume(self) -> Progress:
        """State of the newest whole checkpoint; a run without one starts again."""
        checkpoint, skipped = newest_checkpoint(self.folder.checkpoints)
        for name, reason in skipped:
            self.console.warn(f"checkpoint {name} is not whole ({reason}) and was skipped")
        if checkpoint is None:
            return Progress(algorithm=self.ready.algorithm.state())
        state = read_state(checkpoint)
        check_same_run(state, self.ready)
        saved = load_model(str(checkpoint), self.ready.config.device)
        self.ready.model.module.load_state_dict(saved.module.state_dict())
        load_optimizer_tensors(self.optimizer, self.named, read_tensors(checkpoint, "optimizer"))
        return Progress(**state["progress"])

    def finish(self, progress: Progress, evaluation: Evaluation | None) -> Path:
        model_dir = self.folder.write_model(self._export)
        self.folder.write_card(card(self.ready, progress, evaluation))
        return model_dir

    def _export(self, folder: Path) -> None:
        model = self.ready.model
        export_model(model.module, model.tokenizer, folder, model.eos_ids)


def card(ready: Assembled, progress: Progress, evaluation: Evaluation | None) -> str:
    """The model card: what was trained on what, how good it is, how to load it."""
    config = ready.config
    after = evaluation.summary() if evaluation else {}
    results = [
        f"| {when} | {s['eval/greedy']:.3f} | {s['eval/greedy_low']:.3f} to {s['eval/greedy_high']:.3f} |"
        for when, s in (("before", progress.before), ("after", after))
        if s.get("eval/greedy") is not None
    ]
    table = ["", "| held-out greedy score | mean | 95 % interval |", "|---|---|---|", *results] if results else []
    return "\n".join(
        [
            f"# {Path(config.model).name} trained with {_algorithm_name(config)}",
            "",
            f"- base model: `{config.model}`, SHA-256 of its weights `{ready.model.sha256}`; its licence applies",
            f"- prompts: `{resolved(config)['data']['path'] or config.sampler}` (SHA-256 `{ready.data_fingerprint}`)",
            f"- score: {', '.join(ready.reward_names) or 'as recorded'}",
            f"- {progress.step} steps, learning rate {config.learning_rate}, seed {config.seed}; all keys: config.yaml",
            *table,
            "",
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
            "```",
            "",
        ]
    )


IDENTITY = ("algorithm", "seed", "prompts_per_step", "temperature", "max_tokens", "optimizer", "learning_rate", "stop")


def identity(config: Config) -> dict[str, Any]:
    """The keys that make two runs different runs."""
    values = resolved(config)
    own = config.algorithm_options if isinstance(config.algorithm, str) else {}
    return {**{key: values[key] for key in IDENTITY}, **{key: str(value) for key, value in own.items()}}


def check_same_run(state: dict[str, Any], ready: Assembled) -> None:
    """A run continues with the data and the algorithm that it began with."""
    now = identity(ready.config)
    changed = [
        f"{key}: {state['identity'].get(key)} then, {now.get(key)} now"
        for key in sorted({*state["identity"], *now})
        if state["identity"].get(key) != now.get(key)
    ]
    if state["base_sha256"] != ready.model.sha256:
        changed.append("the starting model's weights are not the same")
    if state["data_sha256"] != ready.data_fingerprint:
        changed.append("the training prompts are not the same")
    if changed:
        raise InputError("this run cannot be continued with other settings:\n" + "\n".join(changed[:3]))


def arithmetic(ready: Assembled) -> str:
    """The batch in words."""
    config, plan = ready.config, ready.algorithm.plan
    if config.replay_file:
        return f"replaying {config.replay_file}, {config.steps} steps; nothing is sampled"
    assert plan is not None and ready.train is not None
    rows = config.prompts_per_step * plan.group_size
    steps = max(objective.epochs * objective.minibatches for objective in ready.algorithm.objectives)
    held = len(ready.held_out.prompts) if ready.held_out else 0
    updates = "1 optimiser step" if steps == 1 else f"{steps} optimiser steps"
    return (
        f"{config.steps} steps of {config.prompts_per_step} prompts x {plan.group_size} responses = {rows} responses "
        f"of at most {config.max_tokens} tokens, {updates} each; {len(ready.train.prompts)} training prompts "
        f"({config.steps * config.prompts_per_step / len(ready.train.prompts):.1f} passes), {held} held out"
    )


def dry_run(config: Config) -> str:
    """The decided config with reasons, the first prompt as the model sees it, the batch in words, the expected time."""
    ready = assemble(config)
    parts = [describe(ready.config), "", arithmetic(ready)]
    if ready.train is not None:
        prompt: Prompt = ready.train.prompts[0]
        shown = render_prompt(ready.model.tokenizer, prompt.content, config.data.chat)
        parts += ["", f"first prompt, {len(ready.train.ids[0])} tokens:", shown]
        parts += ["", expected_time(ready)]
    return "\n".join([*parts, *(f"note: {note}" for note in ready.notes)])


def expected_time(ready: Assembled) -> str:
    """From the machine's matrix rate, measured now: an order of magnitude, for responses of full length."""
    config, group = ready.config, ready.algorithm.plan.group_size if ready.algorithm.plan else 1
    assert ready.train is not None and config.max_tokens is not None
    rate = matrix_rate(ready.config.device)
    size = ready.model.module.num_parameters()
    prompt = sum(map(len, ready.train.ids)) / len(ready.train.ids)
    sampled = config.prompts_per_step * (prompt + group * config.max_tokens)
    trained = config.prompts_per_step * group * (prompt + config.max_tokens)
    epochs = max(objective.epochs for objective in ready.algorithm.objectives)
    step = 2 * size * (2 * sampled + 3 * epochs * trained) / rate  # decoding runs at about half the matrix rate
    held = ready.held_out.ids if ready.held_out else []
    evaluation = 2 * size * 2 * sum(len(i) + (1 + config.eval.samples) * config.max_tokens for i in held) / rate
    count = 2 + (config.steps // config.eval.every if config.eval.every else 0)
    return (
        f"expected, if every response is {config.max_tokens} tokens long: about {duration(step)} a step, "
        f"{duration(evaluation)} an evaluation, {duration(step * config.steps + evaluation * count)} in all "
        f"(matrix rate {rate / 1e9:.0f} GFLOP/s)"
    )


def matrix_rate(device: str) -> float:
    """Floating-point operations per second of a 1024 x 1024 float32 product, the best of three."""
    a = torch.randn(1024, 1024, device=device)
    best = 0.0
    for _ in range(4):
        start = time.perf_counter()
        (a @ a).sum().item()
        best = max(best, 2 * 1024**3 / (time.perf_counter() - start))
    return best


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """`hotcold eval`: scores with intervals of any model on any prompts."""
    device = pick_device(config.device)
    scorer = make_scorer(config.reward, config.reward_weights)
    prompts = load_prompts(config.data)[: config.prompts]
    check_columns(scorer, prompts)
    model, config = _load_for(config, device)
    notes: list[str] = []
    encoded = encode(prompts, model, config, notes)
    assert scorer is not None
    options = sampling_options(config, EVAL_STREAM)
    evaluator = Evaluator(encoded.prompts, encoded.ids, _sampler(model), scorer, options, config.samples)
    console = Console(print)
    for note in notes:
        console.warn(note)
    evaluation = evaluator.run(console.stage)
    console.quiet_stage()
    return {"model": config.model, "model_sha256": model.sha256, **evaluation.summary()}


def sample(config: SampleConfig) -> Iterator[dict[str, Any]]:
    """`hotcold sample`: responses to one prompt or to every prompt of a file."""
    model, config = _load_for(config, pick_device(config.device))
    prompts = [Prompt(0, config.prompt, {})] if config.prompt is not None else load_prompts(config.data)
    encoded = encode(prompts, model, config, [])
    options = sampling_options(config.model_copy(update={"temperature": config.temperature or 1.0}), SAMPLE_STREAM)
    sampler = _sampler(model)
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
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.max_tokens is None:
        tokens = 128 if device == "cpu" else 512
        config = decided(config, {"max_tokens": (tokens, "default on this device")})
    return load_model(config.model, device), config


def _sampler(model: LoadedModel) -> TransformersSampler:
    return TransformersSampler(model.module, model.tokenizer, model.eos_ids, model.context_length, pad_id=model.pad_id)


def _algorithm_name(config: Config) -> str:
    return config.algorithm if isinstance(config.algorithm, str) else type(config.algorithm).__name__


def _say_result(
    console: Console, folder: RunFolder, model_dir: Path, progress: Progress, evaluation: Evaluation | None, took: float
) -> None:
    console.say(f"{progress.step} steps in {duration(took)}")
    if evaluation is not None and progress.before.get("eval/greedy") is not None:
        b = progress.before
        console.say(
            f"held-out greedy: {b['eval/greedy']:.3f} (95 % interval {b['eval/greedy_low']:.3f} to "
            f"{b['eval/greedy_high']:.3f}) before, {evaluation.greedy} after"
        )
    console.say(f"model: {model_dir}  (transformers and vLLM load this folder)")
