"""What a single key may hold: the types of the configuration, with what is needed said in words."""

from __future__ import annotations

import math
import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hotcold.errors import NotAvailableError

PYTHON = "<from Python: "  # begins the placeholder of an object that no file can hold


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


def _texts_or_auto(value: Any) -> Any:
    if value in (None, "auto", "all-linear"):
        return None
    if not (texts := _texts(value)):
        raise ValueError("at least one layer name is needed, or auto for every linear layer")
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
        elif not callable(reward) and not hasattr(reward, "funcs"):  # a rubric of verifiers
            raise ValueError("FILE.py:NAME, in Python a function, or a list of these is needed")
    return rewards


def _reward_weights(value: Any) -> Any:
    return (value,) if isinstance(value, int | float | str) else value


def _on_error(value: Any) -> Any:
    if value in ("drop", "stop"):
        return value
    try:
        score = float(_number(value))
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise ValueError("drop, stop or a number, the score of such a response, is needed")
    return score


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


_NAMES = {"float32": "fp32", "bfloat16": "bf16"}


def _dtype(value: Any) -> Any:
    """None is auto. Parameters and the optimiser's state are float32 whatever it is."""
    if value is None or value == "auto":
        return None
    if value in ("fp32", "bf16"):
        return value
    if value in ("fp16", "float16", "half"):
        hint = "; float16 is not offered, its small numbers vanish, and bf16 has the range of fp32"
    elif isinstance(value, str) and value in _NAMES:
        hint = f": write {_NAMES[value]}"
    else:
        hint = "; parameters are always fp32, dtype is that of the computation"
    raise ValueError(f"auto, fp32 or bf16 is needed{hint}")


_BYTES = {"GB": 1.0, "GiB": 2**30 / 1e9, "MB": 1e-3, "MiB": 2**20 / 1e9, "": 1.0}


def _gigabytes(value: Any) -> Any:
    """None is auto."""
    if value is None or value == "auto":
        return None
    found = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([GM]i?B|)\s*", str(value))
    try:
        size = float(found[1]) * _BYTES[found[2]] if found and not isinstance(value, bool) else 0.0
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise ValueError("a number of GB above 0 is needed, as in 8, 8GB, 8GiB or 800MB, or auto")
    return size


def _temperature(value: float) -> float:
    if 0 < value < COLDEST:
        raise ValueError(f"logits divided by it would not be finite; at least {COLDEST:g} is needed")
    return value


COLDEST = 1e-4
MOST_RANK = 65536  # of an adapter
_NUMBER = BeforeValidator(_number)
Whole = Annotated[int, _NUMBER]
Count = Annotated[int, _NUMBER, Field(ge=1, le=10**9)]  # 1, 2, ...
CountOrZero = Annotated[int, _NUMBER, Field(ge=0, le=10**9)]
Few = Annotated[int, _NUMBER, Field(ge=1, le=10**6)]  # of what is held in memory at once
FewOrZero = Annotated[int, _NUMBER, Field(ge=0, le=10**6)]
Real = Annotated[float, _NUMBER, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, _NUMBER, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, _NUMBER, Field(gt=0, allow_inf_nan=False)]
Temperature = Annotated[Positive, AfterValidator(_temperature)]
TemperatureOrZero = Annotated[NotNegative, AfterValidator(_temperature)]
Share = Annotated[float, _NUMBER, Field(ge=0, le=1)]
ShareAboveZero = Annotated[float, _NUMBER, Field(gt=0, le=1)]
Seed = Annotated[int, _NUMBER, Field(ge=0, lt=2**63)]
PathText = Annotated[str, BeforeValidator(_path_text)]
Auto = word_for_none("auto")
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Source = Annotated[Any, BeforeValidator(_source)]
Rewards = Annotated[tuple[Any, ...], BeforeValidator(_rewards)]
RewardWeights = Annotated[tuple[Real, ...] | None, BeforeValidator(_reward_weights)]
OnError = Annotated[float | Literal["drop", "stop"], BeforeValidator(_on_error)]
Norm = Annotated[float | Literal["none"] | None, BeforeValidator(_norm)]
SamplerName = Annotated[str, BeforeValidator(_sampler)]
Device = Annotated[str, BeforeValidator(_device)]
Resume = Annotated[str, BeforeValidator(_resume)]
Dtype = Annotated[Literal["fp32", "bf16"] | None, BeforeValidator(_dtype)]
Gigabytes = Annotated[float | None, BeforeValidator(_gigabytes)]
TextsOrAuto = Annotated[tuple[str, ...] | None, BeforeValidator(_texts_or_auto)]
