"""The tests of a row: programs with input and output, calls with values, asserts. Read once, outside of any sandbox."""

from __future__ import annotations

import ast
import builtins
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotcold.rewards.code_blocks import close, names_called
from hotcold.sandbox.programs import is_test, modules_used

COLUMNS = ("tests", "test", "asserts", "test_list", "input_output")


class Unusable(ValueError):
    """Tests that nobody can pass or fail: the response gets no score."""


@dataclass(frozen=True)
class InputOutput:
    given: str
    expected: str
    wanted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Call:
    """Either an expression, or a name with arguments."""

    expected: Any
    expression: str = ""
    name: str = ""
    args: tuple[Any, ...] = ()
    wrapped: bool = False  # [4] may mean 4, as the data sets with inputs and outputs write it

    @property
    def wanted(self) -> frozenset[str]:
        return frozenset({self.name} if self.name else _foreign(self.expression))


@dataclass(frozen=True)
class Asserts:
    source: str
    count: int  # of tests in it

    @property
    def wanted(self) -> frozenset[str]:
        return frozenset(_foreign(self.source))


Test = InputOutput | Call | Asserts


def _foreign(source: str) -> set[str]:
    """What only the program can have defined."""
    return names_called(source) - set(dir(builtins)) - modules_used(ast.parse(source))


def tests_of(columns: Mapping[str, Any]) -> list[Test]:
    """All tests of a row. Unusable where there are none, or one cannot be read."""
    found: list[Test] = []
    for name in COLUMNS:
        value = columns.get(name)
        if value is not None:
            found += _read(value, name, columns.get("entry_point"))
    if not found:
        raise Unusable("there is no test")
    if any(isinstance(test, (Call, Asserts)) and not test.wanted for test in found):
        raise Unusable("a test uses nothing that the program could define: every program would pass it")
    return found


def _read(value: Any, name: str, entry_point: Any) -> list[Test]:
    if isinstance(value, str):
        value = _json(value)
    if isinstance(value, str):
        return [_asserts(value, entry_point)]
    if isinstance(value, Mapping):
        return _one(value, name)
    if not isinstance(value, (list, tuple)):
        raise Unusable(f"{name} is a {type(value).__name__}")
    texts = [one for one in value if isinstance(one, str)]
    if texts and len(texts) == len(value):
        return [_asserts("\n".join(texts), entry_point)] if texts else []
    return [test for one in value for test in _one(one, name)]


def _json(text: str) -> Any:
    """Lists and objects are often stored as text; Python is none."""
    try:
        found = json.loads(text) if text.lstrip()[:1] in ("[", "{") else text
    except (ValueError, RecursionError):
        return text
    return found


def _one(test: Any, name: str) -> list[Test]:
    if not isinstance(test, Mapping):
        raise Unusable(f"{name} holds a {type(test).__name__} among others")
    if "call" in test and "expected" in test:
        return [_call(str(test["call"]), test["expected"])]
    if "inputs" in test and "outputs" in test:
        return _many(test)
    output = test.get("output", test.get("expected"))
    if "input" not in test or output is None:
        raise Unusable(
            f"a test in {name} has the keys {sorted(map(str, test))}: input and output, or call and expected"
        )
    return [InputOutput(_text(test["input"]), _text(output))]


def _many(test: Mapping[str, Any]) -> list[Test]:
    inputs, outputs, function = test["inputs"], test["outputs"], test.get("fn_name")
    if not isinstance(inputs, (list, tuple)) or not isinstance(outputs, (list, tuple)) or len(inputs) != len(outputs):
        raise Unusable("inputs and outputs are not two lists of one length")
    if not function:
        return [InputOutput(_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True)]
    if not all(isinstance(args, (list, tuple)) for args in inputs):
        raise Unusable("with fn_name each of inputs must be a list of arguments")
    return [
        Call(o, name=str(function), args=tuple(args), wrapped=True) for args, o in zip(inputs, outputs, strict=True)
    ]


def _text(value: Any) -> str:
    """Lines may be stored as a list."""
    if isinstance(value, (list, tuple)):
        return "\n".join(map(str, value))
    if value is None or isinstance(value, (Mapping, bytes)):
        raise Unusable(f"input and output are texts, not {type(value).__name__}")
    return str(value)


def _call(expression: str, expected: Any) -> Call:
    try:
        ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unusable(f"the call {expression[:60]!r} is no expression: {error}") from None
    return Call(expected, expression)


def _asserts(source: str, entry_point: Any) -> Asserts:
    source = source.replace("\r\n", "\n")
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unusable(f"the tests are no Python: {error}") from None
    if entry_point and any(isinstance(s, ast.FunctionDef) and s.name == "check" for s in statements):
        if not any(map(is_test, statements)):
            source += f"\ncheck({entry_point})\n"
            statements = ast.parse(source).body
    if not (count := sum(map(is_test, statements))):
        raise Unusable("the tests assert nothing")
    return Asserts(source, count)


# ---- values


def same_value(found: Any, test: Call, tolerance: float) -> bool:
    """The value that a call gave is the one that the test expects."""
    if equal(found, test.expected, tolerance):
        return True
    is_wrapped = test.wrapped and isinstance(test.expected, (list, tuple)) and len(test.expected) == 1
    return is_wrapped and equal(found, test.expected[0], tolerance)


def equal(found: Any, expected: Any, tolerance: float) -> bool:
    """As Python's ==, but a tuple equals a list, and true is not 1: JSON has no tuples, and has both of these."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(expected, (list, tuple)):
        same_kind = isinstance(found, (list, tuple, deque)) and len(found) == len(expected)
        return same_kind and all(equal(a, b, tolerance) for a, b in zip(found, expected, strict=True))
    if isinstance(expected, Mapping):
        return isinstance(found, dict) and _equal_dicts(found, expected, tolerance)
    if isinstance(found, (int, float)) and isinstance(expected, (int, float)):
        return found == expected or bool(tolerance and _near(found, expected, tolerance))
    return type(found) is type(expected) and bool(found == expected)


def _near(found: float, expected: float, tolerance: float) -> bool:
    try:
        return close(float(found), float(expected), tolerance)
    except OverflowError:
        return False


def _equal_dicts(found: dict[Any, Any], expected: Mapping[Any, Any], tolerance: float) -> bool:
    """JSON has only texts as keys."""
    by_text = {key if isinstance(key, str) else str(key): value for key, value in found.items()}
    wanted = {key if isinstance(key, str) else str(key): value for key, value in expected.items()}
    if len(by_text) != len(found) or by_text.keys() != wanted.keys():
        return False
    return all(equal(by_text[key], value, tolerance) for key, value in wanted.items())
