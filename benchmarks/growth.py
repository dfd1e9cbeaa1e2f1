"""Time over the limit of one prompt's step, as prompts, groups and responses grow; and the padding of ragged groups.

    python benchmarks/growth.py [--all] [--steps 3] [--threads 1] [--out FOLDER]
    python benchmarks/growth.py --quick        # a tiny model, two cells: does it run?

Each cell is `hotcold bench grpo prompts_per_step=1` on SmolLM2-135M-Instruct with a copy whose EOS is a token that it
does not say, so that every response has max_tokens tokens; the median of 3 steps after one to warm up. Prompt tokens
64, 256, 1024, responses to the prompt (G) 4, 8, 16, response tokens 32, 128, 512. By default five of the nine lines of
three G: response tokens 128 with each prompt, prompt tokens 256 with each response. `--all` takes the 27 cells. A line
is flat if its largest ratio is at most 1.15 of its smallest.

Ragged: 16 recorded responses of 8 to 256 tokens to one prompt, trained on by `sampler=replay:FILE`; the share of the
tokens that went through the model without need. Writes results.json, results.md and growth.svg.
"""

import argparse
import datetime
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from against_trl import PACKAGES, REWARD, WORDS, length, without_eos
from replay_gradient import ROOT, hardware
from transformers import AutoTokenizer

from hotcold.models.loading import resolve_folder

PROMPTS, GROUPS, RESPONSES = (64, 256, 1024), (4, 8, 16), (32, 128, 512)
DEFAULT_LINES = ((64, 128), (256, 32), (256, 128), (256, 512), (1024, 128))
FLAT = 1.15
RAGGED = (8, 256)  # shortest and longest response of the group
QUICK_LINES, QUICK_GROUPS, QUICK_RAGGED = ((8, 4), (16, 8)), (2, 4), (2, 24)


# ---- the work


def exact_prompt(tokenizer: object, num_tokens: int, rng: random.Random) -> str:
    """A text without chat template of exactly so many tokens."""
    words: list[str] = []
    while length(tokenizer, " ".join(words)) < num_tokens:
        words.append(rng.choice(WORDS) if tokenizer.chat_template else rng.choice("abcdefgh"))
    text = " ".join(words)
    while length(tokenizer, text) > num_tokens:
        text = text[:-1]
    if length(tokenizer, text) != num_tokens:
        raise SystemExit(f"no text of {num_tokens} tokens was found: {text!r}")
    return text


class Bench:
    def __init__(self, a: argparse.Namespace, work: Path):
        self.a, self.work = a, work
        self.base = self._base()
        self.silent = without_eos(self.base, work / "silent")
        self.tokenizer = AutoTokenizer.from_pretrained(self.base)
        self.reward = work / "reward.py"
        self.reward.write_text(REWARD)

    def _base(self) -> Path:
        if not self.a.quick:
            return Path(resolve_folder("smollm2", None))
        sys.path.insert(0, str(ROOT))
        from tests.tiny_model import write_tiny

        return write_tiny(self.work / "tiny")

    def cell(self, prompt: int, group: int, response: int) -> dict:
        rng = random.Random(prompt)
        texts = [exact_prompt(self.tokenizer, prompt, rng) for _ in range(8)]
        data = self.work / "prompts.jsonl"
        data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        words = [f"data={data}", "chat=false", f"reward={self.reward}", "prompts_per_step=1", f"group_size={group}"]
        found = self._hotcold(*words, f"max_tokens={response}")
        return {"prompt": prompt, "group": group, "response": response, **figures(found)}

    def ragged(self, prompt: int, group: int, shortest: int, longest: int) -> dict:
        """Lengths at equal distances; the ids are those of ordinary tokens."""
        rng, lengths = random.Random(0), []
        vocabulary = len(self.tokenizer)
        start = vocabulary // 2

        def ids(n: int) -> list[int]:
            return [rng.randrange(start, vocabulary - 1) for _ in range(n)]

        rows = []
        for step in range(1, self.a.steps + 2):
            prompt_ids = ids(prompt)
            for i in range(group):
                lengths.append(shortest + (longest - shortest) * i // (group - 1))
                row = {"step": step, "group": 0, "episode": i, "prompt_ids": prompt_ids, "reward": rng.random()}
                rows.append({**row, "response_ids": ids(lengths[-1])})
        file = self.work / "ragged.parquet"
        pq.write_table(pa.Table.from_pylist(rows), file)
        found = self._hotcold(f"sampler=replay:{file}")
        return {"prompt": prompt, "group": group, "lengths": lengths[:group], **figures(found)}

    def _hotcold(self, *words: str) -> dict:
        command = [sys.executable, "-m", "hotcold", "bench", "grpo", f"model={self.silent}", *words]
        command += ["dtype=fp32", "device=cpu", f"threads={self.a.threads}", f"steps={self.a.steps}", "--json"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.a.threads)}
        done = subprocess.run(command, cwd=self.work, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        return json.loads(done.stdout)


def figures(found: dict) -> dict:
    parts = {part["name"]: part for part in found["parts"]}
    update = parts["update"]
    return {
        "seconds": found["step"]["seconds"],
        "limit": found["step"]["limit"],
        "ratio": found["step"]["ratio"],
        "ratios": {name: part["ratio"] for name, part in parts.items()},
        "response_tokens": [step["completions/mean_length"] for step in found["per_step"]],
        "padding": padding(update),
        "peak_memory": found["peak_memory"],
        "matrix_rate": found["matrix_rate"]["used"],
    }


def padding(part: dict) -> float | None:
    """Of the tokens that went through the model, those that were not needed."""
    return 1 - part["needed_tokens"] / part["computed_tokens"] if part["computed_tokens"] else None


# ---- what is written


def lines_of(cells: list[dict]) -> dict[tuple[int, int], list[dict]]:
    lines: dict[tuple[int, int], list[dict]] = {}
    for cell in cells:
        lines.setdefault((cell["prompt"], cell["response"]), []).append(cell)
    return lines


def spread(line: list[dict]) -> float:
    ratios = [cell["ratio"] for cell in line]
    return max(ratios) / min(ratios)


def write(out: Path, results: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "results.md").write_text("\n".join(page(results)) + "\n")
    (out / "growth.svg").write_text(drawing(results["cells"]))


def page(results: dict) -> list[str]:
    on, versions = results["hardware"], ", ".join(f"{name} {v}" for name, v in results["versions"].items())
    quick = " **A trial with a tiny model: no number here means anything.**" if results["quick"] else ""
    lines = [
        "# One prompt's step over its limit, as it grows",
        "",
        f"`{results['command']}`, {results['date']}. {on['cpu']}, {on['cores']} cores, {on['threads']} threads, "
        f"float32; Python {on['python']}, {versions}. Base model SHA-256 `{results['base_sha256']}`.{quick}",
        "",
        "Seconds of a step (median), its limit (necessary arithmetic over the matrix rate measured in the same "
        "process) and their ratio, of the whole step, of sampling and of the update. Padding: share of the tokens in "
        f"the update that were not needed. Spread of a line: largest over smallest ratio as G grows; goal {FLAT}.",
        "",
        "| prompt | response | G | seconds | limit | ratio | sampling | update | padding | peak (GB) | spread |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (prompt, response), line in lines_of(results["cells"]).items():
        for i, cell in enumerate(line):
            of_line = f"{spread(line):.2f}" if i == len(line) - 1 else ""
            lines.append(f"| {prompt} | {response} | {cell['group']} | {numbers(cell)} | {of_line} |")
    for ragged in results["ragged"]:
        low, high = ragged["lengths"][0], ragged["lengths"][-1]
        lines += [
            "",
            f"Ragged: {ragged['group']} responses of {low} to {high} tokens to a prompt of {ragged['prompt']}: "
            f"{ragged['padding']:.1%} of the tokens in the update were padding or repetition; "
            f"{ragged['seconds']:.2f} s, {ragged['ratio']:.2f} x the limit.",
        ]
    return [*lines, "", "Ratio of the step over G: `growth.svg`."]


def numbers(cell: dict) -> str:
    ratios = [cell["ratio"], cell["ratios"]["sampling"], cell["ratios"]["update"]]
    cells = [f"{cell['seconds']:.2f}", f"{cell['limit']:.2f}", *("" if r is None else f"{r:.2f}" for r in ratios)]
    cells += ["" if cell["padding"] is None else f"{cell['padding']:.1%}", f"{cell['peak_memory'] / 1e9:.2f}"]
    return " | ".join(cells)


WIDTH, HEIGHT, LEFT, TOP = 420, 260, 50, 30  # pixels
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999", "#8b4513")


def drawing(cells: list[dict]) -> str:
    """Time over the limit against G, a curve for each prompt and response length."""
    groups = sorted({cell["group"] for cell in cells})
    top = 1.1 * max(cell["ratio"] for cell in cells)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 240}" height="{TOP + HEIGHT + 50}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="{TOP - 10}">time over the limit</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{LEFT - 6}" y="{TOP + 10}" text-anchor="end">{top:.2f}</text>',
        f'<text x="{LEFT - 6}" y="{TOP + HEIGHT}" text-anchor="end">0</text>',
    ]

    def place(group: int, ratio: float) -> tuple[float, float]:
        x = groups.index(group) / max(len(groups) - 1, 1)
        return LEFT + WIDTH * x, TOP + HEIGHT * (1 - ratio / top)

    for group in groups:
        x, _ = place(group, 0.0)
        lines.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">G = {group}</text>')
    for number, ((prompt, response), line) in enumerate(lines_of(cells).items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [place(cell["group"], cell["ratio"]) for cell in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(f'<polyline points="{path}" stroke="{colour}" stroke-width="1.5" fill="none"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        label = f"prompt {prompt}, response {response}"
        lines.append(f'<text x="{LEFT + WIDTH + 20}" y="{TOP + 14 + 18 * number}" fill="{colour}">{label}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--all", action="store_true", help="27 cells instead of 15")
    p.add_argument("--steps", type=int, default=3, help="counted steps of a cell")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--quick", action="store_true")
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    date = datetime.date.today().isoformat()
    words = f"{' --all' if a.all else ''} --steps {a.steps} --threads {a.threads}"
    lines, groups = DEFAULT_LINES, GROUPS
    if a.all:
        lines = tuple((prompt, response) for prompt in PROMPTS for response in RESPONSES)
    if a.quick:
        lines, groups, a.steps = QUICK_LINES[:1], QUICK_GROUPS, 1
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(a, Path(work))
        results: dict = {
            "date": date,
            "command": f"python benchmarks/growth.py{words}",
            "quick": a.quick,
            "hardware": hardware(a.threads),
            "versions": {name: metadata.version(name) for name in PACKAGES},
            "base_sha256": hashlib.sha256((bench.base / "model.safetensors").read_bytes()).hexdigest(),
            "ragged": [bench.ragged(8, 4, *QUICK_RAGGED) if a.quick else bench.ragged(256, 16, *RAGGED)],
            "cells": [],
        }
        out = a.out or ROOT / "benchmarks" / "results" / f"{date}-growth"
        for prompt, response in lines:
            for group in groups:
                cell = bench.cell(prompt, group, response)
                print(f"prompt {prompt}, response {response}, G {group}: {numbers(cell)}", flush=True)
                results["cells"].append(cell)
                write(out, results)
    return 0 if all(spread(line) <= FLAT for line in lines_of(results["cells"]).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
