"""hotcold from Python: the same as the command line, with functions, rows and algorithms instead of names."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from hotcold.algorithms.base import Algorithm
from hotcold.config.schema import Config
from hotcold.launch import Run
from hotcold.launch import train as launch_train

Data = str | os.PathLike[str] | Sequence[dict[str, Any]] | Callable[[], Any] | dict[str, Any]
Reward = str | Callable[..., Any]


def train(
    model: str | os.PathLike[str],
    data: Data | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    algorithm: str | Algorithm = "grpo",
    *,
    echo: Callable[[str], None] | None = print,
    **keys: Any,
) -> Run:
    """Train and return the run: `.model_dir`, `.metrics`, `.evaluate()`.

    `keys` are those of the command line; a nested one is `eval={"every": 5}` or `eval__every=5`. `echo` hears the
    progress, line by line; None is silent. `data` may be a file or name, rows, a function that returns rows, or a dict
    of its keys: `{"path": ..., "prompt": ...}`.
    """
    given = {"data": data, "reward": reward}
    config = Config.from_keys(
        model=model, algorithm=algorithm, **{k: v for k, v in given.items() if v is not None}, **keys
    )
    for warning in config.warnings:
        warnings.warn(warning, stacklevel=2)
    return launch_train(config, echo)
