"""Does every algorithm learn? The embedded task, several seeds; writes a table with 95 % intervals.

    make learn        (or: python benchmarks/learn.py [--seeds 0 1 2] [--demo-seeds 0 1 2 3 4] [--out FOLDER])

First `hotcold demo` for each demo seed (its own supervised start each), then every algorithm from one saved start with
the demo's settings. Held-out sums are never trained on; accuracy is greedy exact match on 200 of them.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from hotcold.toys.task import RECOMMENDED, write_toy

ROOT = Path(__file__).parents[1]
ALGORITHMS = {
    "reinforce, no baseline": ["reinforce", "baseline=none"],
    "reinforce, batch mean": ["reinforce", "baseline=batch_mean"],
    "reinforce, leave-one-out": ["reinforce", "baseline=leave_one_out"],
    "reinforce, greedy baseline": ["reinforce", "baseline=greedy"],
    "rloo": ["rloo"],
    "grpo": ["grpo"],
    "grpo without std": ["grpo", "scale_by_std=false"],
    "grpo, 2 epochs x 2 minibatches": ["grpo", "epochs_per_batch=2", "minibatches=2"],
    "expert iteration": ["expert_iteration"],
    "expert iteration from the start": ["expert_iteration", "start_from=starting", "epochs_per_batch=4"],
}


def run(words: list[str], folder: Path) -> float:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "hotcold", *words, f"run={folder}"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return time.perf_counter() - start


def result(folder: Path, seconds: float) -> dict:
    evaluations = sorted((folder / "eval").glob("*.json"))
    first, last = (json.loads(path.read_text()) for path in (evaluations[0], evaluations[-1]))
    keys = ("eval/greedy", "eval/greedy_low", "eval/greedy_high")
    return {"before": [first[k] for k in keys], "after": [last[k] for k in keys], "seconds": seconds}


def show(values: list[float]) -> str:
    return f"{values[0]:.3f} ({values[1]:.3f} to {values[2]:.3f})"


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    p.add_argument("--demo-seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    date = datetime.date.today().isoformat()
    out = a.out or ROOT / "benchmarks" / "results" / f"{date}-learn"
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for seed in a.demo_seeds:
            rows.append({"what": "hotcold demo", "seed": seed, **_demo(seed, work)})
            print(rows[-1], flush=True)
        files = write_toy(work / "start", 0)
        settings = [f"{key}={value}" for key, value in RECOMMENDED.items()]
        common = [f"model={files.model}", f"data={files.train}", f"eval.data={files.held_out}", "reward=exact"]
        for name, words in ALGORITHMS.items():
            for seed in a.seeds:
                folder = work / f"{len(rows)}"
                seconds = run(["train", *words, *common, *settings, f"seed={seed}", "threads=1"], folder)
                rows.append({"what": name, "seed": seed, **result(folder, seconds)})
                print(rows[-1], flush=True)
    write(out, date, a, rows)


def _demo(seed: int, work: Path) -> dict:
    folder = work / f"demo{seed}"
    return result(folder, run(["demo", f"seed={seed}"], folder))


def write(out: Path, date: str, a: argparse.Namespace, rows: list[dict]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    machine = f"{cpu()}, {os.cpu_count()} cores (1 thread used), {versions}"
    command = f"python benchmarks/learn.py --seeds {_words(a.seeds)} --demo-seeds {_words(a.demo_seeds)}"
    settings = ", ".join(f"{key}={value}" for key, value in RECOMMENDED.items())
    lines = [
        "# The embedded task, every algorithm",
        "",
        f"`{command}`, {date}. {machine}.",
        "",
        f"Settings: {settings}. Greedy exact match on 200 held-out sums, 95 % Wilson interval.",
        "Seconds are those of the whole command, start-up included.",
        "",
        "| what | seed | before | after | seconds |",
        "|---|---|---|---|---|",
        *(
            f"| {r['what']} | {r['seed']} | {show(r['before'])} | {show(r['after'])} | {r['seconds']:.0f} |"
            for r in rows
        ),
        "",
    ]
    (out / "results.md").write_text("\n".join(lines))
    (out / "results.json").write_text(json.dumps({"date": date, "machine": machine, "rows": rows}, indent=1) + "\n")


def _line(r: dict) -> str:
    return f"| {r['what']} | {r['seed']} | {show(r['before'])} | {show(r['after'])} | {r['seconds']:.0f} |"


def _words(seeds: list[int]) -> str:
    return " ".join(map(str, seeds))


if __name__ == "__main__":
    main()
