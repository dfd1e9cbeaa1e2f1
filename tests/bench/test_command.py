"""`hotcold bench` on a tiny model: every part, shares, JSON, errors, nothing left; and how many tokens are computed."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hotcold.assemble import assemble
from hotcold.bench.command import measured_steps, planned
from hotcold.bench.report import NAMES, PartOfStep, Setting, verdict
from hotcold.cli import main
from hotcold.config.schema import train_config
from tests.tiny_model import write_tiny

VARIED = "def reward(completions):\n    return [i % 4 for i in range(len(completions))]\n"
WORDS = ("model=model", "data=prompts.jsonl", "reward=reward.py", "max_tokens=5", "prompts_per_step=3", "group_size=4")
Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, 12 prompts of four tokens and a reward that varies in each group, as the current one."""
    for name in ("here", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    write_tiny(Path("model"))
    rows = [{"prompt": f"{a}+{b}="} for a in range(3) for b in range(4)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("reward.py").write_text(VARIED)
    return tmp_path


@pytest.fixture
def bench(here: Path, capfd: pytest.CaptureFixture[str]) -> Bench:
    def command(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["hotcold", "bench", *words])
            main()
        return (int(stop.value.code or 0), *capfd.readouterr())

    return command


def test_the_table_has_every_part_and_nothing_is_left_on_the_disk(bench: Bench, here: Path) -> None:
    before = sorted(here.rglob("*"))
    code, out, _ = bench("grpo", *WORDS, "steps=2")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("grpo, model, cpu, fp32, ") and "medians of 2 steps after one to warm up" in lines[0]
    parts = ("sampling", "scoring by reward", "log-probs", "update", "everything else")
    for name in (*parts, "step", "tokens per second", "peak memory", "matrix rate"):
        assert sum(line.startswith(name) for line in lines) == 1, name
    assert "Farthest from its limit: " in out
    assert sorted(here.rglob("*")) == before


def test_the_json_has_the_same_parts_and_shares_that_sum_to_one(bench: Bench) -> None:
    code, out, _ = bench("grpo", *WORDS, "--json")
    result = json.loads(out)
    parts = {part["name"]: part for part in result["parts"]}
    assert code == 0 and tuple(parts) == NAMES and result["steps"] == len(result["per_step"]) == 3
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1.0, abs=1e-12)
    assert result["matrix_rate"]["used"] == max(result["matrix_rate"]["before"], result["matrix_rate"]["after"])
    for name in ("sampling", "update"):
        part = parts[name]
        assert part["limit"] == pytest.approx(part["work"] / result["matrix_rate"]["used"])
        assert part["ratio"] == pytest.approx(part["seconds"] / part["limit"])
    assert parts["scoring by reward"]["limit"] is parts["everything else"]["limit"] is None
    assert parts["log-probs"]["work"] is None, "one optimiser step and no KL: nothing is recomputed"
    assert result["peak_memory"] > 10**7 and result["tokens_per_second"] > 0
    for step in result["per_step"]:
        assert 0 <= step["time/logp"] <= step["time/update"] <= step["time/step"]


def recorded(path: Path, num_steps: int) -> Path:
    """In each step two responses, of 3 and 4 tokens, to one prompt of 5."""
    rows = [
        {
            "step": step,
            "group": 0,
            "episode": i,
            "prompt_ids": [1, 2, 3, 4, 5],
            "response_ids": [6] * n,
            "reward": i * 1.0,
        }
        for step in range(1, num_steps + 1)
        for i, n in enumerate((3, 4))
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


FORWARD = 170176  # of these rows: tests/bench/test_work.py


def test_the_work_of_recorded_rows_is_that_of_a_hand_count(bench: Bench, here: Path) -> None:
    file = recorded(here / "rows.parquet", 3)
    code, out, _ = bench("grpo", "model=model", f"sampler=replay:{file}", "--json")
    result = json.loads(out)
    parts = {part["name"]: part for part in result["parts"]}
    assert code == 0 and result["steps"] == 2, "as many as the file has, but for one"
    assert parts["update"]["work"] == 3 * FORWARD and parts["sampling"]["work"] is None


def test_passes_before_the_update_and_every_optimiser_step_are_counted(bench: Bench, here: Path) -> None:
    file = recorded(here / "rows.parquet", 2)
    words = ("model=model", f"sampler=replay:{file}", "steps=1", "--json")
    _, out, _ = bench("ppo", *words, "beta=0.1", "epochs_per_batch=2")
    parts = {part["name"]: part for part in json.loads(out)["parts"]}
    # A critic has one output instead of 23: its head is 2 x 32 x 7 operations for seven values, not 2 x 736 x 7.
    of_critic = FORWARD - 2 * (736 - 32) * 7
    assert parts["log-probs"]["work"] == 2 * FORWARD + of_critic  # log pi_old, the reference's, values
    assert parts["update"]["work"] == 2 * 3 * (FORWARD + of_critic)  # two passes of each


def test_exact_kl_needs_the_reference_in_the_update(bench: Bench, here: Path) -> None:
    file = recorded(here / "rows.parquet", 2)
    words = ("model=model", f"sampler=replay:{file}", "steps=1", "--json")
    _, out, _ = bench("rloo", *words, "beta=0.1", "kl.estimator=exact")
    parts = {part["name"]: part for part in json.loads(out)["parts"]}
    assert parts["log-probs"]["work"] == 2 * FORWARD  # the KL at rollout, for the reward
    assert parts["update"]["work"] == (3 + 1) * FORWARD


def test_a_recipes_steps_are_those_of_training_and_a_key_without_effect_is_named(bench: Bench) -> None:
    Path("recipe.yaml").write_text("algorithm: rloo\nsteps: 50\nstop_at: 0.5\n")
    code, out, err = bench("recipe.yaml", *WORDS, "run=runs/x", "learning_rate=0")
    assert code == 0 and "medians of 3 steps" in out
    assert "note: run: no effect on a bench" in out
    assert "learning_rate=0" in err
    assert not Path("runs").exists()


def test_rows_without_a_signal_are_said_to_be_left_out(bench: Bench) -> None:
    Path("reward.py").write_text("def reward(completion):\n    return 1.0\n")
    code, out, _ = bench("grpo", *WORDS, "steps=1")
    assert code == 0 and "12 of 12 rows had no signal" in out


def test_wrong_words_are_errors_with_what_to_do(bench: Bench, here: Path) -> None:
    for words, said in (
        (("grpoo", *WORDS), "unknown algorithm 'grpoo'"),
        (("grpo", *WORDS, "stepz=3"), 'Did you mean "steps"?'),
        (("grpo", *WORDS, "steps=0"), "steps=0"),
        (("grpo", *WORDS[:2]), "reward is missing"),
        ((), "algorithm is missing"),
    ):
        code, out, err = bench(*words)
        assert (code, out) == (2, "") and said in err and len(err.splitlines()) <= 5, words
    file = recorded(here / "rows.parquet", 2)
    code, _, err = bench("grpo", "model=model", f"sampler=replay:{file}", "steps=2")
    assert code == 2 and f"steps=2, and one more to warm up, but {file} has 2 steps: use steps=1." in err
    assert "2 wrong input" not in err


# ---- the guard: counts, not times


class HeadProducts(TorchDispatchMode):
    """Counts the rows of matrix products with the output layer, 23 x 32, whoever computes them.

    A forward takes one for each position, its backward two: for the hidden states and for the weights. One more where
    the logits are not kept but computed anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default):
            a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            sizes = [*a.shape, b.shape[1]]
            if 23 in sizes and 32 in sizes:
                self.num += a.shape[0] * a.shape[1] * b.shape[1] // (23 * 32)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens_per_microbatch", [2048, 24])
def test_a_prompt_is_computed_once_for_its_group_and_the_head_at_response_positions_only(
    here: Path, tokens_per_microbatch: int
) -> None:
    """3 prompts of 4 tokens, 4 responses of 5 to each; with 24 tokens a micro-batch has 4 + 4 x 5, one group.

    Sampling: 3 x 4 tokens of prompts; of each response the last token is not read again: 3 x 4 x 4. The same in the
    update. The head: once for each prompt and 3 x 4 x 4 times in sampling; 3 x 4 x 5 positions in the update.
    """
    words = ("grpo", *WORDS, f"tokens_per_microbatch={tokens_per_microbatch}", "steps=2")
    ready = assemble(planned(train_config(words)))
    ready.sampler.eos_ids = ()  # so that every response has 5 tokens
    with HeadProducts() as heads:
        steps, _, reads = measured_steps(ready, here / "temporary" / "run", lambda text: None)
    assert len(steps) == 2 and reads == ()
    for seen in steps:
        assert seen.computed == {"sampling": 12 + 48, "log-probs": 0, "update": 12 + 48}
        assert seen.needed == seen.computed
        assert seen.metrics["rows/trained"] == 12
    steps_with_warm_up = 3
    assert heads.num in [steps_with_warm_up * ((3 + 48) + times * 60) for times in (3, 4)]


def test_log_pi_old_costs_one_more_forward_of_the_same_tokens(here: Path) -> None:
    ready = assemble(planned(train_config(("grpo", *WORDS, "epochs_per_batch=2", "steps=1"))))
    ready.sampler.eos_ids = ()
    with HeadProducts() as heads:
        (seen,), _, reads = measured_steps(ready, here / "temporary" / "run", lambda text: None)
    assert reads == ("policy",)
    assert seen.computed == seen.needed == {"sampling": 60, "log-probs": 60, "update": 2 * 60}
    steps_with_warm_up, passes = 2, 2
    assert heads.num in [steps_with_warm_up * ((3 + 48) + 60 + passes * times * 60) for times in (3, 4)]


# ---- the sentence


PLACE = Setting("grpo", "m", "cpu", "fp32", 1)


def part(name: str, share: float, ratio: float | None, needed: int = 90, computed: int = 100) -> PartOfStep:
    limit = None if ratio is None else 1.0
    return PartOfStep(name, ratio or 1.0, share, limit, ratio, None, needed, computed)


def test_the_verdict_names_the_part_with_the_largest_ratio_that_takes_a_share() -> None:
    parts = [part("sampling", 0.5, 2.0), part("log-probs", 0.01, 9.0), part("update", 0.49, 3.0)]
    said = verdict(parts, PLACE)
    assert said.startswith("Farthest from its limit: update, 3.0 times (49% of a step). ") and "microbatch" in said
    roomy = replace(PLACE, tokens_per_microbatch=90)
    assert "one micro-batch already" in verdict(parts, roomy)
    assert "beta=0 needs no reference" in verdict([part("log-probs", 0.5, 4.0)], replace(PLACE, reads=("reference",)))
    assert "leaves little to gain" in verdict([part("update", 0.9, 1.3)], PLACE)
    assert "50% of its tokens are padding" in verdict([part("update", 0.9, 2.0, 50, 100)], PLACE)
    assert "make the reward async" in verdict([*parts, part("scoring by reward", 0.4, None)], PLACE)
