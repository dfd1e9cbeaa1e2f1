"""Plain values as text and back. What is decoded is made of built-in types, whatever the other side says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

DEEPEST = 60
LONGEST_ITERATOR = 10_000
Refer = Callable[[Any], Any]  # how an object is written that is no plain value


class NotPlain(ValueError):
    """An object that has no value apart from the process it lives in."""


def _refuse(value: Any) -> Any:
    raise NotPlain(f"an object of type {type(value).__name__} is no plain value")


def encode(value: Any, refer: Refer = _refuse, depth: int = 0) -> Any:
    """JSON of the value. A subclass counts as its base: what it overrides is not asked."""
    if depth > DEEPEST:
        raise NotPlain("the value is nested too deeply")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, int):
        number = int.__add__(value, 0)
        return number if abs(number) < 2**53 else {"int": hex(number)}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, str):
        return str.__str__(value)
    return _container(value, refer, depth + 1)


def _container(value: Any, refer: Refer, depth: int) -> Any:
    def all_of(items: Any) -> list[Any]:
        return [encode(item, refer, depth) for item in items]

    for base, name in ((list, None), (tuple, "tuple"), (set, "set"), (frozenset, "frozenset"), (deque, "deque")):
        if isinstance(value, base):
            items = all_of(base.__iter__(value))  # type: ignore[arg-type]
            return items if name is None else {name: items}
    if isinstance(value, dict):
        return {"dict": [[encode(k, refer, depth), encode(v, refer, depth)] for k, v in dict.items(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {type(value).__name__ if type(value) in (bytes, bytearray) else "bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if type(value) in (Decimal, Fraction):
        return {type(value).__name__: str(value)}
    if isinstance(value, Iterator):
        return {"iterator": all_of(islice(value, LONGEST_ITERATOR + 1))}
    return refer(value)


def _iterate(items: list[Any]) -> Iterator[Any]:
    yield from items[:LONGEST_ITERATOR]
    if len(items) > LONGEST_ITERATOR:
        raise RuntimeError(f"only the first {LONGEST_ITERATOR} items of an iterator are handed over")


def decode(found: Any, resolve: Refer = _refuse) -> Any:
    """The value. ValueError for what `encode` never writes."""
    if found is None or isinstance(found, (bool, int, str)):
        return found
    if isinstance(found, list):
        return [decode(item, resolve) for item in found]
    if not isinstance(found, dict) or len(found) != 1:
        raise ValueError("no value")
    ((name, content),) = found.items()
    try:
        if name in _READ_ITEMS:
            return _READ_ITEMS[name]([decode(item, resolve) for item in content])
        if name in _READ:
            return _READ[name](content)
        if name == "dict":
            return {decode(key, resolve): decode(value, resolve) for key, value in content}
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"no value: {error}") from None
    return resolve(found)


_READ_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "iterator": _iterate,
}
_READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda parts: complex(float.fromhex(parts[0]), float.fromhex(parts[1])),
    "range": lambda parts: range(*parts),
    "Decimal": Decimal,
    "Fraction": lambda text: Fraction(*map(int, text.split("/"))),  # not "1e999999999"
}
