"""One attempt of a training run: the parts that the loop needs, and what is saved."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotcold.assemble import Assembled, algorithm_name
from hotcold.batch import Batch
from hotcold.checkpoint import (
    file_sha256,
    newest_checkpoint,
    prune,
    read_tensors,
    tensors_sha256,
    write_checkpoint,
    write_folder,
)
from hotcold.config.show import resolved
from hotcold.engines.local import LocalEngine, Trainee
from hotcold.errors import InputError
from hotcold.intake import EncodedPrompts
from hotcold.memory import PeakMemory
from hotcold.models.adapters import adapter_tensors, load_adapter_tensors, save_adapter
from hotcold.models.critic import save_critic
from hotcold.models.loading import export_model, load_model
from hotcold.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors
from hotcold.runs import RESULT, RunFolder
from hotcold.same_run import check_same_run, checked_state, identity
from hotcold.stopping import Stopping
from hotcold.training.console import Console, near
from hotcold.training.dataset import EncodedDemonstrations, held_out_loss
from hotcold.training.evaluate import Evaluates, Evaluation, WithLoss, interval_text
from hotcold.training.loop import Loop, LoopSettings, Progress
from hotcold.training.update import UpdateSettings


class Attempt:
    """One attempt of a run: the parts that the loop needs, and what is saved."""

    def __init__(self, ready: Assembled, folder: RunFolder, console: Console, stopping: Stopping):
        self.ready, self.folder, self.console, self.stopping = ready, folder, console, stopping
        self.saved: Progress | None = None  # what the checkpoint says that this attempt began with
        config, models = ready.config, ready.models
        assert config.learning_rate is not None
        restarted = {objective.model for objective in ready.algorithm.objectives if objective.restart}
        modules = {"policy": models.policy.module, **({} if models.critic is None else {"critic": models.critic})}
        self.named = {
            name: [(n, p) for n, p in module.named_parameters() if p.requires_grad] for name, module in modules.items()
        }
        self.optimizers = {
            name: make_optimizer(config.optimizer, named, config.learning_rate) for name, named in self.named.items()
        }
        trainees = {
            name: Trainee(module, self.optimizers[name], remember_start=name in restarted)
            for name, module in modules.items()
        }
        recompute = config.gradient_checkpointing
        self.engine = LocalEngine(
            trainees, config.temperature, models.reference, models.compute, recompute, models.reading
        )

    def announce(self, progress: Progress) -> None:
        self.console.say(f"run folder: {near(self.folder.path)}")
        for note in self.ready.notes:
            self.console.warn(note)
        if progress.tokens_per_microbatch is not None:
            self.console.say(f"tokens_per_microbatch={progress.tokens_per_microbatch}, since memory did not suffice")
        self.console.say(arithmetic(self.ready))
        if models := what_models(self.ready):
            self.console.say(models)
        config = self.ready.config
        if progress.step == config.steps:
            self.console.say(f"all {progress.step} steps are done; steps=N with a larger N goes on")
        elif config.stop_at is not None and (progress.greedy or 0.0) >= config.stop_at:
            self.console.say(f"ended at step {progress.step}, where stop_at was reached; stop_at=off goes on")
        elif progress.step:
            self.console.say(f"continuing after step {progress.step}")

    def loop(self) -> Loop:
        config = self.ready.config
        assert config.learning_rate is not None and config.tokens_per_microbatch is not None
        norms = {"policy": _norm(config.max_grad_norm), "critic": _norm(config.critic.max_grad_norm)}
        rates = {"policy": config.learning_rate, "critic": config.critic.learning_rate or 0.0}
        settings = LoopSettings(
            steps=config.steps,
            learning_rate=rates,
            warmup_steps=config.warmup_steps,
            update=UpdateSettings(
                config.tokens_per_microbatch,
                norms,
                config.seed,
                self.ready.mismatch,
                self.ready.laying,
            ),
            save_every=config.save_every,
            eval_every=config.eval.every,
            truncation=self.ready.truncation,
            stop_at=config.stop_at,
        )
        return Loop(
            algorithm=self.ready.algorithm,
            engine=self.engine,
            source=self.ready.source,
            evaluator=self._evaluator(config.tokens_per_microbatch),
            record=self.folder,
            settings=settings,
            console=self.console,
            refresh=self.ready.sampler.refresh,
            save=self.save,
            reward_names=self.ready.reward_names,
            key_of_rollouts=self._key_of_rollouts if isinstance(self.ready.train, EncodedPrompts) else None,
            stopping=self.stopping,
            saved=self.saved,
            memory=PeakMemory(config.device),
        )

    def _key_of_rollouts(self, progress: Progress) -> str:
        """Of all that decides the next step's rows: a run is a function only if its rewards are."""
        ready = self.ready
        content = {
            "parameters": tensors_sha256(dict(self.named["policy"])),
            "base": ready.model.sha256,
            "data": ready.data_fingerprint,
            "identity": identity(ready.config),
            "rewards": [_content(reward) for reward in ready.config.reward],
            "position": progress.position,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _evaluator(self, tokens_per_microbatch: int) -> Evaluates | None:
        watched = self.ready.watched
        if watched is None:
            return self.ready.evaluator

        def logp(batch: Batch) -> Tensor:
            return self.engine.read(batch, frozenset({"logp_old"}))["logp_old"]

        return WithLoss(self.ready.evaluator, lambda: held_out_loss(logp, watched.rows, tokens_per_microbatch))

    def save(self, progress: Progress) -> None:
        target = self.folder.checkpoints / f"step_{progress.step:06d}"
        reference = self.ready.models.reference
        state = {
            "progress": asdict(progress),
            "base_sha256": self.ready.model.sha256,
            "reference_sha256": None if reference is None else reference.sha256,
            "data_sha256": self.ready.data_fingerprint,
            "identity": identity(self.ready.config),
            "tokens_per_microbatch": self.ready.config.tokens_per_microbatch,  # as configured
        }
        write_checkpoint(target, self._export_checkpoint, self._tensors(), state)
        best = set() if progress.best_step is None else {f"step_{progress.best_step:06d}"}
        prune(self.folder.checkpoints, self.ready.config.keep_checkpoints, best)

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """What the trainer needs beside the policy's folder. The policy's optimiser is called `optimizer`."""
        out = {
            OPTIMIZER_FILE[name]: optimizer_tensors(optimizer, self.named[name])
            for name, optimizer in self.optimizers.items()
        }
        if "critic" in self.named:
            out["critic"] = {n: p.detach().cpu().contiguous() for n, p in self.named["critic"]}
        if self.ready.models.trains_adapter:
            out["adapter"] = adapter_tensors(self.ready.model.module)
        return out

    def resume(self) -> Progress:
        """State of the newest whole checkpoint; a run without one starts again."""
        checkpoint, skipped = newest_checkpoint(self.folder.checkpoints)
        for name, reason in skipped:
            self.console.warn(f"checkpoint {name} is not whole ({reason}) and was skipped")
        if checkpoint is None:
            return Progress(algorithm=self.ready.algorithm.state())
        state, progress = checked_state(checkpoint)
        check_same_run(state, self.ready)
        self._load_parameters(checkpoint)
        for name, optimizer in self.optimizers.items():
            load_optimizer_tensors(optimizer, self.named[name], read_tensors(checkpoint, OPTIMIZER_FILE[name]))
        self.saved = progress
        if state.get("tokens_per_microbatch") != self.ready.config.tokens_per_microbatch:
            progress = replace(progress, tokens_per_microbatch=None)  # somebody has given another number since
        if progress.step > self.ready.config.steps:
            raise InputError(
                f"{near(self.folder.path)} has done {progress.step} steps already, "
                f"steps={self.ready.config.steps} is fewer: give at least as many."
            )
        return progress

    def _load_parameters(self, checkpoint: Path) -> None:
        module = self.ready.model.module
        if self.ready.models.trains_adapter:
            load_adapter_tensors(module, read_tensors(checkpoint, "adapter"))
        else:
            saved = load_model(str(checkpoint), self.ready.config.device)
            module.load_state_dict(saved.module.state_dict())
        if "critic" in self.named:
            tensors = read_tensors(checkpoint, "critic")
            with torch.no_grad():
                for name, parameter in self.named["critic"]:
                    parameter.copy_(tensors[name])

    def finish(self, progress: Progress, evaluation: Evaluation | None) -> Path:
        model_dir = self.folder.write_model(self._export)
        if self.ready.models.trains_adapter:
            write_folder(self.folder.path / "adapter", self._export_adapter)
        if (critic := self.ready.models.critic) is not None:
            write_folder(self.folder.path / "critic", lambda folder: save_critic(critic, folder))
        self.folder.write_card(card(self.ready, progress, evaluation))
        result = self._result(progress)
        self.folder.write_result(result)
        self.console.say(
            f"SHA-256 of the trained parameters {result['parameters_sha256'][:16]}, "
            f"of the optimiser {result['optimizer_sha256'][:16]} (whole: {near(self.folder.path / RESULT)})"
        )
        return model_dir

    def _result(self, progress: Progress) -> dict[str, Any]:
        """What two runs must share to be the same run."""
        return {
            "step": progress.step,
            "parameters_sha256": tensors_sha256(dict(self.named["policy"])),
            **({"critic_sha256": tensors_sha256(dict(self.named["critic"]))} if "critic" in self.named else {}),
            **{
                f"{OPTIMIZER_FILE[name]}_sha256": tensors_sha256(optimizer_tensors(optimizer, self.named[name]))
                for name, optimizer in self.optimizers.items()
            },
            "algorithm": progress.algorithm,
            "position": progress.position,
        }

    def _export(self, folder: Path) -> None:
        """The whole model; an adapter is merged into what is written."""
        model = self.ready.model
        export_model(model.module, model.tokenizer, folder, model.eos_ids)

    def _export_checkpoint(self, folder: Path) -> None:
        if self.ready.models.trains_adapter:
            self._export_adapter(folder)
        else:
            self._export(folder)

    def _export_adapter(self, folder: Path) -> None:
        """In PEFT's format; the base model is named, not copied."""
        model = self.ready.model
        save_adapter(model.module, folder, model.source)
        model.tokenizer.save_pretrained(folder)


OPTIMIZER_FILE = {"policy": "optimizer", "critic": "critic_optimizer"}


def _content(reward: Any) -> str:
    """Of a score in a file: what the file says now. Somebody may stop a run to mend it."""
    head, is_python, _ = str(reward).partition(".py")
    path = Path(head + is_python).expanduser()
    return file_sha256(path) if is_python and path.is_file() else ""


def _norm(value: float | str | None) -> float | None:
    return None if isinstance(value, str) else value


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
    steps = max(objective.epochs * objective.minibatches for objective in ready.algorithm.objectives)
    updates = "1 optimiser step" if steps == 1 else f"{steps} optimiser steps"
    if isinstance(ready.train, EncodedDemonstrations):
        what, num, held = "rows", len(ready.train.rows), len(ready.watched.rows) if ready.watched else 0
        batch = f"{config.prompts_per_step} rows"
    else:
        assert plan is not None and ready.train is not None
        what, num, held = "prompts", len(ready.train.prompts), len(ready.held_out.prompts) if ready.held_out else 0
        batch = (
            f"{config.prompts_per_step} prompts x {plan.group_size} responses = "
            f"{config.prompts_per_step * plan.group_size} responses of at most {config.max_tokens} tokens"
        )
    passes = config.steps * config.prompts_per_step / num
    return (
        f"{config.steps} steps of {batch}, {updates} each; {num} training {what} ({passes:.1f} passes), {held} held out"
    )


def what_models(ready: Assembled) -> str:
    """Which models are held beside the policy, and what is trained of it."""
    models, parts = ready.models, []
    if models.trains_adapter:
        num = sum(p.numel() for p in models.policy.module.parameters() if p.requires_grad)
        parts.append(f"an adapter of {num / 1e6:.2f} M parameters is trained, the model itself is frozen")
    if models.reference is not None:
        where = ready.config.reference or "the starting model"
        parts.append(f"the reference is {where} (SHA-256 {models.reference.sha256[:12]})")
    if models.critic is not None:
        parts.append(f"the critic starts as {ready.config.critic.init or 'a copy of the policy'}")
    return "; ".join(parts)
