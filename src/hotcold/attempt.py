"""One attempt of a training run: the parts that the loop needs, and what is saved."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hotcold.assemble import Assembled
from hotcold.checkpoint import newest_checkpoint, prune, read_state, read_tensors, write_checkpoint
from hotcold.config.schema import Config
from hotcold.config.show import flat_values, resolved
from hotcold.engines.local import LocalEngine
from hotcold.errors import InputError
from hotcold.models.loading import export_model, load_model
from hotcold.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors
from hotcold.runs import RunFolder
from hotcold.training.console import Console, near
from hotcold.training.evaluate import Evaluation, interval_text
from hotcold.training.loop import Loop, LoopSettings, Progress
from hotcold.training.update import UpdateSettings


class Attempt:
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
        self.console.say(f"run folder: {near(self.folder.path)}")
        for note in self.ready.notes:
            self.console.warn(note)
        self.console.say(arithmetic(self.ready))
        config = self.ready.config
        if progress.step == config.steps:
            self.console.say(f"all {progress.step} steps are done; steps=N with a larger N goes on")
        elif config.stop_at is not None and (progress.greedy or 0.0) >= config.stop_at:
            self.console.say(f"ended at step {progress.step}, where stop_at was reached; stop_at=off goes on")
        elif progress.step:
            self.console.say(f"continuing after step {progress.step}")

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
        progress = Progress(**state["progress"])
        if progress.step > self.ready.config.steps:
            raise InputError(
                f"{near(self.folder.path)} has done {progress.step} steps already, "
                f"steps={self.ready.config.steps} is fewer: give at least as many."
            )
        return progress

    def finish(self, progress: Progress, evaluation: Evaluation | None) -> Path:
        model_dir = self.folder.write_model(self._export)
        self.folder.write_card(card(self.ready, progress, evaluation))
        return model_dir

    def _export(self, folder: Path) -> None:
        model = self.ready.model
        export_model(model.module, model.tokenizer, folder, model.eos_ids)


FREE = {  # keys that a continued run may change; model and data are compared by their hashes
    *("model", "data.path", "run", "resume", "steps", "stop_at", "save_every", "keep_checkpoints", "device", "threads"),
    *("eval.data", "eval.every", "eval.samples", "eval.prompts", "tokens_per_microbatch"),
}


def identity(config: Config) -> dict[str, str]:
    """The keys that make two runs different runs, as text."""
    values = {key: value for key, value in flat_values(config).items() if key not in FREE}
    return {key: _as_text(value) for key, value in values.items()}


def _as_text(value: Any) -> str:
    """A value that is the same text in another process: objects by their class and what they hold."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_as_text, value)) + "]"
    if isinstance(value, partial):
        return f"{_as_text(value.func)}({value.args}, {value.keywords})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)
    if name := getattr(value, "__qualname__", None):
        return str(name)
    held = getattr(value, "__dict__", {})
    return f"{type(value).__qualname__}({', '.join(f'{k}={_as_text(v)}' for k, v in sorted(held.items()))})"


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


def card(ready: Assembled, progress: Progress, evaluation: Evaluation | None) -> str:
    """The model card: what was trained on what, how good it is, how to load it."""
    config = ready.config
    after = evaluation.summary() if evaluation else {}
    results = [
        f"| {when} | {interval_text(s)} |"
        for when, s in (("before", progress.before), ("after", after))
        if s.get("eval/greedy") is not None
    ]
    table = ["", "| | held-out greedy score |", "|---|---|", *results] if results else []
    return "\n".join(
        [
            f"# {Path(config.model).name} trained with {algorithm_name(config)}",
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


def algorithm_name(config: Config) -> str:
    return config.algorithm if isinstance(config.algorithm, str) else type(config.algorithm).__name__
