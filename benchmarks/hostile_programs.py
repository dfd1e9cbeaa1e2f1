"""What do hostile programs achieve at each level of the sandbox, and what does the sandbox cost?

    python benchmarks/hostile_programs.py [--deadline 1] [--python /usr/bin/python3] [--out FOLDER]

Runs tests/rewards/hostile_programs at every level that this machine has, as the reward runs them, then 200 times a
right program, beside a plain subprocess in a loop. `--python`: an interpreter that every user can read, for the levels
without namespaces, where ours lies in a folder of root's. Writes results.md.
"""

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from replay_gradient import ROOT, hardware

from hotcold.rewards.code import Boxes, passed
from hotcold.sandbox.box import LEVELS, SOURCES, Limits, interpreter, refusal

sys.path.insert(0, str(ROOT))
from tests.rewards.hostile import Outcome, attack, is_alive, names, place_secrets, tests_for

TIMES = 200
PROGRAM = "print(int(input()) ** 2)"
FUNCTION = "def f(x):\n    return x * x"


def python_for(level: str, other: str) -> str | None:
    """None: the level is not there. Ours where it works."""
    if refusal(level) is None:
        return interpreter()
    return other if os.path.exists(other) else None


def battery(level: str, python: str, deadline: float) -> tuple[list[Outcome], bool]:
    with Boxes(Limits(seconds=deadline), level, python) as boxes:
        outcomes = [attack(boxes, name) for name in names()]
        return outcomes, is_alive(boxes)


def median_ms(work: Callable[[], object], times: int = TIMES) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)


def costs(level: str, python: str) -> dict[str, float]:
    def fresh() -> None:
        with Boxes(Limits(), level, python) as new:
            passed(new, PROGRAM, tests_for("io"))

    with Boxes(Limits(), level, python) as boxes:
        return {
            "input and output": median_ms(lambda: passed(boxes, PROGRAM, tests_for("io"))),
            "a call": median_ms(lambda: passed(boxes, FUNCTION, tests_for("calls"))),
            "asserts": median_ms(lambda: passed(boxes, FUNCTION, tests_for("asserts"))),
            "the first of a step": median_ms(fresh, 20),
        }


def plain(python: str, *flags: str) -> float:
    command = [python, *flags, "-c", PROGRAM]
    return median_ms(lambda: subprocess.run(command, input=b"2\n", capture_output=True, check=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deadline", type=float, default=1.0)
    parser.add_argument("--python", default="/usr/bin/python3")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    folder = args.out or ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-hostile-programs"
    place_secrets()
    found: dict[str, tuple[list[Outcome], bool]] = {}
    cost: dict[str, dict[str, float]] = {}
    for level in reversed(LEVELS):
        if (python := python_for(level, args.python)) is None:
            print(f"{level}: not here: {refusal(level)}")
            continue
        found[level] = battery(level, python, args.deadline)
        cost[level] = costs(level, python)
        print(level, summary(*found[level], args.deadline), cost[level], flush=True)
    plains = {"python -c": plain(interpreter()), "python -I -S -c": plain(interpreter(), "-I", "-S")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(report(found, cost, plains, args.deadline))
    print(folder / "results.md")


def summary(outcomes: list[Outcome], alive: bool, deadline: float) -> str:
    escapes = sum(bool(one.escapes) for one in outcomes)
    false = sum(one.has_passed for one in outcomes)
    late = sum(one.seconds > deadline + 1 for one in outcomes)
    slowest = max(one.seconds for one in outcomes)
    return f"| {len(outcomes)} | {false} | {escapes} | {late} | {slowest:.2f} | {'yes' if alive else 'NO'} |"


def told(outcome: Outcome) -> str:
    return "; ".join(sorted(set(outcome.escapes))).replace(SOURCES, "...")


def report(
    found: dict[str, tuple[list[Outcome], bool]],
    cost: dict[str, dict[str, float]],
    plains: dict[str, float],
    deadline: float,
) -> str:
    lines = [
        f"# Hostile programs, {datetime.date.today()}",
        "",
        ", ".join(f"{name} {value}" for name, value in hardware(1).items()),
        "",
        "`python benchmarks/hostile_programs.py`",
        "",
    ]
    lines += [f"Deadline {deadline:g} s. Late: more than the deadline and 1 s.", ""]
    lines += ["| level | programs | false passes | escapes | late | slowest (s) | right programs pass afterwards |"]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [f"| {level} {summary(*one, deadline)}" for level, one in found.items()]
    for level, (outcomes, _) in found.items():
        lines += ["", f"## What {level} lets through", ""]
        gaps = [one for one in outcomes if not one.is_held]
        lines += [f"- `{one.name}`: {'PASSED; ' * one.has_passed}{told(one)}" for one in gaps]
        lines += [] if gaps else ["Nothing of the battery."]
    kinds = list(next(iter(cost.values())))
    lines += [
        "",
        "## Milliseconds for a program, median",
        "",
        f"| | {' | '.join(kinds)} |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    lines += [f"| {level} | {' | '.join(f'{one[kind]:.1f}' for kind in kinds)} |" for level, one in cost.items()]
    lines += [f"| plain subprocess, `{name}` | {ms:.1f} |{' |' * (len(kinds) - 1)}" for name, ms in plains.items()]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
