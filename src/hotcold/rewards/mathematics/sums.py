"""Exact values: quotients of sums of terms, a term being a rational number times powers of atoms.

Atoms are variables, pi, e, i, and primes under a root, which stand as "2" with an exponent between 0 and 1. Roots of
different square-free numbers are independent over the rationals (Besicovitch 1940), so two sums are equal when their
terms are, and two quotients a/b and c/d when a d = c b. Nothing is rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

Term = tuple[tuple[str, Fraction], ...]  # atoms in order, each with its exponent
Sum = dict[Term, Fraction]

MOST_TERMS = 200
MOST_BITS = 40_000  # of a whole number
LARGEST_FACTORIAL = 3000
LARGEST_FACTOR = 10_000  # that is looked for under a root
CONSTANTS: dict[str, complex] = {"pi": math.pi, "e": math.e, "i": 1j}


class Unreadable(ValueError):
    """Not in the language that is compared exactly."""


class Refused(Unreadable):
    """What is no answer in any language: a division by zero, 2 + 2 = 5, two numbers side by side."""


class TooLarge(Refused):
    """A number that nobody writes as an answer, or an expression that takes too long."""


@dataclass(frozen=True)
class Value:
    """num / den"""

    num: Sum
    den: Sum

    @property
    def rational(self) -> Fraction | None:
        """The value where it is a rational number."""
        if not self.num:
            return Fraction(0)
        if list(self.num) == [()] and list(self.den) == [()]:
            return self.num[()] / self.den[()]
        return None

    @property
    def variables(self) -> set[str]:
        atoms = {atom for part in (self.num, self.den) for term in part for atom, _ in term}
        return {atom for atom in atoms if atom not in CONSTANTS and not atom.isdigit()}

    def __add__(self, other: Value) -> Value:
        if self.den == other.den:
            return quotient(_plus(self.num, other.num), self.den)
        return quotient(_plus(_times(self.num, other.den), _times(other.num, self.den)), _times(self.den, other.den))

    def __neg__(self) -> Value:
        return Value({term: -c for term, c in self.num.items()}, self.den)

    def __sub__(self, other: Value) -> Value:
        return self + -other

    def __mul__(self, other: Value) -> Value:
        return quotient(_times(self.num, other.num), _times(self.den, other.den))

    def __truediv__(self, other: Value) -> Value:
        return quotient(_times(self.num, other.den), _times(self.den, other.num))

    def equals(self, other: Value) -> bool:
        return _times(self.num, other.den) == _times(other.num, self.den)

    def power(self, exponent: Fraction) -> Value:
        if exponent.denominator == 1:
            return _whole_power(self, int(exponent))
        if len(self.num) > 1 or len(self.den) > 1:
            raise Unreadable("a root of a sum")
        (found,) = self.num.items() or [((), Fraction(0))]
        (below,) = self.den.items()
        return _root(*found, exponent) / _root(*below, exponent)

    def approximate(self) -> complex | None:
        """None where a variable stands in it."""
        if self.variables:
            return None
        try:
            return _approximate(self.num) / _approximate(self.den)
        except (OverflowError, ZeroDivisionError):
            return None


def quotient(num: Sum, den: Sum) -> Value:
    if not den:
        raise Refused("a division by zero")
    if len(den) == 1:  # a single term is divided at once, so that numbers stay numbers
        ((term, c),) = den.items()
        return Value(_times(num, _one_term(1 / c, {atom: -e for atom, e in term})), {(): Fraction(1)})
    return Value(num, den)


def number(value: Fraction | int) -> Value:
    value = Fraction(value)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise TooLarge("a number of many digits")
    return Value({(): value} if value else {}, {(): Fraction(1)})


def atom(name: str) -> Value:
    return Value({((name, Fraction(1)),): Fraction(1)}, {(): Fraction(1)})


def factorial(value: Value) -> Value:
    n = value.rational
    if n is None or n.denominator != 1 or n < 0:
        raise Unreadable("a factorial of what is no whole number")
    if n > LARGEST_FACTORIAL:
        raise TooLarge("a factorial")
    return number(math.factorial(int(n)))


def _plus(a: Sum, b: Sum) -> Sum:
    found = dict(a)
    for term, c in b.items():
        found[term] = found.get(term, Fraction(0)) + c
    return {term: c for term, c in found.items() if c}


def _times(a: Sum, b: Sum) -> Sum:
    if len(a) * len(b) > MOST_TERMS:
        raise TooLarge("a product of long sums")
    found: Sum = {}
    for left, c in a.items():
        for right, d in b.items():
            powers = dict(left)
            for name, exponent in right:
                powers[name] = powers.get(name, Fraction(0)) + exponent
            found = _plus(found, _one_term(c * d, powers))
    return found


def _one_term(c: Fraction, powers: dict[str, Fraction]) -> Sum:
    """c times the powers, with whole powers of numbers and of i taken out."""
    kept: dict[str, Fraction] = {}
    for name, exponent in powers.items():
        if name.isdigit():
            whole = math.floor(exponent)
            c *= _bounded(Fraction(int(name)), whole)
            exponent -= whole
        elif name == "i" and exponent.denominator == 1:
            c *= (1, 1, -1, -1)[int(exponent) % 4]
            exponent = Fraction(int(exponent) % 2)
        if exponent:
            kept[name] = exponent
    return {tuple(sorted(kept.items())): c} if c else {}


def _bounded(base: Fraction, exponent: int) -> Fraction:
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and size * abs(exponent) > MOST_BITS:
        raise TooLarge("a power")
    if base == 0 and exponent < 0:
        raise Refused("a division by zero")
    return base**exponent if abs(base) != 1 else base ** (abs(exponent) % 2)


def _whole_power(value: Value, n: int) -> Value:
    if n < 0:
        return _whole_power(number(1) / value, -n)
    if len(value.num) <= 1 and len(value.den) == 1:
        ((term, c),) = value.num.items() or [((), Fraction(0))]
        if not c:
            return number(1 if n == 0 else 0)
        return Value(_one_term(_bounded(c, n), {name: e * n for name, e in term}), value.den)
    if n > 12:
        raise TooLarge("a power of a sum")
    found = number(1)
    for _ in range(n):
        found = found * value
    return found


def _root(term: Term, c: Fraction, exponent: Fraction) -> Value:
    """(c term) ** exponent, with variables taken to be positive where that is no matter of taste."""
    if any(not name.isdigit() and name not in ("pi", "e") and (e.denominator > 1 or e % 2 == 0) for name, e in term):
        raise Unreadable("a root of a square, which may be of either sign")
    if c < 0 and exponent.denominator != 2:
        raise Unreadable("an odd root of a negative number, which has several values")
    if c == 0 and exponent <= 0:
        raise Refused("a division by zero")
    powers = {name: e * exponent for name, e in term}
    for base, sign in ((abs(c.numerator), 1), (c.denominator, -1)):
        for prime, count in _factors(base).items():
            name = str(prime)
            powers[name] = powers.get(name, Fraction(0)) + sign * count * exponent
    found = Value(_one_term(Fraction(1 if c else 0), powers), {(): Fraction(1)})
    return found * _whole_power(atom("i"), exponent.numerator) if c < 0 else found


def _factors(n: int) -> dict[int, int]:
    """Prime factors with their powers; a large rest must be a prime or its square, or it is not read."""
    found: dict[int, int] = {}
    factor = 2
    while factor <= LARGEST_FACTOR and factor * factor <= n:
        while n % factor == 0:
            found[factor] = found.get(factor, 0) + 1
            n //= factor
        factor += 1 if factor == 2 else 2
    if n > 1:
        root = math.isqrt(n)
        if n > LARGEST_FACTOR**4 or (n > LARGEST_FACTOR**2 and root * root != n):
            raise Unreadable("a root of a large number")
        base, count = (root, 2) if root * root == n else (n, 1)
        found[base] = found.get(base, 0) + count
    return found


def _approximate(part: Sum) -> complex:
    return sum((float(c) * math.prod(_number_of(n) ** float(e) for n, e in term) for term, c in part.items()), 0j)


def _number_of(name: str) -> complex:
    return CONSTANTS[name] if name in CONSTANTS else int(name)
