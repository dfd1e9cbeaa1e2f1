"""What a run will write, beside what the disk has left."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotcold.assemble import Assembled
from hotcold.errors import InputError
from hotcold.memory import GB

FLOAT = 4  # bytes: models and optimiser states are stored in float32
BESIDE = 10_000_000  # bytes for the record, tokenizers and what a file system takes for itself


@dataclass(frozen=True)
class Needed:
    checkpoint: int  # bytes of one
    num_checkpoints: int  # those that are kept and the one that is being written
    final: int  # bytes of the model, and the critic, that the run ends with

    @property
    def total(self) -> int:
        return self.checkpoint * self.num_checkpoints + self.final + BESIDE


def needed(ready: Assembled) -> Needed:
    """Rollouts are not counted: they are small beside a model."""
    config, models = ready.config, ready.models
    policy, critic = models.policy.module, models.critic
    states = 2 if config.optimizer == "adamw" else 0
    whole = _size(policy.parameters())
    trained = _size(p for p in policy.parameters() if p.requires_grad)
    checkpoint = (trained if models.trains_adapter else whole) + states * trained
    final = whole
    if critic is not None:
        of_critic = _size(p for p in critic.parameters() if p.requires_grad)
        checkpoint += (1 + states) * of_critic
        final += _size(critic.parameters())
    saves = 1 + (config.steps // config.save_every if config.save_every else 0)
    kept = min(config.keep_checkpoints, saves) + (1 if ready.evaluator is not None else 0)
    return Needed(checkpoint, kept + 1, final)


def check_disk(ready: Assembled, folder: Path) -> None:
    """Before a run starts, not in its last hour. What an earlier attempt left there is counted in."""
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    want = needed(ready)
    usage = shutil.disk_usage(place)
    if not usage.total:  # a file system that counts no space; what is wrong with it, its first write will say
        return
    free, there = usage.free, _bytes_below(folder)
    if want.total > free + there:
        raise InputError(
            f"{place} has {_gb(free)} GB left, and this run needs about {_gb(want.total - there)} GB more: "
            f"{want.num_checkpoints} checkpoints of {_gb(want.checkpoint)} GB (keep_checkpoints="
            f"{ready.config.keep_checkpoints}, the best one, one being written) and the final model.\n"
            "Make room, choose another place with run=FOLDER, or keep fewer checkpoints."
        )


def _size(parameters: Iterable[Any]) -> int:
    return FLOAT * sum(parameter.numel() for parameter in parameters)


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _gb(size: int) -> str:
    return f"{size / GB:.3g}"
