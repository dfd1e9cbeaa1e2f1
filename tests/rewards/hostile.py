"""Programs that want a score without earning it, or harm: each run as the reward runs it, and looked at from outside.

The first line of a program says how it is tested: io (input 2, output 4), calls (f(2) is 4) or asserts. A program that
achieved what it must not prints a line with ESCAPE.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from hotcold.rewards.code import Boxes, passed
from hotcold.rewards.code_blocks import same_output
from hotcold.rewards.code_tests import Test, tests_of
from hotcold.sandbox.box import SOURCES, Ended

FOLDER = Path(__file__).with_name("hostile_programs")
CANARY = Path("/tmp/hotcold_canary")  # a secret of the machine's
TESTS = {
    "io": [{"input": "2\n", "output": "4\n"}],
    "calls": [{"call": "f(2)", "expected": 4}],
    "asserts": "import math\nassert f(2) == 4 and abs(f(2) - 4) < 1 and math.isclose(f(2), 4)",
}
RIGHT = {
    "io": "print(int(input()) ** 2)",
    "calls": "def f(x):\n    return x * x",
    "asserts": "def f(x: int) -> List[int]:\n    return x * x",
}


@dataclass(frozen=True)
class Outcome:
    name: str
    has_passed: bool
    escapes: tuple[str, ...]
    seconds: float

    @property
    def is_held(self) -> bool:
        return not self.has_passed and not self.escapes


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def place_secrets() -> None:
    CANARY.mkdir(exist_ok=True)
    CANARY.chmod(0o777)  # what then protects it is the sandbox alone
    (CANARY / "secret").write_text("canary")
    os.environ["HOTCOLD_CANARY"] = "canary"


def attack(boxes: Boxes, name: str) -> Outcome:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8").replace("@SOURCES@", SOURCES)
    kind = text.split("\n", 1)[0].removeprefix("# ")
    start = time.monotonic()
    if kind == "io":  # as `passed` does it, with a look at what it printed
        with boxes.one() as box:
            ended = box.script(text, "2\n")
        has_passed = ended.is_well and same_output(ended.out, "4\n")
        return Outcome(name, has_passed, reported(ended), time.monotonic() - start)
    has_passed = any(passed(boxes, text, tests_for(kind)))
    seconds = time.monotonic() - start
    return Outcome(name, has_passed, called(boxes, text) if "ESCAPE" in text else (), seconds)


def called(boxes: Boxes, text: str) -> tuple[str, ...]:
    """What it reports when its function is called in a script, where its output can be seen."""
    with boxes.one() as box:
        return reported(box.script(f"{text}\nf(2)\n", "2\n"))


def reported(ended: Ended) -> tuple[str, ...]:
    return tuple(line for line in ended.out.splitlines() if "ESCAPE" in line)


def tests_for(kind: str) -> list[Test]:
    return tests_of({"tests": TESTS[kind]})


def is_alive(boxes: Boxes) -> bool:
    """Right programs of each kind still pass."""
    return all(all(passed(boxes, program, tests_for(kind))) for kind, program in RIGHT.items())
