"""tests/vectors/exact.json through the laboratory: each estimator is one of ours or a class of this file, and its whole
update is summed over every response. FIXED is T1 and VARIABLE is T2. 1e-9.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Forward, Objective, Plan, TokenLoss
from hotcold.algorithms.baselines import Baseline, no_baseline
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.kl import ExactKL, KLInLoss, KLInReward
from hotcold.algorithms.losses import (
    ClippedLoss,
    SequenceClippedLoss,
    TruncatedISLoss,
    importance_weighted_loss,
    policy_gradient_loss,
)
from hotcold.algorithms.ppo import PPO
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Batch, episode_totals
from hotcold.equations import (
    fixed_length,
    kl_k1,
    kl_k2,
    kl_k3,
    mean_per_response,
    mean_per_token,
    reward_to_go,
    sum_per_response,
)
from hotcold.lab.certificate import reference_variance
from hotcold.lab.expectation import Expected, Setting, expected_update
from hotcold.lab.refused import Anywhere
from hotcold.lab.tiny import FIXED, VARIABLE, Tiny
from hotcold.lab.truth import state_values, truth
from hotcold.training.mismatch import Mismatch
from hotcold.training.record import UpdateRecord

EXACT = json.loads((Path(__file__).parents[1] / "vectors" / "exact.json").read_text())
ALONE = partial(REINFORCE, group_size=1, baseline=no_baseline)


def close(actual: Tensor | float, expected: Any) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    actual = torch.as_tensor(actual, dtype=torch.float64)
    assert float((actual - expected).abs().max()) <= 1e-9 * max(1.0, float(expected.abs().max()))


def constant(value: float) -> Baseline:
    return Baseline(lambda totals, group: torch.full_like(totals, value))


def test_the_worlds_are_those_of_the_file() -> None:
    assert EXACT["T1"]["theta"] == [list(row) for row in FIXED.logits]
    assert EXACT["T1"]["ref"] == [list(row) for row in FIXED.reference]
    assert EXACT["T1"]["mu"] == [list(row) for row in FIXED.sampler]
    assert EXACT["T2"]["logits"] == [list(row) for row in VARIABLE.logits]
    for key, tiny in (("T1", FIXED), ("T2", VARIABLE)):
        assert EXACT[key]["responses"] == ["".join(map(str, y)) for y in tiny.responses]
        close(truth(tiny).J, EXACT[key]["J"])
    close(truth(FIXED).grad_J, EXACT["T1"]["grad_J"])
    close(state_values(FIXED), EXACT["T1"]["state_value"])
    close(truth(FIXED).grad_reverse_kl, EXACT["kl_on_T1"]["grad_reverse_kl"])
    close(truth(FIXED).grad_forward_kl, EXACT["kl_on_T1"]["grad_forward_kl"])


# ------------------------------------------------------------------ kl_on_T1

WITHOUT_REWARD = replace(FIXED, reward=dict.fromkeys(FIXED.responses, 0.0))


@dataclass(frozen=True)
class OfTokens(Anywhere):
    """A KL term in the loss, of log-ratios d [B, T] with gradient."""

    of: Callable[[Tensor, Tensor], Tensor] | None = None

    def loss(self, forward: Forward, batch: Batch) -> Tensor | None:
        assert forward.logp is not None and batch.logp_ref is not None and self.of is not None
        return self.of(torch.where(batch.trained, forward.logp - batch.logp_ref, 0.0), batch.trained)


def in_loss(of: Callable[[Tensor, Tensor], Tensor]) -> OfTokens:
    return OfTokens(1.0, kl_k1, False, None, of)


def per_sequence(k: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """k of the response's whole log-ratio, an equal share at each of its tokens."""
    return lambda d, mask: torch.where(mask, k(d.sum(1, keepdim=True)) / mask.sum(1, keepdim=True), 0.0)


def ratio_times(k: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda d, mask: torch.where(mask, (d - d.detach()).exp() * k(d), 0.0)


PLACEMENTS: dict[str, Algorithm] = {
    "k1_in_loss_per_token": ALONE(kl=Anywhere(1.0, kl_k1, False)),
    "k2_in_loss_per_token": ALONE(kl=KLInLoss(1.0, kl_k2)),
    "k2_in_loss_per_sequence": ALONE(kl=in_loss(per_sequence(lambda d: d**2 / 2))),
    "k3_in_loss_per_token": ALONE(kl=KLInLoss(1.0, kl_k3)),
    "k3_in_loss_per_sequence": ALONE(kl=in_loss(per_sequence(lambda d: torch.expm1(-d) + d))),
    "ratio_times_k3_in_loss_per_token": ALONE(kl=KLInLoss(1.0, kl_k3, times_ratio=True)),
    "ratio_times_k1_in_loss_per_token": ALONE(kl=in_loss(ratio_times(lambda d: d))),
    "exact_in_loss_per_state": ALONE(kl=ExactKL(1.0, in_reward=False)),
    "k1_in_reward_to_go": ALONE(kl=KLInReward(1.0)),
    "k1_in_reward_gamma_0": ALONE(kl=KLInReward(1.0), gamma=0.0),
    "k2_in_reward_to_go": ALONE(kl=Anywhere(1.0, kl_k2, True)),
    "k3_in_reward_to_go": ALONE(kl=Anywhere(1.0, kl_k3, True)),
    "exact_in_reward_to_go": ALONE(kl=Anywhere(1.0, None, True)),
    "exact_in_loss_and_later_states_in_reward": ALONE(kl=ExactKL(1.0)),
    "wrong_k3_upside_down_in_loss_per_token": ALONE(kl=in_loss(lambda d, mask: torch.expm1(d) - d)),
}


@pytest.mark.parametrize("key", list(EXACT["kl_on_T1"]["placements"]))
def test_kl_on_T1_placements(key: str) -> None:
    """Without a reward the update is downhill in what the KL term is the gradient of."""
    update = expected_update(PLACEMENTS[key], WITHOUT_REWARD).gradient
    close(-update, EXACT["kl_on_T1"]["placements"][key]["expected_gradient"])


# ------------------------------------------------------------------ weighting_on_T2


@pytest.mark.parametrize(
    ("key", "weighting", "rows"),
    [
        ("sum_per_response", sum_per_response, 2),
        ("fixed_length_3", partial(fixed_length, length=3), 2),
        ("mean_per_response", mean_per_response, 2),
        ("mean_per_token_batch_2", mean_per_token, 2),
        ("mean_per_token_batch_4", mean_per_token, 4),
    ],
)
def test_weighting_on_T2(key: str, weighting: Any, rows: int) -> None:
    """The file has the x column of the table, which is that of token 1."""
    algorithm = REINFORCE(group_size=rows, baseline=constant(EXACT["T2"]["J"]), weighting=weighting)
    close(expected_update(algorithm, VARIABLE).gradient[:, 1], EXACT["weighting_on_T2"][key]["gradient"])


# ------------------------------------------------------------------ group_estimators_on_T1


@pytest.mark.parametrize("size", ["2", "3", "4"])
def test_group_estimators_on_T1_leave_one_out(size: str) -> None:
    expected = EXACT["group_estimators_on_T1"]["leave_one_out"][size]["gradient"]
    close(expected_update(RLOO(group_size=int(size)), FIXED).gradient, expected)


@pytest.mark.parametrize("size", ["2", "3", "4"])
def test_group_estimators_on_T1_group_mean(size: str) -> None:
    expected = EXACT["group_estimators_on_T1"]["group_mean"][size]["gradient"]
    algorithm = GRPO(group_size=int(size), scale_by_std=False, weighting=sum_per_response)
    close(expected_update(algorithm, FIXED).gradient, expected)


@dataclass(frozen=True)
class OverStd:
    """(R - group mean)/(std + eps) of the one group of the step; std 0 gives 0."""

    group_size: int
    correction: int
    eps: float
    reads = frozenset[str]()
    objectives = (Objective(policy_gradient_loss, sum_per_response),)

    @property
    def plan(self) -> Plan:
        return Plan(self.group_size)

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch.keep)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        totals = episode_totals(batch)
        std = totals.std(correction=self.correction)
        scaled = (totals - totals.mean()) / (std + self.eps) if bool(totals.max() > totals.min()) else 0 * totals
        return batch.replace(advantages=torch.where(batch.response_mask, scaled[:, None], 0.0)), state


@pytest.mark.parametrize("size", ["2", "3", "4"])
@pytest.mark.parametrize(
    ("key", "correction", "eps"),
    [("population_std", 0, 0.0), ("sample_std_eps_1e-6", 1, 1e-6), ("sample_std_eps_1e-4", 1, 1e-4)],
)
def test_group_estimators_on_T1_group_mean_over_other_stds(size: str, key: str, correction: int, eps: float) -> None:
    expected = EXACT["group_estimators_on_T1"]["group_mean_over_std"][size][key]["gradient"]
    close(expected_update(OverStd(int(size), correction, eps), FIXED).gradient, expected)


@pytest.mark.parametrize("size", ["2", "3", "4"])
def test_group_estimators_on_T1_group_mean_over_sample_std(size: str) -> None:
    expected = EXACT["group_estimators_on_T1"]["group_mean_over_std"][size]["sample_std"]["gradient"]
    close(expected_update(GRPO(group_size=int(size), weighting=sum_per_response), FIXED).gradient, expected)


# ------------------------------------------------------------------ baselines_on_T1


def baseline_update(key: str) -> Expected:
    entry = EXACT["baselines_on_T1"][key]
    if key in ("state_value", "exact_advantage"):
        critic = PPO(group_size=1, lam=1.0 if key == "state_value" else 0.0, whiten=False, weighting=sum_per_response)
        return expected_update(critic, FIXED, Setting(values=EXACT["T1"]["state_value"]))
    return expected_update(REINFORCE(group_size=1, baseline=constant(entry["baseline"])), FIXED)


@pytest.mark.parametrize("key", list(EXACT["baselines_on_T1"]))
def test_baselines_on_T1(key: str) -> None:
    found = baseline_update(key)
    close(found.gradient, EXACT["T1"]["grad_J"])
    close(found.variance, EXACT["baselines_on_T1"][key]["trace_variance"])


def test_baselines_on_T1_best_constant_is_what_variance_is_measured_against() -> None:
    plain, best = reference_variance(FIXED, beta=0.0)
    close(plain, EXACT["baselines_on_T1"]["none"]["trace_variance"])
    close(best, EXACT["baselines_on_T1"]["best_constant"]["trace_variance"])


# ------------------------------------------------------------------ off_policy_on_T1


@dataclass(frozen=True)
class PrefixProduct:
    """R times the product of the ratios up to each token, from the sampler's report."""

    reads = frozenset({"logp_old"})
    objectives = (Objective(policy_gradient_loss, sum_per_response),)
    plan = Plan()

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch.keep)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        assert batch.logp_old is not None and batch.logp_sampler is not None
        weight = torch.where(batch.trained, batch.logp_old - batch.logp_sampler, 0.0).cumsum(1).exp()
        earned = reward_to_go(batch.token_rewards, batch.response_mask)
        return batch.replace(advantages=torch.where(batch.trained, weight * earned, 0.0)), state


RULES: dict[str, Mismatch | None] = {
    "none": None,
    "token": Mismatch("truncate", "token", cap=math.inf),
    "sequence": Mismatch("truncate", "sequence", cap=math.inf),
    "geometric": Mismatch("truncate", "geometric", cap=math.inf),
    "token_truncate_cap_1.2": Mismatch("truncate", "token", cap=1.2),
    "token_mask_0.8_1.25": Mismatch("mask", "token", low=0.8, high=1.25),
    "sequence_truncate_cap_1.2": Mismatch("truncate", "sequence", cap=1.2),
    "sequence_mask_0.8_1.25": Mismatch("mask", "sequence", low=0.8, high=1.25),
    "geometric_mask_0.9_1.1": Mismatch("mask", "geometric", low=0.9, high=1.1),
}


@pytest.mark.parametrize("key", list(EXACT["off_policy_on_T1"]["estimators"]))
def test_off_policy_on_T1_estimators(key: str) -> None:
    algorithm: Algorithm = PrefixProduct() if key == "prefix_product" else ALONE()
    setting = Setting(sampler=FIXED.sampler, mismatch=RULES.get(key))
    expected = EXACT["off_policy_on_T1"]["estimators"][key]["gradient"]
    close(expected_update(algorithm, FIXED, setting).gradient, expected)


# ------------------------------------------------------------------ surrogates_on_T1


@dataclass(frozen=True)
class OfOlder:
    """A = R - 1 on responses of pi_old, whose log-probabilities are read."""

    loss: Callable[[Forward, Batch], TokenLoss]
    weighting: Any = sum_per_response
    reads = frozenset({"logp_old"})
    plan = Plan()

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return (Objective(self.loss, self.weighting),)

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch.keep)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        a = episode_totals(batch) - 1
        return batch.replace(advantages=torch.where(batch.trained, a[:, None], 0.0)), state


SURROGATES: dict[str, OfOlder] = {
    "policy_gradient": OfOlder(policy_gradient_loss),
    "importance_weighted": OfOlder(importance_weighted_loss),
    "clipped_0.2_0.2": OfOlder(ClippedLoss(0.2, 0.2)),
    "clipped_0.2_0.28": OfOlder(ClippedLoss(0.2, 0.28)),
    "cispo_0.2_0.28": OfOlder(TruncatedISLoss(0.2, 0.28)),
    "gspo_0.1_0.1_mean_per_response": OfOlder(SequenceClippedLoss(0.1, 0.1), mean_per_response),
}


def of_older(algorithm: Algorithm, tiny: Tiny = FIXED) -> tuple[Expected, dict[str, float]]:
    """The update, and the means of what the step records (loss, clipped tokens, approx_kl)."""
    seen: list[tuple[Batch, UpdateRecord]] = []
    found = expected_update(
        algorithm, tiny, Setting(old=tiny.sampler), lambda batch, record: seen.append((batch, record))
    )
    means: dict[str, float] = {}
    for batch, record in seen:
        assert batch.logp_old is not None
        probability = float(batch.logp_old.sum().exp())
        for name, value in record.summary().items():
            means[name] = means.get(name, 0.0) + probability * (value or 0.0)
    return found, means


@pytest.mark.parametrize("key", list(SURROGATES))
def test_surrogates_on_T1(key: str) -> None:
    found, means = of_older(SURROGATES[key])
    close(-found.gradient, EXACT["surrogates_on_T1"][key]["expected_gradient"])
    close(means["loss"], EXACT["surrogates_on_T1"][key]["expected_loss"])


def test_surrogates_on_T1_clip_fraction_and_approx_kl() -> None:
    """Both are means over a response's two tokens; approx_kl is stated per response."""
    _, means = of_older(SURROGATES["clipped_0.2_0.2"])
    close(means["clip_fraction"], EXACT["surrogates_on_T1"]["expected_share_of_clipped_tokens_0.2_0.2"])
    close(2 * means["approx_kl"], EXACT["surrogates_on_T1"]["expected_approx_kl_per_response"])


def test_every_entry_that_the_laboratory_can_express_is_covered() -> None:
    assert set(EXACT["kl_on_T1"]["placements"]) == set(PLACEMENTS)
    assert set(EXACT["off_policy_on_T1"]["estimators"]) == set(RULES) | {"prefix_product"}
    of_surrogates = {k for k, v in EXACT["surrogates_on_T1"].items() if isinstance(v, dict)}
    assert of_surrogates == set(SURROGATES)
