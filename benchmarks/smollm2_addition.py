"""SmolLM2-135M-Instruct on sums: train with the recipe, measure the saved folder with plain transformers.

    python benchmarks/smollm2_addition.py [--seeds 0 1 2] [--threads 2] [--jobs 1] [--out FOLDER]

For each seed it runs `hotcold train recipes/addition_smollm2.yaml seed=N`, then loads the final folder with
AutoModelForCausalLM and counts right answers among the 100 sums of `recipes/addition.py:test`, greedily, one prompt at
a time. Nothing of hotcold takes part in that count. Writes results.json and results.md.
"""

import argparse
import datetime
import hashlib
import importlib.util
import json
import math
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/addition_smollm2.yaml"


def test_rows() -> list[dict]:
    spec = importlib.util.spec_from_file_location("addition", ROOT / "recipes" / "addition.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.test()


@torch.no_grad()
def accuracy(folder: Path) -> float:
    """Share of the 100 test sums whose greedy answer's last number is right, by plain transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = 0
    rows = test_rows()
    for row in rows:
        inputs = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**inputs, do_sample=False, max_new_tokens=24)
        text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        numbers = re.findall(r"\d+", text)
        right += bool(numbers) and numbers[-1] == row["answer"]
    return right / len(rows)


def wilson(p: float, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def train(seed: int, runs: Path, threads: int) -> Path:
    """The run folder; a seed that was trained before is only measured."""
    run = runs / f"smollm2-addition-seed{seed}"
    if not (run / "model").is_dir():
        words = [RECIPE, f"seed={seed}", f"threads={threads}", f"run={run}", "resume=auto"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([sys.executable, "-m", "hotcold", "train", *words], cwd=ROOT, check=True, env=environment)
    return run


def curve(run: Path) -> list[dict]:
    keys = ("step", "reward", "frac_reward_zero_std", "grad_norm", "entropy", "mismatch/max_abs", "eval/greedy")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: json.loads(line).get(key) for key in (*keys, "time/step", "time/sample")} for line in lines]


def hardware() -> dict:
    cpu = next(
        (l.split(":")[1].strip() for l in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in l), ""
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write(out: Path, results: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    base, hardware = results["base"], results["hardware"]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, torch {hardware['torch']}"
    lines = [
        "# SmolLM2-135M-Instruct on sums, rloo",
        "",
        f"`{results['command']}`, {results['date']}. {machine}, float32. Base model SHA-256 `{base['sha256']}`.",
        "",
        "Greedy accuracy on the 100 sums of `recipes/addition.py:test`, by plain transformers on the saved folder "
        "(95 % Wilson interval). Minutes and seconds are those of the steps with their evaluations, "
        f"{results['jobs']} runs at a time with {results['threads']} thread each.",
        "",
        "| model | accuracy | interval | steps | minutes | median s per step |",
        "|---|---|---|---|---|---|",
        "| before training | {:.2f} | {:.2f} to {:.2f} | 0 | | |".format(
            base["accuracy"], *wilson(base["accuracy"], 100)
        ),
    ]
    for r in results["runs"]:
        times = sorted(row["time/step"] for row in r["curve"])
        lines.append(
            "| seed {} | {:.2f} | {:.2f} to {:.2f} | {} | {:.0f} | {:.0f} |".format(
                r["seed"],
                r["accuracy"],
                *wilson(r["accuracy"], 100),
                len(r["curve"]),
                sum(times) / 60,
                times[len(times) // 2],
            )
        )
    lines += ["", "Watched sums (`recipes/addition.py:stop`, 50) and mean reward by step:", ""]
    for r in results["runs"]:
        watched = ", ".join(f"{c['step']}: {c['eval/greedy']:.2f}" for c in r["curve"] if c["eval/greedy"] is not None)
        reward = ", ".join(f"{c['reward']:.2f}" for c in r["curve"])
        lines += [f"- seed {r['seed']}: watched {watched}; reward {reward}"]
    lines += ["", "Config (`config.yaml` of the first run):", "", "```yaml", results["config"].strip(), "```", ""]
    (out / "results.md").write_text("\n".join(lines))


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    p.add_argument("--threads", type=int, default=2, help="torch threads of each run")
    p.add_argument("--jobs", type=int, default=1, help="runs at a time")
    p.add_argument("--runs", type=Path, default=ROOT / "runs")
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    date = datetime.date.today().isoformat()
    seeds = " ".join(map(str, a.seeds))
    command = f"python benchmarks/smollm2_addition.py --seeds {seeds} --threads {a.threads} --jobs {a.jobs}"
    results: dict = {"date": date, "command": command, "threads": a.threads, "jobs": a.jobs, "runs": []}
    results["hardware"] = hardware()
    with ThreadPoolExecutor(a.jobs) as pool:
        runs = list(pool.map(lambda seed: train(seed, a.runs, a.threads), a.seeds))
    for seed, run in zip(a.seeds, runs, strict=True):
        results["runs"].append({"seed": seed, "accuracy": accuracy(run / "model"), "curve": curve(run)})
        print(f"seed {seed}: {results['runs'][-1]['accuracy']:.2f}", flush=True)
        if "base" not in results:
            config = (run / "config.yaml").read_text().splitlines()
            results["config"] = "\n".join(line for line in config if not line.startswith("run:"))
            env = json.loads((run / "env.json").read_text())
            base = Path(env["attempts"][0]["model_folder"])
            digest = hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
            results["base"] = {"accuracy": accuracy(base), "sha256": digest}
        write(a.out or ROOT / "benchmarks" / "results" / f"{date}-smollm2-addition", results)


if __name__ == "__main__":
    main()
