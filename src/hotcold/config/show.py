"""A configuration for people and for files: plain values, YAML, a line for each key with its reason."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel

from hotcold.config.checks import void_keys
from hotcold.config.keys import EVAL_KEYS, SAMPLE_KEYS, TRAIN_KEYS, Key
from hotcold.config.schema import Config, EvalConfig, Settings
from hotcold.config.sources import plain_value, whole_name
from hotcold.config.values import PYTHON


def flat_values(config: Settings) -> dict[str, Any]:
    """Every key that has an effect, by its dotted name, in the order of the tables; those that only an own algorithm
    knows come last. Objects stay objects.
    """
    values: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            values |= {f"{name}.{inner}": getattr(value, inner) for inner in type(value).model_fields}
        elif name == "algorithm_options":
            values |= value
        elif name != "reasons":
            values[name] = value
    order = [whole_name(key.name) for keys in keys_of(config).values() for key in keys]
    void = void_keys(config) if isinstance(config, Config) else {}
    return {key: values[key] for key in [*(key for key in order if key in values), *values] if key not in void}


def keys_of(config: Settings) -> dict[str, tuple[Key, ...]]:
    return TRAIN_KEYS if isinstance(config, Config) else EVAL_KEYS if isinstance(config, EvalConfig) else SAMPLE_KEYS


OF_ONE_START = ("resume", "allow_changed")


def resolved(config: Settings) -> dict[str, Any]:
    """Plain nested values, as in config.yaml, which `hotcold train` accepts back.

    What says how this start was made, not what the run is, is left out.
    """
    nested: dict[str, Any] = {}
    for key, value in flat_values(config).items():
        outer, _, inner = key.partition(".")
        if inner:
            nested.setdefault(outer, {})[inner] = _plain(value)
        elif key not in OF_ONE_START:
            nested[key] = _plain(value)
    return nested


def to_yaml(config: Settings) -> str:
    return yaml.dump(resolved(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def describe(config: Settings) -> str:
    """A line for each key: name, value, reason. For --dry-run."""
    defaults = {whole_name(key.name): key.default for keys in keys_of(config).values() for key in keys}
    defaults |= dict.fromkeys(getattr(config, "algorithm_options", {}), "none")  # decided, so it is no "auto"
    rows = [
        (key, _shown(value, defaults.get(key, "-")), config.reasons.get(key, "default"))
        for key, value in flat_values(config).items()
    ]
    widths = [min(32, max(len(row[column]) for row in rows)) for column in (0, 1)]
    return "\n".join(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {reason}" for key, value, reason in rows)


def _shown(value: Any, default: str) -> str:
    plain = _plain(value)
    if plain is None or plain == []:
        return default.partition(":")[0]
    if isinstance(plain, list):
        return ", ".join(
            repr(item) if isinstance(item, str) and not item.isprintable() else str(item) for item in plain
        )
    return str(plain).lower() if isinstance(plain, bool) else str(plain)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        rows = bool(value) and all(isinstance(item, dict) for item in value)
        return f"{PYTHON}{len(value)} rows>" if rows else [_plain(item) for item in value]
    name = getattr(value, "__qualname__", None) if callable(value) else None
    return f"{PYTHON}{name or _one_line(value)}>"


def _one_line(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{type(value).__name__} object"


class _Dumper(yaml.SafeDumper):
    """Quotes every text that a recipe would read as something else."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None if isinstance(plain_value(text), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
