"""What can be wrong with a configuration, in words. No file is opened, no torch: values alone."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hotcold.algorithms.presets import PRESETS, Preset
from hotcold.config.keys import WORKERS
from hotcold.errors import InputError, NotAvailableError
from hotcold.rewards.base import is_own, runs_in_worker, runs_programs

if TYPE_CHECKING:
    from hotcold.config.schema import Config, ScoringSettings

# ---- several keys together


def check_rewards(rewards: tuple[Any, ...], weights: tuple[float, ...] | None) -> None:
    if rewards and weights and not any(weights):
        raise InputError("every reward weight is 0: nothing would be learnt. Give at least one another weight.")
    if weights is not None and len(weights) != len(rewards):
        raise InputError(
            f"reward_weights has {len(weights)} numbers, reward has {len(rewards)}: give one for each, in their order."
        )


def missing(key: str) -> InputError:
    what = {
        "model": "model=FOLDER, a hub name, a .gguf file, or model=smollm2",
        "data": "data=prompts.jsonl, a file with a column of prompts",
        "reward": "reward=reward.py, a file with a Python function that scores a response",
        "algorithm": "write it first, as in `hotcold train grpo model=smollm2 data=prompts.jsonl reward=reward.py`",
    }
    return InputError(f"{key} is missing: {what[key]}.")


def check_not_truncating(top_p: float, top_k: int, min_p: float) -> None:
    """Training draws from softmax(logits / temperature) and nothing else."""
    wrong = [f"top_p={top_p}"] if top_p != 1 else []
    wrong += [f"top_k={top_k}"] if top_k != 0 else []
    wrong += [f"min_p={min_p}"] if min_p != 0 else []
    if wrong:
        raise InputError(
            f"{', '.join(wrong)}: not in training. It would sample from another distribution than the one whose\n"
            "gradient is taken, and the estimate would be wrong. Leave it out; temperature makes samples sharper.\n"
            "`hotcold eval` and `hotcold sample` take it."
        )


def check_plain_step(config: Config) -> None:
    if config.optimizer != "sgd":
        return
    wrong = [f"warmup_steps={config.warmup_steps}"] if config.warmup_steps else []
    norms = {"max_grad_norm": config.max_grad_norm, "critic.max_grad_norm": config.critic.max_grad_norm}
    wrong += [f"{key}={norm}" for key, norm in norms.items() if norm != "none"]
    if wrong:
        raise InputError(
            f"{wrong[0]} has no effect with optimizer=sgd, which takes a plain step (no warm-up, no clip). "
            "Leave it out."
        )


def check_record(config: Config) -> None:
    run, resume = config.run, config.resume
    check_name("run", run)
    check_name("resume", resume)
    if resume == "auto" and run is None:
        raise InputError("resume=auto continues the run of that name, and there is no name: add run=NAME.")
    named = run if run is None or "/" in run else os.path.join("runs", run)
    if resume not in ("no", "auto") and named is not None and os.path.abspath(named) != os.path.abspath(resume):
        raise InputError(f"resume={resume} continues in that folder, run={run} names another: leave run out.")
    if config.stop_at is not None and config.eval.every == 0:
        raise InputError("stop_at needs evaluations, and eval.every=0 makes none: set eval.every or leave stop_at out.")
    if config.stop_at is not None and not config.reward:
        raise InputError("stop_at needs evaluations, and without a reward there are none: add reward=FILE.py.")


def check_name(key: str, path: str | None) -> None:
    """A folder could have it: a NUL byte, half of a character, a part of 300 bytes or `..` alone is no name."""
    try:
        parts = [os.fsencode(part) for part in Path(path or "x").parts]
    except UnicodeEncodeError:
        parts = []
    if not parts or path in (".", "..") or any(len(part) > 255 or b"\0" in part for part in parts):
        raise InputError(f"{key}={_shown(path)}: no folder can have this name. Give another one.")


def void_keys(config: Config) -> dict[str, tuple[str, str]]:
    """Keys that the values of others make void, each with the key that does it and what gives it an effect."""
    void: dict[str, tuple[str, str]] = {}
    sampling = samples(config.algorithm)
    if sampling is not None and config.replay_file is None:
        kind = KEYS_OF_IMITATION if sampling else KEYS_OF_SAMPLING
        void |= {key: ("algorithm", needed) for key, needed in kind.items()}
    if _has_critic(config) is False:
        void |= dict.fromkeys(CRITIC_KEYS, ("algorithm", "an algorithm that has a critic (ppo)"))
    if _beta(config) == 0:
        void["reference"] = ("beta", "beta above 0")
    if config.lora.rank == 0:
        void |= dict.fromkeys(("lora.alpha", "lora.targets"), ("lora.rank", "lora.rank above 0"))
    if config.mismatch.mode == "off":
        void["mismatch.level"] = ("mismatch.mode", "mismatch=truncate or mismatch=mask")
    if config.mismatch.mode != "truncate":
        void["mismatch.cap"] = ("mismatch.mode", "mismatch=truncate")
    if config.mismatch.mode != "mask":
        void |= dict.fromkeys(("mismatch.low", "mismatch.high"), ("mismatch.mode", "mismatch=mask"))
    void |= void_worker_keys(config)
    if config.resume == "no":
        void["allow_changed"] = ("resume", "resume=auto or resume=FOLDER")
    if config.truncated != "penalty":
        void |= dict.fromkeys(("overlong.buffer", "overlong.penalty"), ("truncated", "truncated=penalty"))
    return void


def void_worker_keys(config: ScoringSettings) -> dict[str, tuple[str, str]]:
    """Keys about rewards of the user's own, where there are none, and about workers, where there are none."""
    own = ("reward", "a reward of your own (FILE.py:NAME)")
    void = {} if any(map(is_own, config.reward)) else {"reward_dialect": own}
    if not any(map(runs_programs, config.reward)):
        void |= {"sandbox.require": ("reward", "reward=code")}
    return void | _without_workers(config)


def _without_workers(config: ScoringSettings) -> dict[str, tuple[str, str]]:
    if not any(map(runs_in_worker, config.reward)):
        needed = "a reward in a file (FILE.py:NAME)"
        return dict.fromkeys(("reward_workers", *WORKER_KEYS), ("reward", needed))
    if config.reward_workers == 0:
        return dict.fromkeys(WORKER_KEYS, ("reward_workers", "reward_workers above 0"))
    return {}


WORKER_KEYS = tuple(key.name for key in WORKERS if key.name != "reward_workers")
CRITIC_KEYS = ("critic.init", "critic.learning_rate", "critic.max_grad_norm", "lora.critic")


def _has_critic(config: Config) -> bool | None:
    """None: not known before the algorithm is built."""
    preset = preset_of(config.algorithm)
    return None if preset is None else any(key.startswith("critic.") for key in preset.values)


def _beta(config: Config) -> Any:
    preset = preset_of(config.algorithm)
    if preset is None:
        return None
    beta = config.algorithm_options.get("beta")  # null is the preset's
    return preset.values["beta"] if beta is None else beta


def preset_of(algorithm: Any) -> Preset | None:
    return PRESETS.get(algorithm) if isinstance(algorithm, str) else None


def check_void(config: Config) -> None:
    """A recipe's key that the command line makes void is forgotten: `config.yaml truncated=keep` is no error."""
    void = {
        key: needed
        for key, (cause, needed) in void_keys(config).items()
        if not (_said(config, key, "recipe") and _said(config, cause, "given on the command line"))
    }
    check_not_given(config, void)


def _said(config: Config, key: str, by: str) -> bool:
    return config.reasons.get(key, "").startswith(by)


def check_not_given(config: Any, void: Mapping[str, str]) -> None:
    """Raises InputError for a key that somebody gave and that has no effect: {"reference": "beta above 0"}.

    A recipe that states a default contradicts nothing: config.yaml does.
    """
    for key, needed in void.items():
        outer, _, inner = key.partition(".")
        part, name = (getattr(config, outer), inner) if inner else (config, key)
        value = getattr(part, name)
        is_default = value == type(part).model_fields[name].default
        if value is None or name not in part.model_fields_set or (is_default and _said(config, key, "recipe")):
            continue
        if key == "critic.max_grad_norm" and config.optimizer == "sgd":
            continue  # nobody gave it: a plain step is not clipped
        raise InputError(f"{key}={_shown(value)} has no effect: it takes effect with {needed}. Leave it out.")


def check_bounds(config: Config) -> None:
    """Numbers that bound each other."""
    low, high = config.mismatch.low, config.mismatch.high
    if config.mismatch.mode == "mask" and low > high:
        raise InputError(f"mismatch.low={low:g} is above mismatch.high={high:g}: no weight would lie between them.")
    buffer, limit = config.overlong.buffer, config.max_tokens
    if buffer is not None and limit is not None and buffer > limit:
        raise InputError(
            f"overlong.buffer={buffer} tokens are more than max_tokens={limit}: the penalty grows over the last\n"
            "overlong.buffer tokens before max_tokens. Give at most that many, or leave it out for a fifth."
        )


def check_reward_given(config: Config) -> None:
    """For an algorithm that samples: its responses must be scored, unless rows with scores are replayed."""
    if not config.reward and config.replay_file is None:
        raise missing("reward")


def check_sampling_keys(config: Config, samples: bool) -> None:
    """`samples`: the algorithm learns from its own responses, not from those of the data."""
    if config.replay_file is None:
        check_not_given(config, KEYS_OF_IMITATION if samples else KEYS_OF_SAMPLING)


_IMITATION = "an algorithm that imitates the data's responses (sft)"
_SAMPLING = "an algorithm that learns from sampled responses"
KEYS_OF_IMITATION = dict.fromkeys(("data.response", "data.train_on"), _IMITATION)
KEYS_OF_SAMPLING = dict.fromkeys(("truncated", "mismatch.mode"), _SAMPLING)


def samples(algorithm: Any) -> bool | None:
    """Whether the algorithm learns from responses that it samples. None: not known before it is built."""
    preset = preset_of(algorithm)
    return None if preset is None else "group_size" in preset.values


def check_run_folder(folder: str) -> None:
    if not os.path.isfile(os.path.join(folder, "config.yaml")):
        there = os.path.isfile(os.path.join("runs", folder, "config.yaml"))
        hint = f" Did you mean resume=runs/{folder}?" if there else " Give the folder of a run, as in resume=runs/NAME."
        raise InputError(f"resume={folder} is no run folder: it has no config.yaml.{hint}")


def epochs_error(prompts_per_step: Any, source: Any) -> InputError:
    """`epochs` could mean two things."""
    per_step = prompts_per_step if isinstance(prompts_per_step, int) and prompts_per_step > 0 else 16
    rows = _num_rows(source)
    known = f"{source} has {rows} rows: one pass is about {math.ceil(rows / per_step)} steps" if rows else ""
    return InputError(
        "epochs could mean two things. Write one of:\n"
        "epochs_per_batch: passes over each batch of responses, after they are sampled;\n"
        f"steps: for passes over the prompts, steps = passes x prompts / prompts_per_step ({per_step})."
        + (f"\n{known}." if known else "")
    )


def _num_rows(source: Any) -> int | None:
    """Rows of a file of lines, to be helpful; nothing depends on it."""
    if not isinstance(source, str) or Path(source).suffix != ".jsonl" or not Path(source).is_file():
        return None
    with open(source, "rb") as file:
        return sum(1 for line in file if line.strip())


# ---- what pydantic found, in our words

_NEEDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_parsing": lambda ctx: "a whole number is needed",
    "int_type": lambda ctx: "a whole number is needed",
    "int_from_float": lambda ctx: "a whole number is needed",
    "float_parsing": lambda ctx: "a number is needed",
    "float_type": lambda ctx: "a number is needed",
    "finite_number": lambda ctx: "a finite number is needed",
    "bool_parsing": lambda ctx: "true or false is needed",
    "bool_type": lambda ctx: "true or false is needed",
    "string_type": lambda ctx: "text is needed",
    "literal_error": lambda ctx: f"{ctx['expected']} is needed",
    "greater_than": lambda ctx: f"more than {ctx['gt']:g} is needed",
    "greater_than_equal": lambda ctx: f"at least {ctx['ge']:g} is needed",
    "less_than": lambda ctx: f"less than {ctx['lt']} is needed",
    "less_than_equal": lambda ctx: f"at most {ctx['le']:g} is needed",
    "tuple_type": lambda ctx: "a list is needed",
}
_HINTS = {  # for a number that is too small
    "learning_rate": " 1e-5 is usual below 0.5 B parameters, 1e-6 above.",
    "steps": " `hotcold eval` measures a model without training it.",
    "temperature": (
        " At 0 the responses to a prompt are all the same and nothing can be compared; 1.0 is usual."
        " Evaluations measure the greedy response too."
    ),
    "top_k": " 0 is all tokens.",
    "lora.rank": " 0 is off, 16 is usual.",
    "max_tokens": " Leave it out for 512, or 128 on a CPU.",
}


def explain(error: ValidationError, where: Callable[[str], str]) -> InputError:
    """`where` says for a key in which file and line it stands, as a prefix."""
    lines: list[str] = []
    for found in error.errors(include_url=False):
        cause = found.get("ctx", {}).get("error")
        if isinstance(cause, InputError) and not found["loc"]:
            return cause
        key = ".".join(part for part in found["loc"] if isinstance(part, str))
        if found["type"] == "missing":
            return missing(key)
        if isinstance(cause, NotAvailableError):
            return NotAvailableError(f"{where(key)}{cause}")
        context = {"msg": found["msg"], **found.get("ctx", {})}
        need = cause or _NEEDS.get(found["type"], lambda ctx: ctx["msg"])(context)
        hint = _HINTS.get(key, "") if found["type"].startswith("greater_than") else ""
        lines.append(f"{where(key)}{key}={_shown(found['input'])}: {need}.{hint}")
    return InputError("\n".join(lines[:5]))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        value = f"[{', '.join(map(str, value))}]"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
