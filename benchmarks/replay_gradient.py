"""Every algorithm on SmolLM2-135M-Instruct: the gradient of one step of the program against plain PyTorch.

    python benchmarks/replay_gradient.py [--threads 1] [--only NAME ...] [--out FOLDER]

Seven fixed rows are replayed by `hotcold train NAME model=smollm2 sampler=replay:FILE optimizer=sgd`, one configuration
after the other. A plain step is after = before - rate x gradient, so (before - after) / rate is what the program
computed. The expected gradient is that of `tests/plain_gradient.py`: transformers and torch alone, float64, one row at
a time, nothing of hotcold. The rate makes rate x gradient as large as the parameters, or the rounding of the float32
parameters would hide it. The reference is another model (the base with noise), and the critic's head is not 0: with the
defaults, KL and values would be 0 in the first step. Writes results.json and results.md; exit code 1 if one is off.
"""

import argparse
import datetime
import gc
import hashlib
import json
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for tests.plain_gradient

from tests.plain_gradient import (  # noqa: E402
    CASES,
    Case,
    Row,
    Update,
    change_of,
    change_of_critic,
    plain_update,
    relative_distance,
    save_plain_critic,
    write_rows,
)

from hotcold.models.loading import resolve_folder  # noqa: E402

TOLERANCE = 1e-5
PACKAGES = ("hotcold", "torch", "transformers", "safetensors", "numpy")
EOS = 2  # also the pad id
SUM = (1780, 314, 216, 35, 1232, 216, 36, 47, 19842, 42, 216)  # "What is 3 + 4? Answer: "
COLOUR = (5820, 253, 7302, 42)  # "Name a colour:"
GAP = (True, True, True, True, False, False, True, True)
ROWS = (
    Row(SUM, (378, 2988, 314, 216, 39, 30, EOS), 1.0, group=0, greedy=0.25),  # " The answer is 7."
    Row(COLOUR, (10062, 28, 702, 260, 6376, 30, EOS), 2.0, group=1, greedy=0.5),  # " Blue, like the sky."
    Row(SUM, (216, 40, EOS), 0.0, group=0, greedy=0.25),  # " 8"
    Row(SUM, (216, 35, 1232, 216, 36, 446, 216, 39), 0.25, 0, GAP, ((5, 0.5),), truncated=True, greedy=0.25),
    Row(COLOUR, (3950, EOS), -1.0, group=1, greedy=0.5),  # " Red"
    Row(COLOUR, (41827, 28, 253, 7302, 47, EOS), 0.5, group=1, greedy=0.5),  # " Hmm, a colour?"
    Row(COLOUR, (253, EOS), None, group=1, greedy=0.5),  # without a score
)


def make_reference(base: Path, folder: Path) -> Path:
    """The base with 2 % noise in every tensor."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter += 0.02 * parameter.square().mean().sqrt() * noise
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def cpu_seconds() -> float:
    """Of this process and of the runs that it started: other work on the machine does not count."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def norm(tensors: dict) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def size_of(folder: Path) -> float:
    """The norm of all parameters that a folder holds."""
    from safetensors.torch import load_file

    files = [path for name in ("model", "value_head") if (path := folder / f"{name}.safetensors").exists()]
    return math.sqrt(sum(norm(load_file(path)) ** 2 for path in files))


def rate_for(folder: Path, gradient: dict) -> float:
    """A power of two: dividing by it rounds nothing."""
    return 2.0 ** round(math.log2(size_of(folder) / norm(gradient))) if gradient else 1.0


class Bench:
    """The folders that all configurations share."""

    def __init__(self, work: Path, threads: int):
        self.work, self.threads = work, threads
        self.base = Path(resolve_folder("smollm2", None))
        self.reference = make_reference(self.base, work / "reference")
        self.critic = save_plain_critic(self.base, work / "critic", seed=1)
        self.rows = write_rows(work / "rows.parquet", ROWS)

    def expected(self, case: Case) -> Update:
        return plain_update(case, ROWS, self.base, self.reference, self.critic)

    def program(self, case: Case, rate: float, critic_rate: float) -> Update:
        run = self.work / "run"
        words = [*case.words.split(), "model=smollm2", f"sampler=replay:{self.rows}", "optimizer=sgd", "dtype=fp32"]
        words += ["device=cpu", f"threads={self.threads}", f"learning_rate={rate}", f"run={run}"]
        words += [f"reference={self.reference}"] * case.needs_reference
        words += [f"critic.init={self.critic}", f"critic.learning_rate={critic_rate}"] * case.needs_critic
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        done = subprocess.run(
            [sys.executable, "-m", "hotcold", "train", *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{case.words}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        critic = change_of_critic(self.critic, run / "critic", critic_rate) if case.needs_critic else {}
        update = Update(change_of(self.base, run / "model", rate), critic)
        shutil.rmtree(run)
        return update

    def measure(self, name: str) -> dict:
        case, start = CASES[name], cpu_seconds()
        want = self.expected(case)
        rate, critic_rate = rate_for(self.base, want.policy), rate_for(self.critic, want.critic)
        got = self.program(case, rate, critic_rate)
        row = {
            "name": name,
            "words": case.words,
            "distance": relative_distance(got.policy, want.policy),
            "norm": norm(want.policy),
            "rate": rate,
            "critic_distance": relative_distance(got.critic, want.critic) if want.critic else None,
            "critic_norm": norm(want.critic) if want.critic else None,
            "critic_rate": critic_rate if want.critic else None,
            "cpu_seconds": cpu_seconds() - start,
        }
        gc.collect()
        return row


def hardware(threads: int) -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": threads, "python": platform.python_version()}


def is_close(row: dict) -> bool:
    return max(row["distance"], row["critic_distance"] or 0.0) <= TOLERANCE


def write(out: Path, results: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    machine, versions = results["hardware"], results["versions"]
    lines = [
        "# The gradient of every algorithm on SmolLM2-135M-Instruct",
        "",
        f"`{results['command']}`, {results['date']}. {machine['cpu']}, {machine['cores']} cores, {machine['threads']} "
        f"thread; Python {machine['python']}, {', '.join(f'{name} {v}' for name, v in versions.items())}. The program "
        f"in float32, the expected gradient in float64. Base model SHA-256 `{results['base_sha256']}`.",
        "",
        "Seven replayed rows, one plain step of each configuration. Distance: L2 norm of the difference between what "
        "the program did, (before - after) / rate, and the gradient in plain PyTorch, over the norm of the latter. "
        f"Tolerance {TOLERANCE:g}. With beta the reference is another model; the critic's head is not 0.",
        "",
        "| configuration | distance | gradient norm | rate | critic: distance | gradient norm | rate | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results["cases"]:
        critic = "| | "
        if r["critic_distance"] is not None:
            critic = f"{r['critic_distance']:.1e} | {r['critic_norm']:.3g} | {r['critic_rate']:g}"
        policy = f"{r['distance']:.1e} | {r['norm']:.3g} | {r['rate']:g}"
        lines.append(f"| `{r['words']}` | {policy} | {critic} | {r['cpu_seconds']:.0f} |")
    worst = max(max(r["distance"], r["critic_distance"] or 0.0) for r in results["cases"])
    verdict = "all within the tolerance" if all(map(is_close, results["cases"])) else "NOT all within the tolerance"
    lines += [
        "",
        f"Largest distance {worst:.1e}: {verdict}. {results['cpu_seconds'] / 60:.1f} minutes of CPU time in all.",
        "",
    ]
    (out / "results.md").write_text("\n".join(lines))


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    start, date = time.perf_counter(), datetime.date.today().isoformat()
    results: dict = {
        "date": date,
        "command": f"python benchmarks/replay_gradient.py --threads {a.threads}",
        "tolerance": TOLERANCE,
        "hardware": hardware(a.threads),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "cases": [],
    }
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(Path(work), a.threads)
        results["base_sha256"] = hashlib.sha256((bench.base / "model.safetensors").read_bytes()).hexdigest()
        for name in a.only:
            row = bench.measure(name)
            critic = "" if row["critic_distance"] is None else f", critic {row['critic_distance']:.1e}"
            print(f"{name:<28} {row['distance']:.1e}{critic}  {row['cpu_seconds']:.0f} s of CPU", flush=True)
            results["cases"].append(row)
    results |= {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds()}
    write(a.out or ROOT / "benchmarks" / "results" / f"{date}-replay-gradient", results)
    return 0 if all(map(is_close, results["cases"])) else 1


if __name__ == "__main__":
    sys.exit(main())
