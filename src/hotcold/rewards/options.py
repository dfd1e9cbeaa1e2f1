"""Options of a reward with a name: `NAME?key=value&key=value`.

They are the keyword arguments of a factory, with its types and defaults. A value is written as on the command line: a
number, true or false, a text, a [list, of, texts]; `null` is None where the type has it. An `&` that no `key=` follows
belongs to the value.
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from hotcold.errors import InputError, did_you_mean

Make = Callable[..., Callable[..., Any]]


@dataclass(frozen=True)
class Factory:
    """Makes a reward function from options. What `make` says with ValueError becomes a message to the user."""

    make: Make

    @property
    def options(self) -> dict[str, Any]:
        """The type of each."""
        hints = typing.get_type_hints(self.make)
        return {name: hints.get(name, str) for name in inspect.signature(self.make).parameters}

    def __call__(self, name: str, given: Mapping[str, str]) -> Callable[..., Any]:
        known = self.options
        for key in given:
            if key not in known:
                close = did_you_mean(key, list(known))
                raise InputError(f"reward={name} has no option {key!r}.{close} It has: {', '.join(known)}.")
        values = {key: _value(f"reward={name}?{key}={text}", text, known[key]) for key, text in given.items()}
        needed = [p.name for p in inspect.signature(self.make).parameters.values() if p.default is p.empty]
        for key in needed:
            if key not in values:
                raise InputError(f"reward={name} needs the option {key}: write reward='{name}?{key}=...'.")
        try:
            return self.make(**values)
        except InputError:
            raise
        except ValueError as error:
            raise InputError(f"reward={name}?{'&'.join(f'{k}={v}' for k, v in given.items())}: {error}.") from None


def split_options(spec: str) -> tuple[str, dict[str, str]]:
    """(NAME, options as they are written)"""
    name, mark, query = spec.partition("?")
    given: dict[str, str] = {}
    for pair in re.split(r"&(?=\w+=)", query) if mark else ():
        key, equals, text = pair.partition("=")
        if not (key and equals and text):
            raise InputError(f"reward={spec}: {pair!r} is no option. Write reward='{name}?key=value&key=value'.")
        if key in given:
            raise InputError(f"reward={spec}: the option {key} is given twice. Keep one of them.")
        given[key] = text
    return name, given


def _value(where: str, text: str, kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [one for one in get_args(kind) if one is not type(None)]
        if text == "null" and len(kinds) < len(get_args(kind)):
            return None
        kind = kinds[0]
    try:
        if get_origin(kind) in (list, tuple):
            return get_origin(kind)(_scalar(one, get_args(kind)[0]) for one in _texts(text))
        return _scalar(_text(text), kind)
    except ValueError as error:
        raise InputError(f"{where}: {error}.") from None


def _scalar(text: str, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError(f"one of {', '.join(get_args(kind))} is needed")
        return text
    return READERS[kind](text)


def _whole(text: str) -> int:
    if not re.fullmatch(r"[-+]?[0-9]{1,18}", text):
        raise ValueError("a whole number is needed")
    return int(text)


def _real(text: str) -> float:
    if not re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+\.?[0-9]*)([eE][-+]?[0-9]+)?", text) or not math.isfinite(float(text)):
        raise ValueError("a number is needed")
    return float(text)


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false is needed")
    return text.lower() == "true"


READERS: dict[Any, Callable[[str], Any]] = {int: _whole, float: _real, bool: _truth, str: str}


def _text(text: str) -> str:
    """Without the quotes that a text may stand in."""
    found = _yaml(text) if text[:1] in ("'", '"') else text
    if not isinstance(found, str):
        raise ValueError("one value is needed")
    return found


def _texts(text: str) -> list[str]:
    found = _yaml(text) if text.startswith("[") else [_text(text)]
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise ValueError("""a list of texts is needed, as in ["one", "two words"]""")
    return found


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError):
        raise ValueError('neither a list nor a quoted text. Write ["one", "two words"]') from None
