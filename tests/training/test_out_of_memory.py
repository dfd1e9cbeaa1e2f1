"""Out of memory in an update: the optimiser step is done again on smaller micro-batches and comes out the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.ppo import PPO
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Batch, collate
from hotcold.engines.local import LocalEngine, Trainee
from hotcold.errors import InputError, OutOfMemory
from hotcold.models.critic import Critic
from hotcold.training.batching import Cut, Room
from hotcold.training.record import UpdateRecord
from tests.toy_policies import ragged_rollouts, relative_gap, run_update, tiny_llama

BUDGET = 60  # tokens; the twelve rows of 2 to 17 tokens are cut into at least three
TWO_STEPS = GRPO(group_size=4, minibatches=2)  # pi_old is read first: passes without gradient as well
ALGORITHMS: dict[str, Algorithm] = {
    "rloo": RLOO(group_size=4),
    "two steps": TWO_STEPS,
    "critic": PPO(group_size=4, epochs_per_batch=2),
}


class Faulty(LocalEngine):
    """Has no memory at the calls of these numbers, from 1, or wherever a micro-batch has more than `rows`."""

    def __init__(self, at: frozenset[int] = frozenset(), rows: int = 10**6):
        policy = tiny_llama()
        modules = {"policy": policy, "critic": Critic(copy.deepcopy(policy.model), width=16)}
        super().__init__({n: Trainee(m, torch.optim.SGD(m.parameters(), lr=0.0)) for n, m in modules.items()}, 1.0)
        self.at, self.rows, self.calls, self.after = at, rows, 0, 0
        self.start = self.parameters()

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for trainee in self.models.values() for p in trainee.parameters]

    def moved(self) -> list[Tensor]:
        return [now - then for now, then in zip(self.parameters(), self.start, strict=True)]

    def _measure_policy(self, batch: Batch, needs: frozenset[str]) -> Any:
        self._fail(batch)
        return super()._measure_policy(batch, needs)

    def _values(self, batch: Batch) -> Tensor:
        self._fail(batch)
        return super()._values(batch)

    def _fail(self, batch: Batch) -> None:
        self.calls += 1
        if self.calls in self.at or len(batch) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def run(engine: LocalEngine, algorithm: Algorithm, budget: int = BUDGET) -> UpdateRecord:
    rows = ragged_rollouts()
    _, record = run_update(
        rows, algorithm, engine, dtype=torch.float32, rate=0.5, tokens_per_microbatch=budget, max_grad_norm=1.0
    )
    return record


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_fault_at_any_call_changes_nothing_but_the_cut(name: str) -> None:
    algorithm = ALGORITHMS[name]
    whole = Faulty()
    expected = run(whole, algorithm)
    assert expected.room.num_halved == 0 and whole.calls >= 3
    for call in range(1, whole.calls + 1):
        engine = Faulty(at=frozenset({call}))
        record = run(engine, algorithm)
        assert record.room.num_halved >= 1
        assert record.room.cut.tokens_per_microbatch == BUDGET >> record.room.num_halved
        assert relative_gap(engine.moved(), whole.moved()) < 1e-5, call
        for key, value in expected.summary().items():
            wanted = value if value is None else pytest.approx(value, rel=1e-4, abs=1e-5)
            assert record.summary()[key] == wanted, (call, key)


def test_it_is_halved_as_often_as_it_takes() -> None:
    """No more than two rows fit: 60 tokens, 30, and so on."""
    whole, engine = Faulty(), Faulty(rows=2)
    run(whole, TWO_STEPS)
    record = run(engine, TWO_STEPS)
    assert record.room.num_halved >= 2
    assert relative_gap(engine.moved(), whole.moved()) < 1e-5


def test_the_next_steps_are_cut_smaller_at_once() -> None:
    """Fault at the first call alone: what follows has no larger micro-batch than the halved cut gives."""
    engine = Faulty(at=frozenset({1}))
    record = run(engine, TWO_STEPS)
    again = Faulty()
    run(again, TWO_STEPS, budget=record.room.cut.tokens_per_microbatch)
    assert engine.calls == again.calls + 1
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), again.parameters(), strict=True))


def test_a_row_that_does_not_fit_alone_is_an_error_that_says_what_to_do() -> None:
    engine = Faulty(rows=0)
    with pytest.raises(InputError, match="a single row of 17 tokens") as error:
        run(engine, RLOO(group_size=4))
    assert "max_tokens" in str(error.value) and "gradient_checkpointing" in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), engine.start, strict=True))


def test_other_errors_are_not_taken_for_it() -> None:
    def work(_: list[list[int]]) -> None:
        raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match="shapes"):
        Room(Cut(10)).run(collate(ragged_rollouts()), [[0], [1]], work)


def test_memory_that_the_optimiser_lacks_is_no_matter_of_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Faulty()
    fail: Callable[..., None] = lambda *_: (_ for _ in ()).throw(MemoryError())  # noqa: E731
    monkeypatch.setattr(engine.models["policy"].optimizer, "step", fail)
    with pytest.raises(OutOfMemory, match="a step of the optimiser"):
        run(engine, RLOO(group_size=4))
