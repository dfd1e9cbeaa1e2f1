"""What makes a run another run, and what a checkpoint says of the run that it belongs to."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from hotcold.assemble import Assembled
from hotcold.checkpoint import read_state
from hotcold.config.keys import WORKERS
from hotcold.config.schema import Config
from hotcold.config.show import flat_values
from hotcold.errors import InputError, did_you_mean
from hotcold.training.console import near
from hotcold.training.loop import Progress

FREE = {  # keys that a continued run may change; models and data are compared by their hashes
    *(
        "model",
        "reference",
        "data.path",
        "run",
        "resume",
        "steps",
        "stop_at",
        "save_every",
        "keep_checkpoints",
        "device",
        "threads",
        "watchdog",
        "allow_changed",
        "sandbox.require",
    ),
    *("eval.data", "eval.every", "eval.samples", "eval.prompts", "tokens_per_microbatch", "max_memory"),
    "gradient_checkpointing",
    *(key.name for key in WORKERS),
}


def identity(config: Config) -> dict[str, str]:
    """The keys that make two runs different runs, as text."""
    values = {key: value for key, value in flat_values(config).items() if key not in FREE}
    return {key: _as_text(value) for key, value in values.items()}


def _as_text(value: Any) -> str:
    """A value that is the same text in another process: objects by their class and what they hold."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_as_text, value)) + "]"
    if isinstance(value, partial):
        return f"{_as_text(value.func)}({value.args}, {value.keywords})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)
    if name := getattr(value, "__qualname__", None):
        return str(name)
    held = getattr(value, "__dict__", {})
    return f"{type(value).__qualname__}({', '.join(f'{k}={_as_text(v)}' for k, v in sorted(held.items()))})"


def check_same_run(state: dict[str, Any], ready: Assembled) -> None:
    """A run continues with the data and the algorithm that it began with, except where somebody says otherwise."""
    known = sorted({"data", "model", "reference", *state["identity"], *identity(ready.config)})
    for name in ready.config.allow_changed:
        if name not in known:
            raise InputError(
                f"allow_changed={name} is no key in which a continued run could be refused.{did_you_mean(name, known)}"
            )
    changed = {key: text for key, text in changes(state, ready).items() if key not in ready.config.allow_changed}
    if changed:
        raise InputError(
            "this run cannot be continued with other settings:\n"
            + "\n".join(list(changed.values())[:2])
            + (f"\n... and {len(changed) - 2} more" if len(changed) > 2 else "")
            + f"\nGive them as they were, or allow it: allow_changed=[{','.join(changed)}]"
        )


def checked_state(checkpoint: Path) -> tuple[dict[str, Any], Progress]:
    """What a checkpoint says of its run. Its hashes are right, but anybody may have written it."""
    state = read_state(checkpoint)
    try:
        progress = Progress(**state["progress"])
        hashes, groups = (state["base_sha256"], state["data_sha256"]), (progress.algorithm, progress.before)
        fits = all(isinstance(text, str) for text in hashes)
        fits &= all(isinstance(group, dict) for group in (*groups, state["identity"]))
        fits &= all(type(n) is int and n >= 0 for n in (progress.step, progress.position, progress.version))
        fits &= all(type(n) in (int, type(None)) for n in (progress.best_step, progress.tokens_per_microbatch))
        numbers = (progress.greedy, progress.best, *progress.algorithm.values())
        fits &= all(isinstance(x, int | float | None) for x in numbers)
    except (KeyError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise InputError(
            f"{near(checkpoint / 'trainer' / 'state.json')} does not say where a run is.\n"
            f"Delete {near(checkpoint)} to go on from the checkpoint before it."
        )
    return state, progress


def changes(state: dict[str, Any], ready: Assembled) -> dict[str, str]:
    """By key: in what the run at hand is another one than the run that was saved."""
    then, now = state["identity"], identity(ready.config)
    found = {
        key: f"{key}: {then.get(key)} then, {now.get(key)} now"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key)
    }
    if state["base_sha256"] != ready.model.sha256:
        found["model"] = "the starting model's weights are not the same"
    reference = ready.models.reference
    if reference is not None and state.get("reference_sha256") != reference.sha256:
        found["reference"] = "the reference's weights are not the same"
    if state["data_sha256"] != ready.data_fingerprint:
        found["data"] = "the training prompts are not the same"
    return found
