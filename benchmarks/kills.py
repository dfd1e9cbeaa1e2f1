"""Does a run that is killed at any instant end where one that is never killed ends?

    python benchmarks/kills.py [--runs 100] [--inside-a-save 20] [--seed 0] [--out FOLDER]
    python benchmarks/kills.py --smollm2                # one run of SmolLM2-135M-Instruct, killed once in the middle

PPO with Adam, a critic, an adaptive KL penalty, two epochs of three minibatches; a tiny model. Each run is started,
killed once by SIGKILL at a random instant (from its first moment on; some of them while a checkpoint is being written)
and started again by the same command, `run=NAME resume=auto`. It counts if the second start ends by itself and leaves
the same SHA-256 of parameters and optimisers, the same rollouts and the same metrics (times, rates and memory aside; of
each step the last attempt's) as a run that was not killed. Another seed must leave others. Writes results.json and
results.md.
"""

import argparse
import datetime
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet as pq
from replay_gradient import ROOT, hardware

from hotcold.runs import RunFolder

NOT_REPEATED = ("time/", "memory/", "tokens_per_second", "attempt")
REWARD = "import zlib\n\ndef reward(completion):\n    return zlib.crc32(completion.encode()) % 100 / 100\n"
TINY = ["ppo", "model=model", "data=prompts.jsonl", "reward=reward.py", "max_tokens=6", "prompts_per_step=3"]
TINY += ["group_size=4", "epochs_per_batch=2", "minibatches=3", "beta=0.05", "kl.target=0.01", "kl.horizon=50"]
TINY += ["learning_rate=3e-3", "save_every=2", "eval.every=4", "steps=10", "threads=1"]
LARGE = ["rloo", "model=smollm2", "data=prompts.jsonl", "reward=reward.py", "max_tokens=12", "prompts_per_step=2"]
LARGE += ["group_size=4", "save_every=2", "eval.every=0", "eval.prompts=4", "steps=6", "threads=1"]


@dataclass(frozen=True)
class Killed:
    number: int
    where: str  # what it was doing, by what it had left behind
    seconds: float  # after its start
    same: bool
    differs: tuple[str, ...]


def work(folder: Path, words: list[str]) -> None:
    sys.path.insert(0, str(ROOT))
    from tests.tiny_model import write_tiny

    if "model=model" in words:
        write_tiny(folder / "model")
        prompts = [f"{a}+{b}=" for a in range(4) for b in range(5)]
    else:
        prompts = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a in range(4) for b in range(5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (folder / "reward.py").write_text(REWARD)


def command(words: list[str], name: str, seed: int) -> list[str]:
    return [sys.executable, "-m", "hotcold", "train", *words, f"seed={seed}", f"run={name}", "resume=auto"]


def start(folder: Path, words: list[str], name: str, seed: int) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command(words, name, seed),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(folder: Path, words: list[str], name: str, seed: int) -> tuple[int, str]:
    process = start(folder, words, name, seed)
    _, said = process.communicate()
    return process.returncode, said


def what_it_left(run: Path) -> dict[str, str]:
    """A hash for each part of a finished run that must be the same."""
    result = json.loads((run / "result.json").read_text())
    parts = {name: str(value) for name, value in result.items()}
    for path in sorted((run / "rollouts").glob("*.parquet")):
        rows = json.dumps(pq.read_table(path).to_pylist(), sort_keys=True)
        parts[f"rollouts/{path.name}"] = hashlib.sha256(rows.encode()).hexdigest()
    rows = [{k: v for k, v in row.items() if not k.startswith(NOT_REPEATED)} for row in RunFolder.read_metrics(run)]
    parts["metrics"] = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    weights = (run / "model" / "model.safetensors").read_bytes()
    parts["model"] = hashlib.sha256(weights).hexdigest()
    return parts


def killed_at(folder: Path, words: list[str], name: str, seed: int, seconds: float | None, save: int) -> tuple:
    """Kills after so many seconds; None: while the `save`-th checkpoint is being written. (when, where)"""
    process, begin = start(folder, words, name, seed), time.monotonic()
    run, seen = folder / "runs" / name, set()
    while process.poll() is None:
        if seconds is not None and time.monotonic() - begin >= seconds:
            break
        if seconds is None:
            seen |= {path.name for path in run.glob("checkpoints/.*.partial-*")}
            if len(seen) >= save:
                break
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return time.monotonic() - begin, where(run)


def where(run: Path) -> str:
    if list(run.glob("checkpoints/.*.partial-*")):
        return "inside a save"
    if not (run / "config.yaml").exists():
        return "start-up"
    if (run / "result.json").exists():
        return "at the end"
    if list(run.glob(".*.partial-*")):
        return "writing the final model"
    steps = len(RunFolder.read_metrics(run))
    rollouts = len(list(run.glob("rollouts/step_*.parquet")))
    return "before the first step" if not rollouts else "updating" if rollouts > steps else "between, sampling, scoring"


def trial(folder: Path, words: list[str], number: int, seconds: float | None, save: int, expected: dict) -> Killed:
    name = f"killed{number}"
    when, place = killed_at(folder, words, name, 0, seconds, save)
    code, said = finish(folder, words, name, 0)
    if code:
        return Killed(number, place, when, False, (f"exit code {code}: {said.strip()[-300:]}",))
    found = what_it_left(folder / "runs" / name)
    differs = tuple(sorted(k for k in {*expected, *found} if expected.get(k) != found.get(k)))
    return Killed(number, place, when, not differs, differs)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--runs", type=int, default=100)
    p.add_argument("--inside-a-save", type=int, default=20)
    p.add_argument("--seed", type=int, default=0, help="of the instants")
    p.add_argument("--smollm2", action="store_true")
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    if a.smollm2:
        a.runs, a.inside_a_save = 1, 0
    words, random_ = LARGE if a.smollm2 else TINY, random.Random(a.seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        work(folder, words)
        begin = time.monotonic()
        code, said = finish(folder, words, "whole", 0)
        assert code == 0, said
        length = time.monotonic() - begin
        expected = what_it_left(folder / "runs" / "whole")
        code, said = finish(folder, words, "other", 1)
        assert code == 0, said
        other = what_it_left(folder / "runs" / "other")
        print(f"a whole run takes {length:.1f} s and leaves {expected['parameters_sha256'][:16]}", flush=True)
        trials = []
        for number in range(a.runs):
            inside = number < a.inside_a_save
            part = random_.uniform(0.4, 0.8) if a.smollm2 else random_.random()
            trials.append(
                trial(folder, words, number, None if inside else part * length, random_.randint(1, 5), expected)
            )
            last = trials[-1]
            what = "the same end" if last.same else f"DIFFERS: {', '.join(last.differs)}"
            print(f"run {number}: killed after {last.seconds:.1f} s ({last.where}): {what}", flush=True)
    results = {
        "command": "python benchmarks/kills.py"
        + (" --smollm2" if a.smollm2 else f" --runs {a.runs} --inside-a-save {a.inside_a_save} --seed {a.seed}"),
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(1),
        "words": words,
        "seconds_of_a_run": length,
        "expected": expected,
        "another_seed_differs": expected["parameters_sha256"] != other["parameters_sha256"],
        "runs": [asdict(one) for one in trials],
    }
    name = "kills-smollm2" if a.smollm2 else "kills"
    write(a.out or ROOT / "benchmarks" / "results" / f"{results['date']}-{name}", results)
    return 0 if results["another_seed_differs"] and all(one.same for one in trials) else 1


def write(out: Path, results: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    runs, on = results["runs"], results["hardware"]
    same = sum(run["same"] for run in runs)
    lines = [
        "# Killed runs end where whole ones end",
        "",
        f"`{results['command']}`, {results['date']}. {on['cpu']}, {on['cores']} cores, 1 thread. "
        f"`hotcold train {' '.join(results['words'])}`; a whole run takes {results['seconds_of_a_run']:.1f} s, "
        "start-up included.",
        "",
        f"{same} of {len(runs)} killed runs, started again by the same command, ended with the same SHA-256 of "
        f"parameters ({results['expected']['parameters_sha256'][:16]}), critic and optimisers, the same rollouts and "
        "metrics. "
        f"Another seed ends elsewhere: {'yes' if results['another_seed_differs'] else 'NO'}.",
        "",
        "| killed while | runs | the same end | median seconds after the start |",
        "|---|---|---|---|",
    ]
    for place, number in Counter(run["where"] for run in runs).most_common():
        there = [run for run in runs if run["where"] == place]
        middle = statistics.median(run["seconds"] for run in there)
        lines.append(f"| {place} | {number} | {sum(run['same'] for run in there)} | {middle:.1f} |")
    (out / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
