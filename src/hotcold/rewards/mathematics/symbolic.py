"""What the exact path cannot read, by math-verify (extra `math`): functions, sums under roots, inequalities, systems.

Only what it parses whole is compared. Two expressions are equal when their values agree to 30 digits at several points:
its own comparison rounds to 6 decimals. It keeps deadlines by SIGALRM, which the main thread alone can have; here it
has none, and the worker of the reward is ended instead. What is known to take for ever is not begun.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


INSTALL = "pip install 'hotcold[math]'"
LONGEST = 300  # characters
DIGITS, POINTS = 60, 6
CLOSE = 1e-30  # relative

# Powers and factorials of large numbers, towers, and what is evaluated term by term.
ENDLESS = re.compile(
    r"\^\s*\{?\s*-?\d{4,}|\d{31,}|\d{4,}\s*\)?\s*!|!\s*!|!\s*\)+\s*!|\^\s*\(?\d+\)?\s*\^"
    r"|\\(?:sum|prod|int|iint|lim|oint|bigcup|bigcap)(?![A-Za-z])"
)
EXPONENT = re.compile(r"\^\s*(\{|\(?-?(\d{1,3}))")
TOWER = re.compile(r"[\d)}]\s*\^")
MOST_POWER = 10**6  # all exponents multiplied
COMMANDS = _words(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt frac dfrac tfrac cfrac binom dbinom "
    "cdot times div left right pi infty pm mp circ in cup cap emptyset varnothing le ge leq geq lt gt det gcd max min "
    "begin end text mathrm displaystyle alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi varphi psi "
    "omega Gamma Delta Theta Lambda Sigma Phi Psi Omega"
)
PLAIN_WORDS = _words("sin cos tan cot sec csc log ln exp sqrt pi pmatrix bmatrix vmatrix matrix and or")
SIGNS = re.compile(r"[A-Za-z\d\s+\-*/^_(){}\[\],=<>|!.\\&$]+")
HINT = re.compile(r"\\[A-Za-z]|[\^!|=<>]|sin|cos|tan|log|ln")


def is_installed() -> bool:
    return find_spec("math_verify") is not None


def is_mathematical(text: str) -> bool:
    """Whether it is worth a try."""
    return HINT.search(text) is not None and _is_known(text)


def _is_known(text: str) -> bool:
    """It ends, and nothing in it could be passed over: a sign, a command, or a word whose letters are multiplied."""
    if len(text) > LONGEST or not SIGNS.fullmatch(text) or ENDLESS.search(text) or _is_tower(text):
        return False
    if text.count("=") > 1 or text.count("|") % 2 or text.count("{") != text.count("}"):
        return False
    if re.search(r"\\\\|&", text) and r"\begin" not in text:
        return False
    commands = re.findall(r"\\([A-Za-z]+)", text)
    words = re.findall(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", text))
    return all(command in COMMANDS for command in commands) and all(word in PLAIN_WORDS for word in words)


def _is_tower(text: str) -> bool:
    power = 1
    for found in EXPONENT.finditer(text):
        power *= int(found[2] or 1) or 1
        if found[1] == "{":
            inside = _group(text, found.end())
            first = re.match(r"\s*-?(\d{1,3})", inside)
            power *= int(first[1]) or 1 if first else 1
            if TOWER.search(inside):
                return True
    return power > MOST_POWER


def _group(text: str, start: int) -> str:
    """Up to the brace that closes the one before `start`."""
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start:place]
    return text[start:]


def parsed(text: str) -> Any:
    """A sympy object, or None."""
    if not _is_known(text):
        return None
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no deadline
    logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)
    found = parse(
        rf"\boxed{{{_latex(text)}}}",
        [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found[0] if found and not isinstance(found[0], str) else None


def _latex(text: str) -> str:
    text = text.strip().strip("$").replace("**", "^")
    return re.sub(r"(?<![\\A-Za-z])(sin|cos|tan|cot|log|ln|exp|sqrt|pi)(?![A-Za-z])", r"\\\1", text)


def equal(gold: Any, answer: Any) -> bool:
    """Whether two parsed objects are the same."""
    import sympy

    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        return _equal_values(_exact(gold), _exact(answer))
    from math_verify import verify

    return all(
        verify(one, other, float_rounding=30, numeric_precision=DIGITS, timeout_seconds=None)
        for one, other in ((gold, answer), (answer, gold))
    )


def _exact(value: Any) -> Any:
    """Decimals as the fractions that they are."""
    import sympy

    return value.xreplace({f: sympy.Rational(str(f)) for f in value.atoms(sympy.Float)})


def _equal_values(one: Any, other: Any) -> bool:
    if one.free_symbols != other.free_symbols:
        return False
    compared = 0
    for point in _points(one.free_symbols):
        values = [_at(value, point) for value in (one, other)]
        if any(value is None or (point and not value.is_real) for value in values):
            continue
        compared += 1
        if abs(values[0] - values[1]) > CLOSE * max(abs(values[0]), abs(values[1])):
            return False
    return compared > 0


def _points(symbols: Any) -> Iterator[dict[Any, Any]]:
    """Fixed ones, of both signs, all coordinates different."""
    import sympy

    for n in range(POINTS if symbols else 1):
        signs = (1 if (n >> k) % 2 == 0 else -1 for k in range(len(symbols)))
        ordered = zip(sorted(symbols, key=str), signs, strict=True)
        yield {x: sign * sympy.Rational(7 * n + 3 * k + 5, 11 + 2 * n + k) for k, (x, sign) in enumerate(ordered)}


def _at(value: Any, point: dict[Any, Any]) -> Any:
    try:
        found = value.subs(point).doit().evalf(DIGITS)
    except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError):
        return None
    return found if found.is_number and found.is_finite else None
