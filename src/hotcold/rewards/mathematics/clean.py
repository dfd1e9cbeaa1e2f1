"""What stands in an answer, without how it is set: one spelling for each sign, no spacing, no fonts."""

from __future__ import annotations

import re
from fractions import Fraction

SIGNS = {
    "\N{MINUS SIGN}": "-", "\N{MULTIPLICATION SIGN}": "*", "\N{MIDDLE DOT}": "*",
    "\N{DOT OPERATOR}": "*", "\N{DIVISION SIGN}": "/", "\N{FRACTION SLASH}": "/", "\N{PLUS-MINUS SIGN}": r"\pm ",
    "\N{SQUARE ROOT}": r"\sqrt ", "\N{GREEK SMALL LETTER PI}": r"\pi ", "\N{INFINITY}": r"\infty ",
    "\N{LESS-THAN OR EQUAL TO}": "<=", "\N{GREATER-THAN OR EQUAL TO}": ">=", "\N{UNION}": r"\cup ",
    "\N{ELEMENT OF}": r"\in ", "\N{EMPTY SET}": r"\emptyset ", "\N{DEGREE SIGN}": r" degrees ",
    "\N{SUPERSCRIPT TWO}": "^2", "\N{SUPERSCRIPT THREE}": "^3", "\N{NO-BREAK SPACE}": " ",
    "\N{NARROW NO-BREAK SPACE}": " ", "\N{THIN SPACE}": " ", "\N{VULGAR FRACTION ONE HALF}": r"\frac{1}{2}",
    "\N{VULGAR FRACTION ONE QUARTER}": r"\frac{1}{4}", "\N{VULGAR FRACTION THREE QUARTERS}": r"\frac{3}{4}",
}  # fmt: skip
NAMES = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\cdot": "*", r"\times": "*", r"\ast": "*",
    r"\div": "/", r"\leq": "<=", r"\le": "<=", r"\leqslant": "<=", r"\geq": ">=", r"\ge": ">=", r"\geqslant": ">=",
    r"\lt": "<", r"\gt": ">", r"\varnothing": r"\emptyset ", r"\degree": " degrees ", r"\lbrace": r"\{",
    r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]", r"\dbinom": r"\binom", r"\tbinom": r"\binom",
    r"\euro": "", r"\pounds": "", r"\land": " and ", r"\lor": " or ",
}  # fmt: skip
GONE = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|displaystyle|textstyle|limits|nolimits)(?![A-Za-z])"
    r"|\\!|[\N{EURO SIGN}\N{POUND SIGN}\N{YEN SIGN}]"
)
SPACE = re.compile(r"\\(?:quad|qquad|space|thinspace|enspace)(?![A-Za-z])|(?<!\\)\\[,;: ]|~")
FONT = re.compile(
    r"\\(?:text|mbox|textrm|textbf|textit|textnormal|textsf|texttt|mathrm|mathbf|mathit|mathsf|operatorname|bf|rm)"
    r"\s*\{([^{}]*)\}"
)
ONE_LETTER_UNITS = {"m": "meters", "s": "seconds", "g": "grams", "L": "liters", "h": "hours", "l": "liters"}
COMMA = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
PAIR = re.compile(r"(?:,[1-9]\d\d)+")  # (100,200) is a pair, (1,000) a number
BLANKS = re.compile(r"(?<![\d.,] )(?<![\d.,])[1-9]\d{0,2}(?: \d{3})+(?!\d)(?! ?\d)")
REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
MIXED = re.compile(
    r"(?<![\w.^/}])(\d+)(?:\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|\s*\\frac\s*(\d)\s*(\d)|\s+(\d+)/(\d+)(?![\w/]))"
)
ORDINAL = re.compile(r"(?<=\d)\s*(?:\^\s*)?(?:\{\s*)?(?:st|nd|rd|th)(?![A-Za-z])(?:\s*\})?")


def clean(text: str) -> str:
    for sign, word in SIGNS.items():
        text = text.replace(sign, word)
    is_money = r"\$" in text or text.count("$") == 1
    text = re.sub(r",\s*\\!\s*(?=\d{3})", ",", text)  # 11,\! 111,\! 100
    text = text.replace(r"\$", "").replace(r"\%", "%").replace(r"\(", "").replace(r"\)", "")
    text = re.sub(r"\\\[|\\\](?![A-Za-z])", "", text)
    text = GONE.sub("", text)
    text = re.sub(r"(?<=\d)\\[,:; ](?=\d{3})", "", text).replace("{,}", ",")
    text = SPACE.sub(" ", text.replace("$", " "))
    text = re.sub(r"\\[A-Za-z]+", lambda found: NAMES.get(found[0], found[0]), text)
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)", " degrees ", text)
    for _ in range(3):  # \textbf{\text{B}}
        text = FONT.sub(_unwrapped, text)
    text = ORDINAL.sub("", text)
    text = re.sub(r"(?<=\d)\s*%", " percent ", text)
    text = COMMA.sub(_joined, text)
    text = BLANKS.sub(lambda found: found[0].replace(" ", ""), text)
    text = REPEATING.sub(_repeating, text)
    text = re.sub(r"(?<=\d)\s*[x*]\s*10\s*\^", "*10^", text)
    text = MIXED.sub(_mixed, text)
    text = re.sub(r"\s+", " ", text).strip().strip("*`").strip().rstrip(",;").removesuffix(".").strip()
    return f"{text} dollars" if is_money and re.fullmatch(r"-? ?[\d.]+", text) else text


def _joined(found: re.Match[str]) -> str:
    """Without its commas, unless it is what two brackets hold."""
    before, after = found.string[: found.start()].rstrip(), found.string[found.end() :].lstrip()
    first, comma, rest = found[0].partition(",")
    is_held = before.endswith(("(", "[", "\\{")) or after.startswith((")", "]", "\\}"))
    if is_held and PAIR.fullmatch(comma + rest):
        return found[0]
    return first + rest.replace(",", "")


def _unwrapped(found: re.Match[str]) -> str:
    word = found[1].strip()
    after_number = re.search(r"[\d})]\s*$", found.string[: found.start()]) is not None
    if after_number and word in ONE_LETTER_UNITS:
        return f" {ONE_LETTER_UNITS[word]} "
    return f" {found[1]} "


def _repeating(found: re.Match[str]) -> str:
    whole, start, again = found[1] or "0", found[2], found[3]
    value = Fraction(int(whole + start + again) - int(whole + start), (10 ** len(again) - 1) * 10 ** len(start))
    return f"({value.numerator}/{value.denominator})"


def _mixed(found: re.Match[str]) -> str:
    """3 1/2 is 3.5. Of 2 5/2 it is not known whether it is a sum or a product, and it stays what it is: unreadable."""
    whole, *rest = [part for part in found.groups() if part is not None]
    top, bottom = rest
    if int(top) >= int(bottom):
        return f"{whole} {top} {bottom}"
    return f"({whole}+{top}/{bottom})"
