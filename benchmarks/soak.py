"""Does a long run keep its memory and its open files, and what does saving cost?

    python benchmarks/soak.py [--steps 2000] [--out FOLDER]

A tiny model, 2,000 steps of grpo with a reward in a worker process, a checkpoint every 50: resident memory and open
files of the run's process at step 200 and at the end. Then SmolLM2-135M-Instruct, 40 steps, saved every 20: `time/save`
beside the time of all steps. Writes results.json and results.md.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from replay_gradient import ROOT, hardware

from hotcold.runs import RunFolder
from kills import LARGE, work

SMALL = ["grpo", "model=model", "data=prompts.jsonl", "reward=reward.py", "max_tokens=5", "prompts_per_step=2"]
SMALL += ["group_size=3", "save_every=50", "eval.every=500", "eval.prompts=2", "threads=1", "run=long"]
GROWTH, SHARE = 0.02, 0.05


def watched(folder: Path, words: list[str], steps: int) -> list[dict]:
    """Memory and open files at every look, with the step that was done."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "hotcold", "train", *words, f"steps={steps}"]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    seen = []
    while process.poll() is None:
        time.sleep(0.25)
        try:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
            with open(folder / "long" / "metrics.jsonl", "rb") as file:
                step = sum(1 for _ in file)
        except OSError:
            continue
        seen.append({"step": step, "bytes": pages * os.sysconf("SC_PAGE_SIZE"), "files": files})
    if process.returncode:
        raise SystemExit(f"the run ended with exit code {process.returncode}")
    return seen


def between(seen: list[dict], low: float, high: float) -> dict:
    """The median of the looks between two steps: a single one may fall into a save."""
    part = [look for look in seen if low <= look["step"] < high]
    middle = {name: sorted(look[name] for look in part)[len(part) // 2] for name in ("bytes", "files")}
    return {**middle, "steps": f"{low:.0f} to {high:.0f}", "looks": len(part)}


def saving(folder: Path, steps: int) -> dict:
    words = [word for word in LARGE if not word.startswith(("save_every", "steps"))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "hotcold", "train", *words, "save_every=20", f"steps={steps}", "run=saved"]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    rows = RunFolder.read_metrics(folder / "runs" / "saved")
    first = rows[: steps - 1]
    # a save is reported with the step after it: of the two, the one after the last step is not seen
    saves = [row["time/save"] for row in first if row["time/save"]]
    whole = sum(row["time/step"] for row in rows)
    return {
        "saves": saves,
        "seconds": whole,
        "share": sum(saves) / len(saves) * (steps // 20) / whole if saves else None,
    }


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--only", choices=["long", "saving"], default=None)
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    date, good = datetime.date.today().isoformat(), True
    command = f"python benchmarks/soak.py --steps {a.steps}" + (f" --only {a.only}" if a.only else "")
    results: dict = {"command": command, "date": date, "hardware": hardware(1)}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if a.only != "saving":
            work(folder, SMALL)
            seen = watched(folder, [word.replace("run=long", f"run={folder}/long") for word in SMALL], a.steps)
            early, late = between(seen, 0.1 * a.steps, 0.2 * a.steps), between(seen, 0.9 * a.steps, a.steps)
            growth = late["bytes"] / early["bytes"] - 1
            results["long"] = {"early": early, "late": late, "growth": growth}
            good &= growth < GROWTH and early["files"] == late["files"]
            print(f"memory grew by {growth:.2%}, open files {early['files']} and {late['files']}", flush=True)
        if a.only != "long":
            work(folder, LARGE)
            results["saving"] = saving(folder, 40)
            good &= results["saving"]["share"] < SHARE
            print(f"saving took {results['saving']['share']:.2%} of the time", flush=True)
    write(a.out or ROOT / "benchmarks" / "results" / f"{date}-soak", results)
    return 0 if good else 1


def write(out: Path, results: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = ["# Long runs, and what saving costs", ""]
    lines += [f"`{results['command']}`, {results['date']}. {results['hardware']['cpu']}, 1 thread.", ""]
    if "long" in results:
        early, late = results["long"]["early"], results["long"]["late"]
        lines += ["| steps | resident memory (MB) | open files |", "|---|---|---|"]
        lines += [f"| {part['steps']} | {part['bytes'] / 1e6:.1f} | {part['files']} |" for part in (early, late)]
        lines += ["", f"Growth {results['long']['growth']:.2%} (goal: below {GROWTH:.0%})."]
    if "saving" in results:
        part = results["saving"]
        lines += [
            "",
            f"SmolLM2-135M-Instruct, 40 steps, a checkpoint every 20: {part['seconds']:.0f} s in all, saves of "
            f"{', '.join(f'{s:.1f}' for s in part['saves'])} s: {part['share']:.2%} (goal: below {SHARE:.0%}).",
        ]
    (out / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
