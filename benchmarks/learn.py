"""Does every algorithm learn? The embedded task, several seeds; writes a table with 95 % intervals.

    make learn        (or: python benchmarks/learn.py [--only NAME ...] [--seeds 0 1 2] [--demo-seeds 0 1 2 3 4]
                       [--jobs 2] [--work FOLDER] [--out FOLDER])

First `hotcold demo` for each demo seed, each with a supervised start of its own. Then every row of the table below, for
every seed, from one saved supervised start (that of seed 0) with the demo's settings; what a row sets otherwise is
printed beside it. Held-out sums are never trained on; the score is greedy exact match on 200 of them.

A row misses when its score ends below 0.95 (`reach`), when the lower end of its interval does not lie above the upper
end of the start's (`rise`), or when it trains for more than 60 seconds. Then the command says which, and exits 1.
`--work` keeps the runs and, called again, does only what is not there yet; without it they go when the command ends.
"""

import argparse
import datetime
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hotcold.toys.task import RECOMMENDED, ToyFiles, write_toy

ROOT = Path(__file__).parents[1]
REACH = 0.95
MAX_SECONDS = 60.0  # of training, in each run
EXPECTED = {"reach": "at least 0.95", "rise": "rise above the start", "shown": "no bound"}


@dataclass(frozen=True)
class Row:
    name: str
    words: str  # the algorithm and the keys that make it this variant
    expected: str = "reach"  # a key of EXPECTED
    changed: dict[str, object] = field(default_factory=dict)  # settings other than the demo's; None: left out
    why: str = ""  # of the change

    @property
    def settings(self) -> dict[str, object]:
        return {key: value for key, value in {**RECOMMENDED, **self.changed}.items() if value is not None}


FEWER = {"prompts_per_step": 64, "steps": 30, "learning_rate": 8e-4}  # a fifth of the demo's responses
WITH_CRITIC = {**FEWER, "steps": 20}
FEW = {**FEWER, "steps": 15, "learning_rate": 4e-4}
SHORT, SEVERAL = "to stay below a minute", "several optimiser steps on each batch"
ADAPTER = {**FEWER, "steps": 20, "learning_rate": 4e-3}
ROWS = (
    Row("reinforce, no baseline", "reinforce baseline=none", "rise", FEWER, SHORT),
    Row("reinforce, batch mean", "reinforce baseline=batch_mean", "reach", FEWER, SHORT),
    Row("reinforce, leave-one-out", "reinforce baseline=leave_one_out", "reach", FEWER, SHORT),
    Row("reinforce, greedy baseline", "reinforce baseline=greedy", "reach", FEWER, SHORT),
    Row("reinforce_pp", "reinforce_pp", "reach", FEWER, SHORT),
    Row("rloo", "rloo", "reach", FEWER, SHORT),
    Row("rloo, KL k1 in the reward", "rloo beta=0.01", "reach", FEWER, SHORT),
    Row("rloo, exact KL", "rloo beta=0.01 kl.estimator=exact", "reach", FEWER, SHORT),
    Row("rloo, LoRA", "rloo lora.rank=16", "reach", ADAPTER, "an adapter wants a higher rate"),
    Row("grpo", "grpo", "reach", FEWER, SHORT),
    Row("grpo, KL k3 in the loss", "grpo beta=0.01", "reach", FEWER, SHORT),
    Row("dr_grpo", "dr_grpo", "reach", FEWER, SHORT),
    Row("dapo", "dapo", "reach", FEWER, SHORT),
    Row("gspo", "gspo", "reach", FEWER, SHORT),
    Row("cispo, 4 minibatches", "cispo minibatches=4", "reach", FEW, SEVERAL),
    Row("ppo", "ppo", "reach", WITH_CRITIC, SHORT),
    Row("ppo, KL, beta adaptive", "ppo beta=0.01 kl.target=0.5", "reach", WITH_CRITIC, SHORT),
    Row("ppo, LoRA", "ppo lora.rank=16", "reach", {**ADAPTER, "steps": 35}, "an adapter wants a higher rate"),
    Row("expert iteration", "expert_iteration", "reach", FEWER, SHORT),
    Row(
        "expert iteration from the starting model",
        "expert_iteration start_from=starting epochs_per_batch=4",
        "rise",
        FEW,
        SEVERAL,
    ),
    Row("sft on right answers", "sft", "rise", {"group_size": None}, "sft samples nothing"),
)
LAST = ("kl/response", "beta", "value/explained_variance", "clip_fraction")  # of the last step, where a row has them


@dataclass(frozen=True)
class Job:
    row: Row | None  # None: `hotcold demo`
    seed: int

    @property
    def name(self) -> str:
        return self.row.name if self.row else "hotcold demo"

    @property
    def expected(self) -> str:
        return self.row.expected if self.row else "reach"

    @property
    def file(self) -> str:
        return "".join(c if c.isalnum() else "_" for c in f"{self.name} {self.seed}")

    def words(self, files: ToyFiles) -> list[str]:
        if self.row is None:
            return ["demo", f"seed={self.seed}"]
        settings = [f"{key}={value}" for key, value in self.row.settings.items()]
        common = [f"model={files.model}", f"data={files.train}", f"eval.data={files.held_out}", "reward=exact"]
        return ["train", *self.row.words.split(), *settings, *common, f"seed={self.seed}", "threads=1"]


def main() -> None:
    a = _arguments()
    rows = [row for row in ROWS if not a.only or row.name in a.only]
    demos = [Job(None, seed) for seed in a.demo_seeds if not a.only or "hotcold demo" in a.only]
    jobs = demos + [Job(row, seed) for row in rows for seed in a.seeds]
    with _work_folder(a.work) as work:
        files = _start(work)
        with ThreadPoolExecutor(a.jobs) as pool:
            results = list(pool.map(lambda job: _run(job, files, work), jobs))
        missed = [line for result in results if (line := _miss(result))]
        date = datetime.date.today().isoformat()
        out = a.out or ROOT / "benchmarks" / "results" / f"{date}-learn"
        _write(out, _head(date, a, files), rows, results, missed)
    print(f"{out / 'results.md'}: {len(results)} runs, {len(missed)} missed")
    sys.exit("\n".join(["missed:", *missed]) if missed else 0)


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    names = ["hotcold demo", *(row.name for row in ROWS)]
    p.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"these rows: {'; '.join(names)}")
    p.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    p.add_argument("--demo-seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    p.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at a time, one thread each")
    p.add_argument("--work", type=Path, help="keep the runs here, and go on from what is there")
    p.add_argument("--out", type=Path, help="folder of the results")
    return p.parse_args()


@contextmanager
def _work_folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
    else:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)


def _start(work: Path) -> ToyFiles:
    """The one saved start. It appears under its name when it is whole."""
    if not (work / "start").exists():
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(dir=work) as unfinished:
            write_toy(Path(unfinished) / "start", 0)
            (Path(unfinished) / "start").rename(work / "start")
    names = ("model", "train.jsonl", "held_out.jsonl")
    return ToyFiles(*(work / "start" / name for name in names))


def _run(job: Job, files: ToyFiles, work: Path) -> dict:
    """One command, its result as a row; a command that fails ends everything."""
    saved, folder, log = (work / f"{job.file}{end}" for end in (".json", "", ".log"))
    if saved.exists():
        return json.loads(saved.read_text())
    command = [sys.executable, "-m", "hotcold", *job.words(files), f"run={folder}"]
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as text:
        process = subprocess.Popen(command, stdout=text, stderr=subprocess.STDOUT, env=environment)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        os._exit(_say_failed(command, log))  # not sys.exit: the other jobs would be run to their end first
    result = {"what": job.name, "seed": job.seed, "expected": job.expected, **_measured(folder)}
    result |= {"wall": time.perf_counter() - start, "cpu": _cpu_seconds(used)}
    saved.write_text(json.dumps(result) + "\n")
    print(_line(result), flush=True)
    return result


def _say_failed(command: list[str], log: Path) -> int:
    print(f"{' '.join(command)} failed:\n{log.read_text()[-2000:]}", file=sys.stderr, flush=True)
    return 1


def _cpu_seconds(used: resource.struct_rusage) -> float:
    return used.ru_utime + used.ru_stime


def _measured(folder: Path) -> dict:
    evaluations = sorted((folder / "eval").glob("step_*.json"))
    first, last = (json.loads(path.read_text()) for path in (evaluations[0], evaluations[-1]))
    steps = {s["step"]: s for s in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    keys = ("eval/greedy", "eval/greedy_low", "eval/greedy_high")
    end = steps[max(steps)]
    return {
        "before": [first[key] for key in keys],
        "after": [last[key] for key in keys],
        "training": sum(s["time/step"] for s in steps.values()),
        "steps": len(steps),
        "last": {key: end[key] for key in LAST if end.get(key) is not None},
    }


def _miss(r: dict) -> str | None:
    """What a run fell short of. Time that other work on the machine took is not the run's own."""
    score, low, start = r["after"][0], r["after"][1], r["before"][2]
    seconds = min(r["training"], r["cpu"])
    name = f"{r['what']}, seed {r['seed']}"
    if r["expected"] == "reach" and score < REACH:
        return f"{name}: {score:.3f}, at least {REACH} is needed"
    if r["expected"] == "rise" and low <= start:
        return f"{name}: its interval begins at {low:.3f}, the start's ends at {start:.3f}"
    if seconds > MAX_SECONDS and r["what"] != "hotcold demo":
        return f"{name}: {seconds:.0f} s of training, at most {MAX_SECONDS:.0f} s is allowed"
    return None


def _head(date: str, a: argparse.Namespace, files: ToyFiles) -> dict:
    words = ["python benchmarks/learn.py", *(["--only", *(f'"{name}"' for name in a.only)] if a.only else [])]
    words += ["--seeds", *map(str, a.seeds), "--demo-seeds", *map(str, a.demo_seeds), "--jobs", str(a.jobs)]
    return {
        "date": date,
        "command": " ".join(words),
        "commit": _git("rev-parse", "HEAD") + ("" if not _git("status", "--porcelain", "src") else ", changed"),
        "machine": f"{_cpu()}, {os.cpu_count()} cores, 1 thread in each of {a.jobs} runs at a time",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "settings": {key: str(value) for key, value in RECOMMENDED.items()},
        "start_sha256": hashlib.sha256((files.model / "model.safetensors").read_bytes()).hexdigest(),
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or ("unknown" if done.returncode else "")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())


def _write(out: Path, head: dict, rows: list[Row], results: list[dict], missed: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    settings = " ".join(f"{key}={value}" for key, value in head["settings"].items())
    verdict = [f"{len(missed)} missed:", "", *(f"- {line}" for line in missed)] if missed else ["None missed."]
    lines = [
        "# The embedded task, every algorithm",
        "",
        f"`{head['command']}`, {head['date']}, commit {head['commit'][:12]}. {head['machine']}; {head['versions']}.",
        "",
        f"Settings: `{settings}`. Start: one supervised model, SHA-256 {head['start_sha256'][:16]}.",
        "Score: greedy exact match on 200 held-out sums, with its 95 % Wilson interval.",
        "",
        f"{len(results)} runs. {verdict[0]}",
        *verdict[1:],
        "",
        "## Rows",
        "",
        "| what | command | expected | after, by seed | settings changed | why |",
        "|---|---|---|---|---|---|",
        *(_row_line(row, [r for r in results if r["what"] == row.name]) for row in rows),
        "",
        "## Runs",
        "",
        "Seconds of training are those of all steps and the evaluations between them; of the whole command, start-up",
        "included, by the clock and by the processor. Other work on the machine lengthens what the clock says.",
        "Last step: KL to the start in nats per response, beta, variance explained by the critic, share of tokens",
        "that are clipped.",
        "",
        "| what | seed | before | after | training s | command s | processor s | last step |",
        "|---|---|---|---|---|---|---|---|",
        *map(_line, results),
        "",
    ]
    (out / "results.md").write_text("\n".join(lines))
    (out / "results.json").write_text(json.dumps({**head, "missed": missed, "rows": results}, indent=1) + "\n")


def _row_line(row: Row, results: list[dict]) -> str:
    after = ", ".join(f"{r['after'][0]:.3f}" for r in results)
    changed = ", ".join(f"{key}={RECOMMENDED.get(key, 'auto')} -> {value}" for key, value in row.changed.items())
    changed = changed.replace("-> None", "-> left out")
    return f"| {row.name} | `{row.words}` | {EXPECTED[row.expected]} | {after} | {changed} | {row.why} |"


def _line(r: dict) -> str:
    short = {"kl/response": "KL", "value/explained_variance": "explained", "clip_fraction": "clipped"}
    last = ", ".join(f"{short.get(key, key)} {value:.3g}" for key, value in r["last"].items())
    cells = [r["what"], r["seed"], _interval(r["before"]), _interval(r["after"])]
    cells += [f"{r[key]:.0f}" for key in ("training", "wall", "cpu")]
    return f"| {' | '.join(map(str, cells))} | {last} |"


def _interval(values: list[float]) -> str:
    return f"{values[0]:.3f} ({values[1]:.3f} to {values[2]:.3f})"


if __name__ == "__main__":
    main()
