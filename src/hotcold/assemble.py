"""From a configuration to the objects that run: everything is loaded and checked here, and nothing is written."""

from __future__ import annotations

import dataclasses
import math
import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hotcold.algorithms.base import Algorithm
from hotcold.algorithms.build import build_algorithm
from hotcold.algorithms.checks import check_algorithm
from hotcold.algorithms.options import resolved_values
from hotcold.algorithms.presets import PRESETS
from hotcold.algorithms.rehearsal import rehearse
from hotcold.config.checks import check_reward_given
from hotcold.config.schema import Config, ScoringSettings, decided
from hotcold.equations import sum_per_response
from hotcold.errors import InputError
from hotcold.intake import (
    EncodedPrompts,
    Examples,
    Recorded,
    check_recorded,
    encode,
    encode_rows,
    read_examples,
    without_effect,
)
from hotcold.lineup import Lineup, check_keys_have_effect, has_critic, line_up
from hotcold.models.compute import default_dtype
from hotcold.models.loading import LoadedModel, load_model
from hotcold.models.reading import Laying, laying_of
from hotcold.prompts import PromptOrder
from hotcold.rewards.base import runs_programs
from hotcold.rewards.failures import Limits
from hotcold.rewards.scorer import FunctionScorer, load_scorer
from hotcold.sampling.base import SamplingOptions
from hotcold.sampling.replay import ReplayRollouts
from hotcold.sampling.transformers_engine import TransformersSampler
from hotcold.sandbox.box import check_level
from hotcold.training.collect import PromptedRollouts, ReplayedRollouts, RolloutSource
from hotcold.training.dataset import DatasetRows, EncodedDemonstrations
from hotcold.training.evaluate import Evaluator
from hotcold.training.mismatch import Mismatch
from hotcold.training.truncation import Truncation

TRAIN_STREAM, EVAL_STREAM, SAMPLE_STREAM = 0, 1, 2
SMALL = 500_000_000  # parameters; below it the higher rate is right
CRITIC_RATE = 10.0  # times the policy's
UNMEASURED = "usual; a run that trains measures how many fit"  # of tokens_per_microbatch, until `sizing` has decided


@dataclass(frozen=True)
class Assembled:
    """A training run that could start."""

    config: Config  # every key decided
    models: Lineup
    algorithm: Algorithm
    source: RolloutSource
    train: EncodedPrompts | EncodedDemonstrations | None  # None: rows are replayed
    held_out: EncodedPrompts | None
    watched: EncodedDemonstrations | None  # held-out rows whose log-likelihood is measured
    evaluator: Evaluator | None
    sampler: TransformersSampler
    truncation: Truncation
    mismatch: Mismatch | None
    scorer: FunctionScorer | None
    data_fingerprint: str
    notes: tuple[str, ...]

    @property
    def model(self) -> LoadedModel:
        return self.models.policy

    @property
    def laying(self) -> Laying:
        """How rows go through the policy."""
        return laying_of(self.models.reading, self.config.gradient_checkpointing)

    @property
    def reward_names(self) -> tuple[str, ...]:
        return () if self.scorer is None else self.scorer.names


def assemble(config: Config) -> Assembled:
    set_threads(config.threads)
    device = pick_device(config.device)
    scorer = make_scorer(config)
    replay = ReplayRollouts(config.replay_file) if config.replay_file else None
    if replay is not None and config.reasons.get("steps", "default").startswith("default"):
        config = decided(config, {"steps": (len(replay.steps), "as many as the file has")})
    algorithm, config = decide_algorithm(config, device)
    imitates = algorithm.plan is None
    examples = read_examples(config, scorer, imitates, replays=replay is not None)
    policy = load_model(config.model, device)
    config = decide_rates(config, algorithm, policy)
    models = line_up(config, algorithm, policy)
    notes = [*policy.notes, *models.notes, *examples.notes, *sandbox_notes(config)]
    sampler = make_sampler(policy, models)
    truncation = make_truncation(config)
    held = encode(examples.held_out, policy, config, notes) if examples.held_out and scorer is not None else None
    train: EncodedPrompts | EncodedDemonstrations | None = None
    source: RolloutSource
    if replay is not None:
        recorded = Recorded(replay, imitates)
        notes += [*check_recorded(recorded, policy, config, algorithm, truncation), *without_effect(config)]
        source = ReplayedRollouts(recorded.rollouts)
    elif imitates:
        assert examples.demonstrations is not None
        train = encode_rows(examples.demonstrations, policy, config)
        notes += train.notes
        source = DatasetRows(train.rows, PromptOrder(len(train.rows), config.seed), config.prompts_per_step)
    else:
        assert examples.prompts is not None and scorer is not None
        train = encode(examples.prompts, policy, config, notes)
        order, options = PromptOrder(len(train.prompts), config.seed), sampling_options(config, TRAIN_STREAM)
        source = PromptedRollouts(
            train.prompts, train.ids, order, sampler, scorer, options, config.prompts_per_step, truncation
        )
    evaluator = None
    if held is not None and scorer is not None:
        evaluator = make_evaluator(held, sampler, scorer, sampling_options(config, EVAL_STREAM), config.eval.samples)
    return Assembled(
        config=config,
        models=models,
        algorithm=algorithm,
        source=source,
        train=train,
        held_out=held,
        watched=_watched(examples, policy, config),
        evaluator=evaluator,
        sampler=sampler,
        truncation=truncation,
        mismatch=make_mismatch(config),
        scorer=scorer,
        data_fingerprint=config.sampler if replay is not None else examples.fingerprint,
        notes=tuple(notes),
    )


def _watched(examples: Examples, policy: LoadedModel, config: Config) -> EncodedDemonstrations | None:
    if not examples.held_out_demonstrations:
        return None
    return encode_rows(examples.held_out_demonstrations, policy, config)


def decide_algorithm(config: Config, device: str) -> tuple[Algorithm, Config]:
    """The algorithm, checked, and the config with its values and all that the device decides."""
    on_cpu = device == "cpu"
    choices: dict[str, tuple[Any, str]] = {"device": (device, config.reasons.get("device", "default"))}
    if config.max_tokens is None:
        choices["max_tokens"] = (128, "default on a CPU") if on_cpu else (512, "default on a GPU")
    max_tokens = config.max_tokens or choices["max_tokens"][0]
    algorithm = _algorithm(config, max_tokens, choices)
    check_algorithm(algorithm, None if config.replay_file else config.prompts_per_step)
    rehearse(algorithm)
    check_start(algorithm, config.steps)
    if algorithm.plan is not None:
        check_reward_given(config)
    check_keys_have_effect(config, algorithm)
    if config.dtype is None:
        choices["dtype"] = (default_dtype(device), "default on this device")
    if config.truncated == "penalty" and config.overlong.buffer is None:
        choices["overlong.buffer"] = (max(1, max_tokens // 5), "default: a fifth of max_tokens")
    if config.tokens_per_microbatch is None:
        choices["tokens_per_microbatch"] = (1024 if on_cpu else 8192, UNMEASURED)
    return algorithm, decided(config, choices)


def decide_rates(config: Config, algorithm: Algorithm, policy: LoadedModel) -> Config:
    """Rates and norms, which depend on the model's size, on adapters and on the weighting."""
    choices: dict[str, tuple[Any, str]] = {}
    if config.lora.rank and config.lora.alpha is None:
        choices["lora.alpha"] = (2.0 * config.lora.rank, "default: twice the rank")
    rate = config.learning_rate
    if rate is None:
        rate, why = default_rate(policy, config.lora.rank > 0)
        choices["learning_rate"] = (rate, why)
    if config.max_grad_norm is None:
        sums = all(o.weighting is sum_per_response for o in algorithm.objectives if o.model == "policy")
        choices["max_grad_norm"] = (
            ("none", "none where the weighting is sum_per_response") if sums else (1.0, "default for this weighting")
        )
    if has_critic(algorithm):
        plain = config.optimizer == "sgd"
        if config.critic.learning_rate is None:
            choices["critic.learning_rate"] = (CRITIC_RATE * rate, "default: ten times the policy's")
        if config.critic.max_grad_norm is None:
            choices["critic.max_grad_norm"] = (
                ("none", "optimizer=sgd takes a plain step") if plain else (1.0, "default")
            )
    return decided(config, choices)


def default_rate(policy: LoadedModel, lora: bool) -> tuple[float, str]:
    if lora or policy.adapter is not None:
        return 1e-4, "default for LoRA"
    small = policy.module.num_parameters() < SMALL
    return (1e-5, "default below 0.5 B parameters") if small else (1e-6, "default from 0.5 B parameters")


def _algorithm(config: Config, max_tokens: int, choices: dict[str, tuple[Any, str]]) -> Algorithm:
    if not isinstance(config.algorithm, str):
        return config.algorithm
    options = dict(config.algorithm_options)
    algorithm = build_algorithm(config.algorithm, options, max_tokens)
    if config.algorithm in PRESETS:
        for key, value in resolved_values(config.algorithm, options).items():
            if key not in options:
                choices[key] = (value, f"preset {config.algorithm}")
    elif dataclasses.is_dataclass(algorithm):
        names = {key.replace(".", "_") for key in options}
        for field in dataclasses.fields(algorithm):
            value = getattr(algorithm, field.name)
            if field.name not in names and isinstance(value, (bool, int, float, str)):
                choices[field.name] = (value, f"default of {type(algorithm).__name__}")
    return algorithm


def algorithm_name(config: Config) -> str:
    return config.algorithm if isinstance(config.algorithm, str) else type(config.algorithm).__name__


def set_threads(count: int | None) -> None:
    cores = os.cpu_count() or 1
    if count is not None and count > 4 * cores:
        raise InputError(f"threads={count}, but this machine has {cores} cores: use at most that many.")
    if count is not None:
        torch.set_num_threads(count)


def check_start(algorithm: Algorithm, steps: int) -> None:
    """Every objective must be trained at some step."""
    last = max(algorithm.objectives, key=lambda objective: objective.start)
    if last.start >= steps:
        raise InputError(
            f"steps={steps}, but the {last.model} is not trained in the first {last.start} steps: use more steps, "
            "or a shorter warm-up."
        )


def pick_device(name: str) -> str:
    """`auto` is the first GPU, else the CPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device={name}: torch sees no CUDA device on this machine. Use device=cpu.")
    if name == "mps" and not torch.backends.mps.is_available():
        raise InputError("device=mps: torch sees no such device on this machine. Use device=cpu.")
    return name


def make_scorer(config: ScoringSettings) -> FunctionScorer | None:
    if not config.reward:
        return None
    sandbox_level(config)
    limits = Limits(
        workers=1 if config.reward_workers is None else config.reward_workers,
        timeout=config.reward_timeout,
        retries=config.reward_retries,
        on_error=config.reward_on_error,
        max_failures=config.reward_max_failures,
        memory=config.reward_memory,
        env=config.reward_env,
    )
    weights = config.reward_weights or [1.0] * len(config.reward)
    return load_scorer(config.reward, weights, limits, config.reward_dialect)


def sandbox_level(config: ScoringSettings) -> str | None:
    """How well programs of the model are shut in here; None where none are run. InputError if that is not enough."""
    return check_level(config.sandbox.require) if any(map(runs_programs, config.reward)) else None


def sandbox_notes(config: ScoringSettings) -> list[str]:
    level = sandbox_level(config)
    weaker = "" if level in (None, "strong") else "; docs/rewards.md says what it does not stop"
    return [] if level is None else [f"the model's programs run in a sandbox of level {level}{weaker}"]


def make_sampler(model: LoadedModel, models: Lineup | None = None) -> TransformersSampler:
    """Samples with the arithmetic with which the run computes log-probabilities."""
    return TransformersSampler(
        model.module,
        model.tokenizer,
        model.eos_ids,
        model.context_length,
        pad_id=model.pad_id,
        compute=nullcontext if models is None else models.compute,
    )


def make_truncation(config: Config) -> Truncation:
    assert config.max_tokens is not None
    return Truncation(config.truncated, config.max_tokens, config.overlong.buffer or 1, config.overlong.penalty)


def make_mismatch(config: Config) -> Mismatch | None:
    keys = config.mismatch
    return None if keys.mode == "off" else Mismatch(keys.mode, keys.level, keys.cap, keys.low, keys.high)


def sampling_options(settings: Any, stream: int) -> SamplingOptions:
    return SamplingOptions(
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop=settings.stop,
        seed=settings.seed,
        stream=stream,
    )


def make_evaluator(
    encoded: EncodedPrompts, sampler: TransformersSampler, scorer: FunctionScorer, options: SamplingOptions, n: int
) -> Evaluator:
    """A response counts as correct in pass@k if it earns all that the rewards can give at 1 each."""
    correct = math.fsum(scorer.weights)
    return Evaluator(encoded.prompts, encoded.ids, sampler, scorer, options, num_samples=n, correct=correct)
