"""Is a run that goes on from a checkpoint the run that was never stopped? At 50 cut points, for each algorithm.

    python benchmarks/cuts.py [--cuts 50] [--only NAME ...] [--out FOLDER]

A tiny model, 50 steps of 3 prompts out of 11, so that passes over the prompts end inside steps; Adam, and where the
algorithm allows it two epochs of three minibatches. The whole run keeps the checkpoint of every step. From each of them
another run goes on for two steps, with fresh objects: its prompt ids, responses, metrics (times, rates, memory and the
evaluation at its end aside) and its checkpoint (parameters, optimisers, state) must be those of the whole run, to the
bit. Since the state after the two steps is the whole run's, so is all that follows. Writes results.json and results.md.
"""

import argparse
import datetime
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
import torch
from replay_gradient import ROOT, hardware

import hotcold
from hotcold.checkpoint import file_sha256
from hotcold.runs import RunFolder
from kills import NOT_REPEATED, REWARD

EVALUATED = ("before", "greedy", "best", "best_step")  # the last step of a run is evaluated
SEVERAL = {"epochs_per_batch": 2, "minibatches": 3}
LEASH = {"beta": 0.05, "kl.target": 0.01, "kl.horizon": 50}
ALGORITHMS: dict[str, dict] = {
    "reinforce": {"baseline": "greedy"},
    "reinforce_pp": {"beta": 0.05},
    "rloo": LEASH,
    "grpo": SEVERAL,
    "dr_grpo": SEVERAL,
    "dapo": {**SEVERAL, "refill": 2},
    "gspo": SEVERAL,
    "cispo": SEVERAL,
    "ppo": {**SEVERAL, **LEASH},
    "expert_iteration": {"threshold": 0.5, "minibatches": 3},
    "rloo, adapter": {"lora.rank": 2},
}


def run(folder: Path, name: str, algorithm: str, keys: dict, steps: int) -> None:
    hotcold.train(
        algorithm=algorithm.split(",")[0],
        model=str(folder / "model"),
        data=str(folder / "prompts.jsonl"),
        reward=str(folder / "reward.py"),
        run=str(folder / name),
        resume="auto",
        steps=steps,
        max_tokens=6,
        prompts_per_step=3,
        group_size=4,
        learning_rate=3e-3,
        save_every=1,
        keep_checkpoints=1000,
        eval__every=0,
        eval__prompts=1,
        threads=1,
        reward_workers=0,
        echo=None,
        **{key.replace(".", "__"): value for key, value in keys.items()},
    )


def state(folder: Path, step: int) -> dict:
    """Of a checkpoint: the hash of every file, and what the state says of where the run is."""
    checkpoint = folder / "checkpoints" / f"step_{step:06d}"
    files = {p.relative_to(checkpoint).as_posix(): file_sha256(p) for p in checkpoint.rglob("*.safetensors")}
    progress = json.loads((checkpoint / "trainer" / "state.json").read_text())["progress"]
    return {**files, **{name: value for name, value in progress.items() if name not in EVALUATED}}


def rows(folder: Path, step: int) -> list:
    return pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def metrics(folder: Path, step: int) -> dict:
    row = next(row for row in RunFolder.read_metrics(folder) if row["step"] == step)
    return {k: v for k, v in row.items() if not k.startswith((*NOT_REPEATED, "eval/"))}


def differences(whole: Path, part: Path, cut: int, steps: int) -> list[str]:
    found = []
    for step in range(cut + 1, steps + 1):
        if rows(whole, step) != rows(part, step):
            found.append(f"rollouts of step {step}")
        if metrics(whole, step) != metrics(part, step):
            found.append(f"metrics of step {step}")
    last = state(whole, steps), state(part, steps)
    return found + [f"{name} after step {steps}" for name in last[0] if last[0][name] != last[1].get(name)]


def cut_at(folder: Path, algorithm: str, keys: dict, cut: int) -> list[str]:
    """A copy of the whole run as it was after `cut` steps, without anything that came later."""
    part = folder / "part"
    shutil.rmtree(part, ignore_errors=True)
    (part / "checkpoints").mkdir(parents=True)
    (part / "rollouts").mkdir()
    shutil.copy(folder / "whole" / "config.yaml", part)
    lines = (folder / "whole" / "metrics.jsonl").read_text().splitlines()
    (part / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= cut))
    if cut:
        name = f"step_{cut:06d}"
        shutil.copytree(folder / "whole" / "checkpoints" / name, part / "checkpoints" / name)
    run(folder, "part", algorithm, keys, cut + 2)
    return differences(folder / "whole", part, cut, cut + 2)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cuts", type=int, default=50)
    p.add_argument("--only", nargs="+", default=list(ALGORITHMS))
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    from tests.tiny_model import write_tiny

    found: dict[str, list] = {}
    start = time.monotonic()
    for name in a.only:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write_tiny(folder / "model")
            prompts = [{"prompt": f"{x}+{y}="} for x in range(3) for y in range(4)]
            (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
            (folder / "reward.py").write_text(REWARD)
            run(folder, "whole", name, ALGORITHMS[name], a.cuts + 1)
            cuts = {cut: cut_at(folder, name, ALGORITHMS[name], cut) for cut in range(a.cuts)}
        found[name] = [{"cut": cut, "differs": differs} for cut, differs in cuts.items() if differs]
        print(f"{name}: {a.cuts - len(found[name])} of {a.cuts} the same {found[name][:2] or ''}", flush=True)
    date = datetime.date.today().isoformat()
    results = {
        "command": f"python benchmarks/cuts.py --cuts {a.cuts}",
        "date": date,
        "hardware": hardware(1),
        "seconds": time.monotonic() - start,
        "differences": found,
        "cuts": a.cuts,
    }
    write(a.out or ROOT / "benchmarks" / "results" / f"{date}-cuts", results)
    return 1 if any(found.values()) else 0


def write(out: Path, results: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    on = results["hardware"]
    lines = [
        "# Resumed at every step",
        "",
        f"`{results['command']}`, {results['date']}. {on['cpu']}, 1 thread, {results['seconds']:.0f} s. Cut after 0, "
        f"1, 2, ... {results['cuts'] - 1} steps; the next two steps beside those of the run that was never cut.",
        "",
        "| algorithm | settings | cuts | the same |",
        "|---|---|---|---|",
    ]
    for name, differs in results["differences"].items():
        keys = " ".join(f"{key}={value}" for key, value in ALGORITHMS[name].items())
        lines.append(f"| {name} | {keys} | {results['cuts']} | {results['cuts'] - len(differs)} |")
    (out / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
