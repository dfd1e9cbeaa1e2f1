"""docs/chapter.md names, for each formula of the course chapter, a function and a test: they exist."""

import ast
import importlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hotcold.equations

ROOT = Path(__file__).parents[1]
MAP = ROOT / "docs" / "chapter.md"


@dataclass
class Entry:
    number: int
    title: str
    formula: bool = False
    functions: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    not_yet: bool = False


def entries(text: str) -> list[Entry]:
    found: list[Entry] = []
    for line in text.splitlines():
        if heading := re.fullmatch(r"### (\d+)\. (.+)", line):
            found.append(Entry(int(heading[1]), heading[2]))
        elif item := re.fullmatch(r"- (function|test): `([^`]+)`", line):
            (found[-1].functions if item[1] == "function" else found[-1].tests).append(item[2])
        elif line.startswith("- not yet: "):
            found[-1].not_yet = True
        elif line.startswith("    ") and found:
            found[-1].formula = True
        else:
            assert not line.startswith("- "), f"not an item of the map: {line}"
    return found


ENTRIES = entries(MAP.read_text(encoding="utf-8"))


def resolve(name: str) -> Any:
    """`hotcold.equations.NAME`, or `module:NAME` or `module:Class.method`; None where there is no such thing."""
    module, colon, path = name.partition(":")
    if not colon:
        module, _, path = name.rpartition(".")
    target: Any = importlib.import_module(module)
    for part in path.split("."):
        target = getattr(target, part, None)
    return target


def names_in(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def missing_functions(listed: list[Entry]) -> list[str]:
    return [f"{e.number}. {e.title}: {name}" for e in listed for name in e.functions if not callable(resolve(name))]


def missing_tests(listed: list[Entry]) -> list[str]:
    pairs = [(e, *name.partition("::")) for e in listed for name in e.tests]
    return [f"{e.number}. {e.title}: {path}::{test}" for e, path, _, test in pairs if test not in names_in(ROOT / path)]


def test_the_map_covers_the_chapter_and_is_numbered_through() -> None:
    assert [entry.number for entry in ENTRIES] == list(range(1, len(ENTRIES) + 1))
    assert len(ENTRIES) >= 34
    assert [e.title for e in ENTRIES if not e.formula] == []


def test_every_entry_has_a_function_or_says_not_yet_and_a_test_that_proves_it() -> None:
    assert [e.title for e in ENTRIES if not e.functions and not e.not_yet] == []
    assert [e.title for e in ENTRIES if e.functions and not e.tests] == []


def test_every_named_function_exists() -> None:
    assert missing_functions(ENTRIES) == []


def test_every_named_test_exists() -> None:
    assert missing_tests(ENTRIES) == []


def test_equations_are_named_by_their_public_name() -> None:
    named = [name for e in ENTRIES for name in e.functions if name.startswith("hotcold.equations")]
    assert [name for name in named if name.removeprefix("hotcold.equations.") not in hotcold.equations.__all__] == []


def test_a_wrong_name_in_the_map_is_found() -> None:
    listed = entries("### 1. X\n\n    a = b\n\n- function: `hotcold.equations.no_such`\n- test: `tests/no.py::test_x`")
    assert missing_functions(listed) == ["1. X: hotcold.equations.no_such"]
    assert missing_tests(listed) == ["1. X: tests/no.py::test_x"]
