"""Whole runs with keys that any algorithm takes: the arithmetic, the sampler's mismatch, the length limit, refill."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.test_end_to_end import here, hotcold, metrics, same, train, weights

__all__ = ["here"]  # the fixture

QUIET = ("eval.every=0", "save_every=0")
PLAIN = ("optimizer=sgd", "learning_rate=1")
MANY_SCORES = "def reward(completion_ids):\n    return float(sum(completion_ids) % 3)\n"


def rollouts(run: str, step: int = 1) -> list[dict[str, Any]]:
    return pq.read_table(f"{run}/rollouts/step_{step:06d}.parquet").to_pylist()


def difference(a: str | Path, b: str | Path) -> dict[str, Tensor]:
    first, second = weights(a), weights(b)
    return {name: first[name] - second[name] for name in first}


def size(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().pow(2).sum()) for t in tensors.values()))


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Relative L2 distance."""
    return size({name: a[name] - b[name] for name in a}) / size(a)


def step_on(rows: list[dict[str, Any]], run: str, *words: str, algorithm: str = "grpo") -> dict[str, Tensor]:
    """Parameters before minus after one plain step on these rows: rate 1 times the gradient."""
    schema = pq.read_schema("runs/one/rollouts/step_000001.parquet")
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), f"{Path(run).name}.parquet")
    replay = f"sampler=replay:{Path(run).name}.parquet"
    assert hotcold("train", algorithm, "model=model", replay, f"run={run}", *QUIET, *PLAIN, *words) == 0
    return difference("model", f"{run}/model")


# ---- the arithmetic


def test_bf16_computes_around_float32_parameters_and_resumes_bit_for_bit(here: Path) -> None:
    words = ["dtype=bf16", "learning_rate=0.01", "epochs_per_batch=2", *QUIET]
    assert train(*words, run="runs/whole", algorithm="grpo", steps=4) == 0
    assert train(*words, run="runs/parts", algorithm="grpo", steps=2) == 0
    assert train(*words, "resume=auto", run="runs/parts", algorithm="grpo", steps=4) == 0
    whole = weights("runs/whole/model")
    assert same(whole, weights("runs/parts/model"))
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in whole.values())
    assert train("dtype=fp32", *words[1:], run="runs/fp32", algorithm="grpo", steps=4) == 0
    assert not same(whole, weights("runs/fp32/model"))  # the key does something


def test_under_bf16_steps_far_below_its_resolution_are_not_lost(here: Path) -> None:
    """D11: at 1e-6 a step is about 1/60 of the spacing of bf16 numbers near 0.02."""
    assert train("dtype=bf16", "learning_rate=1e-6", "warmup_steps=0", *QUIET, algorithm="grpo", steps=3) == 0
    moved = difference("runs/one/model", "model")["model.layers.0.mlp.up_proj.weight"]
    assert float((moved != 0).float().mean()) > 0.9 and 0 < float(moved.abs().max()) < 4e-6


@pytest.mark.parametrize(
    ("word", "says"),
    [("float16", "its small numbers vanish"), ("fp16", "bf16 is needed"), ("bfloat16", "write bf16"), ("int8", "bf16")],
)
def test_other_dtypes_are_refused_with_what_to_write(
    here: Path, capsys: pytest.CaptureFixture[str], word: str, says: str
) -> None:
    assert train(f"dtype={word}") == 2
    message = capsys.readouterr().err
    assert f"dtype={word}" in message and says in message and not Path("runs").exists()


def test_recomputed_activations_give_the_same_step_and_the_same_responses(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D12"""
    Path("many.py").write_text(MANY_SCORES)
    num_in_backward, forward, backward = [0], LlamaMLP.forward, Tensor.backward
    is_in_backward = [False]

    def counted(self: LlamaMLP, x: Tensor) -> Tensor:
        num_in_backward[0] += is_in_backward[0]
        return forward(self, x)

    def marked(self: Tensor, *given: Any, **named: Any) -> None:
        is_in_backward[0] = True
        backward(self, *given, **named)
        is_in_backward[0] = False

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    monkeypatch.setattr(Tensor, "backward", marked)
    counts = []
    for run, value in (("runs/kept", "false"), ("runs/anew", "true")):
        num_in_backward[0] = 0
        words = ["reward=many.py", f"gradient_checkpointing={value}", *PLAIN, *QUIET]
        assert train(*words, run=run, algorithm="ppo", steps=1) == 0
        counts.append(num_in_backward[0])
    assert counts[0] == 0 and counts[1] >= 2  # once at least for the policy and for the critic
    assert rollouts("runs/kept") == rollouts("runs/anew")
    kept, anew = (difference("model", f"{run}/model") for run in ("runs/kept", "runs/anew"))
    assert apart(kept, anew) <= 1e-6 and size(kept) > 0.01


# ---- the sampler's mismatch


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_sampler_that_is_the_policy_needs_no_correction(here: Path, mode: str) -> None:
    Path("many.py").write_text(MANY_SCORES)
    words = ["reward=many.py", *PLAIN, *QUIET]
    assert train(*words, run="runs/plain", steps=1) == 0
    assert train(*words, f"mismatch={mode}", run="runs/corrected", steps=1) == 0
    (row,) = metrics("runs/corrected")
    assert row["mismatch/weight_mean"] == pytest.approx(1, abs=1e-4) and row["mismatch/weight_zero"] == 0
    plain, corrected = (difference("model", f"runs/{name}/model") for name in ("plain", "corrected"))
    assert apart(plain, corrected) < 1e-4
    assert not {"mismatch/weight_mean", "mismatch/weight_zero"} & metrics("runs/plain")[0].keys()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_response_that_the_sampler_found_ten_times_less_likely_counts_twice_or_not_at_all(
    here: Path, level: str
) -> None:
    """Each of its tokens has weight 10 (a product of 10s, a mean of 10): cut to 2, or above 5 and masked.

    All other weights are 1. With g its share of the gradient: truncated - plain = g = plain - masked.
    """
    Path("many.py").write_text(MANY_SCORES)
    assert train("reward=many.py", *QUIET, steps=1) == 0
    rows = rollouts("runs/one")
    totals = {row["group"]: sum(r["reward"] for r in rows if r["group"] == row["group"]) for row in rows}
    odd = next(row for row in rows if row["reward"] * 4 != totals[row["group"]])  # one with an advantage
    odd["logp_sampler"] = [logp - math.log(10) for logp in odd["logp_sampler"]]
    words = {
        "plain": [],
        "truncated": ["mismatch=truncate", "mismatch.cap=2", f"mismatch.level={level}"],
        "masked": ["mismatch=mask", "mismatch.high=5", f"mismatch.level={level}"],
    }
    steps = {name: step_on(rows, f"runs/{name}", *keys, algorithm="rloo") for name, keys in words.items()}
    twice = {name: steps["truncated"][name] - t for name, t in steps["plain"].items()}
    once = {name: t - steps["masked"][name] for name, t in steps["plain"].items()}
    assert apart(once, twice) < 1e-3 and size(once) > 0.01 * size(steps["plain"])
    share = len(odd["response_ids"]) / sum(len(row["response_ids"]) for row in rows)
    (truncated,), (masked,) = metrics("runs/truncated"), metrics("runs/masked")
    assert masked["mismatch/weight_zero"] == pytest.approx(share, rel=1e-5)
    assert masked["mismatch/weight_mean"] == pytest.approx(1 - share, abs=1e-4)
    assert truncated["mismatch/weight_mean"] == pytest.approx(1 + share, abs=1e-4)
    assert truncated["mismatch/max_abs"] == pytest.approx(math.log(10), abs=1e-3)


# ---- the length limit

LONG = ("max_tokens=12", "prompts_per_step=5", "group_size=12", "reward=many.py")


def test_masked_responses_leave_the_batch_before_anything_is_computed_of_it(here: Path) -> None:
    """The step is the one on the rows that ended in time alone, groups and all."""
    Path("many.py").write_text(MANY_SCORES)
    assert train(*LONG, *PLAIN, *QUIET, "truncated=mask", algorithm="grpo", steps=1) == 0
    rows, (row,) = rollouts("runs/one"), metrics("runs/one")
    cut = [r for r in rows if len(r["response_ids"]) == 12 and r["truncated"]]
    assert 0 < len(cut) < len(rows) and row["rows/dropped"] == len(cut) == sum(r["truncated"] for r in rows)
    assert row["completions/truncated"] == pytest.approx(len(cut) / len(rows))
    assert row["reward"] == pytest.approx(sum(r["reward"] for r in rows) / len(rows))  # of all that were sampled
    masked = difference("model", "runs/one/model")
    ended = step_on([r for r in rows if not r["truncated"]], "runs/ended")
    assert apart(masked, ended) < 1e-6 and size(masked) > 0.01
    assert apart(masked, step_on(rows, "runs/all")) > 0.1


def test_the_penalty_grows_over_the_last_tokens_and_is_no_part_of_the_score(here: Path) -> None:
    """Buffer 4 before 12: 0 up to length 8, then 1/4, 2/4, 3/4 and at 12 the whole of 0.5."""
    Path("many.py").write_text(MANY_SCORES)
    penalty = ["truncated=penalty", "overlong.buffer=4", "overlong.penalty=0.5"]
    assert train(*LONG, *PLAIN, *QUIET, *penalty, algorithm="grpo", steps=1) == 0
    rows, (row,) = rollouts("runs/one"), metrics("runs/one")
    charged = [0.5 * {9: 0.25, 10: 0.5, 11: 0.75, 12: 1.0}.get(len(r["response_ids"]), 0.0) for r in rows]
    assert len(set(charged)) >= 3
    assert row["rewards/penalty"] == pytest.approx(-sum(charged) / len(rows), rel=1e-6)
    assert row["reward"] == pytest.approx(sum(r["reward"] for r in rows) / len(rows))
    step = difference("model", "runs/one/model")
    less = [{**r, "reward": r["reward"] - c} for r, c in zip(rows, charged, strict=True)]
    assert apart(step, step_on(less, "runs/less")) < 1e-6 and size(step) > 0.01
    assert apart(step, step_on(rows, "runs/score")) > 0.1


# ---- refill


def by_group(rows: list[dict[str, Any]]) -> list[list[float]]:
    """The scores of each prompt, in the order in which they were drawn."""
    draws = sorted({row["draw"] for row in rows})
    return [[row["reward"] for row in rows if row["draw"] == draw] for draw in draws]


def rounds(groups: list[list[float]], wanted: int, varies: Callable[[list[float]], bool]) -> list[int]:
    """How many prompts each round had, if each asks for as many as are missing."""
    out, taken = [], 0
    while taken < len(groups):
        out.append(wanted - sum(map(varies, groups[:taken])))
        taken += out[-1]
    return out


def test_dapo_replaces_groups_without_variance_a_bounded_number_of_times(here: Path) -> None:
    """D20: 'a' is rare, so that most groups score 0 alone."""
    words = ["refill=2", "group_size=4", "prompts_per_step=3", "max_tokens=5", "learning_rate=0.005", *QUIET]
    assert train(*words, algorithm="dapo", steps=6) == 0
    next_draw, seen = 0, set()
    for row in metrics("runs/one"):
        sampled = rollouts("runs/one", row["step"])
        groups = by_group(sampled)
        kept = [scores for scores in groups if len(set(scores)) > 1]
        asked = rounds(groups, 3, lambda scores: len(set(scores)) > 1)
        assert len(asked) <= 1 + 2 and (len(kept) >= 3 or len(asked) == 3)
        assert row["groups/refilled"] == sum(asked[1:])
        assert row["rows/dropped"] == 4 * (len(groups) - len(kept))
        assert row["rows/trained"] + row["rows/skipped"] == 4 * len(kept) if kept else not row["rows/trained"]
        draws = sorted({r["draw"] for r in sampled})
        assert draws == list(range(next_draw, next_draw + len(groups)))  # no prompt is passed over or asked twice
        next_draw += len(groups)
        seen.add(len(asked))
    assert len(seen) > 1  # some steps needed other numbers of rounds than others
    assert not same(weights("model"), weights("runs/one/model"))


def test_dapo_goes_on_where_no_group_ever_varies_and_changes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D20"""
    Path("constant.py").write_text("def reward(completion):\n    return 1.0\n")
    words = ["reward=constant.py", "refill=3", "prompts_per_step=2", "max_tokens=2", *QUIET]
    assert train(*words, algorithm="dapo", steps=4) == 0
    assert [row["groups/refilled"] for row in metrics("runs/one")] == [3 * 2] * 4
    assert [row["rows/dropped"] for row in metrics("runs/one")] == [4 * 2 * 4] * 4
    assert same(weights("model"), weights("runs/one/model"))
    assert "without any signal" in capsys.readouterr().out
