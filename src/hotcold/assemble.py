"""From a configuration to the objects that run: everything is loaded and checked here, and nothing is written."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotcold.algorithms.base import Algorithm
from hotcold.algorithms.build import build_algorithm, resolved_values
from hotcold.algorithms.checks import check_algorithm
from hotcold.algorithms.presets import PRESETS
from hotcold.algorithms.rehearsal import rehearse
from hotcold.batch import Rollout, collate
from hotcold.chat import encode_prompt, fit_prompts, has_template
from hotcold.config.schema import Config, DataSettings, Settings, decided
from hotcold.equations import sum_per_response
from hotcold.errors import InputError
from hotcold.models.loading import LoadedModel, load_model
from hotcold.prompts import Prompt, PromptOrder, distinct, fingerprint, hold_out, make_prompts, read_rows
from hotcold.rewards.functions import check_columns_of_rows, load_reward
from hotcold.rewards.scorer import FunctionScorer
from hotcold.sampling.base import SamplingOptions
from hotcold.sampling.replay import ReplayRollouts
from hotcold.sampling.transformers_engine import TransformersSampler
from hotcold.training.collect import PromptedRollouts, ReplayedRollouts, RolloutSource, kept
from hotcold.training.evaluate import Evaluator

TRAIN_STREAM, EVAL_STREAM, SAMPLE_STREAM = 0, 1, 2
SMALL = 500_000_000  # parameters; below it the higher rate is right


@dataclass(frozen=True)
class EncodedPrompts:
    prompts: Sequence[Prompt]
    ids: Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Assembled:
    """A training run that could start."""

    config: Config  # every key decided
    model: LoadedModel
    algorithm: Algorithm
    source: RolloutSource
    train: EncodedPrompts | None  # None: rows are replayed
    held_out: EncodedPrompts | None
    evaluator: Evaluator | None
    sampler: TransformersSampler
    reward_names: tuple[str, ...]
    data_fingerprint: str
    notes: tuple[str, ...]


def assemble(config: Config) -> Assembled:
    set_threads(config.threads)
    device = pick_device(config.device)
    scorer = make_scorer(config.reward, config.reward_weights)
    replay = ReplayRollouts(config.replay_file) if config.replay_file else None
    if replay is not None and config.reasons.get("steps", "default").startswith("default"):
        config = decided(config, {"steps": (len(replay.steps), "as many as the file has")})
    prompts = None if config.data.path is None else load_prompts(config.data)
    apart = (
        None if config.eval.data is None else load_prompts(config.data.model_copy(update={"path": config.eval.data}))
    )
    check_columns(scorer, prompts, config.data.path)
    check_columns(scorer, apart, config.eval.data)
    model = load_model(config.model, device)
    notes = list(model.notes)
    algorithm, config = decide(config, model, device)
    train, held_out = split(config, prompts if replay is None else None, apart, notes)
    sampler = TransformersSampler(
        model.module, model.tokenizer, model.eos_ids, model.context_length, pad_id=model.pad_id
    )
    encoded = None if train is None else encode(train, model, config, notes)
    held = None if not held_out or scorer is None else encode(held_out, model, config, notes)
    options = sampling_options(config, TRAIN_STREAM)
    source: RolloutSource
    if replay is not None:
        notes += [*check_replay(replay, model, config, algorithm), *without_effect(config)]
        source, data_fingerprint = ReplayedRollouts(replay.rollouts), config.sampler
    else:
        assert encoded is not None and scorer is not None
        order = PromptOrder(len(encoded.prompts), config.seed)
        source = PromptedRollouts(
            encoded.prompts, encoded.ids, order, sampler, scorer, options, config.prompts_per_step
        )
        data_fingerprint = fingerprint(encoded.prompts)
    evaluator = None
    if held is not None and scorer is not None:
        evaluator = make_evaluator(held, sampler, scorer, sampling_options(config, EVAL_STREAM), config.eval.samples)
    names = () if scorer is None else tuple(scorer.names)
    return Assembled(
        config, model, algorithm, source, encoded, held, evaluator, sampler, names, data_fingerprint, tuple(notes)
    )


def decide(config: Config, model: LoadedModel, device: str) -> tuple[Algorithm, Config]:
    """The algorithm, and the config with every automatic key settled, each with its reason."""
    on_cpu = device == "cpu"
    choices: dict[str, tuple[Any, str]] = {"device": (device, config.reasons.get("device", "default"))}
    if config.max_tokens is None:
        choices["max_tokens"] = (128, "default on a CPU") if on_cpu else (512, "default on a GPU")
    max_tokens = config.max_tokens or choices["max_tokens"][0]
    algorithm = _algorithm(config, max_tokens, choices)
    check_algorithm(algorithm, None if config.replay_file else config.prompts_per_step)
    rehearse(algorithm)
    check_start(algorithm, config.steps)
    if config.learning_rate is None:
        small = model.module.num_parameters() < SMALL
        choices["learning_rate"] = (
            (1e-5, "default below 0.5 B parameters") if small else (1e-6, "default from 0.5 B parameters")
        )
    if config.max_grad_norm is None:
        sums = all(objective.weighting is sum_per_response for objective in algorithm.objectives)
        choices["max_grad_norm"] = (
            ("none", "none where the weighting is sum_per_response") if sums else (1.0, "default for this weighting")
        )
    if config.tokens_per_microbatch is None:
        choices["tokens_per_microbatch"] = (2048, "fixed for a CPU") if on_cpu else (8192, "fixed for a GPU")
    return algorithm, decided(config, choices)


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
        for field in dataclasses.fields(algorithm):
            value = getattr(algorithm, field.name)
            if field.name not in options and isinstance(value, (bool, int, float, str)):
                choices[field.name] = (value, f"default of {type(algorithm).__name__}")
    return algorithm


def set_threads(count: int | None) -> None:
    cores = os.cpu_count() or 1
    if count is not None and count > 4 * cores:
        raise InputError(f"threads={count}, but this machine has {cores} cores: use at most that many.")
    if count is not None:
        torch.set_num_threads(count)


def check_start(algorithm: Algorithm, steps: int) -> None:
    first = min(objective.start for objective in algorithm.objectives)
    if first >= steps:
        raise InputError(f"steps={steps}, but nothing is trained in the first {first}: use more steps.")


def pick_device(name: str) -> str:
    """`auto` is the first GPU, else the CPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device={name}: torch sees no CUDA device on this machine. Use device=cpu.")
    if name == "mps" and not torch.backends.mps.is_available():
        raise InputError("device=mps: torch sees no such device on this machine. Use device=cpu.")
    return name


def make_scorer(rewards: Sequence[Any], weights: Sequence[float] | None) -> FunctionScorer | None:
    if not rewards:
        return None
    return FunctionScorer([load_reward(reward) for reward in rewards], list(weights or [1.0] * len(rewards)))


def check_columns(scorer: FunctionScorer | None, prompts: Sequence[Prompt] | None, source: Any) -> None:
    """Every reward's arguments must exist as columns of every row, known before anything is sampled."""
    name = source if isinstance(source, str) else "the data"
    for function in scorer.functions if scorer and prompts else ():
        check_columns_of_rows(function, prompts or (), name)


def load_prompts(data: DataSettings) -> list[Prompt]:
    rows = data.path
    if callable(rows):
        rows = rows()
    if isinstance(rows, str):
        rows = read_rows(rows, data.split)
    return make_prompts(rows, data.prompt)


def split(
    config: Config, prompts: list[Prompt] | None, apart: list[Prompt] | None, notes: list[str]
) -> tuple[list[Prompt] | None, list[Prompt]]:
    """Prompts to train on and prompts held out."""
    if prompts is None:
        return None, distinct(apart or [])[: config.eval.prompts]
    if apart is not None:
        apart = distinct(apart)
        seen = {as_key(prompt) for prompt in apart}
        train = [prompt for prompt in prompts if as_key(prompt) not in seen]
        if len(train) < len(prompts):
            notes.append(f"{len(prompts) - len(train)} training prompts stand in eval.data too and were left out")
        if not train:
            raise InputError("every training prompt stands in eval.data too: nothing is left to train on.")
        return train, apart[: config.eval.prompts]
    train, held_out = hold_out(prompts, seed=config.seed)
    if not held_out:
        notes.append("too few different prompts to hold any out: there is no evaluation (give eval.data)")
    return train, held_out[: config.eval.prompts]


def as_key(prompt: Prompt) -> str:
    return repr(prompt.content)


def encode(prompts: Sequence[Prompt], model: LoadedModel, settings: Settings, notes: list[str]) -> EncodedPrompts:
    """Token ids of every prompt; those that leave no room for a response are refused or dropped."""
    chat = settings.data.chat
    ids = [encode_prompt(model.tokenizer, p.content, chat, where=f"row {p.index}") for p in prompts]
    if chat is None and any(isinstance(p.content, str) for p in prompts) and has_template(model.tokenizer):
        notes.append("prompts are plain text and the model has a chat template: chat=true wraps them in it")
    if model.context_length is None:
        return EncodedPrompts(prompts, ids)
    fitting = fit_prompts(ids, model.context_length - 1, settings.data.too_long, rows=[p.index for p in prompts])
    if dropped := len(prompts) - len(fitting):
        notes.append(
            f"{dropped} prompts leave no room in the context of {model.context_length} tokens and were dropped"
        )
    return EncodedPrompts([prompts[i] for i in fitting], [ids[i] for i in fitting])


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


SAMPLED_ONLY = ("prompts_per_step", "group_size", "stop", "data.path", "data.prompt", "data.split", "data.too_long")


def without_effect(config: Config) -> list[str]:
    """Keys that somebody gave and that replayed rows make void."""
    given = [key for key in SAMPLED_ONLY if not config.reasons.get(key, "default").startswith(("default", "preset"))]
    return [f"{', '.join(given)}: without effect, since the rows are replayed"] if given else []


def check_replay(replay: ReplayRollouts, model: LoadedModel, config: Config, algorithm: Algorithm) -> list[str]:
    """Recorded rows must fit the model and the algorithm; more steps than there are is an error at the start.

    Returns notes on steps that can train nothing: a step is then skipped and counted, as in every run.
    """
    if config.steps > len(replay.steps):
        raise InputError(
            f"steps={config.steps}, but {config.replay_file} has {len(replay.steps)} steps: "
            f"use steps={len(replay.steps)}."
        )
    vocabulary = model.module.get_input_embeddings().num_embeddings
    notes = []
    for number in range(1, config.steps + 1):
        notes += _check_step(f"{config.replay_file}, step {number}", replay.rollouts(number), algorithm)
        for row, rollout in enumerate(replay.rollouts(number)):
            _check_row(f"{config.replay_file}, step {number}, row {row}", rollout, vocabulary, model.context_length)
    return notes


def _check_step(where: str, rollouts: list[Rollout], algorithm: Algorithm) -> list[str]:
    name = type(algorithm).__name__
    if "greedy_rewards" in algorithm.reads and all(r.greedy_reward is None for r in rollouts):
        raise InputError(f"{where}: {name} compares with the greedy response, and no row has a greedy_reward.")
    batch = collate(rollouts)
    num_kept = int((kept(batch, algorithm) & batch.response_mask.any(1)).sum())
    for objective in algorithm.objectives:
        if 0 < num_kept < objective.minibatches:
            raise InputError(
                f"{where}: {num_kept} rows to train on are fewer than minibatches={objective.minibatches}."
            )
    if num_kept:
        return []
    return [
        f"{where}: {name} can train on none of the {len(rollouts)} rows, so nothing is learnt in it. Do the rows "
        "of a prompt share a group, do they have scores, and tokens that were chosen?"
    ]


def _check_row(where: str, rollout: Rollout, vocabulary: int, context_length: int | None) -> None:
    ids = (*rollout.prompt_ids, *rollout.response_ids)
    if ids and max(ids) >= vocabulary:
        raise InputError(f"{where}: token id {max(ids)}, but the model has {vocabulary} tokens.")
    if context_length is not None and len(ids) > context_length:
        raise InputError(f"{where}: {len(ids)} tokens, but the model's context is {context_length}.")
    mask = rollout.response_mask or (True,) * len(rollout.response_ids)
    if not rollout.prompt_ids and mask and mask[0]:
        raise InputError(f"{where}: no token before the first response token: nothing says how likely it was.")
