"""Each algorithm's real credit, loss, weighting and update, summed over every response: the gradient that it expects.

The numbers are those of tests/vectors/exact.json (by key) or follow from autograd of an enumerated sum.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.base import Forward, Objective, Plan, TokenLoss, Weighting
from hotcold.algorithms.baselines import (
    batch_mean_baseline,
    greedy_baseline,
    leave_one_out_baseline,
    no_baseline,
)
from hotcold.algorithms.expert_iteration import BestOfGroup, ExpertIteration, Threshold
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.losses import (
    ClippedLoss,
    Loss,
    importance_weighted_loss,
    log_ratio,
    policy_gradient_loss,
)
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Batch, Rollout
from hotcold.equations import (
    fixed_length,
    mean_per_response,
    mean_per_token,
    sequence_log_ratio,
    sum_per_response,
    truncated_is_policy_gradient,
)
from tests.toy_policies import EXACT, PROMPT, T1, T2, TOOL, Response, Toy, assert_close, expected_update

GRAD_J = {"T1": torch.tensor(EXACT["T1"]["grad_J"], dtype=torch.float64)}
_log_odds = torch.tensor(EXACT["T2"]["grad_J"], dtype=torch.float64)
GRAD_J["T2"] = torch.stack([-_log_odds, _log_odds], dim=1)  # two logits: the second column is minus the first


@dataclass(frozen=True)
class Given:
    """A user's algorithm in 30 lines: the advantage is the score minus a constant, the rest is chosen."""

    constant: float
    loss: Loss
    weighting: Weighting
    reads: frozenset[str] = frozenset()

    @property
    def plan(self) -> Plan:
        return Plan()

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return (Objective(self.loss, self.weighting),)

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch.keep)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        assert "logp_old" not in self.reads or batch.logp_old is not None
        advantage = (batch.rewards - self.constant)[:, None]
        return batch.replace(advantages=torch.where(batch.response_mask, advantage, 0.0)), state


def uphill(toy: Toy, algorithm: Any, group: list[int], **options: Any) -> Tensor:
    return -expected_update(toy, algorithm, group, **options).gradient


# ------------------------------------------------------------------ reinforce, rloo, grpo: grad J, or a share of it


@pytest.mark.parametrize("toy", ["T1", "T2"])
@pytest.mark.parametrize("rows", [1, 2])
def test_reinforce_without_a_baseline_expects_grad_j(toy: str, rows: int) -> None:
    algorithm = REINFORCE(group_size=1, baseline=no_baseline)
    assert_close(uphill({"T1": T1, "T2": T2}[toy], algorithm, list(range(rows))), GRAD_J[toy])


def test_reinforce_against_the_greedy_response_expects_grad_j() -> None:
    """baselines_on_T1.greedy_response: the larger logit at each step gives 00, whose reward is 1."""
    score = EXACT["baselines_on_T1"]["greedy_response"]["baseline"]

    def with_greedy(y: Response, group: int, episode: int) -> list[Rollout]:
        return [replace(T1.rollout(y, group, episode), greedy_reward=score)]

    algorithm = REINFORCE(group_size=1, baseline=greedy_baseline)
    for group in ([0], [0, 1]):
        assert_close(uphill(T1, algorithm, group, rows_of=with_greedy), GRAD_J["T1"])


@pytest.mark.parametrize("group", [[0, 0], [0, 0, 0]])
def test_reinforce_leaving_one_out_expects_grad_j(group: list[int]) -> None:
    algorithm = REINFORCE(group_size=2, baseline=leave_one_out_baseline)
    assert_close(uphill(T1, algorithm, group), GRAD_J["T1"])


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_the_batch_mean_shrinks_grad_j_to_b_minus_1_over_b(rows: int) -> None:
    algorithm = REINFORCE(group_size=1, baseline=batch_mean_baseline)
    factor = EXACT["group_estimators_on_T1"]["group_mean"][str(rows)]["factor"]
    assert factor == pytest.approx((rows - 1) / rows)
    assert_close(uphill(T1, algorithm, list(range(rows))), factor * GRAD_J["T1"])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rloo_expects_grad_j(size: int) -> None:
    expected = EXACT["group_estimators_on_T1"]["leave_one_out"][str(size)]["gradient"]
    actual = uphill(T1, RLOO(group_size=size), [0] * size)
    assert_close(actual, expected)
    assert_close(actual, GRAD_J["T1"])


@pytest.mark.parametrize("size", [2, 3])
def test_rloo_expects_grad_j_where_lengths_vary(size: int) -> None:
    assert_close(uphill(T2, RLOO(group_size=size), [0] * size), GRAD_J["T2"])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_grpo_without_the_std_expects_g_minus_1_over_g_of_grad_j(size: int) -> None:
    algorithm = GRPO(group_size=size, scale_by_std=False, weighting=sum_per_response)
    expected = EXACT["group_estimators_on_T1"]["group_mean"][str(size)]
    actual = uphill(T1, algorithm, [0] * size)
    assert_close(actual, expected["gradient"])
    assert_close(actual, expected["factor"] * GRAD_J["T1"])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_grpo_divides_by_the_sample_std_of_the_group(size: int) -> None:
    algorithm = GRPO(group_size=size, weighting=sum_per_response)
    expected = EXACT["group_estimators_on_T1"]["group_mean_over_std"][str(size)]["sample_std"]["gradient"]
    assert_close(uphill(T1, algorithm, [0] * size), expected)


def test_grpo_as_in_the_paper_halves_it_on_two_tokens() -> None:
    """Mean per response: each of two tokens has half the weight."""
    expected = torch.tensor(EXACT["group_estimators_on_T1"]["group_mean_over_std"]["2"]["sample_std"]["gradient"])
    assert_close(uphill(T1, GRPO(group_size=2), [0, 0]), expected.double() / 2, 1e-7)


def test_two_prompts_in_one_step_expect_the_same_as_one() -> None:
    """Rows of two groups stand interleaved (A11)."""
    assert_close(uphill(T1, RLOO(group_size=2), [4, 2, 4, 2]), GRAD_J["T1"])


def test_the_unclipped_and_the_clipped_objective_expect_what_policy_gradient_does_in_one_step() -> None:
    for objective in (importance_weighted_loss, ClippedLoss(0.2, 0.2)):
        assert_close(uphill(T1, RLOO(group_size=2, objective=objective), [0, 0]), GRAD_J["T1"])


# ------------------------------------------------------------------ rewards on the way


def _with_steps(y: Response, group: int, episode: int) -> list[Rollout]:
    """1.5 for a first token 1, -0.7 for a second token 0, beside the score at the end."""
    steps = [(0, 1.5)] * (y[0] == 1) + [(1, -0.7)] * (y[1] == 0)
    return [replace(T1.rollout(y, group, episode), steps=tuple(steps))]


def _gradient_of_the_expected_total() -> Tensor:
    """By autograd of sum_y pi(y) total(y)."""
    table = torch.tensor(T1.logits, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for y in T1.responses:
        early, late = 1.5 * (y[0] == 1), -0.7 * (y[1] == 0) + T1.reward[y]
        total = total + T1.logp(table, y).exp() * (early + late)
    (gradient,) = torch.autograd.grad(total, table)
    return gradient


@pytest.mark.parametrize(
    ("algorithm", "group"),
    [
        (REINFORCE(group_size=1, baseline=no_baseline), [0]),
        (REINFORCE(group_size=2, baseline=leave_one_out_baseline), [0, 0]),
        (RLOO(group_size=3), [0, 0, 0]),
    ],
)
def test_reward_to_go_expects_the_gradient_of_the_expected_total(algorithm: Any, group: list[int]) -> None:
    assert_close(uphill(T1, algorithm, group, rows_of=_with_steps), _gradient_of_the_expected_total())


def test_grpo_takes_the_total_of_rewards_on_the_way() -> None:
    algorithm = GRPO(group_size=2, scale_by_std=False, weighting=sum_per_response)
    expected = _gradient_of_the_expected_total() / 2
    assert_close(uphill(T1, algorithm, [0, 0], rows_of=_with_steps), expected)


def test_a_discount_credits_the_first_token_with_gamma_times_what_the_second_brings() -> None:
    """E[(r_1 + gamma r_2) grad log pi_1 + r_2 grad log pi_2], by autograd with the credits as constants."""
    gamma = 0.5
    table = torch.tensor(T1.logits, dtype=torch.float64, requires_grad=True)
    objective = torch.zeros((), dtype=torch.float64)
    for y, probability in T1.probabilities().items():
        early, late = 1.5 * (y[0] == 1), -0.7 * (y[1] == 0) + T1.reward[y]
        first, second = table[0].log_softmax(0)[y[0]], table[1 + y[0]].log_softmax(0)[y[1]]
        objective = objective + probability * ((early + gamma * late) * first + late * second)
    (expected,) = torch.autograd.grad(objective, table)
    algorithm = REINFORCE(group_size=1, baseline=no_baseline, gamma=gamma)
    assert_close(uphill(T1, algorithm, [0], rows_of=_with_steps), expected)


def test_a_tool_token_between_two_choices_changes_nothing() -> None:
    def with_tool(y: Response, group: int, episode: int) -> list[Rollout]:
        row = T1.rollout(y, group, episode)
        return [replace(row, response_ids=(y[0], TOOL, TOOL, y[1]), response_mask=(True, False, False, True))]

    for algorithm in (RLOO(group_size=2), RLOO(group_size=2, gamma=0.5)):
        plain = uphill(T1, algorithm, [0, 0])
        assert_close(uphill(T1, algorithm, [0, 0], rows_of=with_tool), plain)
    assert_close(uphill(T1, RLOO(group_size=2), [0, 0], rows_of=with_tool), GRAD_J["T1"])


# ------------------------------------------------------------------ expert iteration


def _imitation(toy: Toy, rows: int, keep: Any, share: Any) -> Tensor:
    """sum over batches of probability x sum over kept rows of share x log pi, differentiated by autograd.

    keep(totals) gives the kept rows, share(kept lengths, i) the weight of a token of row i.
    """
    table = torch.tensor(toy.logits, dtype=torch.float64, requires_grad=True)
    probability = toy.probabilities()
    objective = torch.zeros((), dtype=torch.float64)
    for chosen in itertools.product(toy.responses, repeat=rows):
        good = [y for y, keeps in zip(chosen, keep([toy.reward[y] for y in chosen]), strict=True) if keeps]
        weight = math.prod(probability[y] for y in chosen)
        for y in good:
            objective = objective + weight * share([len(k) for k in good], len(y)) * toy.logp(table, y)
    (gradient,) = torch.autograd.grad(objective, table)
    return gradient


ZERO_ONE = replace(T2, reward=dict(zip(T2.responses, (0.0, 1.0, 1.0, 0.0), strict=True)))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(
    ("weighting", "share"),
    [
        (mean_per_token, lambda lengths, own: 1 / sum(lengths)),
        (sum_per_response, lambda lengths, own: 1 / len(lengths)),
        (mean_per_response, lambda lengths, own: 1 / (len(lengths) * own)),
    ],
)
def test_expert_iteration_imitates_what_it_keeps(rows: int, weighting: Weighting, share: Any) -> None:
    """Rejected rows are not in the denominators."""
    algorithm = ExpertIteration(group_size=1, weighting=weighting)
    expected = _imitation(ZERO_ONE, rows, lambda totals: [t >= 1 for t in totals], share)
    assert_close(uphill(ZERO_ONE, algorithm, list(range(rows))), expected)


def test_expert_iteration_on_one_response_and_zero_one_scores_is_reinforce() -> None:
    algorithm = ExpertIteration(group_size=1, weighting=sum_per_response)
    reinforce = REINFORCE(group_size=1, baseline=no_baseline)
    assert_close(uphill(ZERO_ONE, algorithm, [0]), uphill(ZERO_ONE, reinforce, [0]))


def test_best_of_group_imitates_the_best_and_nothing_where_all_are_equal() -> None:
    algorithm = ExpertIteration(group_size=3, keep_rule=BestOfGroup())
    expected = _imitation(
        T2,
        3,
        lambda totals: [t == max(totals) > min(totals) for t in totals],
        lambda lengths, own: 1 / sum(lengths),
    )
    assert_close(uphill(T2, algorithm, [0, 0, 0]), expected)


def test_a_threshold_of_another_value_keeps_scores_that_reach_it() -> None:
    algorithm = ExpertIteration(group_size=1, keep_rule=Threshold(0.2))
    expected = _imitation(T2, 2, lambda totals: [t >= 0.2 for t in totals], lambda lengths, own: 1 / sum(lengths))
    assert_close(uphill(T2, algorithm, [0, 1]), expected)


# ------------------------------------------------------------------ weightings, with the exact baseline


@pytest.mark.parametrize(
    ("key", "weighting", "rows"),
    [
        ("sum_per_response", sum_per_response, 1),
        ("sum_per_response", sum_per_response, 3),
        ("fixed_length_3", partial(fixed_length, length=3), 1),
        ("fixed_length_3", partial(fixed_length, length=3), 2),
        ("mean_per_response", mean_per_response, 1),
        ("mean_per_response", mean_per_response, 3),
        ("mean_per_token_batch_2", mean_per_token, 2),
        ("mean_per_token_batch_4", mean_per_token, 4),
    ],
)
def test_each_weighting_expects_its_gradient_where_lengths_vary(key: str, weighting: Weighting, rows: int) -> None:
    """weighting_on_T2; A = R - J in an algorithm of our own, which thereby fits the interface."""
    expected = torch.tensor(EXACT["weighting_on_T2"][key]["gradient"], dtype=torch.float64)
    algorithm = Given(EXACT["T2"]["J"], policy_gradient_loss, weighting)
    actual = uphill(T2, algorithm, list(range(rows)), tokens_per_microbatch=8)  # two rows of four at most
    assert_close(actual, torch.stack([-expected, expected], dim=1))


# ------------------------------------------------------------------ surrogates, sampled by another policy


def _cispo(forward: Forward, batch: Batch) -> TokenLoss:
    assert forward.logp is not None and batch.advantages is not None
    ratio = log_ratio(forward.logp, batch)
    return TokenLoss(truncated_is_policy_gradient(forward.logp, ratio, batch.advantages, 0.2, 0.28))


@dataclass(frozen=True)
class Gspo:
    clipped: ClippedLoss

    def __call__(self, forward: Forward, batch: Batch) -> TokenLoss:
        """The clipped loss at the response's mean log-ratio: given as logp, with log pi_old 0."""
        assert forward.logp is not None and batch.logp_old is not None
        mean = sequence_log_ratio(log_ratio(forward.logp, batch), batch.trained)
        return self.clipped(Forward(logp=mean), batch.replace(logp_old=torch.zeros_like(mean)))


@pytest.mark.parametrize(
    ("key", "loss", "weighting"),
    [
        ("policy_gradient", policy_gradient_loss, sum_per_response),
        ("importance_weighted", importance_weighted_loss, sum_per_response),
        ("clipped_0.2_0.2", ClippedLoss(0.2, 0.2), sum_per_response),
        ("clipped_0.2_0.28", ClippedLoss(0.2, 0.28), sum_per_response),
        ("cispo_0.2_0.28", _cispo, sum_per_response),
        ("gspo_0.1_0.1_mean_per_response", Gspo(ClippedLoss(0.1, 0.1)), mean_per_response),
    ],
)
def test_each_surrogate_expects_its_loss_and_gradient_off_policy(key: str, loss: Loss, weighting: Weighting) -> None:
    """surrogates_on_T1: responses from mu, which is also the old policy; A = R - 1."""
    expected = EXACT["surrogates_on_T1"][key]
    algorithm = Given(1.0, loss, weighting, reads=frozenset({"logp_old"}))
    for group in ([0], [0, 1]):
        actual = expected_update(T1, algorithm, group, sampled_by=EXACT["T1"]["mu"])
        assert_close(actual.gradient, expected["expected_gradient"])
        assert_close(actual.loss, expected["expected_loss"])


def test_clip_fraction_and_approx_kl_have_their_exact_means() -> None:
    exact = EXACT["surrogates_on_T1"]
    algorithm = Given(1.0, ClippedLoss(0.2, 0.2), sum_per_response, reads=frozenset({"logp_old"}))
    actual = expected_update(T1, algorithm, [0], sampled_by=EXACT["T1"]["mu"])
    assert_close(actual.metrics["clip_fraction"], exact["expected_share_of_clipped_tokens_0.2_0.2"])
    # reported per token; a response has two
    assert_close(2 * actual.metrics["approx_kl"], exact["expected_approx_kl_per_response"])


def test_a_wrong_old_policy_would_show() -> None:
    """Guard on the tests above: with theta itself as the old policy the clipped gradient is another one."""
    algorithm = Given(1.0, ClippedLoss(0.2, 0.2), sum_per_response)
    on_policy = expected_update(T1, algorithm, [0]).gradient
    expected = torch.tensor(EXACT["surrogates_on_T1"]["clipped_0.2_0.2"]["expected_gradient"], dtype=torch.float64)
    assert float((on_policy - expected).abs().max()) > 0.05


# ------------------------------------------------------------------ several rows in one episode


def _in_two_rows(y: Response, group: int, episode: int) -> list[Rollout]:
    """Each choice in a row of its own, as in a dialogue of two turns; only the second row has a score."""
    first = Rollout((PROMPT,), (y[0],), group, episode, reward=0.0)
    return [first, Rollout((PROMPT, y[0], TOOL), (y[1],), group, episode, reward=T1.reward[y])]


@pytest.mark.parametrize(
    ("algorithm", "size", "factor"),
    [
        (REINFORCE(group_size=1, baseline=no_baseline), 1, 1.0),
        (REINFORCE(group_size=1, baseline=batch_mean_baseline), 2, 0.5),  # two episodes: (2 - 1)/2, not (4 - 1)/4
        (RLOO(group_size=2), 2, 1.0),
        (GRPO(group_size=2, scale_by_std=False, weighting=sum_per_response), 2, 0.5),
    ],
)
def test_a_score_in_the_last_row_of_an_episode_credits_its_earlier_rows(
    algorithm: Any, size: int, factor: float
) -> None:
    """Rows are averaged, two for each episode: half of what one row per episode expects."""
    assert_close(uphill(T1, algorithm, [0] * size, rows_of=_in_two_rows), factor * GRAD_J["T1"] / 2)


def test_a_discount_runs_on_from_row_to_row() -> None:
    algorithm = REINFORCE(group_size=1, baseline=no_baseline, gamma=0.5)
    assert_close(uphill(T1, algorithm, [0], rows_of=_in_two_rows), uphill(T1, algorithm, [0]) / 2)
