"""What a run learns from and is measured on: prompts, demonstrations, or recorded rows, read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotcold.algorithms.base import Algorithm
from hotcold.batch import Rollout
from hotcold.chat import encode_prompt, fit_prompts, has_template
from hotcold.config.schema import Config, DataSettings, Settings
from hotcold.errors import InputError
from hotcold.models.loading import LoadedModel
from hotcold.prompts import (
    Demonstration,
    Prompt,
    apart_from,
    distinct,
    distinct_demonstrations,
    fingerprint,
    fingerprint_demonstrations,
    hold_out,
    hold_out_demonstrations,
    make_demonstrations,
    make_prompts,
    read_rows,
)
from hotcold.rewards.form import Format
from hotcold.rewards.functions import check_columns_of_rows, load_reward
from hotcold.rewards.scorer import FunctionScorer
from hotcold.sampling.replay import ReplayRollouts
from hotcold.training.collect import kept, step_batch
from hotcold.training.dataset import EncodedDemonstrations, encode_demonstrations
from hotcold.training.truncation import Truncation

END = 16  # tokens in which a tag may stand


@dataclass(frozen=True)
class EncodedPrompts:
    prompts: Sequence[Prompt]
    ids: Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Examples:
    """Before the model is known. Either prompts or demonstrations to train on; neither where rows are replayed."""

    prompts: list[Prompt] | None = None
    demonstrations: list[Demonstration] | None = None
    held_out: tuple[Prompt, ...] = ()  # to generate for and score
    held_out_demonstrations: tuple[Demonstration, ...] = ()  # whose log-likelihood is watched
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        if self.demonstrations is not None:
            return fingerprint_demonstrations(self.demonstrations)
        return fingerprint(self.prompts or [])


def read_examples(config: Config, scorer: FunctionScorer | None, imitates: bool, replays: bool) -> Examples:
    """Everything that the data files hold, split into what is trained on and what is kept apart."""
    if imitates and not replays:
        return _demonstrations(config, scorer)
    prompts = None if config.data.path is None else load_prompts(config.data)
    apart = _apart(config)
    check_columns(scorer, prompts, config.data.path)
    check_columns(scorer, apart, config.eval.data)
    return _split_prompts(config, None if replays else prompts, apart)


def _apart(config: Config) -> list[Prompt] | None:
    if config.eval.data is None:
        return None
    return load_prompts(config.data.model_copy(update={"path": config.eval.data}))


def _rows(source: Any, split: str | None) -> Any:
    rows = source() if callable(source) else source
    return read_rows(rows, split) if isinstance(rows, str) else rows


def load_prompts(data: DataSettings) -> list[Prompt]:
    return make_prompts(_rows(data.path, data.split), data.prompt)


def _split_prompts(config: Config, prompts: list[Prompt] | None, apart: list[Prompt] | None) -> Examples:
    most = config.eval.prompts
    if prompts is None:
        return Examples(held_out=tuple(distinct(apart or [])[:most]))
    if apart is not None:
        apart = distinct(apart)
        seen = {as_key(prompt) for prompt in apart}
        train = [prompt for prompt in prompts if as_key(prompt) not in seen]
        return Examples(train, None, tuple(apart[:most]), (), _left_out(len(prompts), len(train), "prompts"))
    train, held_out = hold_out(prompts, seed=config.seed)
    return Examples(train, None, tuple(held_out[:most]), (), () if held_out else (TOO_FEW,))


TOO_FEW = "too few different prompts to hold any out: there is no evaluation (give eval.data)"


def _left_out(num: int, num_left: int, what: str) -> tuple[str, ...]:
    if not num_left:
        raise InputError(f"every training row stands in eval.data too: no {what} are left to train on.")
    return () if num_left == num else (f"{num - num_left} training {what} stand in eval.data too and were left out",)


def as_key(prompt: Prompt) -> str:
    return repr(prompt.content)


def _demonstrations(config: Config, scorer: FunctionScorer | None) -> Examples:
    data, most = config.data, config.eval.prompts
    rows = make_demonstrations(_rows(data.path, data.split), data.prompt, data.response)
    notes: tuple[str, ...] = ()
    watched: list[Demonstration] = []
    if config.eval.data is not None:
        apart = _apart(config) or []
        train = apart_from(rows, apart)
        notes = _left_out(len(rows), len(train), "rows")
        held_out = distinct(apart)
        watched, without = _watched_apart(config, needed=scorer is None)
        notes += without
    else:
        train, watched = hold_out_demonstrations(rows, seed=config.seed)
        notes = () if watched else (TOO_FEW,)
        held_out = [d.prompt for d in watched]
    prompts = tuple(held_out[:most]) if scorer is not None else ()
    check_columns(scorer, prompts, config.eval.data or data.path)
    return Examples(None, train, prompts, tuple(watched[:most]), notes)


def _watched_apart(config: Config, needed: bool) -> tuple[list[Demonstration], tuple[str, ...]]:
    """The demonstrations of eval.data. A file whose prompts are answered and scored may hold prompts alone."""
    data = config.data
    try:
        rows = make_demonstrations(_rows(config.eval.data, data.split), data.prompt, data.response)
    except InputError as error:
        if needed:
            raise
        return [], (f"eval.data holds no demonstrations, so there is no held-out loss: {str(error).splitlines()[0]}",)
    return distinct_demonstrations(rows), ()


def check_columns(scorer: FunctionScorer | None, prompts: Sequence[Prompt] | None, source: Any) -> None:
    """Every reward's arguments must exist as columns of every row, known before anything is sampled."""
    name = source if isinstance(source, str) else "the data"
    for function in scorer.functions if scorer and prompts else ():
        check_columns_of_rows(function, prompts or (), name)


# ---- with the model


def encode(prompts: Sequence[Prompt], model: LoadedModel, settings: Settings, notes: list[str]) -> EncodedPrompts:
    """Token ids of every prompt; those that leave no room for a response are refused or dropped."""
    chat = settings.data.chat
    ids = [encode_prompt(model.tokenizer, p.content, chat, where=f"row {p.index}") for p in prompts]
    if chat is None and any(isinstance(p.content, str) for p in prompts) and has_template(model.tokenizer):
        notes.append("prompts are plain text and the model has a chat template: chat=true wraps them in it")
    notes += [note for note in _misfits(settings, model.tokenizer, ids[0]) if note not in notes]
    if model.context_length is None:
        return EncodedPrompts(prompts, ids)
    fitting = fit_prompts(ids, model.context_length - 1, settings.data.too_long, rows=[p.index for p in prompts])
    if dropped := len(prompts) - len(fitting):
        notes.append(
            f"{dropped} prompts leave no room in the context of {model.context_length} tokens and were dropped"
        )
    return EncodedPrompts([prompts[i] for i in fitting], [ids[i] for i in fitting])


def _misfits(settings: Settings, tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Rewards for format that no response to this prompt could have."""
    specs = [spec for spec in getattr(settings, "reward", ()) if str(spec).partition("?")[0] == "format"]
    formats = [load_reward(spec).function for spec in specs]
    end = tokenizer.decode(list(ids[-END:]), skip_special_tokens=False) if formats else ""
    return [one.misfit(end) for one in formats if isinstance(one, Format) and one.misfit(end)]


def encode_rows(demonstrations: Sequence[Demonstration], model: LoadedModel, config: Config) -> EncodedDemonstrations:
    data = config.data
    return encode_demonstrations(
        model.tokenizer, demonstrations, model.eos_ids, model.context_length, data.chat, data.train_on, data.too_long
    )


# ---- recorded rows

SAMPLED_ONLY = ("prompts_per_step", "group_size", "stop", "data.path", "data.prompt", "data.split", "data.too_long")


def given_keys(config: Settings) -> set[str]:
    """The keys that somebody wrote, on the command line, in a recipe or in Python."""
    return {key for key, reason in config.reasons.items() if reason.startswith(("given", "recipe"))}


def without_effect(config: Config) -> list[str]:
    """Keys that somebody gave and that replayed rows make void."""
    given = [key for key in SAMPLED_ONLY if key in given_keys(config)]
    return [f"{', '.join(given)}: without effect, since the rows are replayed"] if given else []


@dataclass(frozen=True)
class Recorded:
    """Recorded rows for an algorithm: one that imitates takes all of them, with or without a score."""

    replay: ReplayRollouts
    imitates: bool

    def rollouts(self, number: int) -> list[Rollout]:
        rows = self.replay.rollouts(number)
        return [replace(row, demonstration=True) for row in rows] if self.imitates else rows


def check_recorded(
    recorded: Recorded, model: LoadedModel, config: Config, algorithm: Algorithm, truncation: Truncation
) -> list[str]:
    """Recorded rows must fit the model and the algorithm; more steps than there are is an error at the start.

    Returns notes on steps that can train nothing: a step is then skipped and counted, as in every run.
    """
    num_steps = len(recorded.replay.steps)
    if config.steps > num_steps:
        raise InputError(
            f"steps={config.steps}, but {config.replay_file} has {num_steps} steps: use steps={num_steps}."
        )
    vocabulary = model.module.get_input_embeddings().num_embeddings
    notes = []
    for number in range(1, config.steps + 1):
        where, rows = f"{config.replay_file}, step {number}", recorded.rollouts(number)
        notes += _check_step(where, rows, algorithm, truncation)
        for row, rollout in enumerate(rows):
            _check_row(f"{where}, row {row}", rollout, vocabulary, model.context_length)
        if config.mismatch.mode != "off" and any(r.logp_sampler is None for r in rows):
            raise InputError(
                f"{where}: mismatch={config.mismatch.mode} needs the sampler's log-probabilities of every row: "
                "the column logp_sampler. Add it, or leave mismatch out."
            )
    return notes


def _check_step(where: str, rollouts: list[Rollout], algorithm: Algorithm, truncation: Truncation) -> list[str]:
    name = type(algorithm).__name__
    if "greedy_rewards" in algorithm.reads and all(r.greedy_reward is None for r in rollouts):
        raise InputError(f"{where}: {name} compares with the greedy response, and no row has a greedy_reward.")
    batch = step_batch(rollouts, truncation)
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
