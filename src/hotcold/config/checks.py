"""What can be wrong with a configuration, in words. No file is opened, no torch: values alone."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from hotcold.errors import InputError, NotAvailableError

PYTHON = "<from Python: "  # begins the placeholder of an object that no file can hold

# ---- values of one key


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


def word_for_none(*words: str) -> BeforeValidator:
    """`auto` or `off` for None."""
    return BeforeValidator(lambda value: None if isinstance(value, str) and value in words else value)


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _texts(value: Any) -> Any:
    texts = (value,) if isinstance(value, str) else () if value is None else tuple(value)
    if any(not isinstance(text, str) or text == "" for text in texts):
        raise ValueError("one text or a list of texts is needed, none of them empty")
    return texts


def _source(value: Any) -> Any:
    """A path or name as text; rows or a function from Python as they are."""
    if value is None or callable(value):
        return value
    value = _path_text(value)
    if isinstance(value, str):
        return _no_placeholder(value)
    if isinstance(value, list | tuple) and all(isinstance(row, dict) for row in value):
        return list(value)
    raise ValueError("a file, a name, or in Python a list of rows (dicts) is needed")


def _no_placeholder(value: str) -> str:
    if value.startswith(PYTHON):
        raise ValueError("it was a Python object, which a file cannot hold: give it again")
    return value


def _rewards(value: Any) -> Any:
    rewards = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
    for reward in rewards:
        if isinstance(reward, str) and reward:
            _no_placeholder(reward)
        elif not callable(reward):
            raise ValueError("FILE.py:NAME, in Python a function, or a list of these is needed")
    return rewards


def _reward_weights(value: Any) -> Any:
    return (value,) if isinstance(value, int | float | str) else value


def _norm(value: Any) -> Any:
    if value is None or value in ("auto", "none"):
        return None if value == "auto" else value
    try:
        norm = float(_number(value))
    except (TypeError, ValueError):
        norm = math.nan
    if not 0 < norm < math.inf:
        raise ValueError("a number above 0, auto, or none for no clipping is needed")
    return norm


def _sampler(value: Any) -> Any:
    if value == "vllm":
        raise NotAvailableError("sampler=vllm is not available yet; leave it out.")
    if value != "transformers" and not (isinstance(value, str) and re.fullmatch(r"replay:.+", value)):
        raise ValueError("transformers or replay:FILE.parquet is needed")
    return value


def _device(value: Any) -> Any:
    value = "auto" if value is None else value
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", value):
        raise ValueError("auto, cpu, cuda, cuda:1 or mps is needed")
    return value


def _resume(value: Any) -> Any:
    value = "no" if value is False else _path_text(value)
    if not isinstance(value, str) or not value:
        raise ValueError("no, auto or a run folder is needed")
    return value


def _later(key: str, *words: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if value in words:
            raise NotAvailableError(f"{key}={value} is not available yet; leave it out.")
        return value

    return BeforeValidator(check)


_NUMBER = BeforeValidator(_number)
Whole = Annotated[int, _NUMBER]
Count = Annotated[int, _NUMBER, Field(ge=1)]  # 1, 2, ...
CountOrZero = Annotated[int, _NUMBER, Field(ge=0)]
Real = Annotated[float, _NUMBER, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, _NUMBER, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, _NUMBER, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, _NUMBER, Field(ge=0, le=1)]
ShareAboveZero = Annotated[float, _NUMBER, Field(gt=0, le=1)]
Seed = Annotated[int, _NUMBER, Field(ge=0, lt=2**63)]
PathText = Annotated[str, BeforeValidator(_path_text)]
Auto = word_for_none("auto")
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Source = Annotated[Any, BeforeValidator(_source)]
Rewards = Annotated[tuple[Any, ...], BeforeValidator(_rewards)]
RewardWeights = Annotated[tuple[Real, ...] | None, BeforeValidator(_reward_weights)]
Norm = Annotated[float | Literal["none"] | None, BeforeValidator(_norm)]
SamplerName = Annotated[str, BeforeValidator(_sampler)]
Device = Annotated[str, BeforeValidator(_device)]
Resume = Annotated[str, BeforeValidator(_resume)]
Dtype = Annotated[Literal["fp32"], _later("dtype", "bf16", "bfloat16", "fp16", "float16")]
Truncated = Annotated[Literal["keep"], _later("truncated", "mask", "penalty")]

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


def check_plain_step(optimizer: str, warmup_steps: int, max_grad_norm: Any) -> None:
    if optimizer != "sgd":
        return
    if warmup_steps != 0 or max_grad_norm != "none":
        key = f"warmup_steps={warmup_steps}" if warmup_steps else f"max_grad_norm={max_grad_norm}"
        raise InputError(
            f"{key} has no effect with optimizer=sgd, which takes a plain step (no warm-up, no clip). Leave it out."
        )


def check_record(resume: str, run: str | None, stop_at: float | None, every: int) -> None:
    if resume == "auto" and run is None:
        raise InputError("resume=auto continues the run of that name, and there is no name: add run=NAME.")
    named = run if run is None or "/" in run else os.path.join("runs", run)
    if resume not in ("no", "auto") and named is not None and os.path.abspath(named) != os.path.abspath(resume):
        raise InputError(f"resume={resume} continues in that folder, run={run} names another: leave run out.")
    if stop_at is not None and every == 0:
        raise InputError("stop_at needs evaluations, and eval.every=0 makes none: set eval.every or leave stop_at out.")


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
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
