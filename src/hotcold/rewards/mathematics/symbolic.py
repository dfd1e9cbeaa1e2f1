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

# Towers, powers and factorials of large numbers, and what is evaluated term by term.
ENDLESS = re.compile(
    r"\^\s*\{?\s*-?\d{4,}|\d{31,}|\d{4,}\s*\)?\s*!|!\s*!|!\s*\)+\s*!|\^\s*\{[^{}]*\^|\^\s*\(?\d+\)?\s*\^"
    r"|\\(?:sum|prod|int|iint|lim|oint|bigcup|bigcap)(?![A-Za-z])"
)
FUNCTIONS = _words(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lg sqrt pi frac binom infty in cup "
    "cap left right pm det gcd lcm max min mod begin end pmatrix bmatrix vmatrix matrix and or le ge leq geq lt "
    "gt"
)
HINT = re.compile(r"\\[A-Za-z]|[\^!|=<>]|sin|cos|tan|log|ln")


def is_installed() -> bool:
    return find_spec("math_verify") is not None


def is_mathematical(text: str) -> bool:
    """Whether it is worth a try."""
    return HINT.search(text) is not None and _is_harmless(text)


def _is_harmless(text: str) -> bool:
    """It ends, and the letters of no word are multiplied."""
    if len(text) > LONGEST or ENDLESS.search(text) or text.count("=") > 1:
        return False
    words = re.findall(r"(?<!\\)(?<![A-Za-z\\])[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", text))
    return all(word in FUNCTIONS for word in words) and text.count("{") == text.count("}")


def parsed(text: str) -> Any:
    """A sympy object, or None."""
    if not _is_harmless(text):
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
