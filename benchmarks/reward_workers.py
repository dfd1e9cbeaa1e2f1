"""What does a reward that misbehaves cost, and what does a worker process cost one that does not?

    python benchmarks/reward_workers.py [--timeout 2] [--out FOLDER]

16 responses; the reward misbehaves at one of them, or at every one. A row is good if it ends with a result or a message
that names the cause within the deadline of each try and 5 s, and if no process is left. Writes results.md.
"""

import argparse
import datetime
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path

from replay_gradient import ROOT, hardware

from hotcold.errors import RewardError
from hotcold.rewards.base import Scorable
from hotcold.rewards.failures import Limits
from hotcold.rewards.functions import load_reward
from hotcold.rewards.scorer import FunctionScorer, load_scorer

TAG = "HOTCOLD_BENCH_TAG"
KINDS = {
    "raises": "raise ValueError('no number')",
    "hangs": "time.sleep(1000)",
    "is busy": "while True: pass",
    "sys.exit(0)": "sys.exit(0)",
    "os._exit(0)": "os._exit(0)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "takes all memory": "all = []\n        while True: all.append(bytearray(10**7))",
    "prints 10 MB": "print('y' * 10**7)",
    "forks a child that stays": "if os.fork() == 0: time.sleep(1000)",
    "leaves a daemon": "if os.fork() == 0: os.setsid(); os.fork(); time.sleep(1000)",
    "returns NaN": "return float('nan')",
    "writes to the pipe": "write_to_all()",
    "30 % raise, by text": "if hash_of(completion) < 0.3: raise ValueError('flaky')",
}
FILE = """import hashlib, os, signal, sys, time

def hash_of(text):
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32

def write_to_all():
    for fd in range(3, 9):
        try:
            os.write(fd, b'x')
        except OSError:
            pass

def reward(completion):
    if {where}:
        {what}
    return len(completion)
"""


def items(num: int) -> list[Scorable]:
    return [Scorable("2 + 3 =", f"response {i}", (1,) * 64, (2,) * 64, {"answer": "5"}, row=i) for i in range(num)]


def left(tag: str) -> int:
    wanted, num = f"{TAG}={tag}".encode(), 0
    for entry in Path("/proc").iterdir():
        try:
            num += entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
    return num


def row(folder: Path, name: str, where: str, limits: Limits) -> tuple[str, bool]:
    os.environ[TAG] = tag = uuid.uuid4().hex
    file = folder / f"{uuid.uuid4().hex}.py"
    file.write_text(FILE.format(where=where, what=KINDS[name]))
    scorer = load_scorer([str(file)], [1.0], limits)
    start = time.perf_counter()
    try:
        scores = [score.total for score in scorer.score(items(16))]
        ends = f"{sum(score is not None for score in scores)} of 16 scored"
    except RewardError as error:
        ends = "stops: " + str(error).splitlines()[-1].replace(str(file), "FILE").replace("|", " ")[:90]
    took = time.perf_counter() - start
    scorer.close()
    counts = scorer.take_counts()
    num = left(tag)
    numbers = " | ".join(str(counts[f"rewards/{key}"]) for key in ("failed", "timeouts", "workers_replaced"))
    return f"{took:.1f} | {ends} | {numbers} | {num}", took < 2 * limits.timeout + 5 and num == 0


def overhead(folder: Path) -> str:
    file = folder / "plain.py"
    file.write_text(FILE.format(where="False", what="pass"))
    start = time.perf_counter()
    scorer = load_scorer([str(file)], [1.0], Limits())
    started = time.perf_counter() - start
    times = {"in a worker": timed(scorer), "in the run": timed(FunctionScorer([load_reward(str(file))], [1.0]))}
    scorer.close()
    per_score = ", ".join(f"{seconds:.3f} ms {where}" for where, seconds in times.items())
    return f"A worker starts in {started:.2f} s. Of 1,000 scores, 64 + 64 token ids each: {per_score} (best of 3)."


def timed(scorer: FunctionScorer) -> float:
    """Milliseconds for a score."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        scorer.score(items(1000))
        best = min(best, time.perf_counter() - start)
    return best


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--timeout", type=float, default=2.0)
    default = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-reward-workers"
    p.add_argument("--out", type=Path, default=default)
    given = p.parse_args()
    limits = Limits(timeout=given.timeout, memory=0.5, env=(TAG,))
    rows, good = [], True
    with tempfile.TemporaryDirectory() as folder:
        for where, words in (("completion == 'response 5'", "one response"), ("True", "every response")):
            for name in KINDS:
                os.environ[TAG] = ""
                text, is_good = row(Path(folder), name, "True" if name.startswith("30") else where, limits)
                good &= is_good
                rows.append(f"| {name} | {words} | {text} | {'yes' if is_good else 'NO'} |")
                print(rows[-1], flush=True)
        cost = overhead(Path(folder))
    machine = hardware(1)
    head = [
        "# Rewards that misbehave",
        "",
        f"`python benchmarks/reward_workers.py --timeout {given.timeout:g}`, {datetime.date.today()}. "
        f"{machine['cpu']}, {machine['cores']} cores. "
        "One worker, one second try, reward_memory=0.5; seconds until there is a result or a message.",
        "",
        "| the reward | at | s | ends | failed | timeouts | workers replaced | processes left | good |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "results.md").write_text("\n".join([*head, *rows, "", cost, ""]))
    print(cost)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
