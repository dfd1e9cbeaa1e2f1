"""Time per score of `reward=math` and of the rewards for form, beside math-verify called in a loop.

    python benchmarks/reward_throughput.py [--out FOLDER] [--scores 1000]

Three kinds of answers: numbers as in GSM8K, LaTeX as in MATH that the exact path reads, and functions that go to
math-verify. Each is scored 1,000 times, by a different answer each time: in this process; in a worker as in a run,
whose start is not counted; and by `math_verify.verify(parse(gold), parse(response))`. Agreement is counted too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hotcold.rewards.base import Scorable
from hotcold.rewards.failures import Limits
from hotcold.rewards.functions import load_reward
from hotcold.rewards.scorer import FunctionScorer, load_scorer


def numbers(n: int) -> tuple[str, str, float]:
    """(gold, response, score)"""
    right = n % 2 == 0
    return (
        f"work {n}\n#### {1000 + n:,}",
        f"So she has {n} and\nThe answer is \\boxed{{{1000 + n + (not right)}}}",
        right,
    )


def latex(n: int) -> tuple[str, str, float]:
    right, k = n % 2 == 0, n + 2
    gold = rf"We find $\boxed{{\frac{{{k}\sqrt{{3}}}}{{2}} + {n}}}$."
    return gold, rf"Hence $\boxed{{{n} + \dfrac{{{3 * k}}}{{2\sqrt{{3}}}}{'' if right else ' + 1'}}}$.", right


def functions(n: int) -> tuple[str, str, float]:
    right, k = n % 2 == 0, n + 2
    return rf"\boxed{{\ln {k * k}}}", rf"\boxed{{2\ln {k if right else k + 1}}}", right


KINDS = {"numbers": numbers, "latex": latex, "functions": functions}
FORMS = (
    "format",
    "length?target=100",
    "overlong?limit=200&buffer=50",
    "repetition?n=4",
    "phrases?required=[answer, so]",
)
TEXT = "<think>" + "so it is one more than the last one and " * 40 + "</think><answer>5</answer>"


def timed(
    score: Callable[[Sequence[Scorable]], list[float | None]], items: Sequence[Scorable]
) -> tuple[float, list[float | None]]:
    """(milliseconds per score, the scores)"""
    start = time.perf_counter()
    found = score(items)
    return (time.perf_counter() - start) / len(items) * 1000, found


def of(scorer: FunctionScorer) -> Callable[[Sequence[Scorable]], list[float | None]]:
    return lambda items: [one.total for one in scorer.score(items)]


def by_math_verify(items: Sequence[Scorable]) -> list[float | None]:
    from math_verify import parse, verify

    return [float(verify(parse(str(i.columns["answer"])), parse(i.completion))) for i in items]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scores", type=int, default=1000)
    arguments = parser.parse_args()
    rows = []
    worker = load_scorer(["math"], [1.0], Limits())
    ways = {"in this process": of(FunctionScorer([load_reward("math")], [1.0])), "in a worker": of(worker)}
    ways["math-verify in a loop"] = by_math_verify
    for kind, make in KINDS.items():
        made = [make(n) for n in range(arguments.scores)]
        items = [Scorable("q", text, (), (), {"answer": gold}, row=n) for n, (gold, text, _) in enumerate(made)]
        warm = [Scorable("q", r"\boxed{\ln 2}", (), (), {"answer": r"\boxed{\ln 3}"})]
        for way, score in ways.items():
            score(warm)
            ms, found = timed(score, items)
            agree = sum(a == b for a, (_, _, b) in zip(found, made, strict=True))
            rows.append({"kind": kind, "way": way, "ms per score": round(ms, 3), "right verdicts": agree})
            print(rows[-1], flush=True)
    worker.close()
    for spec in FORMS:
        item = Scorable("q", TEXT, (), tuple(range(200)), {})
        ms, _ = timed(of(FunctionScorer([load_reward(spec)], [1.0])), [item] * arguments.scores)
        rows.append({"kind": spec, "way": "in this process", "ms per score": round(ms, 4), "right verdicts": None})
        print(rows[-1], flush=True)
    if arguments.out:
        write(arguments.out, rows, arguments.scores)


def write(folder: Path, rows: Sequence[dict[str, object]], scores: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    about = {"machine": processor(), "cores": os.cpu_count(), "load": load, "python": platform.python_version()}
    (folder / "results.json").write_text(json.dumps({**about, "scores": scores, "rows": rows}, indent=1) + "\n")
    lines = [f"`python benchmarks/reward_throughput.py`, {scores} scores of each kind; {about}", ""]
    lines += ["| kind | way | ms per score | right verdicts |", "|---|---|---|---|"]
    for row in rows:
        right = "" if row["right verdicts"] is None else f"{row['right verdicts']} of {scores}"
        lines.append(f"| `{row['kind']}` | {row['way']} | {row['ms per score']} | {right} |")
    (folder / "results.md").write_text("\n".join(lines) + "\n")


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
