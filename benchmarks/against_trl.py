"""One GRPO step beside TRL's on the same machine, in turns, and the least that its arithmetic can take.

    python -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0
    python benchmarks/against_trl.py --trl-python trl/bin/python [--rounds 2] [--steps 2] [--threads 2] [--out FOLDER]
    python benchmarks/against_trl.py --trl-python trl/bin/python --quick      # a tiny model: does it run?

The work: SmolLM2-135M-Instruct, 4 prompts x 8 responses, temperature 1, beta 0, float32, no gradient checkpointing, one
optimiser step. Three regimes: exactly 64 tokens (a copy of the model whose EOS is a token that it does not say, for
both sides), the model's own lengths (at most 64), and prompts of 512 tokens with exactly 64. Each prompt has its own
filler, so that prompts share nothing but the chat template. The score is a hash of the text and of its place: it varies
in every group. A turn is one process of ours, then one of TRL at each micro-batch; the first step of each is not
counted. Ours is timed by `hotcold bench`, TRL by `trl_side.py`. The limit is the necessary work that `hotcold bench`
counts over the best matrix rate of all turns. TRL counts at its best micro-batch.

The first update of TRL is taken again by ours from TRL's own rows (`sampler=replay:FILE optimizer=sgd`): the cosine of
the two directions shows that both do the same. Writes results.json and results.md.
"""

import argparse
import datetime
import hashlib
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from replay_gradient import ROOT, hardware
from safetensors import safe_open
from transformers import AutoTokenizer

from hotcold.models.loading import resolve_folder

PROMPTS, GROUP, ROWS_OF_DATA = 4, 8, 64
MICROBATCHES = (32, 8)
COSINE = 0.9999
PACKAGES = ("hotcold", "torch", "transformers", "safetensors", "numpy")
WORDS = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "sun", "moon"]
REWARD = '''"""A score that varies in every group: a hash of the text and of its place in the batch."""

import zlib


def reward(completions, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [zlib.crc32(f"{place}:{text}".encode()) % 1000 / 1000 for place, text in enumerate(texts)]
'''


@dataclass(frozen=True)
class Regime:
    name: str
    says_eos: bool
    prompt_tokens: int  # 0: the question alone
    max_tokens: int


REGIMES = (
    Regime("exactly 64 tokens", False, 0, 64),
    Regime("own lengths", True, 0, 64),
    Regime("512-token prompts", False, 512, 64),
)
QUICK = (
    Regime("exactly 8 tokens", False, 0, 8),
    Regime("own lengths", True, 0, 8),
    Regime("24-token prompts", False, 24, 8),
)


# ---- the work


def without_eos(base: Path, folder: Path) -> Path:
    """A copy whose EOS is the last added token without a role, or where there is none an ordinary one."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    roles = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token}
    free = [i for i, t in sorted(tokenizer.added_tokens_decoder.items()) if t.content not in roles]
    never = free[-1] if free else tokenizer.convert_tokens_to_ids("?")
    folder.mkdir()
    for path in base.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path.resolve())
        elif path.suffix != ".json" or path.name == "tokenizer.json":
            shutil.copy(path, folder)
        else:
            content = json.loads(path.read_text())
            changes = {"eos_token_id": never, "eos_token": tokenizer.convert_ids_to_tokens(never)}
            content |= {key: value for key, value in changes.items() if key in content}
            (folder / path.name).write_text(json.dumps(content, indent=1))
    return folder


def write_data(path: Path, regime: Regime, base: Path) -> Path:
    """Sums; with a filler of its own where a number of prompt tokens is wanted."""
    tokenizer, rng = AutoTokenizer.from_pretrained(base), random.Random(0)
    rows = []
    for _ in range(ROWS_OF_DATA):
        x, y = rng.randint(1, 20), rng.randint(1, 20)
        rows.append({"prompt": filled(tokenizer, x, y, regime.prompt_tokens, rng)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def filled(tokenizer: object, x: int, y: int, num_tokens: int, rng: random.Random) -> object:
    filler: list[str] = []
    prompt = question(tokenizer, x, y, filler)
    while length(tokenizer, prompt) < num_tokens:
        filler.append(rng.choice(WORDS))
        prompt = question(tokenizer, x, y, filler)
    return prompt


def question(tokenizer: object, x: int, y: int, filler: list[str]) -> object:
    if tokenizer.chat_template is None:  # the tiny model of --quick, whose tokens are characters
        return "".join(word[0] for word in filler) + f"{x}+{y}="
    ignore = f"Ignore these words: {' '.join(filler)}. " if filler else ""
    return [{"role": "user", "content": f"{ignore}What is {x} + {y}? Reply with only the number."}]


def length(tokenizer: object, prompt: object) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])


# ---- the two sides


class Bench:
    def __init__(self, a: argparse.Namespace, work: Path):
        self.a, self.work = a, work
        self.base = self._base()
        self.silent = without_eos(self.base, work / "silent")
        self.reward = work / "reward.py"
        self.reward.write_text(REWARD)
        self.environment = {**os.environ, "OMP_NUM_THREADS": str(a.threads), "HF_HUB_OFFLINE": "1"}

    def _base(self) -> Path:
        if not self.a.quick:
            return Path(resolve_folder("smollm2", None))
        sys.path.insert(0, str(ROOT))
        from tests.tiny_model import write_tiny

        return write_tiny(self.work / "tiny")

    def measure(self, regime: Regime) -> dict:
        model = self.base if regime.says_eos else self.silent
        data = write_data(self.work / "prompts.jsonl", regime, self.base)
        ours, theirs = [], {str(size): [] for size in MICROBATCHES}
        for number in range(self.a.rounds):
            ours.append(self.ours(model, data, regime))
            say(f"{regime.name}, turn {number + 1}: ours {ours[-1]['step']['seconds']:.1f} s")
            for size in MICROBATCHES:
                if number and not theirs[str(size)]:
                    continue  # it did not fit the first time
                steps, failure = self.theirs(model, data, regime, size, self.a.steps + 1)
                theirs[str(size)] += steps[1:]
                shown = f"{statistics.median(s['seconds'] for s in steps[1:]):.1f} s" if len(steps) > 1 else failure
                say(f"{regime.name}, turn {number + 1}: TRL, micro-batch {size}: {shown}")
        cosine = self.cosine(model, data, regime)
        say(f"{regime.name}: cosine of the first updates {cosine:.7f}")
        return {"regime": asdict(regime), **summary(ours, theirs), "cosine": cosine, "ours": ours, "trl": theirs}

    def ours(self, model: Path, data: Path, regime: Regime) -> dict:
        words = ["grpo", f"model={model}", f"data={data}", f"reward={self.reward}", "dtype=fp32", "device=cpu"]
        words += [f"prompts_per_step={PROMPTS}", f"group_size={GROUP}", f"max_tokens={regime.max_tokens}"]
        words += ["learning_rate=1e-5", f"threads={self.a.threads}", f"steps={self.a.steps}", "--json"]
        found = json.loads(self._hotcold("bench", *words))
        return {**found, "model": Path(found["model"]).name}  # where it lies is nobody's business

    def theirs(
        self, model: Path, data: Path, regime: Regime, size: int, steps: int, first: Path | None = None
    ) -> tuple[list[dict], str]:
        """The steps that were done, and the last line of what was wrong if not all were."""
        words = [str(self.a.trl_python), str(ROOT / "benchmarks" / "trl_side.py"), str(model), f"--data={data}"]
        words += [f"--reward={self.reward}", f"--max-tokens={regime.max_tokens}", f"--microbatch={size}"]
        words += [f"--steps={steps}", f"--threads={self.a.threads}", f"--memory-gb={self.a.memory_gb}"]
        words += [f"--first={first}"] if first else []
        done = subprocess.run(words, cwd=self.work, env=self.environment, capture_output=True, text=True)
        lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("STEP ")]
        if done.returncode == 0:
            return lines, ""
        return [], (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]

    def cosine(self, model: Path, data: Path, regime: Regime) -> float:
        """Of TRL's first gradient and what ours does to the parameters on the same rows."""
        first, run = self.work / "first", self.work / "replayed"
        for folder in (first, run):
            shutil.rmtree(folder, ignore_errors=True)
        first.mkdir()
        steps, failure = self.theirs(model, data, regime, min(MICROBATCHES), 1, first)
        if not steps:
            raise SystemExit(f"TRL's first step failed: {failure}")
        before, gradient = tensors(model / "model.safetensors"), tensors(first / "gradient.safetensors")
        rate = 2.0 ** round(math.log2(norm(before) / norm(gradient)))  # or float32 parameters would hide the gradient
        words = ["grpo", f"model={model}", f"sampler=replay:{first / 'rows.parquet'}", "optimizer=sgd", "steps=1"]
        words += [f"learning_rate={rate}", "dtype=fp32", "device=cpu", f"threads={self.a.threads}", f"run={run}"]
        self._hotcold("train", *words)
        after = tensors(run / "model" / "model.safetensors")
        update = {name: (before[name].double() - after[name].double()) for name in gradient}
        dot = sum(float((update[name] * gradient[name].double()).sum()) for name in gradient)
        return dot / (norm(update) * norm(gradient))

    def _hotcold(self, *words: str) -> str:
        command = [sys.executable, "-m", "hotcold", *words]
        done = subprocess.run(command, cwd=self.work, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        return done.stdout


def tensors(path: Path) -> dict:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def norm(of: dict) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in of.values()))


def say(text: str) -> None:
    print(text, flush=True)


# ---- what is written


def summary(ours: list[dict], theirs: dict[str, list[dict]]) -> dict:
    """Medians over all counted steps; a micro-batch that failed has none."""
    steps = [step for turn in ours for step in turn["per_step"]]
    rate = max(turn["matrix_rate"]["used"] for turn in ours)
    seconds = statistics.median(step["time/step"] for step in steps)
    limit = statistics.median(sum(step["work"].values()) for step in steps) / rate
    of_trl = {size: medians(done) for size, done in theirs.items() if done}
    best = min(of_trl, key=lambda size: of_trl[size]["seconds"], default=None)
    smallest = str(min(MICROBATCHES))
    peak = max(turn["peak_memory"] for turn in ours)
    return {
        "seconds": seconds,
        "parts": {
            part["name"]: statistics.median(turn["parts"][i]["seconds"] for turn in ours)
            for i, part in enumerate(ours[0]["parts"])
        },
        "response_tokens": statistics.median(step["completions/mean_length"] for step in steps),
        "num_steps": len(steps),
        "peak": peak,
        "matrix_rate": rate,
        "limit": limit,
        "ratio_to_limit": seconds / limit,
        "trl_medians": of_trl,
        "best_microbatch": best,
        "times_faster": of_trl[best]["seconds"] / seconds if best else None,
        "peak_share": peak / of_trl[smallest]["peak"] if smallest in of_trl else None,
    }


def medians(steps: list[dict]) -> dict:
    keys = ("seconds", "sampling", "prompt_tokens", "response_tokens")
    return {
        **{key: statistics.median(step[key] for step in steps) for key in keys},
        "peak": max(step["peak"] for step in steps),
        "num_steps": len(steps),
    }


def write(out: Path, results: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "results.md").write_text("\n".join(page(results)) + "\n")


def page(results: dict) -> list[str]:
    on, versions = results["hardware"], ", ".join(f"{name} {v}" for name, v in results["versions"].items())
    quick = " **A trial with a tiny model: no number here means anything.**" if results["quick"] else ""
    lines = [
        "# One GRPO step beside TRL's",
        "",
        f"`{results['command']}`, {results['date']}. {on['cpu']}, {on['cores']} cores, {on['threads']} threads on both "
        f"sides, float32; Python {on['python']}, {versions}; {results['trl_versions']}. Base model SHA-256 "
        f"`{results['base_sha256']}`.{quick}",
        "",
        f"{PROMPTS} prompts x {GROUP} responses, one optimiser step, no KL. Medians over all steps but the first of "
        "each process; processes in turns. Times faster: TRL at its best micro-batch over ours. The limit is the "
        "necessary work over the best matrix rate. Peak: resident memory of the whole process, the largest of all "
        "turns; its share is of TRL's at micro-batch 8. Cosine: of the two first updates on TRL's rows.",
        "",
        "| regime | ours (s) | TRL 32 (s) | TRL 8 (s) | times faster | limit (s) | x limit | peak (GB) | TRL 32 "
        "| TRL 8 | share | cosine |",
        "|---" * 12 + "|",
        *(row_of(regime) for regime in results["regimes"]),
        "",
        "| regime | "
        + " | ".join(results["regimes"][0]["parts"])
        + " | TRL sampling | response tokens | TRL's | steps |",
        "|---" * (len(results["regimes"][0]["parts"]) + 5) + "|",
        *(parts_row(regime) for regime in results["regimes"]),
    ]
    return lines


def row_of(r: dict) -> str:
    trl = r["trl_medians"]

    def of(key: str, size: int, scale: float = 1.0) -> str:
        return f"{trl[str(size)][key] / scale:.2f}" if str(size) in trl else "failed"

    cells = [r["regime"]["name"], f"{r['seconds']:.2f}", *(of("seconds", size) for size in MICROBATCHES)]
    cells += [shown(r["times_faster"]), f"{r['limit']:.2f}", shown(r["ratio_to_limit"]), f"{r['peak'] / 1e9:.2f}"]
    cells += [*(of("peak", size, 1e9) for size in MICROBATCHES), shown(r["peak_share"]), f"{r['cosine']:.7f}"]
    return "| " + " | ".join(cells) + " |"


def parts_row(r: dict) -> str:
    best = r["trl_medians"].get(r["best_microbatch"], {})
    cells = [r["regime"]["name"], *(f"{seconds:.2f}" for seconds in r["parts"].values()), shown(best.get("sampling"))]
    cells += [f"{r['response_tokens']:.1f}", shown(best.get("response_tokens")), str(r["num_steps"])]
    return "| " + " | ".join(cells) + " |"


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def trl_versions(python: Path) -> str:
    code = "from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in "
    code += "('trl', 'torch', 'transformers', 'accelerate')))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{python} has no trl: python -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0\n"
            f"{done.stderr.strip().splitlines()[-1] if done.stderr else ''}"
        )
    return f"TRL's side: {done.stdout.strip()}"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trl-python", type=Path, required=True, help="the Python of an environment with trl 1.16.0")
    p.add_argument("--rounds", type=int, default=2, help="turns")
    p.add_argument("--steps", type=int, default=2, help="counted steps of each process")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--only", nargs="+", type=int, default=[0, 1, 2], help="regimes, by number from 0")
    p.add_argument(
        "--memory-gb", type=float, default=0.85e-9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    p.add_argument("--quick", action="store_true")
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    a.trl_python = a.trl_python.absolute()  # not resolved: a link to the system's Python would forget its packages
    versions = trl_versions(a.trl_python)
    if a.quick:
        a.rounds, a.steps = 1, 1
    date = datetime.date.today().isoformat()
    command = f"python benchmarks/against_trl.py --rounds {a.rounds} --steps {a.steps} --threads {a.threads}"
    command += "" if a.only == [0, 1, 2] else f" --only {' '.join(map(str, a.only))}"
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(a, Path(work))
        results: dict = {
            "date": date,
            "command": command,
            "quick": a.quick,
            "hardware": hardware(a.threads),
            "versions": {name: metadata.version(name) for name in PACKAGES},
            "trl_versions": versions,
            "base_sha256": hashlib.sha256((bench.base / "model.safetensors").read_bytes()).hexdigest(),
            "regimes": [],
        }
        for number in a.only:
            results["regimes"].append(bench.measure((QUICK if a.quick else REGIMES)[number]))
            write(a.out or ROOT / "benchmarks" / "results" / f"{date}-against-trl", results)
    return 0 if all(regime["cosine"] >= COSINE for regime in results["regimes"]) else 1


if __name__ == "__main__":
    sys.exit(main())
