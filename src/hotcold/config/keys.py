"""The keys a user may write: one table for --help, the docs and "did you mean". No torch, no pydantic."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hotcold.algorithms.presets import PRESETS
from hotcold.config.foreign import find_foreign, translation
from hotcold.errors import InputError, NotAvailableError, did_you_mean


@dataclass(frozen=True)
class Key:
    name: str
    default: str  # as shown
    meaning: str


MODEL = Key("model", "-", "a Hugging Face folder, a hub name, a .gguf file, or smollm2")
DATA = (
    Key("data", "-", "prompts: .jsonl .json .parquet .csv, FILE.py:FUNCTION, a reasoning-gym task (long: data.path)"),
    Key("data.prompt", "found by habit", "column of the prompt: text or messages"),
    Key("data.split", "-", "part of a named data set"),
    Key("data.chat", "auto", "true wraps text in the chat template, false never does (short: chat)"),
    Key("data.too_long", "error", "a prompt that leaves no room in the context: error or drop"),
)
REWARD = (
    Key("reward", "-", "FILE.py:NAME, FILE.py (its function `reward` or its only one), or a list"),
    Key("reward_weights", "1 each", "one number for each reward"),
    Key("reward_dialect", "auto", "how rewards of yours are called: auto, plain, trl, verl, openrlhf, verifiers"),
    Key("sandbox.require", "any", "reward=code: the weakest sandbox it may run in: any, landlock, namespaces, strong"),
)
WORKERS = (
    Key("reward_workers", "auto: 1", "processes for rewards in files; 0: they run in this one, and a failure stops it"),
    Key("reward_timeout", "60.0", "seconds for one response; for a function that takes all at once, for its call"),
    Key("reward_retries", "1", "times that a response whose reward failed is tried again"),
    Key("reward_on_error", "drop", "then: drop (no score, it leaves its group), stop (the run), or a number as score"),
    Key("reward_max_failures", "0.5", "share of a step's responses without a score, above which the run stops"),
    Key("reward_memory", "auto: half of what is free", "GB that a worker may take"),
    Key("reward_env", "-", "names of variables of the environment that rewards may see, as in [API_KEY]"),
)
SEED = Key("seed", "0", "fixes every random number; another kind of CPU or GPU rounds differently")
DEVICE = (
    Key("device", "auto", "auto, cpu, cuda, cuda:1, mps"),
    Key("threads", "auto", "CPU threads of torch"),
)
MAX_TOKENS = Key("max_tokens", "auto: 512, 128 on a CPU", "longest response, in tokens")
STOP = Key("stop", "-", "a text or a list of texts that end a response; sampled ids are kept, the text is cut")
TRUNCATING = (
    Key("top_p", "1.0", "sample from the likeliest tokens that hold this much probability"),
    Key("top_k", "0", "sample from this many likeliest tokens; 0 is all"),
    Key("min_p", "0.0", "sample from tokens at least this likely, relative to the likeliest"),
)

TRAIN_KEYS: dict[str, tuple[Key, ...]] = {
    "What": (
        Key("algorithm", "-", f"{', '.join(PRESETS)}, or FILE.py:CLASS; written first without `algorithm=`"),
        MODEL,
        *DATA,
        Key("data.response", "found by habit", "sft: column of the response, as text; messages may hold it themselves"),
        Key("data.train_on", "assistant", "sft: assistant (the responses), or all tokens"),
        *REWARD,
        Key("reference", "the starting model", "beta above 0: the frozen model that the policy is kept near"),
    ),
    "Rewards in files": WORKERS,
    "How much": (
        Key("steps", "100", "batches of prompts; each is sampled, scored and learnt from"),
        Key("prompts_per_step", "16", "prompts in a batch; the batch has prompts_per_step x group_size responses"),
        Key("group_size", "8", "responses to each prompt"),
        Key("epochs_per_batch", "1", "passes over a batch's responses"),
        Key("minibatches", "1", "optimiser steps in a pass; divides the number of responses"),
        Key("stop_at", "off", "end when greedy held-out accuracy reaches this (0 to 1)"),
    ),
    "Optimiser": (
        Key(
            "learning_rate",
            "auto: 1e-5 below 0.5 B parameters, 1e-6 above, 1e-4 for LoRA",
            "0 or more; at 0 nothing is learnt",
        ),
        Key("warmup_steps", "3", "steps over which the rate rises; then it is constant"),
        Key("max_grad_norm", "auto: 1.0, none where weighting is sum_per_response", "clip the gradient; none is off"),
        Key("optimizer", "adamw", "adamw, or sgd: a plain step without warm-up, clip or decay"),
    ),
    "Sampling": (
        Key("temperature", "1.0", "above 0; log-probabilities are taken at this temperature too"),
        MAX_TOKENS,
        STOP,
        Key("top_p", "1.0", "only 1.0 in training; eval and sample take others"),
        Key("top_k", "0", "only 0 in training; eval and sample take others"),
        Key("min_p", "0.0", "only 0 in training; eval and sample take others"),
        Key(
            "truncated",
            "keep",
            "a response cut at max_tokens: keep counts it like any other, mask leaves it out of the loss, "
            "penalty takes reward off near the limit (dapo: penalty)",
        ),
        Key("overlong.buffer", "auto: a fifth of max_tokens", "truncated=penalty: last tokens, over which it grows"),
        Key("overlong.penalty", "1.0", "truncated=penalty: reward that a response of max_tokens loses"),
        Key("sampler", "transformers", "transformers, or replay:FILE.parquet to train on given ids and rewards"),
        Key(
            "mismatch",
            "off",
            "weights against a sampler that differs from the policy: off, truncate, mask (long: mismatch.mode)",
        ),
        Key("mismatch.level", "token", "token, sequence (their product), geometric (their mean)"),
        Key("mismatch.cap", "2.0", "mismatch=truncate: largest weight"),
        Key("mismatch.low", "0.5", "mismatch=mask: a smaller weight becomes 0"),
        Key("mismatch.high", "5.0", "mismatch=mask: a larger weight becomes 0"),
    ),
    "Algorithm": (
        Key("baseline", "by algorithm", "none (reinforce_pp), batch_mean (reinforce), leave_one_out, greedy"),
        Key(
            "scale_by_std",
            "by algorithm",
            "divide advantages by the group's standard deviation (dr_grpo: false)",
        ),
        Key("whiten", "by algorithm", "centre and scale advantages over the step (ppo, reinforce_pp: true)"),
        Key(
            "objective",
            "by algorithm",
            "policy_gradient, importance_weighted, clipped_surrogate, sequence_clipped_surrogate (gspo), "
            "truncated_is_policy_gradient (cispo)",
        ),
        Key(
            "weighting",
            "by algorithm",
            "sum_per_response, mean_per_response, mean_per_token, fixed_length (or fixed_length:128)",
        ),
        Key("clip_low", "by algorithm", "the ratio is kept above 1 - clip_low (0.2)"),
        Key("clip_high", "by algorithm", "the ratio is kept below 1 + clip_high (0.2; dapo: 0.28)"),
        Key("dual_clip", "off", "above 1: a bad token costs at most dual_clip times its advantage; 3 is usual"),
        Key("gamma", "1.0", "discount per token (reinforce, rloo, ppo)"),
        Key("lam", "1.0 (ppo)", "GAE: 1 weighs the score fully at every token, less trusts the critic"),
        Key("value_clip", "off", "ppo: no gain from moving a value further than this within a step"),
        Key("critic.lam", "off", "ppo: lam of the returns that the critic learns; off: lam"),
        Key("critic.warmup", "0", "ppo: first steps, in which the critic alone is trained"),
        Key("entropy_bonus", "0.0", "reward per nat of entropy, in the loss"),
        Key("max_approx_kl", "off", "end the passes over a batch once the policy moved so far (nats per token)"),
        Key("beta", "0.0", "strength of the leash to the reference, reward per nat of KL; 0 loads no reference"),
        Key("kl.placement", "by algorithm", "with beta: reward, loss, loss_times_ratio"),
        Key("kl.estimator", "by algorithm", "with beta: k1, k2, k3, exact (the whole vocabulary)"),
        Key("kl.target", "off", "with beta: nats per response that beta is moved towards; off: beta is fixed"),
        Key("kl.horizon", "10000.0", "with kl.target: responses over which beta is moved"),
        Key("drop_zero_variance", "by algorithm", "leave out groups whose scores are all equal (dapo: true)"),
        Key("refill", "by algorithm", "times that new prompts replace the groups left out (dapo: 3)"),
        Key("keep_rule", "threshold (expert_iteration)", "threshold, best_of_group, top_fraction"),
        Key("threshold", "1.0", "keep_rule=threshold: least score that is kept"),
        Key("fraction", "0.25", "keep_rule=top_fraction: share of a step's responses that is kept"),
        Key(
            "start_from", "current (expert_iteration)", "current, or starting: train the starting model anew each step"
        ),
    ),
    "Critic and adapters": (
        Key("critic.init", "a copy of the policy", "ppo: folder, hub name or reward model whose trunk the critic gets"),
        Key("critic.learning_rate", "auto: ten times the policy's", "ppo: 0 or more"),
        Key("critic.max_grad_norm", "auto: 1.0", "ppo: clip the critic's gradient; none is off"),
        Key("lora.rank", "0", "train adapters of this rank and leave the model as it is; 0: train the model"),
        Key("lora.alpha", "auto: 2 x lora.rank", "the adapter's output is multiplied by alpha / rank"),
        Key("lora.targets", "auto: every linear layer", "a list of layer names, as in [q_proj, v_proj]"),
        Key(
            "lora.critic", "auto: as the policy", "ppo: true, the critic gets adapters too; false, it is trained whole"
        ),
    ),
    "Evaluation": (
        Key("eval.data", "5 % of the prompts, held out", "a file like data; equal prompts stay on one side"),
        Key("eval.every", "20", "steps between evaluations; 0: only before and after"),
        Key("eval.samples", "1", "sampled responses per prompt beside the greedy one; 0 is greedy only"),
        Key("eval.prompts", "200", "at most this many held-out prompts"),
    ),
    "Machine": (
        Key(
            "tokens_per_microbatch",
            "auto: as max_memory allows",
            "tokens in one forward and backward; does not change the gradient",
        ),
        Key(
            "max_memory",
            "auto: 80 % of what is free at the start",
            "GB that an update may take, the models included (on a GPU: of tensors); tokens_per_microbatch follows",
        ),
        Key("dtype", "auto: fp32 on a CPU, bf16 on a GPU", "fp32 or bf16, of the computation; parameters are fp32"),
        Key("gradient_checkpointing", "false", "compute activations again in the backward pass: less memory, slower"),
        *DEVICE,
    ),
    "Record": (
        Key("run", "by name and time", "name of the folder under runs/, or a path"),
        Key("resume", "no", "no; auto: continue `run` if it exists, else start; or a run folder"),
        Key("save_every", "20", "steps between checkpoints; 0 is only the last"),
        Key("keep_checkpoints", "2", "newest checkpoints that are kept, beside the best"),
        Key("allow_changed", "-", "with resume: a key or a list of keys that may differ from what the run began with"),
        Key("watchdog", "900", "seconds without any progress, after which stacks.txt says where; 0 is off"),
        SEED,
    ),
}

EVAL_KEYS: dict[str, tuple[Key, ...]] = {
    "What": (MODEL, *DATA, *REWARD),
    "Rewards in files": WORKERS,
    "How": (
        Key("samples", "1", "sampled responses per prompt beside the greedy one; 0 is greedy only"),
        Key("prompts", "all", "at most this many prompts"),
        Key("temperature", "1.0", "of the sampled responses, above 0"),
        MAX_TOKENS,
        STOP,
        *TRUNCATING,
        SEED,
        *DEVICE,
    ),
}

SAMPLE_KEYS: dict[str, tuple[Key, ...]] = {
    "What": (
        MODEL,
        Key("prompt", "-", "one prompt, as text"),
        *DATA,
    ),
    "How": (
        Key("n", "1", "responses to each prompt"),
        Key("temperature", "1.0", "0 is greedy: the likeliest token each time"),
        MAX_TOKENS,
        STOP,
        *TRUNCATING,
        SEED,
        *DEVICE,
    ),
}

ALGORITHM_KEYS = frozenset(
    {"group_size", "epochs_per_batch", "minibatches", *(key.name for key in TRAIN_KEYS["Algorithm"])}
)

SHORT = {"data": "data.path", "chat": "data.chat", "mismatch": "mismatch.mode"}  # for the whole name

LATER_KEYS = frozenset({"tracker", "max_staleness"})  # of the design; a later version builds them

GROUP_HINTS = {
    "kl": " beta says how strong it is.",
    "critic": " The algorithm ppo has one.",
    "lora": " lora.rank=16 turns it on.",
    "overlong": " truncated=penalty turns it on.",
}


def all_names(groups: dict[str, tuple[Key, ...]]) -> list[str]:
    """The keys as shown, `data` for data.path."""
    return [key.name for keys in groups.values() for key in keys]


def check_no_group(options: Collection[str], keys: Collection[str]) -> None:
    """An own algorithm may have keys of any name but that of a group: `kl` beside `kl.placement` fits no recipe."""
    for key in options:
        parts = [*(name for name in keys if name.startswith(f"{key}.")), *group_parts(key, all_names(TRAIN_KEYS))]
        if parts:
            raise InputError(f"{key} is a group of keys: write one of {', '.join(dict.fromkeys(parts))}.")


def group_parts(key: str, known: Collection[str]) -> list[str]:
    return [name for name in known if name.startswith(f"{key}.")]


def unknown_keys_error(unknown: dict[str, str], known: Collection[str]) -> InputError:
    """One error for all keys that mean nothing here. `unknown` maps each to where it was written, as a prefix."""
    lines = [f"{where}{_explain(key, known)}" for key, where in unknown.items()]
    if len(lines) > 5:
        lines = [*lines[:4], f"... and {len(lines) - 4} more."]
    kind = NotAvailableError if all(key in LATER_KEYS for key in unknown) else InputError
    return kind("\n".join(lines))


def _explain(key: str, known: Collection[str]) -> str:
    if key in LATER_KEYS:
        return f"{key} is not available yet; leave it out."
    if parts := group_parts(key, known):
        return f"{key} is a group of keys: write one of {', '.join(parts)}.{GROUP_HINTS.get(key, '')}"
    if key == "batch_size":
        return (
            "batch_size is not a key, no batch size counts responses here: prompts_per_step is prompts in a step, "
            "group_size responses to each, tokens_per_microbatch what is computed at once."
        )
    if row := find_foreign(key):
        return translation(key, row)
    hint = did_you_mean(key.replace("-", "_"), list(known)) or " `hotcold VERB --help` lists the keys."
    return f"unknown key {key!r}.{hint}"
