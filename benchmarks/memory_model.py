"""Does the measured model of memory say what an update takes? SmolLM2-135M, float32, a prompt of 47, responses of 128.

    python benchmarks/memory_model.py [--tokens 431 943 1967] [--threads 1] [--out FOLDER]

For each size of a micro-batch two processes: one asks `sizing.measured`, as a run does before its first step, the other
takes two such micro-batches forward and backward and steps AdamW, and reads its largest resident memory. Writes
results.md.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from replay_gradient import ROOT, hardware

from hotcold import sizing
from hotcold.assemble import Assembled, assemble
from hotcold.config.schema import train_config
from hotcold.engines.local import LocalEngine, Trainee
from hotcold.memory import GB, held_bytes, record_bytes
from hotcold.optim import make_optimizer

SHAPE = sizing.Shape(47, 128, shares=True)


def assembled(threads: int, place: Path) -> Assembled:
    (place / "prompts.jsonl").write_text("".join(f'{{"prompt": "What is {n} + {n}?"}}\n' for n in range(8)))
    (place / "reward.py").write_text("def reward(completion):\n    return float(len(completion))\n")
    words = ["rloo", "model=smollm2", f"data={place}/prompts.jsonl", f"reward={place}/reward.py", "dtype=fp32"]
    return assemble(train_config([*words, f"threads={threads}", "device=cpu", "eval.every=0", "group_size=16"]))


def predicted(ready: Assembled, tokens: int) -> int:
    held = held_bytes("cpu") or 0  # before the measuring, which leaves the process larger
    (line,) = sizing.measured(ready, SHAPE)
    return int(held + line.bytes(tokens))


def real(ready: Assembled, tokens: int) -> int:
    module = ready.model.module
    trainee = Trainee(module, make_optimizer("adamw", list(module.named_parameters()), 1e-6))
    engine = LocalEngine({"policy": trainee}, 1.0, reading=ready.models.reading)
    (objective,) = ready.algorithm.objectives
    rows = (tokens - SHAPE.prompt) // SHAPE.response
    batch = sizing.made_up(ready.algorithm, module, SHAPE, rows)
    part, weights = batch.select(list(range(rows))), objective.weighting(batch.trained)[:rows]
    for _ in range(2):
        engine.backward(part, weights, objective)
    engine.step("policy", 1e-6, 1.0)
    return record_bytes() or 0


def in_a_process(kind: str, tokens: int, threads: int) -> int:
    words = [sys.executable, __file__, "--one", kind, "--tokens", str(tokens), "--threads", str(threads)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--tokens", type=int, nargs="+", default=[431, 943, 1967])
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, default=None)
    p.add_argument("--one", choices=["predicted", "real"], help=argparse.SUPPRESS)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    if a.one:
        with tempfile.TemporaryDirectory() as place:
            ready = assembled(a.threads, Path(place))
            print(json.dumps({"predicted": predicted, "real": real}[a.one](ready, a.tokens[0])))
        return
    date, machine = datetime.date.today().isoformat(), hardware(a.threads)
    lines = [
        "# What a micro-batch takes, by the measured model and in truth",
        "",
        f"`python benchmarks/memory_model.py --threads {a.threads}`, {date}. {machine['cpu']}; Python "
        f"{machine['python']}, torch {torch.__version__}. GB of the whole process; a run leaves "
        f"{1 - sizing.MARGIN:.2f} of its limit free.",
        "",
        "| tokens | model | resident, the largest |",
        "|---|---|---|",
    ]
    for tokens in a.tokens:
        said, taken = (in_a_process(kind, tokens, a.threads) for kind in ("predicted", "real"))
        lines.append(f"| {tokens} | {said / GB:.2f} | {taken / GB:.2f} |")
        print(lines[-1], flush=True)
    out = a.out or ROOT / "benchmarks" / "results" / f"{date}-memory-model"
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
