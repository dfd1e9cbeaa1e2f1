"""Every preset as it is resolved from its name alone: the gradient that it expects, summed over every response.

The numbers are those of tests/vectors, or autograd of the enumerated objective, which is written out here in plain
sums over responses and shares no code with the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Objective, Plan
from hotcold.algorithms.build import build_algorithm
from hotcold.algorithms.presets import PRESETS
from hotcold.batch import Batch, Rollout
from hotcold.training.truncation import Truncation
from tests.toy_engines import RecordingEngine
from tests.toy_policies import (
    EXACT,
    PROMPT,
    T1,
    T2,
    Response,
    Toy,
    assert_close,
    enumerated_gradient,
    expected_update,
    run_update,
)

GRAD_J = torch.tensor(EXACT["T1"]["grad_J"], dtype=torch.float64)
MU = {"T1": EXACT["T1"]["mu"], "T2": [[0.0, 3.0], [0.0, 0.2], [0.0, 1.5]]}  # a first 0 is 8 times likelier now
REF = {"T1": EXACT["T1"]["ref"], "T2": [[0.0, -0.5], [0.0, 1.0], [0.3, 0.0]]}
VALUES = [0.3, -0.2, 0.6]
TOYS = {"T1": T1, "T2": T2}
ENUMERATED = [
    "reinforce",
    "rloo",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "reinforce_pp",
    "ppo",
    "expert_iteration",
    "sft",
]


def preset(name: str, max_tokens: int = 3, **options: Any) -> Algorithm:
    assert name in ENUMERATED
    return build_algorithm(name, options, max_tokens)


def of_log_odds(gradient: Sequence[float]) -> Tensor:
    """T2's gradients are given for the log-odds: the second column is minus the first."""
    column = torch.tensor(gradient, dtype=torch.float64)
    return torch.stack([-column, column], dim=1)


# ------------------------------------------------------------------ the vectors


@pytest.mark.parametrize(
    ("baseline", "group", "factor"),
    [
        ("none", [0], 1.0),
        ("none", [0, 1], 1.0),
        ("greedy", [0, 0], 1.0),
        ("leave_one_out", [0, 0, 0], 1.0),
        ("batch_mean", [0, 0], EXACT["group_estimators_on_T1"]["group_mean"]["2"]["factor"]),
        ("batch_mean", [0, 1, 1], EXACT["group_estimators_on_T1"]["group_mean"]["3"]["factor"]),
    ],
)
def test_reinforce_expects_grad_j_with_each_baseline(baseline: str, group: list[int], factor: float) -> None:
    greedy = EXACT["baselines_on_T1"]["greedy_response"]["baseline"]

    def with_greedy(y: Response, g: int, episode: int) -> list[Rollout]:
        return [replace(T1.rollout(y, g, episode), greedy_reward=greedy if baseline == "greedy" else None)]

    algorithm = preset("reinforce", baseline=baseline)
    assert_close(-expected_update(T1, algorithm, group, rows_of=with_greedy).gradient, factor * GRAD_J)


@pytest.mark.parametrize(("baseline", "key"), [("none", "none"), ("greedy", "greedy_response")])
def test_the_variance_of_a_baseline_is_that_of_the_vectors(baseline: str, key: str) -> None:
    """baselines_on_T1.trace_variance, from one response."""
    greedy = EXACT["baselines_on_T1"][key]["baseline"] if baseline == "greedy" else None

    def with_greedy(y: Response, g: int, episode: int) -> list[Rollout]:
        return [replace(T1.rollout(y, g, episode), greedy_reward=greedy)]

    actual = expected_update(T1, preset("reinforce", baseline=baseline), [0], rows_of=with_greedy)
    variance = actual.mean_square - float(actual.gradient.square().sum())
    assert_close(variance, EXACT["baselines_on_T1"][key]["trace_variance"])


@pytest.mark.parametrize("size", [2, 3])
def test_rloo_is_exact_and_grpo_and_dr_grpo_have_the_numbers_of_their_group(size: int) -> None:
    """T1 has two tokens: the mean per response and the fixed length 2 both halve."""
    exact = EXACT["group_estimators_on_T1"]
    for name, key, share in (
        ("rloo", exact["leave_one_out"][str(size)], 1.0),
        ("grpo", exact["group_mean_over_std"][str(size)]["sample_std"], 0.5),
        ("dr_grpo", exact["group_mean"][str(size)], 0.5),
    ):
        actual = -expected_update(T1, preset(name, max_tokens=2), [0] * size).gradient
        assert_close(actual, share * torch.tensor(key["gradient"], dtype=torch.float64))


@pytest.mark.parametrize("size", [2, 3])
def test_where_lengths_vary_rloo_keeps_grad_j_and_dr_grpo_its_direction(size: int) -> None:
    """weighting_on_T2; the group mean includes the response itself: (G - 1)/G."""
    exact = EXACT["weighting_on_T2"]
    rloo = -expected_update(T2, preset("rloo"), [0] * size).gradient
    assert_close(rloo, of_log_odds(exact["sum_per_response"]["gradient"]))
    dr_grpo = -expected_update(T2, preset("dr_grpo", max_tokens=3), [0] * size).gradient
    assert_close(dr_grpo, (size - 1) / size * of_log_odds(exact["fixed_length_3"]["gradient"]))


@dataclass(frozen=True)
class Given:
    """A = R - 1 with the objective of another algorithm."""

    objective: Objective

    plan = Plan()
    reads = frozenset({"logp_old"})

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return (self.objective,)

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch.keep)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        advantages = torch.where(batch.response_mask, batch.rewards[:, None] - 1, 0.0)
        return batch.replace(advantages=advantages), state


@pytest.mark.parametrize(
    ("key", "name", "options"),
    [
        ("importance_weighted", "rloo", {"objective": "importance_weighted"}),
        ("clipped_0.2_0.2", "reinforce_pp", {"weighting": "sum_per_response"}),
        ("clipped_0.2_0.2", "ppo", {"weighting": "sum_per_response"}),
        ("clipped_0.2_0.28", "dapo", {"weighting": "sum_per_response"}),
        ("cispo_0.2_0.28", "cispo", {"weighting": "sum_per_response", "clip_low": 0.2, "clip_high": 0.28}),
        ("gspo_0.1_0.1_mean_per_response", "gspo", {"clip_low": 0.1, "clip_high": 0.1}),
    ],
)
def test_the_surrogate_of_a_preset_is_that_of_the_vectors(key: str, name: str, options: dict[str, Any]) -> None:
    """surrogates_on_T1: responses from mu, which is also the old policy."""
    algorithm = Given(build_algorithm(name, options, 16).objectives[0])
    for group in ([0], [0, 1]):
        actual = expected_update(T1, algorithm, group, sampled_by=MU["T1"])
        assert_close(actual.gradient, EXACT["surrogates_on_T1"][key]["expected_gradient"])
        assert_close(actual.loss, EXACT["surrogates_on_T1"][key]["expected_loss"])


# ------------------------------------------------------------------ objectives written out


def centred(scores: Sequence[float], by_std: bool = True) -> list[float]:
    """(r - mean)/sample std; 0 where all are equal."""
    mean = math.fsum(scores) / len(scores)
    if not by_std:
        return [r - mean for r in scores]
    if max(scores) == min(scores):
        return [0.0] * len(scores)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in scores) / (len(scores) - 1))
    return [(r - mean) / std for r in scores]


def clipped(ratio: Tensor, A: Any, low: float, high: float) -> Tensor:
    """min(r A, clip(r) A), by cases: the gain stops above 1 + high, the loss of a bad token below 1 - low."""
    A = torch.as_tensor(A, dtype=torch.float64)
    stopped = ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low))
    bound = torch.where(A > 0, 1 + high, 1 - low)
    return torch.where(stopped, bound * A, ratio * A)


Ratio = Callable[[Tensor, Response], Tensor]


def ratio_to(toy: Toy, old: Any) -> Ratio:
    """[T] pi/pi_old of each token; without `old` the policy itself, held still."""

    def ratio(table: Tensor, y: Response) -> Tensor:
        before = table.detach() if old is None else torch.tensor(old, dtype=torch.float64)
        return (toy.logps(table, y) - toy.logps(before, y)).exp()

    return ratio


def group_loss(name: str, toy: Toy, ratio: Ratio) -> Callable[[Tensor, tuple[Response, ...]], Tensor]:
    """The loss of one group under grpo and its variants."""

    def loss(table: Tensor, ys: tuple[Response, ...]) -> Tensor:
        A = centred([toy.reward[y] for y in ys])
        num_tokens, total = sum(map(len, ys)), torch.zeros((), dtype=torch.float64)
        for y, a in zip(ys, A, strict=True):
            r = ratio(table, y)
            if name == "grpo":
                total = total + clipped(r, a, 0.2, 0.2).sum() / (len(ys) * len(y))
            if name == "gspo":
                s = r.log().mean().exp()  # one ratio, the geometric mean, for the whole response
                total = total + clipped(s, a, 3e-4, 4e-4) / len(ys)
            if name == "cispo":
                weight = r.detach().clamp(max=5.0)
                total = total + (weight * a * toy.logps(table, y)).sum() / num_tokens
        return -total

    return loss


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("toy", ["T1", "T2"])
@pytest.mark.parametrize("off_policy", [False, True])
def test_grpo_and_its_ratios_expect_their_written_objective(name: str, toy: str, off_policy: bool) -> None:
    """On the policy's own samples in one step; and in the second of two, when the samples are from an older policy."""
    old = MU[toy] if off_policy else None
    algorithm = preset(name, **({"epochs_per_batch": 2} if off_policy else {}))
    actual = expected_update(TOYS[toy], algorithm, [0, 0], sampled_by=old)
    expected = enumerated_gradient(TOYS[toy], 2, group_loss(name, TOYS[toy], ratio_to(TOYS[toy], old)), old)
    assert_close(actual.gradient / (2 if off_policy else 1), expected)
    if off_policy and toy == "T2":
        assert actual.metrics["clip_fraction"] > 0.01


# Two tokens at most. Scores that repeat: a group without a signal is not only one of equal responses.
SHORT = Toy([(), (1,)], T2.logits[:2], [(0,), (1, 0), (1, 1)], {(0,): -0.5, (1, 0): 0.0, (1, 1): -0.5})


def _dapo(toy: Toy, ratio: Ratio, charge: Sequence[float]) -> Callable[[Tensor, tuple[Response, ...]], Any]:
    """Two groups of two. A group of equal scores is dropped before tokens are counted; `charge` by length, from 1."""

    def loss(table: Tensor, ys: tuple[Response, ...]) -> Any:
        groups = [group for group in (ys[:2], ys[2:]) if toy.reward[group[0]] != toy.reward[group[1]]]
        num_tokens, total = sum(len(y) for group in groups for y in group), 0.0
        for group in groups:
            A = centred([toy.reward[y] - charge[len(y) - 1] for y in group])
            for y, a in zip(group, A, strict=True):
                total = total - clipped(ratio(table, y), a, 0.2, 0.28).sum() / num_tokens
        return total

    return loss


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize(("rule", "charge"), [("keep", (0.0, 0.0)), ("penalty", (0.5, 1.0))])
def test_dapo_drops_groups_before_it_counts_and_charges_length(
    rule: Any, charge: tuple[float, ...], off_policy: bool
) -> None:
    """Limit 2, buffer 2: 1 and 2 tokens cost 1/2 and 1. The filter looks at the scores as they were given: 0 and 11,
    which only the charge tells apart, are dropped; 0 and 10, which the charge makes equal, stay with A = 0."""
    old = MU["T2"][:2] if off_policy else None
    algorithm = preset("dapo", **({"epochs_per_batch": 2} if off_policy else {}))
    apply = Truncation(rule, max_tokens=2, buffer=2).apply
    actual = expected_update(SHORT, algorithm, [0, 0, 1, 1], sampled_by=old, change=apply)
    expected = enumerated_gradient(SHORT, 4, _dapo(SHORT, ratio_to(SHORT, old), charge), old)
    assert_close(actual.gradient / (2 if off_policy else 1), expected)
    assert PRESETS["dapo"].general == {"truncated": "penalty"}


# ------------------------------------------------------------------ whitened over the step


def costs(toy: Toy, y: Response, beta: float, ref: Any) -> Tensor:
    """[T] beta (log pi - log ref) at the policy of the rollout."""
    now, frozen = (torch.tensor(t, dtype=torch.float64) for t in (toy.logits, ref))
    return beta * (toy.logps(now, y) - toy.logps(frozen, y))


def whitened_loss(toy: Toy, ratio: Ratio, values: Sequence[float], beta: float = 0.0, ref: Any = None) -> Any:
    """A = what is still to come - V, minus its mean, over its population std, over the tokens of the step; clip 0.2."""

    def loss(table: Tensor, ys: tuple[Response, ...]) -> Tensor:
        credit = []
        for y in ys:
            reward = torch.zeros(len(y), dtype=torch.float64) if beta == 0 else -costs(toy, y, beta, ref)
            reward[-1] += toy.reward[y]
            value = torch.tensor([values[s] for s in toy.states(y)], dtype=torch.float64)
            credit.append(torch.stack([reward[t:].sum() for t in range(len(y))]) - value)
        x = torch.cat(credit)
        mean = x.sum() / len(x)
        scale = (((x - mean) ** 2).sum() / len(x) + 1e-8).sqrt()
        rows = zip(ys, credit, strict=True)
        return -sum(clipped(ratio(table, y), (c - mean) / scale, 0.2, 0.2).sum() for y, c in rows) / len(x)

    return loss


@pytest.mark.parametrize("toy", ["T1", "T2"])
@pytest.mark.parametrize("rows", [2, 3])
def test_reinforce_pp_expects_its_written_objective(toy: str, rows: int) -> None:
    loss = whitened_loss(TOYS[toy], ratio_to(TOYS[toy], None), [0.0] * 3)
    actual = expected_update(TOYS[toy], preset("reinforce_pp"), list(range(rows)))
    assert_close(actual.gradient, enumerated_gradient(TOYS[toy], rows, loss))


@pytest.mark.parametrize("toy", ["T1", "T2"])
def test_ppo_expects_its_written_objective_and_its_critic_the_squared_error(toy: str) -> None:
    """The critic: (V - R)/sum of lengths at each token, R the score, whatever the policy does."""
    chosen = TOYS[toy]
    actual = expected_update(chosen, preset("ppo"), [0, 1], critic=chosen.critic(VALUES))
    loss = whitened_loss(chosen, ratio_to(chosen, None), VALUES)
    assert_close(actual.gradient, enumerated_gradient(chosen, 2, loss))
    of_critic, probability = torch.zeros(3, dtype=torch.float64), chosen.probabilities()
    for a in chosen.responses:
        for b in chosen.responses:
            for y in (a, b):
                for state in chosen.states(y):
                    share = probability[a] * probability[b] / (len(a) + len(b))
                    of_critic[state] += share * (VALUES[state] - chosen.reward[y])
    assert_close(actual.of_critic, of_critic)


@pytest.mark.parametrize("name", ["reinforce_pp", "ppo"])
def test_with_several_epochs_both_clip_the_ratio_to_the_old_policy(name: str) -> None:
    values = VALUES if name == "ppo" else [0.0] * 3
    algorithm = preset(name, epochs_per_batch=2)
    actual = expected_update(T2, algorithm, [0, 1], sampled_by=MU["T2"], critic=T2.critic(values))
    expected = enumerated_gradient(T2, 2, whitened_loss(T2, ratio_to(T2, MU["T2"]), values), MU["T2"])
    assert_close(actual.gradient / 2, expected)
    assert actual.metrics["clip_fraction"] > 0.01


@pytest.mark.parametrize("name", ["reinforce_pp", "ppo"])
def test_with_a_leash_the_kl_is_part_of_what_is_still_to_come(name: str) -> None:
    """beta alone resolves to k1 in the reward."""
    values = VALUES if name == "ppo" else [0.0] * 3
    actual = expected_update(T2, preset(name, beta=0.3), [0, 1], reference=REF["T2"], critic=T2.critic(values))
    loss = whitened_loss(T2, ratio_to(T2, None), values, 0.3, REF["T2"])
    assert_close(actual.gradient, enumerated_gradient(T2, 2, loss))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_with_a_leash_the_group_presets_add_k3_in_their_own_weighting(name: str) -> None:
    """beta alone resolves to k3 in the loss; T1 has two tokens, and both weightings halve."""
    algorithm = preset(name, max_tokens=2, beta=0.3)
    leashed = expected_update(T1, algorithm, [0, 0], reference=REF["T1"]).gradient
    free = expected_update(T1, preset(name, max_tokens=2), [0, 0]).gradient
    k3 = torch.tensor(EXACT["kl_on_T1"]["placements"]["k3_in_loss_per_token"]["expected_gradient"]).double()
    assert_close(leashed - free, 0.3 * k3 / 2, 1e-7)


# ------------------------------------------------------------------ imitation


ZERO_ONE = replace(T2, reward=dict(zip(T2.responses, (1.0, 0.0, 0.0, 1.0), strict=True)))


def exact_kl(table: Tensor, state: int, ref: Any) -> Tensor:
    p, q = table[state].log_softmax(0), torch.tensor(ref[state], dtype=torch.float64).log_softmax(0)
    return (p.exp() * (p - q)).sum()


def imitation(toy: Toy, table: Tensor, ys: Sequence[Response], beta: float, ref: Any) -> Any:
    """-log pi plus beta KL of the state, a mean over the tokens of these responses."""
    total = 0.0
    for y in ys:
        leash = sum(exact_kl(table, state, ref) for state in toy.states(y)) if beta else 0.0
        total = total - toy.logp(table, y) + beta * leash
    return total / sum(map(len, ys)) if ys else total


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_expert_iteration_imitates_what_reaches_the_threshold_of_one(rows: int, beta: float) -> None:
    def loss(table: Tensor, ys: tuple[Response, ...]) -> Any:
        return imitation(ZERO_ONE, table, [y for y in ys if ZERO_ONE.reward[y] >= 1.0], beta, REF["T2"])

    algorithm = preset("expert_iteration", beta=beta)
    actual = expected_update(ZERO_ONE, algorithm, list(range(rows)), reference=REF["T2"])
    assert_close(actual.gradient, enumerated_gradient(ZERO_ONE, rows, loss))


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_sft_imitates_every_row_of_the_data(beta: float) -> None:
    """Rows of a data set have no score; a masked token (another speaker's) is read and not imitated."""
    ys = [(0,), (1, 0), (1, 1, 1), (1, 0)]
    rows = [Rollout((PROMPT,), y, i, i, demonstration=True) for i, y in enumerate(ys)]
    rows.append(Rollout((PROMPT,), (1, 0), 4, 4, response_mask=(False, True), demonstration=True))
    engine = RecordingEngine(T2.policy(), reference=T2.policy(REF["T2"]))
    run_update(rows, preset("sft", beta=beta), engine)
    table = torch.tensor(T2.logits, dtype=torch.float64, requires_grad=True)
    of_rows = imitation(T2, table, ys, beta, REF["T2"]) * 8
    of_last = -T2.logps(table, (1, 0))[1] + beta * exact_kl(table, 1, REF["T2"])
    (expected,) = torch.autograd.grad((of_rows + of_last) / 9, table)
    ((actual,),) = engine.gradients
    assert_close(actual, expected)


def test_no_preset_is_left_out() -> None:
    """A new one needs its enumeration above."""
    assert list(PRESETS) == ENUMERATED
