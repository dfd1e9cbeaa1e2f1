"""tokens_per_microbatch is measured before the first step, kept, and halved where memory does not suffice after all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hotcold import sizing
from hotcold.assemble import Assembled, assemble
from hotcold.config.schema import Config
from hotcold.config.values import _gigabytes
from hotcold.engines.local import LocalEngine
from hotcold.errors import InputError
from hotcold.sizing import Limit, Line, Shape, choose, extrapolated, measured, sized
from tests.test_end_to_end import here, hotcold, metrics, same, train, weights

__all__ = ["here"]  # the fixture
MB = 10**6
ROW = Shape(prompt=40, response=60, shares=False)


# ---- the choice, by hand


@pytest.mark.parametrize(
    ("limit", "tokens"),
    [
        (1000, 512),  # 0.85 x 1000 - 100 = 750 MB at 1 MB a token: 750 tokens, 512 below them
        (1324, 1024),  # 1125.4 - 100 = 1025.4
        (1320, 512),  # 1122 - 100 = 1022
        (237, 64),  # 201.45 - 100 = 101.45: one row of 100 fits, and is what a micro-batch of 64 tokens has
        (10**6, 4096),  # the cap: a step has no more
    ],
)
def test_the_largest_power_of_two_that_fits(limit: int, tokens: int) -> None:
    line = Line(fixed=100 * MB, per_token=1 * MB)
    assert choose(line, Limit(limit * MB, ""), ROW, [4096]) == tokens


def test_a_row_that_does_not_fit_says_what_it_needs_what_there_is_and_what_to_do() -> None:
    """100 tokens need 100 + 100 MB, 0.15 of the limit is left free: 200/0.85 = 235.3 MB."""
    with pytest.raises(InputError) as error:
        choose(Line(100 * MB, 1 * MB), Limit(235 * MB, "0.23 GB (so much)"), ROW, [4096])
    text = str(error.value)
    assert "100 tokens" in text and "0.24 GB beside the models" in text and "0.23 GB (so much)" in text
    assert all(word in text for word in ("max_tokens", "gradient_checkpointing", "lora.rank", "max_memory"))


def test_rows_that_are_longer_than_the_measured_ones_follow_a_square() -> None:
    """3 a token and 2 for every pair: 10 tokens are 230, 20 are 860, 100 are 20300."""
    assert extrapolated((10, 230.0), (20, 860.0), 100) == pytest.approx(20300)
    assert extrapolated((10, 30.0), (20, 60.0), 100) == pytest.approx(300)


@pytest.mark.parametrize(("given", "gigabytes"), [(8, 8.0), ("8GB", 8.0), ("500MB", 0.5), ("1 GiB", 1.073741824)])
def test_memory_is_given_in_gigabytes(given: Any, gigabytes: float) -> None:
    assert _gigabytes(given) == pytest.approx(gigabytes)


@pytest.mark.parametrize("given", [0, -1, "8 TB", "much", True])
def test_what_is_no_amount_of_memory_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="number of GB"):
        Config.from_keys(algorithm="grpo", model="model", data="d", reward="r.py", max_memory=given)


# ---- the measured model


def config(algorithm: str = "ppo", **keys: Any) -> Config:
    return Config.from_keys(
        algorithm=algorithm, model="model", data="prompts.jsonl", reward="reward.py", max_tokens=5, **keys
    )


def state_of(ready: Assembled) -> list[Any]:
    modules = [ready.models.policy.module, ready.models.critic]
    tensors = [t.clone() for m in modules if m is not None for t in [*m.parameters(), *m.buffers()]]
    return [*tensors, torch.random.get_rng_state()]


def test_measuring_leaves_no_trace_and_gives_the_same_each_time(here: Path) -> None:
    ready = assemble(config())
    before = state_of(ready)
    one, other = (measured(ready, sizing.longest_row(ready)) for _ in range(2))
    assert one == other and len(one) == 2  # policy and critic
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(ready), strict=True))
    assert all(p.grad is None for m in (ready.model.module, ready.models.critic) for p in m.parameters())  # type: ignore[union-attr]
    tokens = [sized(assemble(config())).config.tokens_per_microbatch for _ in range(2)]
    assert tokens[0] == tokens[1] and tokens[0] is not None and tokens[0] & (tokens[0] - 1) == 0


def test_fixed_memory_holds_gradients_and_the_optimisers_state(here: Path) -> None:
    """AdamW has two numbers a parameter more than SGD, which has none."""
    ready = {kind: assemble(config("grpo", optimizer=kind)) for kind in ("adamw", "sgd")}
    size = 4 * sum(p.numel() for p in ready["sgd"].model.module.parameters())
    lines = {kind: measured(one, sizing.longest_row(one))[0] for kind, one in ready.items()}
    assert lines["adamw"].fixed - lines["sgd"].fixed == 2 * size
    assert lines["adamw"].per_token == lines["sgd"].per_token
    assert lines["sgd"].fixed > size  # the gradient


def test_the_line_bounds_what_a_larger_micro_batch_takes(here: Path) -> None:
    """Rows of the run's own length, four times as many as were measured, counted: below the line and not far."""
    ready = assemble(config("grpo", group_size=64))
    shape = sizing.longest_row(ready)
    (line,) = measured(ready, shape)
    engine, objective = sizing._engine(ready), ready.algorithm.objectives[0]
    batch = sizing.made_up(ready.algorithm, ready.model.module, shape, 64)
    for parameter in ready.model.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    peak, _ = sizing._count(engine, objective, batch, 64)
    held = 3 * sum(p.numel() * 4 for p in ready.model.module.parameters())  # gradient and two moments
    tokens = shape.prompt + 64 * shape.response if shape.shares else 64 * shape.tokens
    assert 0.5 * line.bytes(tokens) < peak + held <= line.bytes(tokens)


@pytest.mark.parametrize(("prompt", "response"), [(1, 1), (4, 1), (300, 1), (1, 300), (300, 300)])
def test_rows_of_any_shape_are_measured_on_few_tokens(
    here: Path, monkeypatch: pytest.MonkeyPatch, prompt: int, response: int
) -> None:
    ready = assemble(config("grpo"))
    seen: list[int] = []
    backward = LocalEngine.backward

    def watched(self: LocalEngine, batch: Any, *args: Any) -> Any:
        seen.append(int(batch.lengths.sum()))
        return backward(self, batch, *args)

    monkeypatch.setattr(LocalEngine, "backward", watched)
    for shares in (False, True):
        (line,) = measured(ready, Shape(prompt, response, shares))
        assert line.fixed > 0 and line.per_token > 0
    assert max(seen) <= 1024 + 256 and len(seen) == (8 if prompt + response > 256 else 4)


def test_recomputing_makes_a_token_cheaper(here: Path) -> None:
    runs = [assemble(config("grpo", gradient_checkpointing=on)) for on in (False, True)]
    plain, less = (measured(ready, sizing.longest_row(ready))[0].per_token for ready in runs)
    assert less < plain


# ---- runs


def first_of(folder: str = "runs/one") -> int:
    return yaml.safe_load(Path(folder, "config.yaml").read_text())["tokens_per_microbatch"]


def state(step: int) -> dict[str, Any]:
    return json.loads(Path("runs/one/checkpoints", f"step_{step:06d}", "trainer", "state.json").read_text())


def fail_once(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """No memory at the at-th backward from now on."""
    backward, calls = LocalEngine._measure, [0]

    def faulty(self: LocalEngine, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return backward(self, *args)

    monkeypatch.setattr(LocalEngine, "_measure", faulty)


def test_the_size_is_shown_with_its_reason_before_anything_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--dry-run") == 0
    (line,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("tokens_per_microbatch")]
    assert "measured: " in line and "MB a token" in line


def test_a_resumed_run_has_the_size_it_began_with_and_says_so(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("save_every=1", steps=1) == 0
    size = first_of()
    monkeypatch.setattr(sizing, "measured", lambda *_: pytest.fail("measured again"))
    capsys.readouterr()
    assert train("save_every=1", "resume=auto", "max_memory=1MB", steps=2) == 0
    assert "max_memory=0.001 has no effect on a run that is continued" in capsys.readouterr().out
    assert first_of() == size and [row["tokens_per_microbatch"] for row in metrics("runs/one")] == [size, size]
    assert hotcold("train", "resume=runs/one", "steps=3") == 0 and first_of() == size
    assert train("resume=auto", "tokens_per_microbatch=32", steps=4) == 0
    assert metrics("runs/one")[-1]["tokens_per_microbatch"] == 32


def test_a_halved_size_is_recorded_kept_in_the_checkpoint_and_used_after_a_resume(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["learning_rate=0.02", "tokens_per_microbatch=64", "save_every=1"]
    assert train(*words, run="runs/whole", steps=3) == 0
    fail_once(monkeypatch, at=2)
    capsys.readouterr()
    assert train(*words, steps=2) == 0
    assert "out of memory; the optimiser step was computed again" in capsys.readouterr().out
    first, second = metrics("runs/one")
    size = first["tokens_per_microbatch"]
    assert size < 64 and first["out_of_memory"] >= 1
    assert (second["tokens_per_microbatch"], second["out_of_memory"]) == (size, 0)
    assert state(2)["progress"]["tokens_per_microbatch"] == size and state(2)["tokens_per_microbatch"] == 64
    assert train(*words, "resume=auto", steps=3) == 0
    assert metrics("runs/one")[-1]["tokens_per_microbatch"] == size
    one, whole = weights("runs/one/model"), weights("runs/whole/model")
    assert all((one[n] - whole[n]).norm() <= 1e-4 * whole[n].norm() for n in whole) and not same(
        whole, weights("model")
    )
    assert train(*words[:1], "tokens_per_microbatch=48", "resume=auto", steps=4) == 0  # another number is another wish
    assert metrics("runs/one")[-1]["tokens_per_microbatch"] == 48


def test_a_number_that_does_not_fit_what_is_allowed_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "held_bytes", lambda device: 0)
    assert train("--dry-run", "tokens_per_microbatch=4096", "max_memory=1MB") == 2
    assert "tokens_per_microbatch=4096 needs" in capsys.readouterr().err
    assert train("--dry-run", "tokens_per_microbatch=32", "max_memory=1MB") == 0


def test_the_peak_of_each_part_is_recorded(here: Path) -> None:
    assert train("minibatches=2", algorithm="grpo", steps=1) == 0
    (row,) = metrics("runs/one")
    assert all(0.05 < row[f"memory/{part}"] < 100 for part in ("sample", "reads", "update"))
