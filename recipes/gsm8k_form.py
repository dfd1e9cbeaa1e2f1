"""Word problems in GSM8K's form, of our own making: `python recipes/gsm8k_form.py` writes gsm8k_form.jsonl beside it.

An answer is a worked solution with each computation in << >> and the result behind ####, as in GSM8K. The prompts are
messages that ask for that last line.
"""

import json
import random
from pathlib import Path

NAMES = ["Ada", "Ben", "Chen", "Dina", "Emil", "Fay", "Gil", "Hana"]
THINGS = ["apples", "books", "coins", "shells", "stamps", "pencils", "stones", "tickets"]
ASK = "Write the solution, and the result on a last line behind ####."


def buys(r: random.Random, name: str, things: str) -> tuple[str, str, int]:
    a, b = r.randint(2, 20), r.randint(2, 20)
    return (
        f"{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        f"{name} has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} {things}.",
        a + b,
    )


def gives(r: random.Random, name: str, things: str) -> tuple[str, str, int]:
    b, rest = r.randint(2, 12), r.randint(2, 12)
    a = b + rest
    return (
        f"{name} has {a} {things} and gives {b} of them away. How many {things} are left?",
        f"{a} - {b} = <<{a}-{b}={rest}>>{rest} {things} are left.",
        rest,
    )


def boxes(r: random.Random, name: str, things: str) -> tuple[str, str, int]:
    a, b = r.randint(2, 9), r.randint(2, 9)
    return (
        f"{name} fills {a} boxes with {b} {things} each. How many {things} is that?",
        f"That is {a} * {b} = <<{a}*{b}={a * b}>>{a * b} {things}.",
        a * b,
    )


def shares(r: random.Random, name: str, things: str) -> tuple[str, str, int]:
    each, friends = r.randint(2, 9), r.randint(2, 6)
    all_of_them = each * friends
    return (
        f"{name} shares {all_of_them} {things} equally among {friends} friends. How many does each friend get?",
        f"Each gets {all_of_them} / {friends} = <<{all_of_them}/{friends}={each}>>{each} {things}.",
        each,
    )


def two_steps(r: random.Random, name: str, things: str) -> tuple[str, str, int]:
    a, b, c = r.randint(2, 6), r.randint(2, 6), r.randint(1, 9)
    return (
        f"{name} buys {a} bags with {b} {things} each and finds {c} more. How many {things} does {name} have?",
        f"The bags hold {a} * {b} = <<{a}*{b}={a * b}>>{a * b} {things}. "
        f"With the others {name} has {a * b} + {c} = <<{a * b}+{c}={a * b + c}>>{a * b + c} {things}.",
        a * b + c,
    )


KINDS = [buys, gives, boxes, shares, two_steps]


def rows(count: int = 60, seed: int = 0) -> list[dict]:
    """The kinds in turn; no question twice."""
    r, found = random.Random(seed), {}
    while len(found) < count:
        question, solution, result = KINDS[len(found) % len(KINDS)](r, r.choice(NAMES), r.choice(THINGS))
        found[question] = f"{solution}\n#### {result}"
    return [
        {"prompt": [{"role": "user", "content": f"{question}\n{ASK}"}], "answer": answer}
        for question, answer in found.items()
    ]


if __name__ == "__main__":
    text = "".join(json.dumps(row) + "\n" for row in rows())
    Path(__file__).with_suffix(".jsonl").write_text(text, encoding="utf-8")
