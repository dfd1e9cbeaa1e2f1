"""TRL's side of against_trl.py: GRPO steps on given prompts with a given score, one JSON line for each.

    PYTHON benchmarks/trl_side.py MODEL --data prompts.jsonl --reward reward.py --max-tokens 64 --microbatch 8 --steps 2

PYTHON has trl 1.16.0; nothing of hotcold is imported. 32 responses a step, 8 to a prompt, float32, beta 0, one
optimiser step. `--first FOLDER` writes the rows of the first step (rows.parquet, as `sampler=replay:FILE` reads them)
and the gradient that its optimiser step is given (gradient.safetensors).
"""

import argparse
import importlib.util
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS, GROUP = 32, 8


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("model")
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--reward", type=Path, required=True, help="a file with reward(completions, **columns)")
    p.add_argument("--max-tokens", type=int, required=True)
    p.add_argument("--microbatch", type=int, required=True, help="responses in a forward; divides 32")
    p.add_argument("--steps", type=int, required=True)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--memory-gb", type=float, default=None, help="allocations fail beyond it, instead of the machine")
    p.add_argument("--first", type=Path, default=None)
    return p.parse_args()


def load_reward(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward


class Watched:
    """What a step sampled and scored, and how long that took."""

    def __init__(self, trainer: Any, score: Any):
        self.score, self.seconds, self.rewards, self.rows = score, 0.0, [], {}
        self.sample = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self.timed

    def timed(self, inputs: Any) -> Any:
        start = time.perf_counter()
        self.rows = self.sample(inputs)
        self.seconds = time.perf_counter() - start
        return self.rows

    def reward(self, completions: list, **columns: Any) -> list[float]:
        self.rewards = self.score(completions=completions)
        return self.rewards

    def lengths(self, name: str) -> list[int]:
        return self.rows[f"{name}_mask"].sum(1).tolist()

    def as_rows(self) -> list[dict]:
        """The order is that of sampling: the responses to one prompt stand together."""

        def ids(name: str, i: int) -> list[int]:
            return self.rows[f"{name}_ids"][i][self.rows[f"{name}_mask"][i].bool()].tolist()

        return [
            {
                "step": 1,
                "group": i // GROUP,
                "episode": i,
                "prompt_ids": ids("prompt", i),
                "response_ids": ids("completion", i),
                "reward": float(reward),
            }
            for i, reward in enumerate(self.rewards)
        ]


def peak() -> int:
    """Resident bytes of this process alone: what getrusage says includes the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def write_first(folder: Path, watched: Watched, model: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from safetensors.torch import save_file

    pq.write_table(pa.Table.from_pylist(watched.as_rows()), folder / "rows.parquet")
    gradient = {n: p.grad.contiguous().clone() for n, p in model.named_parameters() if p.grad is not None}
    save_file(gradient, folder / "gradient.safetensors")


def main() -> None:
    a = arguments()
    if a.memory_gb is not None:
        limit = int(a.memory_gb * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(a.threads)
    score = load_reward(a.reward)
    rows = [json.loads(line) for line in a.data.read_text().splitlines()]
    watched: Watched

    def reward(completions: list, **columns: Any) -> list[float]:
        return watched.reward(completions, **columns)

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=a.microbatch,
        gradient_accumulation_steps=ROWS // a.microbatch,
        num_generations=GROUP,
        max_completion_length=a.max_tokens,
        max_steps=a.steps,
        learning_rate=1e-5,
        loss_type="grpo",
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(model=a.model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows))
    watched = Watched(trainer, score)

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if a.first is not None and state.global_step == 0:
                write_first(a.first, watched, kwargs["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            line = {
                "seconds": time.perf_counter() - self.start,
                "sampling": watched.seconds,
                "prompt_tokens": statistics.mean(watched.lengths("prompt")),
                "response_tokens": statistics.mean(watched.lengths("completion")),
                "peak": peak(),
            }
            print("STEP " + json.dumps(line), flush=True)

    trainer.add_callback(Clock())
    trainer.train()


if __name__ == "__main__":
    main()
