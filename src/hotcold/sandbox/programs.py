"""What the sandboxed process does: run a program as a script, answer calls of its functions, or run tests on another's.

A program that is asked and a test that asks live in two sandboxes and exchange plain values. So no expected value is
ever where the program is, and no object of the program is where the verdict is made.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import importlib
import io
import json
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from hotcold.sandbox.values import decode, encode

CHANGED = "arguments after a call that returned None"  # it may have been made for what it does to them
ASK, ANSWER = 3, 4  # descriptors: lines to this process, lines from it
MODULES = frozenset(
    {"abc", "array", "ast", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "csv", "dataclasses"}
    | {"datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math"}
    | {"numbers", "operator", "os", "queue", "random", "re", "statistics", "string", "struct", "sys", "textwrap"}
    | {"time", "types", "typing", "unicodedata"}
)
NAMES = {
    "typing": "Any Callable Dict Generator Iterable Iterator List Mapping NamedTuple Optional Sequence Set Tuple Type "
    "TypeVar Union",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "functools": "cache cmp_to_key lru_cache reduce",
    "itertools": "accumulate chain combinations permutations product",
    "heapq": "heapify heappop heappush",
    "bisect": "bisect_left bisect_right",
    "math": "ceil comb factorial floor gcd inf isqrt lcm log2 sqrt",
    "fractions": "Fraction",
    "decimal": "Decimal",
    "dataclasses": "dataclass",
}
HOME_OF = {name: module for module, names in NAMES.items() for name in names.split()}


def run(job: dict[str, Any]) -> None:
    {"script": _script, "functions": _functions, "tests": _tests}[job["kind"]](job)


def read_names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def modules_used(tree: ast.AST) -> set[str]:
    """Modules of the standard library, written as in math.sqrt: a program may be asked for a `bisect` of its own."""
    used = {n.value.id for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    return (used - called) & MODULES


def forgotten_imports(names: set[str]) -> dict[str, Any]:
    """Modules and names of the standard library that programs are often written without an import of (C18)."""
    found: dict[str, Any] = {name: importlib.import_module(name) for name in names.intersection(MODULES)}
    for name in names.intersection(HOME_OF):
        found[name] = getattr(importlib.import_module(HOME_OF[name]), name)
    return found


def _loaded(source: str, name: str) -> dict[str, Any]:
    """What the program has defined when it has run. It is `__main__` to itself, as pickle and dataclasses want."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if name != "__main__":
        sys.modules[name] = module
    sys.argv = ["program.py"]
    tree = ast.parse(source, "program.py")
    lent = forgotten_imports(read_names(tree))
    module.__dict__.update({"__name__": name, **lent})
    exec(compile(tree, "program.py", "exec"), module.__dict__)
    return {key: value for key, value in module.__dict__.items() if key not in lent or value is not lent[key]}


def _script(job: dict[str, Any]) -> None:
    code = 0
    try:
        _loaded(job["source"], "__main__")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        code = 1
        sys.stderr.write("".join(traceback.format_exception_only(error)))
    _finish()
    os._exit(code & 255)


def _finish() -> None:
    """What an interpreter does at its end: threads are waited for, and what is to be done at exit is done."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            os._exit(1)


# ---- a program whose functions are called


class Line:
    """Lines of JSON to and from the caller. Nothing on it is secret, and a forged line is just another answer."""

    def __init__(self) -> None:
        self._from = io.open(ASK, "rb", closefd=False)  # noqa: SIM115, UP020
        self.read, self.write = self._from.readline, os.write

    def receive(self) -> Any:
        line = self.read()
        if not line:
            os._exit(0)
        return json.loads(line)

    def send(self, message: Any) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[self.write(ANSWER, data) :]


class Functions:
    """The program's side: it calls what it is asked to, and tells the value."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.objects: list[Any] = []

    def answer(self, asked: dict[str, Any]) -> Any:
        try:
            return {"value": self._told(getattr(self, f"do_{asked['do']}")(**asked["with"]), asked.get("may", ""))}
        except BaseException as error:
            return {"error": [type(error).__name__, str(error)[:1000]]}

    def _told(self, value: Any, may: str) -> Any:
        """A plain value; else a reference, if the caller may have one."""

        def refer(found: Any) -> Any:
            if found is not value or not (may == "object" or (may == "function" and callable(found))):
                raise TypeError(f"the result is an object of type {type(found).__name__}, not a plain value")
            self.objects.append(found)
            return {"object": len(self.objects) - 1}

        return encode(value, refer)

    def _decoded(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        def resolve(found: dict[str, Any]) -> Any:
            return self.objects[found["object"]]

        return [decode(a, resolve) for a in args], {k: decode(v, resolve) for k, v in kwargs.items()}

    def do_eval(self, text: str) -> Any:
        return eval(compile(text, "call", "eval"), self.names)

    def do_names(self, wanted: list[str]) -> Any:
        return [name for name in wanted if name in self.names]

    def do_named(self, name: str) -> Any:
        if name not in self.names and isinstance(self.names.get("Solution"), type):
            return getattr(self.names["Solution"](), name)  # as puzzles are often written
        return self.names[name]

    def do_call(self, args: list[Any], kwargs: dict[str, Any], name: str = "", object: int = -1) -> Any:
        function: Any = self.do_named(name) if name else self.objects[object]
        positional, named = self._decoded(args, kwargs)
        result = function(*positional, **named)
        if result is None and any(isinstance(arg, (list, dict, set, bytearray)) for arg in positional):
            return {CHANGED: positional}
        return result

    def do_method(self, object: int, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        positional, named = self._decoded(args, kwargs)
        return getattr(self.objects[object], name)(*positional, **named)

    def do_get(self, object: int, name: str) -> Any:
        value = getattr(self.objects[object], name)
        return {"method": True} if callable(value) else {"is": value}

    def do_set(self, object: int, name: str, value: Any) -> None:
        setattr(self.objects[object], name, self._decoded([value], {})[0][0])

    def do_builtin(self, object: int, name: str) -> Any:
        made: Any = {"len": len, "str": str, "repr": repr, "bool": bool, "iter": list}[name]
        return made(self.objects[object])

    def do_item(self, object: int, key: Any) -> Any:
        return self.objects[object][self._decoded([key], {})[0][0]]

    def do_set_item(self, object: int, key: Any, value: Any) -> None:
        (key, value), _ = self._decoded([key, value], {})
        self.objects[object][key] = value


def _functions(job: dict[str, Any]) -> None:
    line = Line()
    functions = Functions(_loaded(job["source"], "program"))
    line.send({"value": "ready"})
    while True:
        asked = line.receive()
        answer = functions.answer(asked)
        _flush()
        line.send(answer)


# ---- tests that call them


class ProgramError(Exception):
    """An exception of the program whose class is no built-in one."""


class Asking:
    """The test's side. Only values come back; an object stays where it is."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.is_unusable = False  # the test hands over what cannot leave its process

    def ask(self, do: str, may: str = "", **what: Any) -> Any:
        self._line.send({"do": do, "with": what, "may": may})
        answer = self._line.receive()
        if "error" in answer:
            name, text = answer["error"]
            raise _exception(str(name))(str(text))
        value = answer["value"]
        if may and isinstance(value, dict) and list(value) == ["object"]:  # what may not come is refused by `decode`
            return Object(self, int(value["object"]))
        return decode(value)

    def call(self, may: str, args: tuple[Any, ...], kwargs: dict[str, Any], **what: Any) -> Any:
        result = self.ask("call", may, **self.told(args, kwargs), **what)
        if isinstance(result, dict) and CHANGED in result:
            return _write_back(args, result[CHANGED])
        return result

    def told(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"args": [self.one(arg) for arg in args], "kwargs": {key: self.one(arg) for key, arg in kwargs.items()}}

    def one(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Object):
            return {"object": object.__getattribute__(value, "_number")}
        self.is_unusable |= not isinstance(value, Function)  # which the program chose to return
        raise TypeError(f"an argument of type {type(value).__name__} cannot be handed to the program")


def _exception(name: str) -> type[Exception]:
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception) and known is not StopIteration:
        return known
    return ProgramError


def _write_back(args: tuple[Any, ...], changed: Any) -> None:
    for arg, now in zip(args, changed, strict=False):
        if type(arg) in (list, bytearray) and type(now) is type(arg):
            arg[:] = now
        elif type(arg) in (set, dict) and type(now) is type(arg):
            arg.clear()
            arg.update(now)


class Named:
    """A function or class of the program. Only what is named like a class may give an object that is no value."""

    def __init__(self, asking: Asking, name: str) -> None:
        self._asking, self._name = asking, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        may = "object" if self._name[:1].isupper() else "function"
        result = self._asking.call(may, args, kwargs, name=self._name)
        if isinstance(result, Object) and may == "function":
            number = object.__getattribute__(result, "_number")
            return Function(lambda *a, **k: self._asking.call("", a, k, object=number))
        return result


class Function:
    """A function or method that the program returned. It can be called for a value, and nothing else."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class Object:
    """An object of the program's. It equals itself alone: the program must not say what it is equal to."""

    __slots__ = ("_asking", "_number")

    def __init__(self, asking: Asking, number: int) -> None:
        object.__setattr__(self, "_asking", asking)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        found = self._do("get", name=name)
        if "is" in found:
            return found["is"]
        return Function(lambda *args, **kwargs: self._do("method", name=name, **self._asking.told(args, kwargs)))

    def __setattr__(self, name: str, value: Any) -> None:
        self._do("set", name=name, value=self._asking.one(value))

    def _do(self, do: str, **what: Any) -> Any:
        return self._asking.ask(do, object=self._number, **what)

    def __len__(self) -> int:
        return int(self._do("builtin", name="len"))

    def __bool__(self) -> bool:
        return bool(self._do("builtin", name="bool"))

    def __str__(self) -> str:
        return str(self._do("builtin", name="str"))

    def __repr__(self) -> str:
        return str(self._do("builtin", name="repr"))

    def __iter__(self) -> Any:
        return iter(self._do("builtin", name="iter"))

    def __getitem__(self, key: Any) -> Any:
        return self._do("item", key=self._asking.one(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._do("set_item", key=self._asking.one(key), value=self._asking.one(value))

    def __contains__(self, value: Any) -> bool:
        return value in list(self)


def is_test(statement: ast.stmt) -> bool:
    """A statement that asserts something, or a bare call such as check(f)."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        return False
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return True
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _tests(job: dict[str, Any]) -> None:
    line = Line()
    tree = ast.parse(job["source"], "tests")
    names = read_names(tree)
    space: dict[str, Any] = {"__name__": "tests", **forgotten_imports(modules_used(tree))}
    asking = Asking(line)
    for name in asking.ask("names", wanted=sorted(names - set(space) - set(dir(builtins)))):
        if name in names and name not in space and not hasattr(builtins, name):
            space[name] = Named(asking, name)
    verdict = _passed(tree.body, space)
    line.send({"nonce": job["nonce"], "verdict": None if asking.is_unusable else verdict})


def _passed(statements: list[ast.stmt], space: dict[str, Any]) -> list[bool]:
    """By test, whether it ended without an exception. After a preparation that fails none passes."""
    passed: list[bool] = []
    prepared = True
    for statement in statements:
        holds = prepared and _holds(statement, space)
        if is_test(statement):
            passed.append(holds)
        else:
            prepared = prepared and holds
    return passed


def _holds(statement: ast.stmt, space: dict[str, Any]) -> bool:
    try:
        exec(compile(ast.Module([statement], []), "tests", "exec"), space)
    except BaseException:  # sys.exit() too: a test that ends early has not passed
        return False
    return True
