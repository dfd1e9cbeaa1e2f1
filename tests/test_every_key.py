"""Every key of `hotcold train`, set to another value, changes what is trained or what is left behind.

Two runs of a tiny model that differ in one key are compared: in the parameters they end with, in what was sampled, in
the metrics, in the evaluations, in the files. That config.yaml has another line does not count. A key without an entry
here fails; so does one whose entry names a place where nothing changes.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

import hotcold
from hotcold import sizing
from hotcold.config.keys import TRAIN_KEYS
from hotcold.errors import InputError
from tests.plain_gradient import Row, write_rows
from tests.tiny_model import EOS, character_tokenizer, tiny_llama

KEYS = [key.name for keys in TRAIN_KEYS.values() for key in keys]
BASE: dict[str, Any] = {
    "model": "model",
    "data": "prompts.jsonl",
    "steps": 2,
    "prompts_per_step": 2,
    "max_tokens": 4,
    "learning_rate": 0.02,
    "save_every": 0,
    "eval.every": 0,
    "eval.samples": 0,
}
THREADS = 1
NOT_REPEATED = ("time/", "tokens_per_second", "memory/")
LEAST = 1e-3  # of what training moved: parameters that differ by less are the same up to rounding


def score(completion_ids: list[int], prompt: str) -> float:
    """From 0 to 6/7; to the prompts that begin with 0, every response is as good as another."""
    return 0.5 if prompt.startswith("0") else sum(completion_ids) % 7 / 7


def other_score(completion_ids: list[int]) -> float:
    return sum(completion_ids) % 5 / 5


@dataclass(frozen=True)
class Entry:
    """Another value of a key, where it shows, and what must be given beside it (in both runs) for it to be seen."""

    value: Any
    shows: str  # places, as in `Left`
    algorithm: str = "rloo"
    beside: dict[str, Any] = field(default_factory=dict)


ENDS = {"stop": [*"01234"], "max_tokens": 3}  # responses of different lengths
PASSES = {"epochs_per_batch": 4, "max_grad_norm": "none"}
LEASH = {"beta": 0.5, "reference": "other"}
REPLAY = {"sampler": "replay:rows.parquet", "steps": 1}
HELD = {"eval.data": "held.jsonl"}
FAILING = {"reward": "fails.py"}
AT_SOME = (
    "def reward(completion_ids):\n    if sum(completion_ids) % 5 == 0:\n        {}\n"
    "    return sum(completion_ids) % 7 / 7\n"
)
REWARDS = {  # in files, which run in worker processes
    "fails.py": AT_SOME.format("raise ValueError('no score')"),
    "slow.py": "import time\n\n" + AT_SOME.format("time.sleep(0.4)"),
    "large.py": AT_SOME.format("bytearray(3 * 10**8)"),
    "asks.py": "import os\n\ndef reward(completion):\n    return float('HOTCOLD_KEY' in os.environ)\n",
    "dialect.py": "def reward(completion, state=None):\n    return float(state is None)\n",
    "counts.py": "calls = 0\n\ndef reward(completion):\n    global calls\n    calls += 1\n    return calls\n",
}
TABLE: dict[str, Entry] = {
    "algorithm": Entry("grpo", "parameters"),
    "model": Entry("other", "parameters rollouts"),
    "data": Entry("held.jsonl", "rollouts"),
    "data.prompt": Entry("again", "rollouts", beside={"reward": other_score}),
    "data.split": Entry("test", "rollouts", beside={"data": "somebody/sums"}),
    "data.chat": Entry(True, "rollouts"),
    "data.too_long": Entry("drop", "refusal", beside={"data": "long.jsonl"}),
    "data.response": Entry("again", "parameters rollouts", "sft"),
    "data.train_on": Entry("all", "parameters", "sft"),
    "reward": Entry(other_score, "parameters rollouts"),
    "reward_weights": Entry([1, 3], "parameters rollouts", beside={"reward": [score, other_score]}),
    "reward_dialect": Entry("plain", "rollouts", beside={"reward": "dialect.py"}),
    "reward_workers": Entry(2, "rollouts", beside={"reward": "counts.py"}),
    "reward_timeout": Entry(0.15, "rollouts metrics", beside={"reward": "slow.py"}),
    "reward_retries": Entry(0, "metrics", beside=FAILING),
    "reward_on_error": Entry(0.25, "rollouts parameters", beside=FAILING),
    "reward_max_failures": Entry(0.0, "refusal", beside=FAILING),
    "reward_memory": Entry("200MB", "rollouts metrics", beside={"reward": "large.py"}),
    "reward_env": Entry("HOTCOLD_KEY", "rollouts", beside={"reward": "asks.py"}),
    "reference": Entry("other", "parameters metrics", beside={"beta": 0.5}),
    "steps": Entry(1, "parameters files"),
    "prompts_per_step": Entry(3, "rollouts"),
    "group_size": Entry(2, "rollouts"),
    "epochs_per_batch": Entry(2, "parameters", "grpo"),
    "minibatches": Entry(2, "parameters", "grpo"),
    "stop_at": Entry(0.0, "parameters files", beside={**HELD, "eval.every": 1}),
    "learning_rate": Entry(0.01, "parameters"),
    "warmup_steps": Entry(1, "parameters"),
    "max_grad_norm": Entry(0.01, "parameters"),
    "optimizer": Entry("sgd", "parameters"),
    "temperature": Entry(0.5, "rollouts"),
    "max_tokens": Entry(3, "rollouts"),
    "stop": Entry([*"01234"], "rollouts"),
    "truncated": Entry("mask", "parameters", "grpo", ENDS),
    "overlong.buffer": Entry(3, "parameters", "grpo", {**ENDS, "truncated": "penalty"}),
    "overlong.penalty": Entry(0.25, "parameters", "grpo", {**ENDS, "truncated": "penalty"}),
    "sampler": Entry("replay:rows.parquet", "rollouts", beside={"steps": 1}),
    "mismatch": Entry("truncate", "parameters metrics", "grpo", REPLAY),
    "mismatch.level": Entry("sequence", "parameters", "grpo", {**REPLAY, "mismatch": "truncate"}),
    "mismatch.cap": Entry(1.25, "parameters", "grpo", {**REPLAY, "mismatch": "truncate"}),
    "mismatch.low": Entry(1.2, "parameters", "grpo", {**REPLAY, "mismatch": "mask"}),
    "mismatch.high": Entry(2.0, "parameters", "grpo", {**REPLAY, "mismatch": "mask"}),
    "baseline": Entry("none", "parameters", "reinforce"),
    "scale_by_std": Entry(False, "parameters", "grpo", {"optimizer": "sgd"}),
    "whiten": Entry(True, "parameters", "reinforce"),
    "objective": Entry("truncated_is_policy_gradient", "parameters", "grpo", PASSES),
    "weighting": Entry("mean_per_token", "parameters", beside=ENDS),
    "clip_low": Entry(0.01, "parameters", "grpo", PASSES),
    "clip_high": Entry(0.01, "parameters", "grpo", PASSES),
    "dual_clip": Entry(1.001, "parameters", "grpo", {**PASSES, "clip_low": 0.9, "clip_high": 3.0}),
    "gamma": Entry(0.5, "parameters"),
    "lam": Entry(0.5, "parameters critic", "ppo"),
    "value_clip": Entry(0.001, "critic", "ppo", {"epochs_per_batch": 2}),
    "critic.lam": Entry(0.5, "critic", "ppo"),
    "critic.warmup": Entry(1, "parameters", "ppo"),
    "entropy_bonus": Entry(0.5, "parameters"),
    "max_approx_kl": Entry(1e-9, "parameters metrics", "grpo", PASSES),
    "beta": Entry(0.5, "parameters metrics", "grpo"),
    "kl.placement": Entry("loss", "parameters", beside=LEASH),
    "kl.estimator": Entry("exact", "parameters", beside=LEASH),
    "kl.target": Entry(0.01, "metrics", beside=LEASH),
    "kl.horizon": Entry(20.0, "parameters metrics", beside={**LEASH, "kl.target": 0.01}),
    "drop_zero_variance": Entry(True, "parameters metrics", "grpo", {"prompts_per_step": 6}),
    "refill": Entry(2, "rollouts metrics", "grpo", {"prompts_per_step": 6, "drop_zero_variance": True}),
    "keep_rule": Entry("best_of_group", "parameters", "expert_iteration"),
    "threshold": Entry(0.5, "parameters", "expert_iteration"),
    "fraction": Entry(0.75, "parameters", "expert_iteration", {"keep_rule": "top_fraction"}),
    "start_from": Entry("starting", "parameters", "expert_iteration", {"threshold": 0.0}),
    "critic.init": Entry("other", "critic", "ppo"),
    "critic.learning_rate": Entry(0.01, "critic", "ppo"),
    "critic.max_grad_norm": Entry(0.01, "critic", "ppo"),
    "lora.rank": Entry(2, "parameters files"),
    "lora.alpha": Entry(16, "parameters", beside={"lora.rank": 2}),
    "lora.targets": Entry(["q_proj"], "parameters", beside={"lora.rank": 2}),
    "lora.critic": Entry(False, "critic", "ppo", {"lora.rank": 2}),
    "eval.data": Entry("held.jsonl", "evaluations"),
    "eval.every": Entry(1, "evaluations files"),
    "eval.samples": Entry(2, "evaluations"),
    "eval.prompts": Entry(2, "evaluations", beside=HELD),
    "dtype": Entry("bf16", "parameters"),
    "threads": Entry(THREADS + 1, "environment"),
    "save_every": Entry(1, "files"),
    "keep_checkpoints": Entry(1, "files", beside={"save_every": 1, "steps": 3}),
    "seed": Entry(1, "rollouts"),
}
NOT_SEEN = {  # at most ten; what they do instead is tested one by one below
    "top_p": "refused in training unless 1: the trainer would renormalise over a kept set that is not stored",
    "top_k": "refused in training unless 0, for the same reason",
    "min_p": "refused in training unless 0, for the same reason",
    "tokens_per_microbatch": "memory against time; that it changes no gradient is a promise",
    "gradient_checkpointing": "memory against time; that it changes no gradient is a promise",
    "max_memory": "how much of both; its number shows in tokens_per_microbatch",
    "device": "a machine without another device can only refuse it",
    "watchdog": "what it writes when a run stands still is in tests/test_watchdog.py",
    "sandbox.require": "refuses a machine that offers less, and changes nothing: in tests/rewards/test_code.py",
    "allow_changed": "for a run that is continued: in tests/test_runs_whole.py",
}
BY_ITSELF = {"run", "resume"}  # where the files are, which is no content of theirs: tests of their own below


def test_every_key_has_an_entry_and_no_entry_is_left_of_a_key_that_is_gone() -> None:
    assert sorted([*TABLE, *NOT_SEEN, *BY_ITSELF]) == sorted(KEYS)
    assert len(NOT_SEEN) <= 10


# ---- runs


@dataclass(frozen=True)
class Left:
    """What a run leaves behind, without what is different each time (seconds, folder, the config itself)."""

    parameters: dict[str, Tensor]
    critic: dict[str, Tensor]
    rollouts: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    evaluations: dict[str, Any]
    files: list[str]
    environment: dict[str, Any]
    refusal: str = ""


def left_behind(folder: Path) -> Left:
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    environment = json.loads((folder / "env.json").read_text())["attempts"][0]
    return Left(
        load_file(folder / "model" / "model.safetensors"),
        {n: t for name in ("model", "value_head") for n, t in _tensors(folder / "critic" / f"{name}.safetensors")},
        [row for path in sorted(folder.glob("rollouts/*")) for row in pq.read_table(path).to_pylist()],
        [_without_seconds(row) for row in _lines(folder / "metrics.jsonl")],
        {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("eval/*"))},
        files,
        {key: environment[key] for key in ("threads", "model_sha256", "data_sha256", "reference_sha256")},
    )


def _tensors(path: Path) -> list[tuple[str, Tensor]]:
    return list(load_file(path).items()) if path.is_file() else []


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(NOT_REPEATED)}


class Place:
    """A folder with models, data and recorded rows; runs in it are kept, so that a base is run once."""

    def __init__(self, folder: Path):
        self.folder, self.done = folder, {}
        for seed, name in enumerate(("model", "other")):
            tiny_llama(seed).save_pretrained(folder / name)
            tokenizer = character_tokenizer()
            tokenizer.chat_template = "{% for m in messages %}={{ m['content'] }}={% endfor %}?"
            tokenizer.save_pretrained(folder / name)
        for name, text in REWARDS.items():
            (folder / name).write_text(text)
        sums = [(a, b) for a in range(4) for b in range(5)]
        self._write("prompts.jsonl", sums)
        self._write("held.jsonl", [(a, b) for a in range(5, 8) for b in range(2)])
        self._write("long.jsonl", [*sums, (10**70, 1)])
        rows = [Row((1, 10, n), (*(3 + (5 * n + i) % 17 for i in range(2 + n)), EOS), n / 4, 0) for n in range(4)]
        reported = [[-3.0 - 0.6 * ((i + n) % 3) for i in range(len(row.response))] for n, row in enumerate(rows)]
        write_rows(folder / "rows.parquet", rows, reported)

    def _write(self, name: str, sums: list[tuple[int, int]]) -> None:
        rows = [
            {"prompt": f"{a}+{b}=", "response": str(a + b), "again": f"{b}+{a}?"}  # a prompt, or a response, too
            for a, b in sums
        ]
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, keys: dict[str, Any]) -> Left:
        name = repr(sorted((key, getattr(value, "__name__", str(value))) for key, value in keys.items()))
        if name not in self.done:
            self.done[name] = self.run_anew(keys)
        return self.done[name]

    def run_anew(self, keys: dict[str, Any]) -> Left:
        torch.set_num_threads(THREADS)  # `threads` holds for the whole process
        folder = self.folder / "runs" / str(len(list((self.folder / "runs").glob("*"))))
        try:
            hotcold.train(**keys, run=str(folder), echo=None)
        except InputError as error:
            return Left({}, {}, [], [], {}, [], {}, str(error))
        return left_behind(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder, threads = tmp_path_factory.mktemp("keys"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOTCOLD_KEY", "yes")
        patch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=named_data))
        (folder / "runs").mkdir()
        yield Place(folder)
    torch.set_num_threads(threads)


def named_data(name: str, configuration: str | None, split: str | None) -> Any:
    """Stands for the package datasets, which answers a name and a split with rows."""
    sums = {"train": ((1, 2), (3, 1), (2, 2)), "test": ((4, 4), (3, 3), (4, 1))}[split or "train"]
    return [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in sums]


def base_of(entry: Entry) -> dict[str, Any]:
    base = {**BASE, "algorithm": entry.algorithm}
    if entry.algorithm != "sft":
        base |= {"reward": score, "group_size": 4}
    return {**base, **entry.beside}


def differ(one: Any, other: Any, moved: float) -> bool:
    """Whether two things left behind are not the same; of parameters, by more than rounding."""
    if one and isinstance(one, dict) and isinstance(next(iter(one.values())), Tensor):
        return one.keys() != other.keys() or distance(one, other) > LEAST * moved
    return one != other


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name] - other[name]).double().square().sum()) for name in one) ** 0.5


@pytest.mark.parametrize("key", TABLE)
def test_a_key_changes_what_is_trained_or_left_behind(key: str, place: Place) -> None:
    entry = TABLE[key]
    base = base_of(entry)
    before = place.run(base)
    after = place.run({**{k: v for k, v in base.items() if k != key}, key: entry.value})
    if "refusal" not in entry.shows:
        assert (before.refusal, after.refusal) == ("", "")
    start = load_file("model/model.safetensors")
    moved = distance(start, before.parameters) if before.parameters else 0.0
    for place_of_it in entry.shows.split():
        assert differ(getattr(before, place_of_it), getattr(after, place_of_it), moved), place_of_it


@pytest.mark.parametrize("algorithm", ["rloo", "ppo", "sft"])
def test_without_another_value_nothing_changes(algorithm: str, place: Place) -> None:
    """The control: two runs with the same keys leave the same behind, bit for bit."""
    base = base_of(Entry(None, "", algorithm))
    one, other = place.run(base), place.run_anew(base)
    assert one.refusal == "" and len(one.metrics) == 2
    for name in ("rollouts", "metrics", "evaluations", "files", "environment"):
        assert getattr(one, name) == getattr(other, name), name
    assert distance(one.parameters, other.parameters) == 0 and distance(one.critic, other.critic) == 0
    assert distance(load_file("model/model.safetensors"), one.parameters) > 0.01  # something was trained
    assert bool(one.critic) == (algorithm == "ppo")


# ---- the keys that no run shows


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)])
def test_what_truncates_the_distribution_is_refused(key: str, value: float, place: Place) -> None:
    """A21"""
    assert key in place.run_anew({**base_of(Entry(None, "")), key: value}).refusal


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device here")
def test_a_device_that_is_not_there_is_refused(place: Place) -> None:
    assert "device=cuda" in place.run_anew({**base_of(Entry(None, "")), "device": "cuda"}).refusal
    with pytest.raises(AssertionError):  # the control: cpu is what it was
        assert place.run({**base_of(Entry(None, "")), "device": "cpu"}).refusal


@pytest.mark.parametrize(
    ("key", "value", "cost"), [("tokens_per_microbatch", 1, "calls"), ("gradient_checkpointing", True, "tokens")]
)
def test_memory_is_bought_with_more_forwards_and_the_same_gradient(
    key: str, value: Any, cost: str, place: Place
) -> None:
    base = base_of(Entry(None, "", "grpo", {"optimizer": "sgd", "learning_rate": 1.0, **REPLAY}))
    (one, costs_one), (other, costs_other) = (counted(place, keys) for keys in (base, {**base, key: value}))
    assert costs_other[cost] > costs_one[cost] > 0
    moved = distance(load_file("model/model.safetensors"), one.parameters)
    assert moved > 0 and distance(one.parameters, other.parameters) < 1e-5 * moved


def counted(place: Place, keys: dict[str, Any]) -> tuple[Left, dict[str, int]]:
    """With what went through a part of a layer while gradients were wanted. The layer's own forward is what starts the
    recomputing, so that it is not replaced."""
    costs = {"calls": 0, "tokens": 0}
    forward = LlamaMLP.forward

    def counting(self: Any, x: Tensor) -> Any:
        if torch.is_grad_enabled():
            costs["calls"] += 1
            costs["tokens"] += x.shape[:2].numel()
        return forward(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaMLP, "forward", counting)
        return place.run_anew(keys), costs


def test_less_memory_cuts_smaller_and_too_little_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of(Entry(None, "", "grpo"))
    (free,) = {row["tokens_per_microbatch"] for row in place.run_anew(base).metrics}
    monkeypatch.setattr(sizing, "held_bytes", lambda device: 0)
    (tokens,) = {row["tokens_per_microbatch"] for row in place.run_anew({**base, "max_memory": "0.25MB"}).metrics}
    assert tokens < free
    assert "max_memory" in place.run_anew({**base, "max_memory": "0.12MB"}).refusal


# ---- the keys of the place


def test_run_is_where_the_files_are_and_resume_goes_on_there(place: Place) -> None:
    base = base_of(Entry(None, ""))
    first = hotcold.train(**base, run="mine", echo=None)
    assert first.folder == place.folder / "runs" / "mine" and len(first.metrics) == 2
    again = {**base, "steps": 3}
    with pytest.raises(InputError, match="holds a run already"):
        hotcold.train(**again, run="mine", echo=None)
    for resume in ({"run": "mine", "resume": "auto"}, {"resume": "runs/mine"}):
        on = hotcold.train(**again, **resume, echo=None)
        assert on.folder == first.folder and len(on.metrics) == 3
    attempts = json.loads((first.folder / "env.json").read_text())["attempts"]
    assert [attempt["attempt"] for attempt in attempts] == [1, 2, 3]
