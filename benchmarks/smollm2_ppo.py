"""SmolLM2-135M-Instruct on sums by PPO with a critic and a KL leash: train, then measure with plain transformers.

    python benchmarks/smollm2_ppo.py [--seeds 0 1] [--threads 1] [--jobs 2] [--out FOLDER]

For each seed it runs `hotcold train recipes/ppo_smollm2.yaml seed=N`, then counts right greedy answers of the saved
folder among the 100 sums of `recipes/addition.py:test` as smollm2_addition.py does: nothing of hotcold takes part in
that count. Writes results.json, results.md and curves.svg. A seed that was trained before is only measured.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from smollm2_addition import ROOT, accuracy, hardware, wilson

RECIPE = "recipes/ppo_smollm2.yaml"
GOAL = 0.75
METRICS = {  # column of the table: key of metrics.jsonl, digits
    "reward": ("reward", 2),
    "held-out": ("eval/greedy", 2),
    "KL per response": ("kl/response", 3),
    "KL per token": ("kl", 4),
    "explained variance": ("value/explained_variance", 2),
    "value loss": ("value/loss", 3),
    "V": ("value/mean", 2),
    "returns": ("returns/mean", 2),
    "entropy": ("entropy", 2),
    "tokens": ("completions/mean_length", 1),
    "clip fraction": ("clip_fraction", 3),
    "grad norm": ("grad_norm", 2),
    "critic's": ("value/grad_norm", 2),
}
LOWEST = -1.0  # what is drawn: where all scores are equal the returns vary by the KL alone, and -1e10 is possible
CURVES = ("held-out", "reward", "KL per response", "explained variance", "value loss")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


# ---- runs


def train(seed: int, runs: Path, threads: int) -> Path:
    """The run folder. The peak memory of the process is written beside the metrics, for a later look at them."""
    run = runs / f"smollm2-ppo-seed{seed}"
    if (run / "model").is_dir():
        return run
    words = [RECIPE, f"seed={seed}", f"threads={threads}", f"run={run}", "resume=auto"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "hotcold", "train", *words], cwd=ROOT, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with exit code {process.returncode}")
    measured = {
        "peak_rss_gib": usage.ru_maxrss / 2**20,  # Linux counts KiB
        "minutes_wall": (time.monotonic() - start) / 60,
        "minutes_cpu": (usage.ru_utime + usage.ru_stime) / 60,
    }
    (run / "benchmark.json").write_text(json.dumps(measured, indent=1) + "\n")
    return run


def metrics_of(run: Path) -> list[dict]:
    """The metrics of every step; of a step that was run twice the last attempt."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return list({line["step"]: line for line in lines}.values())


def result_of(run: Path, seed: int) -> dict:
    metrics, measured = metrics_of(run), run / "benchmark.json"
    parts = sorted({key for line in metrics for key in line if key.startswith("time/")})
    before = json.loads((run / "eval" / "step_000000.json").read_text())
    return {
        "seed": seed,
        "accuracy": accuracy(run / "model"),
        "held_out_before": before["eval/greedy"],
        "held_out": next(line["eval/greedy"] for line in reversed(metrics) if line.get("eval/greedy") is not None),
        **(json.loads(measured.read_text()) if measured.is_file() else {}),
        "seconds": {part: [line.get(part) for line in metrics] for part in parts},
        "curve": [{"step": m["step"], **{key: m.get(key) for key, _ in METRICS.values()}} for m in metrics],
    }


def base_of(run: Path) -> dict:
    base = Path(json.loads((run / "env.json").read_text())["attempts"][0]["model_folder"])
    digest = hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    return {"accuracy": accuracy(base), "sha256": digest}


# ---- what is written


def write(out: Path, results: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "results.md").write_text("\n".join(page(results)))
    (out / "curves.svg").write_text(drawing(results["runs"]))


def page(results: dict) -> list[str]:
    base, on, runs = results["base"], results["hardware"], results["runs"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# SmolLM2-135M-Instruct on sums, ppo with a critic and the KL to the starting model",
        "",
        f"`{results['command']}`, {results['date']}. {on['cpu']}, {on['cores']} cores, {versions}, float32. Base model "
        f"SHA-256 `{base['sha256']}`. One seed alone: `hotcold train {RECIPE} seed=0`.",
        "",
        f"Accuracy is greedy, on the 100 sums of `recipes/addition.py:test`, by plain transformers on the saved folder "
        f"(95 % Wilson interval); the goal is {GOAL}. Held-out: the 50 sums of `recipes/addition.py:stop` that the run "
        f"watches and ends at. Minutes include evaluations and saving; at most {results['jobs']} at a time with "
        f"{results['threads']} thread each, on a machine that had other work too.",
        "",
        "| model | accuracy | interval | held-out | steps | minutes | of the processor | peak memory (GiB) |",
        "|---|---|---|---|---|---|---|---|",
        "| before training | {:.2f} | {:.2f} to {:.2f} | {:.2f} | 0 | | | |".format(
            base["accuracy"], *wilson(base["accuracy"], 100), runs[0]["held_out_before"]
        ),
        *(row_of(run) for run in runs),
        "",
        *seconds_table(runs),
        "",
        "Curves: `curves.svg`, and by step below. KL per response is the sum over its tokens of log pi - log pi_ref, "
        "the mean over responses, in nats; it and the explained variance are measured before the step's update, on "
        "responses that neither model was trained on. The explained variance is empty where all returns are equal, and "
        f"far below 0 where they differ by the KL alone; the drawing ends at {LOWEST:.0f}. Value loss is "
        "the mean of (V - return)^2 / 2 over tokens.",
        "",
    ]
    for run in runs:
        lines += [f"## Seed {run['seed']}", "", *curve_table(run["curve"]), ""]
    return [*lines, "## Config (`config.yaml` of the first run)", "", "```yaml", results["config"].strip(), "```", ""]


def row_of(run: dict) -> str:
    cells = [f"seed {run['seed']}", f"{run['accuracy']:.2f}", "{:.2f} to {:.2f}".format(*wilson(run["accuracy"], 100))]
    cells += [f"{run['held_out']:.2f}", str(len(run["curve"]))]
    cells += [shown(run.get(key), digits) for key, digits in MEASURED.items()]
    return "| " + " | ".join(cells) + " |"


MEASURED = {"minutes_wall": 0, "minutes_cpu": 0, "peak_rss_gib": 1}


def seconds_table(runs: list[dict]) -> list[str]:
    """Median seconds of each part, over the steps that have it."""
    parts = [part for part in runs[0]["seconds"] if any(v for run in runs for v in run["seconds"][part] if v)]
    lines = ["| median s per step | " + " | ".join(part.removeprefix("time/") for part in parts) + " |"]
    lines += ["|---" * (len(parts) + 1) + "|"]
    for run in runs:
        cells = [median(run["seconds"].get(part, [])) for part in parts]
        lines += [f"| seed {run['seed']} | " + " | ".join(cells) + " |"]
    return lines


def median(values: list) -> str:
    known = [value for value in values if value]
    return f"{statistics.median(known):.1f}" if known else ""


def curve_table(curve: list[dict]) -> list[str]:
    lines = ["| step | " + " | ".join(METRICS) + " |", "|---" * (len(METRICS) + 1) + "|"]
    for point in curve:
        cells = [shown(point[key], digits) for key, digits in METRICS.values()]
        lines += [f"| {point['step']} | " + " | ".join(cells) + " |"]
    return lines


def shown(value: float | None, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:.0e}"


# ---- curves.svg

WIDTH, HEIGHT, LEFT, TOP, GAP = 560, 110, 60, 24, 40  # pixels


def drawing(runs: list[dict]) -> str:
    """One panel under the other, a line for each seed over the steps."""
    last = max(run["curve"][-1]["step"] for run in runs)
    height = TOP + len(CURVES) * (HEIGHT + GAP)
    font = 'font-family="sans-serif" font-size="12"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height + 10}" {font}>']
    lines += ['<rect width="100%" height="100%" fill="white"/>']
    for i, run in enumerate(runs):
        x = LEFT + WIDTH - 70 * (len(runs) - i)
        lines += [f'<text x="{x}" y="14" fill="{COLOURS[i % len(COLOURS)]}">seed {run["seed"]}</text>']
    for i, name in enumerate(CURVES):
        lines += panel(name, METRICS[name][0], runs, last, TOP + i * (HEIGHT + GAP))
    return "\n".join([*lines, "</svg>", ""])


def panel(name: str, key: str, runs: list[dict], last: int, top: int) -> list[str]:
    series = [[(p["step"], max(p[key], LOWEST)) for p in run["curve"] if p[key] is not None] for run in runs]
    values = [value for points in series for _, value in points] or [0.0]
    low, high = min(0.0, *values), max(0.0, *values)
    high = high if high > low else low + 1

    def place(step: float, value: float) -> str:
        return f"{LEFT + WIDTH * step / last:.1f},{top + HEIGHT * (1 - (value - low) / (high - low)):.1f}"

    left, bottom = LEFT, top + HEIGHT
    lines = [
        f'<text x="{left}" y="{top - 4}">{name}</text>',
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">{high:.2f}</text>',
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end">{low:.2f}</text>',
        f'<text x="{left}" y="{bottom + 14}">0</text>',
        f'<text x="{left + WIDTH}" y="{bottom + 14}" text-anchor="end">step {last}</text>',
        f'<polyline points="{place(0, 0)} {place(last, 0)}" stroke="#ccc" fill="none"/>',
    ]
    for i, points in enumerate(series):
        colour, path = COLOURS[i % len(COLOURS)], " ".join(place(*point) for point in points)
        lines += [f'<polyline points="{path}" stroke="{colour}" stroke-width="1.5" fill="none"/>']
    return lines


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    p.add_argument("--threads", type=int, default=1, help="torch threads of each run")
    p.add_argument("--jobs", type=int, default=2, help="runs at a time; each needs the memory in results.md")
    p.add_argument("--runs", type=Path, default=ROOT / "runs")
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    date = datetime.date.today().isoformat()
    seeds = " ".join(map(str, a.seeds))
    command = f"python benchmarks/smollm2_ppo.py --seeds {seeds} --threads {a.threads} --jobs {a.jobs}"
    with ThreadPoolExecutor(a.jobs) as pool:
        folders = list(pool.map(lambda seed: train(seed, a.runs.resolve(), a.threads), a.seeds))
    config = (folders[0] / "config.yaml").read_text().splitlines()
    results: dict = {
        "date": date,
        "command": command,
        "threads": a.threads,
        "jobs": a.jobs,
        "hardware": hardware(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "hotcold")},
        "config": "\n".join(line for line in config if not line.startswith("run:")),
        "base": base_of(folders[0]),
        "runs": [],
    }
    for seed, run in zip(a.seeds, folders, strict=True):
        results["runs"].append(result_of(run, seed))
        print(f"seed {seed}: {results['runs'][-1]['accuracy']:.2f}", flush=True)
    write(a.out or ROOT / "benchmarks" / "results" / f"{date}-smollm2-ppo", results)
    if missed := [run["seed"] for run in results["runs"] if run["accuracy"] < GOAL]:
        raise SystemExit(f"accuracy below {GOAL}: seeds {missed}")


if __name__ == "__main__":
    main()
