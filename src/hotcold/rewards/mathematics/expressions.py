"""Reads an expression, LaTeX or plain, into an exact value."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from hotcold.rewards.mathematics.sums import Refused, TooLarge, Unreadable, Value, atom, factorial, number


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NUMBER = re.compile(r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,4}(?!\d))?")
WORD = re.compile(r"\\[A-Za-z]+|[A-Za-z]+")
GREEK = _words(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi varphi chi psi "
    "omega Gamma Delta Theta Lambda Sigma Phi Psi Omega"
)
LONGEST = 400  # characters
DEEPEST = 30  # brackets and powers within each other


def read_value(text: str) -> Value:
    """Unreadable for what is in no language of ours; TooLarge for what nobody writes."""
    if len(text) > LONGEST:
        raise TooLarge("a long expression")
    if not text.isascii():
        raise Unreadable("signs that are not known")
    reader = _Reader(text)
    value = reader.total()
    reader.blanks()
    if reader.at < len(text):
        raise Unreadable(text[reader.at :])
    return value


class _Reader:
    """Recursive descent: total, product, power, base."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def blanks(self) -> str:
        """Skips blanks; the next character, or nothing at the end."""
        while self.text[self.at : self.at + 1] == " ":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def total(self) -> Value:
        self.depth += 1
        if self.depth > DEEPEST:
            raise TooLarge("a deep expression")
        value = self._signed()
        while (sign := self.blanks()) in ("+", "-") and sign:
            self.at += 1
            value = value + self.product() if sign == "+" else value - self.product()
        self.depth -= 1
        return value

    def _signed(self) -> Value:
        sign = self.blanks()
        if sign in ("+", "-") and sign:
            self.at += 1
            value = self.product()
            return -value if sign == "-" else value
        return self.product()

    def product(self) -> Value:
        value = self.power()
        while True:
            sign = self.blanks()
            if sign in ("*", "/") and sign:
                self.at += 1
                other = self._signed_power()
                value = value * other if sign == "*" else value / other
            elif sign and (sign.isalpha() or sign in "({\\"):
                value = value * self.power()
            elif sign.isdigit() or sign == ".":
                raise Refused("two numbers side by side")
            else:
                return value

    def _signed_power(self) -> Value:
        if self.blanks() == "-":
            self.at += 1
            return -self.power()
        return self.power()

    def power(self) -> Value:
        value = self.base()
        while self.blanks() == "!":
            self.at += 1
            value = factorial(value)
        if self.text.startswith("**", self.at):
            self.at += 2
        elif self.blanks() == "^":
            self.at += 1
        else:
            return value
        self.depth += 1
        if self.depth > DEEPEST:
            raise TooLarge("a deep expression")
        exponent = self._exponent().rational
        self.depth -= 1
        if exponent is None:
            raise Unreadable("an exponent that is no number")
        return value.power(exponent)

    def _exponent(self) -> Value:
        sign = self.blanks()
        if sign == "-":
            self.at += 1
            return -self.power()
        return self.power()

    def base(self) -> Value:
        sign = self.blanks()
        if sign in ("(", "{", "[") and sign:
            return self._group(sign)
        if found := NUMBER.match(self.text, self.at):
            self.at = found.end()
            return number(Fraction(found[0]))
        if found := WORD.match(self.text, self.at):
            return self._word(found[0])
        raise Unreadable(sign or "nothing")

    def _group(self, opening: str) -> Value:
        self.at += 1
        value = self.total()
        if self.blanks() != {"(": ")", "{": "}", "[": "]"}[opening]:
            raise Unreadable("brackets that do not match")
        self.at += 1
        return value

    def _word(self, word: str) -> Value:
        self.at += len(word)
        name = word.removeprefix("\\")
        if name == "sqrt":
            return self._root()
        if word in (r"\frac", r"\binom"):
            top, bottom = self._argument(), self._argument()
            return top / bottom if word == r"\frac" else _binomial(top, bottom)
        if name in ("pi", "infty", "infinity") or (word[0] == "\\" and name in GREEK):
            return self._subscripted("infty" if name == "infinity" else name)
        if word[0] == "\\" or len(word) > 2:
            raise Unreadable(word)
        self.at -= len(word) - 1  # letters side by side are a product
        return self._subscripted(word[0])

    def _subscripted(self, name: str) -> Value:
        if self.text[self.at : self.at + 1] != "_":
            return atom(name)
        found = re.compile(r"_(\w|\{\w+\})").match(self.text, self.at)
        if not found:
            raise Unreadable("a subscript")
        self.at = found.end()
        return atom(f"{name}_{found[1].strip('{}')}")

    def _root(self) -> Value:
        degree = Fraction(2)
        if self.blanks() == "[":
            inside = self._group("[").rational
            if inside is None or inside < 2:
                raise Unreadable("a root of that degree")
            degree = inside
        return self._argument().power(1 / degree)

    def _argument(self) -> Value:
        """Of a command: a group, or a single sign as in \\frac12."""
        sign = self.blanks()
        if sign in ("{", "(") and sign:
            return self._group(sign)
        if sign.isdigit():
            self.at += 1
            return number(int(sign))
        if sign.isalpha():
            self.at += 1
            return atom(sign)
        return self.base()


def _binomial(top: Value, bottom: Value) -> Value:
    n, k = top.rational, bottom.rational
    if n is None or k is None or n.denominator > 1 or k.denominator > 1 or not 0 <= k <= n:
        raise Unreadable("a binomial coefficient")
    if n > 3000:
        raise TooLarge("a binomial coefficient")
    return number(math.comb(int(n), int(k)))
