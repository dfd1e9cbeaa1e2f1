"""Which part of a response is the program, and whether two outputs are the same."""

from __future__ import annotations

import ast
import math
import re
import textwrap
from collections.abc import Collection
from dataclasses import dataclass

FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*$")
PYTHON = frozenset({"python", "python3", "py", "python2"})
THOUGHT = "</think>"


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def program_of(response: str, wanted: Collection[str] = ()) -> str:
    """The program in a response.

    Of the Python blocks (without any, of those that name no language) it is the one that defines most of what the tests
    call; where they call nothing, one that reads input; among equals the last. An unclosed block reaches to the end.
    Without a block the whole response is the program. What stands before a closing think tag does not count.
    """
    text = response.replace("\r\n", "\n").replace("\r", "\n").rpartition(THOUGHT)[2]
    found = blocks(text)
    named = [block.text for block in found if block.language in PYTHON]
    programs = named or [block.text for block in found if not block.language]
    if not programs:
        return "" if found else text
    fits = [_fit(program, wanted) for program in programs]
    return next(program for program, fit in zip(reversed(programs), reversed(fits), strict=True) if fit == max(fits))


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    fence, language, lines = "", "", [""]
    for line in text.split("\n"):
        mark = FENCE.match(line)
        if not fence:
            if mark:
                fence, language, lines = mark[1], mark[2].lower(), []
        elif mark and mark[1].startswith(fence) and not mark[2]:
            found.append(Block(language, textwrap.dedent("\n".join(lines))))
            fence = ""
        else:
            lines.append(line)
    return [*found, Block(language, textwrap.dedent("\n".join(lines)))] if fence else found


def _fit(program: str, wanted: Collection[str]) -> int:
    """How many of the names it defines, at any depth: puzzles put functions into a class."""
    if not wanted:
        return int(_reads(program))
    defined = set(re.findall(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", program, re.MULTILINE))
    defined |= set(re.findall(r"^(\w+)[ \t]*(?::[^=\n]+)?=(?!=)", program, re.MULTILINE))
    return len(defined.intersection(wanted))


def _reads(program: str) -> bool:
    return re.search(r"\binput\s*\(|\bstdin\b|open\s*\(\s*0\b", program) is not None


def names_called(source: str) -> set[str]:
    """Names that a text of tests reads and does not make itself. SyntaxError, ValueError where it is no Python."""
    tree = ast.parse(source)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    made = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            made |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return {node.id for node in names} - made


# ---- output


def same_output(found: str, expected: str, tolerance: float = 0.0) -> bool:
    """Line by line, without trailing blanks and blank lines at the end; with a tolerance, numbers within it."""
    ours, theirs = _lines(found), _lines(expected)
    if ours == theirs:
        return True
    if not tolerance or len(ours) != len(theirs):
        return False
    return all(_same_line(a.split(), b.split(), tolerance) for a, b in zip(ours, theirs, strict=True))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(ours: list[str], theirs: list[str], tolerance: float) -> bool:
    if len(ours) != len(theirs):
        return False
    return all(a == b or _near(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


NUMBER = re.compile(r"[-+]?([0-9]{1,300}(\.[0-9]{0,300})?|\.[0-9]{1,300})([eE][-+]?[0-9]{1,3})?")


def _near(ours: str, theirs: str, tolerance: float) -> bool:
    if not (NUMBER.fullmatch(ours) and NUMBER.fullmatch(theirs)):
        return False
    return close(float(ours), float(theirs), tolerance)


def close(ours: float, theirs: float, tolerance: float) -> bool:
    """Absolutely below 1, relatively above."""
    return math.isfinite(ours) and abs(ours - theirs) <= tolerance * max(1.0, abs(theirs))
