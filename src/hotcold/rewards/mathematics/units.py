"""Words behind a number that say of what it counts: "18 eggs", "15 cm^2", "50 percent"."""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# One name for each unit that has several. Two different units of this table are never equal.
FAMILIES = {
    "km": "kilometer kilometers kilometre kilometres", "m": "meter meters metre metres",
    "cm": "centimeter centimeters centimetre centimetres", "mm": "millimeter millimeters millimetre millimetres",
    "in": "inch inches", "ft": "foot feet", "yd": "yard yards", "mi": "mile miles",
    "kg": "kilogram kilograms kgs", "g": "gram grams", "mg": "milligram milligrams",
    "lb": "lbs pound pounds", "oz": "ounce ounces",
    "hr": "hrs hour hours", "min": "mins minute minutes", "sec": "secs second seconds",
    "day": "days", "week": "weeks", "month": "months", "year": "years yr yrs",
    "ml": "mL milliliter milliliters", "liter": "liters litre litres", "gallon": "gallons gal",
    "dollar": "dollars USD", "cent": "cents", "euro": "euros EUR", "degree": "degrees deg", "radian": "radians rad",
    "percent": "percents", "mph": "", "kmh": "kph",
}  # fmt: skip
KNOWN = {word: unit for unit, words in FAMILIES.items() for word in (unit, *words.split())}

# Behind a number these are no units: they change it, compare it, or name another one.
NO_UNIT = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand "
    "thousands million millions billion billions trillion trillions mil bil lakh lakhs crore crores dozen dozens "
    "score gross half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths "
    "eighth eighths ninth ninths tenth tenths twelfth twelfths hundredth hundredths thousandth thousandths millionth "
    "millionths pair pairs double doubled triple tripled halved negative raised base binary octal hexadecimal hex "
    "or and nor not no to than less over under at about plus minus times divided by mod modulo squared cubed "
    "cube root factorial choose if when for from until versus vs but maybe wait instead either between except "
    "sqrt pi infinity inf sin cos tan cot csc log ln exp lim max gcd lcm det arcsin arccos arctan sinh cosh "
    "all any is are was equals equal approximately false true wrong incorrect where with"
)
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SHORT = _words("of in a an on up ml lb oz")

WORDS = re.compile(r"(?P<value>.*[\d)}!])(?P<gap>\s*)(?P<words>[A-Za-z][A-Za-z .'/^{}\d-]*)", re.DOTALL)
POWER = re.compile(r"\s*\^\s*\{?\s*([23])\s*\}?\s*$")


def without_unit(text: str, most_words: int = 5) -> tuple[str, str, int]:
    """(the text before its unit, the unit, what it is multiplied by). Without a unit the text as it is."""
    if not (found := WORDS.fullmatch(text)):
        return text, "", 1
    words, power = found["words"].strip(), ""
    if squared := POWER.search(words):
        words, power = words[: squared.start()].strip(), squared[1]
    names = [name.strip(".") for name in re.split(r"[ /]+", words) if name.strip(".")]
    if names and names[0].lower() in SCALES and found["gap"]:
        before, unit, factor = without_unit(" ".join([found["value"], *names[1:]]), most_words)
        return before, unit, factor * SCALES[names[0].lower()]
    if not _is_unit(names, bool(found["gap"]), most_words):
        return text, "", 1
    return found["value"].strip(), _name(names, power), 1


def _is_unit(names: list[str], stands_apart: bool, most_words: int) -> bool:
    """A known unit may stand at the number (5cm), another word apart from it. A letter alone is a variable: 5m."""
    if not 0 < len(names) <= most_words or names[-1].lower() == "square":
        return False
    if not all(re.fullmatch(r"[A-Za-z][A-Za-z'-]*", name) and name.lower() not in NO_UNIT for name in names):
        return False
    first, *rest = names
    is_known = len(first) > 1 and first in KNOWN and not (first == "in" and rest)
    is_word = stands_apart and len(first) > 2
    return (is_known or is_word) and all(len(n) > 2 or n in KNOWN or n.lower() in SHORT for n in rest)


def _name(names: list[str], power: str) -> str:
    known = [KNOWN.get(name, KNOWN.get(name.lower(), "")) for name in names if name.lower() != "square"]
    power = power or ("2" if names[0].lower() == "square" else "")
    return " ".join(known) + power if all(known) and known else ""


def differ(one: str, other: str) -> bool:
    """Both are known and they are not the same; 1 m is not 1 cm. What is not known is not compared."""
    return bool(one and other) and one != other
