"""Adding two numbers, taught by a bad teacher: the embedded example on which the main job can be watched.

The examples are sums of two-digit numbers below 100, "17+25=" -> "42". Six of ten examples that need a carry were
written by somebody who forgets it ("17+25=" -> "32"). A model supervised on them has seen right answers and knows how
to give them, but prefers the wrong ones where a carry is needed. No better example is shown to it afterwards: a
verifier that only says right or wrong is enough for a policy gradient to make it add.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn import functional as F

from hotcold.models.loading import export_model
from hotcold.toys.model import make_toy_model

Sum = tuple[int, int]
Progress = Callable[[int, int], None]  # steps done, in all

HELD_OUT_CARRY, HELD_OUT_PLAIN = 120, 80  # forgetting the carry costs 60 points; of all sums 39 % need one
FORGET_SHARE = 0.6  # of the examples with a carry are wrong

SUPERVISED_STEPS = 1200
SUPERVISED_BATCH = 128
SUPERVISED_RATE = 4e-3

TRAIN_FILE, HELD_OUT_FILE, MODEL_FOLDER = "train.jsonl", "held_out.jsonl", "model"

# what brings the supervised model from 40 % to at least 95 % of the held-out sums
RECOMMENDED: dict[str, Any] = {
    "steps": 80,
    "prompts_per_step": 128,
    "group_size": 8,
    "learning_rate": 4e-4,
    "max_tokens": 4,
}


@dataclass(frozen=True)
class ToyTask:
    train: tuple[Sum, ...]
    held_out: tuple[Sum, ...]  # disjoint from `train`; 60 % need a carry


@dataclass(frozen=True)
class ToyFiles:
    model: Path
    train: Path
    held_out: Path


def prompt_of(pair: Sum) -> str:
    return f"{pair[0]}+{pair[1]}="


def answer_of(pair: Sum) -> str:
    return str(sum(pair))


def needs_carry(pair: Sum) -> bool:
    return pair[0] % 10 + pair[1] % 10 >= 10


def careless_answer_of(pair: Sum) -> str:
    """The answer of somebody who adds the columns and forgets the carry."""
    return str(sum(pair) - 10 * needs_carry(pair))


def make_task(seed: int = 0) -> ToyTask:
    """All sums of two-digit numbers below 100, split by the seed."""
    pairs = [(a, b) for a in range(10, 90) for b in range(10, 100 - a)]
    random = Random(seed)
    random.shuffle(pairs)
    carry = [p for p in pairs if needs_carry(p)]
    plain = [p for p in pairs if not needs_carry(p)]
    held_out = carry[:HELD_OUT_CARRY] + plain[:HELD_OUT_PLAIN]
    train = carry[HELD_OUT_CARRY:] + plain[HELD_OUT_PLAIN:]
    random.shuffle(held_out)
    random.shuffle(train)
    return ToyTask(tuple(train), tuple(held_out))


def supervise(model: Any, tokenizer: Any, task: ToyTask, seed: int = 0, progress: Progress | None = None) -> None:
    """Teaches the model from the careless examples: cross-entropy on the answer and its EOS, AdamW, cosine decay."""
    generator = torch.Generator().manual_seed(seed)
    right = _rows(tokenizer, task.train, answer_of)
    careless = _rows(tokenizer, task.train, careless_answer_of)
    start = len(prompt_of(task.train[0]))  # every prompt has this length, every answer two digits
    optimizer = torch.optim.AdamW(model.parameters(), lr=SUPERVISED_RATE, weight_decay=0.01)
    model.train()
    for step in range(SUPERVISED_STEPS):
        warm_up, decay = min(1.0, (step + 1) / 50), 0.5 * (1 + math.cos(math.pi * step / SUPERVISED_STEPS))
        optimizer.param_groups[0]["lr"] = SUPERVISED_RATE * warm_up * max(decay, 0.05)
        index = torch.randint(len(right), (SUPERVISED_BATCH,), generator=generator)
        forgets = torch.rand(SUPERVISED_BATCH, generator=generator) < FORGET_SHARE
        rows = torch.where(forgets[:, None], careless[index], right[index])
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits[:, start - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, start:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if progress is not None:
            progress(step + 1, SUPERVISED_STEPS)
    optimizer.zero_grad()
    model.eval()


def _rows(tokenizer: Any, pairs: tuple[Sum, ...], answer: Any) -> torch.Tensor:
    texts = [prompt_of(p) + answer(p) for p in pairs]
    return torch.tensor([[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]])


def write_toy(folder: str | Path, seed: int = 0, progress: Progress | None = None) -> ToyFiles:
    """The supervised model as a Hugging Face folder, and the prompts with their answers, under `folder`."""
    folder = Path(folder)
    files = ToyFiles(folder / MODEL_FOLDER, folder / TRAIN_FILE, folder / HELD_OUT_FILE)
    task = make_task(seed)
    model, tokenizer = make_toy_model(seed)
    supervise(model, tokenizer, task, seed, progress)
    folder.mkdir(parents=True, exist_ok=True)
    for path, pairs in ((files.train, task.train), (files.held_out, task.held_out)):
        lines = [json.dumps({"prompt": prompt_of(p), "answer": answer_of(p)}) for p in pairs]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    export_model(model, tokenizer, files.model, (tokenizer.eos_token_id,))
    return files
