"""An answer as what it is: a value, a list, an interval, an equation, words; and when two of them are the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from hotcold.rewards.mathematics.clean import clean
from hotcold.rewards.mathematics.expressions import LONGEST, read_value
from hotcold.rewards.mathematics.sums import Refused, TooLarge, Unreadable, Value, number
from hotcold.rewards.mathematics.units import NO_UNIT, differ, without_unit

OPEN, CLOSE = "([{", ")]}"
EMPTY = frozenset({r"\emptyset", r"\{\}", "{}", r"\{ \}"})
ALL = frozenset({r"\mathbb{R}", r"\mathbb R", r"\R", r"\Reals", "all real numbers", "all reals"})
WORDS = re.compile(r"[A-Za-z][A-Za-z'.-]*(?: [A-Za-z'.-]+){0,4}")
NAMED = re.compile(r"[A-Za-z]{3,}(?: [A-Za-z\d]+){1,3}")  # June 20
IS_WORD = re.compile(r"[A-Za-z]{3}|^[A-Za-z]{2}$")  # ab-c is no word
CHOICE = re.compile(r"\(?([A-J])[).:](?: (?!.*\b[A-J][).:])(?!.*\b(?:or|and) \(?[A-J]\b).*)?|\(([a-jA-J])\)|([A-J])")
BASE = re.compile(r"(\w+)_\s*\{?\s*(\d+)\s*\}?")
TIME = re.compile(r"\d+(?:: ?\d+)+(?: ?[aApP]\.?[mM]\.?)?")
SPLIT = re.compile(r",\s*(?:and|or)\b|;\s*(?:and|or)\b|[,;]|\band\b|\bor\b")
ASSIGNED = re.compile(r"(\\?[A-Za-z]+(?:_\w|_\{\w+\})?|[A-Za-z]\(\s*[A-Za-z]\s*\))\s*")
MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[clr|]+\})?(.*)\\end\{\1\}", re.DOTALL)
RELATION = re.compile(r"(<=|>=|<|>)")
NOT_EQUAL = re.compile(r"\\(?:ne|neq|not|approx|sim)(?![A-Za-z])|!=")
TUPLE_OF_NAMES = re.compile(r"\( ?[A-Za-z](?: ?, ?[A-Za-z])+ ?\) ?")
MEMBER = re.compile(r"\\?[A-Za-z]+(?:_\w)?\s*\\in(?![A-Za-z])\s*")

Kind = Literal["list", "set", "pair", "union", "matrix"]


@dataclass(frozen=True)
class Quantity:
    value: Value
    unit: str = ""


@dataclass(frozen=True)
class Group:
    """Several: in order ("pair", with its brackets: points, intervals), or not ("list", "set", "union")."""

    kind: Kind
    items: tuple[Answer, ...]
    brackets: str = ""
    certain: bool = True  # False: (1, 2), which is a point or an interval
    is_inequality: bool = False


@dataclass(frozen=True)
class Equation:
    difference: Value  # left minus right
    variable: str = ""  # of x = 5
    value: Value | None = None


@dataclass(frozen=True)
class Words:
    text: str


Answer = Quantity | Group | Equation | Words


@dataclass(frozen=True)
class Rules:
    tolerance: float = 0.0  # relative to the gold answer
    percent: Literal["unit", "hundredth"] = "unit"


def read(text: str, rules: Rules, most_words: int = 5) -> Answer:
    """The answer that the text is; Unreadable where it is in no language of ours."""
    if len(text) > LONGEST:
        raise TooLarge("a long answer")
    if not (plain := clean(text)):
        raise Unreadable("nothing")
    return _read(plain, rules, most_words)


def _read(text: str, rules: Rules, most_words: int = 5) -> Answer:
    text = text.strip()
    if NOT_EQUAL.search(text):
        raise Refused("what an answer is not")
    if text in EMPTY:
        return Group("set", ())
    if text in ALL:
        return _read(r"(-\infty,\infty)", rules)
    if choice := CHOICE.fullmatch(text):
        return Words((choice[1] or choice[2] or choice[3]).upper())
    if matrix := MATRIX.fullmatch(text):
        return _matrix(matrix[2], rules)
    if found := MEMBER.match(text):
        inside = _read(text[found.end() :], rules)
        return Group(inside.kind, inside.items, inside.brackets) if isinstance(inside, Group) else inside
    if len(parts := _split(text, re.compile(r"\\cup(?![A-Za-z])"))) > 1:
        return Group("union", tuple(_read(part, rules) for part in parts))
    if (bracketed := _bracketed(text, rules)) is not None:
        return bracketed
    if len(parts := [part for part in _split(text, SPLIT) if part.strip()]) > 1:
        return _list(parts, rules)
    if RELATION.search(text):
        return _inequality(text, rules)
    if "=" in text:
        return _equation(text, rules)
    if r"\pm" in text or r"\mp" in text:
        return _both_signs(text, rules)
    return _single(text, rules, most_words)


def _single(text: str, rules: Rules, most_words: int) -> Answer:
    if WORDS.fullmatch(text) and IS_WORD.search(text) and text not in ("pi", "infinity", "sqrt"):
        return Words(text.casefold().strip("."))
    if NAMED.fullmatch(text) and not any(word.lower() in NO_UNIT for word in text.split()):
        return Words(text.casefold())
    if TIME.fullmatch(text):
        return Words(re.sub(r"[ .]", "", text.casefold()))
    if based := BASE.fullmatch(text):
        if based[1].isdigit():
            return Words(f"{based[1]}_{based[2]}")
    before, unit, factor = without_unit(text, most_words)
    value = read_value(before)
    if unit == "percent" and rules.percent == "hundredth":
        value, unit = value / number(100), ""
    return Quantity(value * number(factor), unit)


def _split(text: str, at: re.Pattern[str]) -> list[str]:
    """At the places where no bracket is open."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        found = at.match(text, place) if depth == 0 else None
        if found:
            parts.append(text[start:place])
            start = place = found.end()
            continue
        depth += (text[place] in OPEN) - (text[place] in CLOSE)
        place += 1
    return [*parts, text[start:]]


def _bracketed(text: str, rules: Rules) -> Group | None:
    """A set, a tuple or an interval. None where the brackets are those of an expression."""
    is_set = text.startswith(r"\{") and text.endswith(r"\}")
    inside = text[2:-2] if is_set else text[1:-1]
    if not is_set and not (text[:1] in ("(", "[", "{") and text[-1:] in (")", "]", "}")):
        return None
    if _depth_falls(inside):
        return None
    parts = _split(inside, re.compile(r"[,;]"))
    if is_set or (text[0] == "{" and len(parts) > 1):
        return Group("set", _flat(_read(part, rules) for part in parts))
    if len(parts) < 2 or text[0] == "{" or text[-1] == "}":
        return None
    items = tuple(_read(part, rules) for part in parts)
    brackets = text[0] + text[-1]
    return Group("pair", items, brackets, certain=brackets != "()" or any(map(_is_infinite, items)))


def _depth_falls(inside: str) -> bool:
    """Whether a bracket closes that was opened before: (1)(2)."""
    depth = 0
    for sign in inside:
        depth += (sign in OPEN) - (sign in CLOSE)
        if depth < 0:
            return True
    return False


def _is_infinite(item: Answer) -> bool:
    return isinstance(item, Quantity) and "infty" in item.value.variables


def _list(parts: Sequence[str], rules: Rules) -> Group:
    items = [_read(part, rules) for part in parts]
    first = items[0]
    if isinstance(first, Equation) and first.variable and first.value is not None:  # n = 2, 3, 4
        if all(isinstance(item, Quantity) for item in items[1:]):
            return Group("list", (Quantity(first.value), *items[1:]))
        if all(isinstance(item, Equation) and item.variable == first.variable for item in items):
            return Group(
                "list", tuple(Quantity(item.value) for item in items if isinstance(item, Equation) and item.value)
            )
    return Group("list", _flat(items))


def _flat(items: Iterable[Answer]) -> tuple[Answer, ...]:
    """1, \\pm 2 are three."""
    found: list[Answer] = []
    for item in items:
        found += item.items if isinstance(item, Group) and item.kind == "list" else [item]
    return tuple(found)


def _both_signs(text: str, rules: Rules) -> Group:
    first = text.replace(r"\pm", "+").replace(r"\mp", "-")
    second = text.replace(r"\pm", "-").replace(r"\mp", "+")
    return Group("list", (_read(first, rules), _read(second, rules)))


def _matrix(text: str, rules: Rules) -> Group:
    rows = [row for row in re.split(r"\\\\", text) if row.strip()]
    return Group("matrix", tuple(Group("pair", tuple(_read(c, rules) for c in row.split("&")), "()") for row in rows))


def _inequality(text: str, rules: Rules) -> Answer:
    """a < x <= b, x > a, a < x: the interval."""
    parts = [part.strip() for part in RELATION.split(text)]
    sides, signs = parts[::2], parts[1::2]
    if len(sides) == 2:
        sides, signs = ([sides[1], sides[0]], [_turned(signs[0])]) if not _is_name(sides[0]) else (sides, signs)
        if not _is_name(sides[0]):
            raise Unreadable("an inequality")
        end, infinity = _read(sides[1], rules), Quantity(read_value(r"\infty"))
        if signs[0][0] == ">":
            return Group("pair", (end, infinity), "[)" if "=" in signs[0] else "()", is_inequality=True)
        low = Quantity(-infinity.value)
        return Group("pair", (low, end), "(]" if "=" in signs[0] else "()", is_inequality=True)
    if len(sides) != 3 or not _is_name(sides[1]) or signs[0][0] != signs[1][0]:
        raise Unreadable("inequalities")
    if signs[0][0] == ">":
        sides, signs = sides[::-1], [_turned(sign) for sign in signs[::-1]]
    brackets = ("[" if "=" in signs[0] else "(") + ("]" if "=" in signs[1] else ")")
    return Group("pair", (_read(sides[0], rules), _read(sides[2], rules)), brackets, is_inequality=True)


def _turned(sign: str) -> str:
    return sign.translate(str.maketrans("<>", "><"))


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z](_\w)?|\\(theta|alpha|beta|lambda|mu|phi|gamma)", text) is not None


def _equation(text: str, rules: Rules) -> Answer:
    """x = 5, 2x + y = 3; of 2 + 3 = 5 the value, where it is true."""
    sides = text.split("=")
    if any(not side.strip() for side in sides):
        raise Refused("an equation with one side")
    name = ASSIGNED.fullmatch(sides[0])
    rest = sides[1:] if name else sides
    if any(word in text for word in (r"\pm", r"\mp")):
        if name and len(sides) == 2:
            return _both_signs(sides[1], rules)
        raise Unreadable("an equation of both signs")
    if TUPLE_OF_NAMES.fullmatch(sides[0]) and len(sides) == 2:
        return _read(sides[1], rules)
    found = [_read(side, rules) for side in rest]
    if name and len(found) == 1 and not isinstance(found[0], Quantity):
        return found[0]  # A = (0, 1)
    quantities = [one for one in found if isinstance(one, Quantity)]
    if len(quantities) < len(found):
        raise Unreadable("an equation")
    last = quantities[-1]
    if name or len(sides) > 2:
        if any(not one.value.equals(last.value) for one in quantities):
            raise Refused("an equation that does not hold")
        variable = re.sub(r"[\\{}]|\(.*\)", "", name[1]) if name else ""
        if name and variable not in last.value.variables:
            left = read_value(variable) if len(variable) == 1 else number(0)
            return Equation(left - last.value, variable, last.value)
        if not name:
            return last
    left, right = read_value(sides[0]), last.value
    if left.equals(right):
        return last
    if not left.variables and not right.variables:
        raise Refused("an equation that does not hold")
    return Equation(left - right)


# ---- the same


def same(gold: Answer, answer: Answer, rules: Rules) -> bool:
    """Whether the answer is the gold one. Not symmetric: see docs/rewards.md on inequalities."""
    if isinstance(gold, Equation) and isinstance(answer, Equation):
        return _same_equations(gold, answer)
    gold, answer = _value_of(gold), _value_of(answer)
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return not differ(gold.unit, answer.unit) and _equal(gold.value, answer.value, rules.tolerance)
    if isinstance(gold, Group) and isinstance(answer, Group):
        return _same_groups(gold, answer, rules)
    if isinstance(gold, Words) and isinstance(answer, Words):
        return gold.text == answer.text
    return _is_its_element(gold, answer, rules)


def _is_its_element(gold: Answer, answer: Answer, rules: Rules) -> bool:
    """A set of one is its element; nothing else differs in kind and is the same."""
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Group) and one.kind == "set" and len(one.items) == 1 and not isinstance(other, Group):
            return same(one.items[0], other, rules)
    return False


def _value_of(answer: Answer) -> Answer:
    """Of x = 5 the 5."""
    return Quantity(answer.value) if isinstance(answer, Equation) and answer.value is not None else answer


def _same_equations(gold: Equation, answer: Equation) -> bool:
    if gold.value is not None and answer.value is not None and not gold.value.variables:
        return gold.variable == answer.variable and gold.value.equals(answer.value)
    if len(gold.variable) > 1 or len(answer.variable) > 1:
        return gold.variable == answer.variable and bool(
            gold.value and answer.value and gold.value.equals(answer.value)
        )
    one, other = gold.difference.num, answer.difference.num
    if one.keys() != other.keys() or not one:
        return False
    ratios: set[Fraction] = {one[term] / other[term] for term in one}
    return len(ratios) == 1


def _same_groups(gold: Group, answer: Group, rules: Rules) -> bool:
    if gold.kind == "matrix" or answer.kind == "matrix":
        return gold.kind == answer.kind and _in_order(gold.items, answer.items, rules)
    if gold.kind == "pair" and answer.kind == "pair":
        if answer.is_inequality and not gold.is_inequality and not gold.certain:
            return False
        return gold.brackets == answer.brackets and _in_order(gold.items, answer.items, rules)
    if "pair" in (gold.kind, answer.kind) or ("union" in (gold.kind, answer.kind) and gold.kind != answer.kind):
        return False
    return _in_any_order(_distinct(gold, rules), _distinct(answer, rules), rules)


def _in_order(gold: Sequence[Answer], answer: Sequence[Answer], rules: Rules) -> bool:
    return len(gold) == len(answer) and all(same(g, a, rules) for g, a in zip(gold, answer, strict=True))


def _in_any_order(gold: Sequence[Answer], answer: Sequence[Answer], rules: Rules) -> bool:
    left = list(answer)
    for one in gold:
        place = next((n for n, other in enumerate(left) if _same_items(one, other, rules)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _same_items(gold: Answer, answer: Answer, rules: Rules) -> bool:
    """x = 1, y = 2 is not 1, 2."""
    return isinstance(gold, Equation) == isinstance(answer, Equation) and same(gold, answer, rules)


def _distinct(group: Group, rules: Rules) -> list[Answer]:
    """The elements of a set, each once; of a list all."""
    if group.kind != "set":
        return list(group.items)
    found: list[Answer] = []
    for item in group.items:
        if not any(same(item, other, Rules()) for other in found):
            found.append(item)
    return found


def _equal(gold: Value, answer: Value, tolerance: float) -> bool:
    if gold.equals(answer):
        return True
    if not tolerance:
        return False
    wanted, given = gold.approximate(), answer.approximate()
    if wanted is None or given is None:
        return False
    return abs(given - wanted) <= tolerance * (abs(wanted) or 1.0)
