"""`hotcold demo`: the main job on the embedded example, in minutes on a laptop."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hotcold.config.schema import Config
from hotcold.errors import InputError
from hotcold.launch import Run, train
from hotcold.toys.task import RECOMMENDED, ToyFiles, write_toy
from hotcold.training.console import Console, duration, near

THREADS = 1  # the matrices are so small that a second thread costs more than it brings

INTRO = """A tiny model (about 190 thousand parameters) learns to add two numbers. First it is taught by examples; six
of ten that need a carry forget it, so it learns a bad habit. From then on nobody shows it an answer: a reward
function says only right (1) or wrong (0), and policy gradient (rloo) does the rest."""


def demo(seed: int = 0, run: str | None = None) -> int:
    start = time.perf_counter()
    torch.set_num_threads(THREADS)
    folder = run_folder(run, seed)
    console = Console(print)
    console.say(INTRO)
    files = prepare(Path(f"{folder}-start"), seed, console)
    result = train(_config(files, folder, seed), print)
    print(summary(result, files, time.perf_counter() - start))
    return 0


def run_folder(run: str | None, seed: int) -> Path:
    """`run`, or a name by time; an existing one is refused before anything is made."""
    name = run or f"demo-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(name) if "/" in name else Path("runs") / name
    for path in (folder, Path(f"{folder}-start")):
        if path.exists():
            raise InputError(f"{path} exists already: choose another name with run=NAME.")
    return folder


def prepare(folder: Path, seed: int, console: Console) -> ToyFiles:
    """The supervised starting model and its prompts. Nothing is left behind if it is interrupted."""
    start = time.perf_counter()
    console.say("making sums and a starting model that has seen some of them: about a minute on two cores")
    try:
        files = write_toy(folder, seed, lambda done, of: console.stage("supervising the starting model", done, of))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    console.say(f"starting model and sums made in {duration(time.perf_counter() - start)}: {folder}")
    return files


def _config(files: ToyFiles, folder: Path, seed: int) -> Config:
    return Config.from_keys(
        algorithm="rloo",
        model=str(files.model),
        data=str(files.train),
        eval={"data": str(files.held_out), "every": 20},
        reward="exact",
        run=str(folder),
        seed=seed,
        threads=THREADS,
        **RECOMMENDED,
    )


def summary(run: Run, files: ToyFiles, seconds: float) -> str:
    before, after = (_greedy(run.folder / "eval" / f"step_{step:06d}.json") for step in (0, run.metrics[-1]["step"]))
    lines = ["", "Held-out sums (none was trained on; 6 of 10 need a carry), greedy exact match with 95 % intervals:"]
    for when, s in (("before", run.before), ("after", run.after)):
        lines.append(
            f"  {when:<7} {100 * s['eval/greedy']:5.1f} %   "
            f"({100 * s['eval/greedy_low']:.1f} to {100 * s['eval/greedy_high']:.1f} %)"
        )
    lines += ["", "Some of them:  sum      before   after   right"]
    lines += [f"               {p:<8} {before[p]:<8} {after[p]:<7} {_right(p)}" for p in _telling(before, after)]
    lines += [
        "",
        f"{duration(seconds)} in all. The run: {near(run.folder)}  (metrics.jsonl, rollouts/, eval/, README.md)",
        "Next:",
        f'  ask it (it knows only digits, + and =):  {command()} sample model={near(run.model_dir)} prompt="38+47="',
        f"  another way:    {command()} train grpo model={files.model} data={files.train} eval.data={files.held_out} "
        + " ".join(["reward=exact", *(f"{key}={value}" for key, value in RECOMMENDED.items())]),
        f"  your own task:  {command()} train rloo model=FOLDER data=prompts.jsonl reward=reward.py   (README.md)",
    ]
    return "\n".join(lines)


def command() -> str:
    """How this program is called from here: `hotcold`, or its path where that is not on the search path."""
    return "hotcold" if shutil.which("hotcold") else near(sys.argv[0])


def _greedy(path: Path) -> dict[str, str]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {row["prompt"]: row["greedy"] for row in rows}


def _right(prompt: str) -> str:
    return str(sum(int(part) for part in prompt.rstrip("=").split("+")))


def _telling(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Three sums that changed, one that was right all along, and one that is wrong now, if there is one."""
    changed = [p for p in before if before[p] != after[p] == _right(p)]
    kept = [p for p in before if before[p] == after[p] == _right(p)]
    wrong = [p for p in before if after[p] != _right(p)]
    return [*changed[:3], *kept[:1], *wrong[:1]]
