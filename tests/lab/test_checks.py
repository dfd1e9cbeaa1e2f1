"""The checks that every algorithm must pass: ours do, and a class that breaks one rule fails that one."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Forward, Objective, Plan, TokenLoss
from hotcold.algorithms.build import build_algorithm
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Batch
from hotcold.equations import sum_per_response
from hotcold.lab.checks import Bench, run_checks, wider


def failed(algorithm: Algorithm, **options: Any) -> list[str]:
    return [check.name for check in run_checks(algorithm, **options) if check.passed is False]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reinforce", {}),
        ("rloo", {"beta": 0.5}),
        ("grpo", {"beta": 0.5}),
        ("dapo", {}),
        ("gspo", {}),
        ("cispo", {"epochs_per_batch": 2}),
        ("reinforce_pp", {}),
        ("ppo", {"beta": 0.5, "kl.estimator": "exact", "entropy_bonus": 0.1}),
        ("expert_iteration", {}),
        ("sft", {}),
    ],
)
def test_ours_pass_every_check(name: str, options: dict[str, Any]) -> None:
    size = {} if name == "sft" else {"group_size": 3}
    assert failed(build_algorithm(name, {**size, **options}, 3)) == []


def test_the_batch_of_the_checks_has_all_that_can_go_wrong() -> None:
    """Two prompts whose rows alternate, unequal lengths, tool tokens, rewards on the way, no two totals equal."""
    batch = Bench(RLOO(group_size=2), None).batch()
    assert batch.group.tolist() == [0, 1, 0, 1]
    assert len(set(batch.lengths.tolist())) > 1
    inside = torch.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
    assert bool((inside & ~batch.response_mask).sum(1).gt(1).any())  # more than the prompt is masked
    assert len(set(batch.token_rewards.sum(1).tolist())) == 4
    assert bool((batch.token_rewards != 0).sum(1).gt(1).any())
    assert wider(batch, 3).tokens.shape[1] == batch.tokens.shape[1] + 3


@dataclass(frozen=True)
class Mine:
    """RLOO with one part replaced."""

    group_size: int = 2
    loss: Any = policy_gradient_loss
    weighting: Any = sum_per_response
    reads = frozenset[str]()

    @property
    def plan(self) -> Plan:
        return Plan(self.group_size)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return (Objective(self.loss, self.weighting),)

    def state(self) -> dict[str, Any]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        return RLOO(self.group_size).keep(batch)

    def credit(self, batch: Batch, state: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
        return RLOO(self.group_size).credit(batch, state)


def test_mine_passes_as_it_is() -> None:
    assert failed(Mine()) == []


def reads_masked(forward: Forward, batch: Batch) -> TokenLoss:
    assert forward.logp is not None and batch.advantages is not None
    return TokenLoss(-batch.advantages * (forward.logp + 0.1 * forward.logp.sum(1, keepdim=True)))


def test_a_loss_that_reads_masked_tokens_is_found() -> None:
    assert failed(Mine(loss=reads_masked)) == [
        "masked tokens contribute exactly 0, whatever stands there",
        "NaN outside the mask changes nothing",
    ]


def nan_where_masked(forward: Forward, batch: Batch) -> TokenLoss:
    """A mask by multiplication: right for numbers, and 0 times NaN is NaN."""
    assert forward.logp is not None and batch.advantages is not None
    own = forward.logp * batch.trained
    return TokenLoss(-batch.advantages * (own + 0.1 * own.sum(1, keepdim=True)))


def test_a_mask_by_multiplication_is_found() -> None:
    assert failed(Mine(loss=nan_where_masked)) == ["NaN outside the mask changes nothing"]


@dataclass(frozen=True)
class WithGradient(Mine):
    def credit(self, batch: Batch, state: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
        batch, state = Mine.credit(self, batch, state)
        assert batch.advantages is not None
        return batch.replace(advantages=batch.advantages.clone().requires_grad_()), state


def test_an_advantage_that_carries_a_gradient_is_found() -> None:
    assert failed(WithGradient())[0] == (
        "advantages, returns, rewards, old and reference log-probabilities carry no gradient"
    )


@dataclass(frozen=True)
class IdsAsIndices(Mine):
    def credit(self, batch: Batch, state: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
        totals = batch.token_rewards.where(batch.response_mask, 0.0).sum(1)
        mean = torch.zeros(4, dtype=totals.dtype).index_add(0, batch.group, totals)[batch.group] / self.group_size
        return batch.replace(advantages=torch.where(batch.response_mask, (totals - mean)[:, None], 0.0)), state


def test_a_group_id_that_is_used_as_an_index_is_found() -> None:
    assert "the same gradient however groups and episodes are numbered" in failed(IdsAsIndices())


@dataclass(frozen=True)
class TensorState(Mine):
    def state(self) -> dict[str, Any]:
        return {"mean": torch.zeros(())}


def test_a_state_that_is_no_json_is_found() -> None:
    assert failed(TensorState()) == ["the state is JSON, before and after credit"]


@dataclass(frozen=True)
class PlainScores(Mine):
    def credit(self, batch: Batch, state: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
        totals = batch.token_rewards.where(batch.response_mask, 0.0).sum(1)
        share = totals / batch.response_mask.sum(1)
        return batch.replace(advantages=torch.where(batch.response_mask, share[:, None], 0.0)), state


def test_scores_without_a_baseline_over_lengths_teach_where_nothing_is_said() -> None:
    """Without a baseline 1/T log pi has a gradient where lengths vary; nothing is asked of what compares nothing."""
    assert failed(PlainScores()) == ["a constant score has expected gradient 0"]
    assert failed(PlainScores(), compares=False) == []


@pytest.mark.filterwarnings("ignore:var")
def test_a_standard_deviation_of_one_response_is_found() -> None:
    assert failed(StdOfOne()) == ["a prompt with one scored response gives no NaN"]


@dataclass(frozen=True)
class StdOfOne(Mine):
    def keep(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch.keep)

    def credit(self, batch: Batch, state: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
        totals = batch.token_rewards.where(batch.response_mask, 0.0).sum(1)
        same = batch.group[:, None] == batch.group[None, :]
        std = torch.stack([totals[row].var().sqrt() for row in same])
        mean = torch.stack([totals[row].mean() for row in same])
        scaled = (totals - mean) / (std + 1e-6)
        return batch.replace(advantages=torch.where(batch.response_mask, scaled[:, None], 0.0)), state


def test_a_check_that_raises_has_failed_with_the_error_as_evidence() -> None:
    @dataclass(frozen=True)
    class Fragile(Mine):
        def keep(self, batch: Batch) -> Tensor:
            if len(batch) != 4:
                raise IndexError("four rows")
            return Mine.keep(self, batch)

    found = [check for check in run_checks(Fragile()) if check.passed is False]
    assert [check.evidence for check in found][:1] == ["IndexError: four rows"]


def test_a_larger_group_is_tried_as_well() -> None:
    assert failed(replace(Mine(), group_size=5)) == []
