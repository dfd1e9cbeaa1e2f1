"""A run that is killed or stopped and goes on is the run that never was."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tests.kills import killed_before_file_operation
from tests.test_end_to_end import here, metrics, train

__all__ = ["here"]  # the fixture

NOT_REPEATED = ("time/", "memory/", "tokens_per_second", "attempt", "eval/")
SEVERAL = ["epochs_per_batch=2", "minibatches=3", "learning_rate=3e-3"]
LEASH = ["beta=0.05", "kl.target=0.01", "kl.horizon=50"]
KINDS = {  # 11 prompts, 3 in a step: the fourth step ends one pass and begins the next
    "ppo": [*SEVERAL, *LEASH],
    "rloo": ["lora.rank=2", "learning_rate=3e-3", *LEASH],
    "expert_iteration": ["threshold=0.5", "minibatches=3", "learning_rate=3e-3"],
    "dapo": [*SEVERAL, "refill=2"],
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A forked child has no threads but the one that forked."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(name: str, kind: str, steps: int, *words: str) -> int:
    settings = ["save_every=1", "keep_checkpoints=9", "eval.every=0", "reward_workers=0", "resume=auto"]
    return train(*KINDS[kind], *settings, *words, algorithm=kind, run=f"runs/{name}", steps=steps)


def left(name: str) -> dict[str, Any]:
    """All that must be the same: hashes of parameters, critic and optimisers, state, rollouts, metrics."""
    folder = Path("runs", name)
    last = {row["step"]: row for row in metrics(str(folder))}
    return {
        **json.loads((folder / "result.json").read_text()),
        "rollouts": [pq.read_table(path).to_pylist() for path in sorted(folder.glob("rollouts/*.parquet"))],
        "metrics": [{k: v for k, v in last[step].items() if not k.startswith(NOT_REPEATED)} for step in sorted(last)],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_any_of_its_checkpoints_to_the_same_end(here: Path, kind: str) -> None:
    """D02"""
    assert run("whole", kind, 5) == 0
    for cut in (0, 3, 4):
        shutil.copytree("runs/whole", "runs/part")
        for name in ("model", "adapter", "critic"):
            shutil.rmtree(f"runs/part/{name}", ignore_errors=True)
        for path in Path("runs/part").glob("*/step_*"):
            if path.parent.name != "eval" and int(path.stem.removeprefix("step_")) > cut:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert run("part", kind, 5) == 0
        assert left("part") == left("whole"), f"cut after step {cut}"
        shutil.rmtree("runs/part")


def test_a_run_killed_before_any_file_operation_ends_where_a_whole_one_ends(here: Path) -> None:
    """D05: from its first file to its last, inside saves too."""
    assert run("whole", "ppo", 3) == 0
    expected, number, places = left("whole"), 1, 0
    while killed_before_file_operation(number, here / "runs", lambda: run("killed", "ppo", 3)):
        assert run("killed", "ppo", 3) == 0, f"killed before operation {number}"
        assert left("killed") == expected, f"killed before operation {number}"
        shutil.rmtree("runs/killed")
        number, places = number + 31, places + 1
    assert places >= 6


def test_another_seed_ends_elsewhere(here: Path) -> None:
    assert run("one", "ppo", 2) == 0 and run("two", "ppo", 2, "seed=1") == 0
    one, two = left("one"), left("two")
    assert all(one[key] != two[key] for key in ("parameters_sha256", "critic_sha256", "optimizer_sha256", "rollouts"))
