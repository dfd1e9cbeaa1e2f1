"""The sampler is not the policy: what the real update expects with each correction, summed over every response.

off_policy_on_T1 of tests/vectors: responses from mu, which reports its log-probabilities; policy theta.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.baselines import no_baseline
from hotcold.algorithms.build import build_algorithm
from hotcold.algorithms.losses import ClippedLoss
from hotcold.algorithms.ppo import PPO
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.batch import Rollout
from hotcold.equations import mean_per_response, mean_per_token, sum_per_response
from hotcold.training.mismatch import Mismatch
from tests.toy_engines import RecordingEngine
from tests.toy_policies import (
    EXACT,
    PROMPT,
    T1,
    T2,
    TOOL,
    Response,
    Toy,
    assert_close,
    enumerated_gradient,
    expected_update,
    run_update,
)

ESTIMATORS = EXACT["off_policy_on_T1"]["estimators"]
GRAD_J = torch.tensor(EXACT["T1"]["grad_J"], dtype=torch.float64)
MU = EXACT["T1"]["mu"]
MU2 = [[0.0, -0.4], [0.0, 0.9], [0.0, 0.3]]
SCORE = REINFORCE(group_size=1, baseline=no_baseline)
ANY = 1e30  # a cap that nothing reaches

CORRECTIONS: dict[str, Mismatch | None] = {
    "none": None,
    "token": Mismatch("truncate", "token", cap=ANY),
    "sequence": Mismatch("truncate", "sequence", cap=ANY),
    "geometric": Mismatch("truncate", "geometric", cap=ANY),
    "token_truncate_cap_1.2": Mismatch("truncate", "token", cap=1.2),
    "token_mask_0.8_1.25": Mismatch("mask", "token", low=0.8, high=1.25),
    "sequence_truncate_cap_1.2": Mismatch("truncate", "sequence", cap=1.2),
    "sequence_mask_0.8_1.25": Mismatch("mask", "sequence", low=0.8, high=1.25),
    "geometric_mask_0.9_1.1": Mismatch("mask", "geometric", low=0.9, high=1.1),
}


def uphill(toy: Toy, algorithm: Any, group: list[int], mu: Any, mismatch: Mismatch | None, **options: Any) -> Tensor:
    update = expected_update(toy, algorithm, group, sampled_by=mu, reported=True, mismatch=mismatch, **options)
    return -update.gradient


# ------------------------------------------------------------------ the vectors


@pytest.mark.parametrize("key", list(CORRECTIONS))
@pytest.mark.parametrize("group", [[0], [0, 1]])
def test_each_correction_has_its_stated_gradient(key: str, group: list[int]) -> None:
    expected = torch.tensor(ESTIMATORS[key]["gradient"], dtype=torch.float64)
    assert_close(uphill(T1, SCORE, group, MU, CORRECTIONS[key]), expected)


@pytest.mark.parametrize("algorithm", [SCORE, build_algorithm("rloo", {"group_size": 2}, 16)])
def test_the_product_of_a_response_is_exact_and_the_others_are_not(algorithm: Any) -> None:
    group = [0] * algorithm.group_size
    for toy, mu, grad_j in ((T1, MU, GRAD_J), (T2, MU2, _grad_j(T2))):
        # leave-one-out: the others are weighted by nothing, yet they are independent of the response
        assert_close(uphill(toy, algorithm, group, mu, CORRECTIONS["sequence"]), grad_j)
        for key in ("none", "token", "geometric"):
            gap = uphill(toy, algorithm, group, mu, CORRECTIONS[key]) - grad_j
            assert float(gap.abs().max()) > 1e-2, key


def _grad_j(toy: Toy) -> Tensor:
    """Autograd of sum_y pi(y) R(y)."""
    table = torch.tensor(toy.logits, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(sum(toy.logp(table, y).exp() * toy.reward[y] for y in toy.responses), table)
    return gradient


def test_a_sampler_that_is_the_policy_needs_no_correction() -> None:
    for mismatch in CORRECTIONS.values():
        assert_close(uphill(T1, SCORE, [0], T1.logits, mismatch), GRAD_J)


# ------------------------------------------------------------------ weights, not shares


WEIGHTED = {
    "sum": (sum_per_response, lambda lengths, own: 1 / len(lengths)),
    "response": (mean_per_response, lambda lengths, own: 1 / (len(lengths) * own)),
    "token": (mean_per_token, lambda lengths, own: 1 / sum(lengths)),
}


@pytest.mark.parametrize("weighting", list(WEIGHTED))
def test_masked_tokens_stay_in_the_denominators(weighting: str) -> None:
    """T2, two rows, weights of tokens kept in 0.8 to 1.25: a token's share is that of all tokens, masked or not."""
    of_rows, share = WEIGHTED[weighting]
    now, mu = (torch.tensor(t, dtype=torch.float64) for t in (T2.logits, MU2))
    masked = 0

    def objective(table: Tensor, ys: tuple[Response, ...]) -> Any:
        nonlocal masked
        lengths, total = [len(y) for y in ys], 0.0
        for y in ys:
            ratio = (T2.logps(now, y) - T2.logps(mu, y)).exp()
            keeps = (ratio >= 0.8) & (ratio <= 1.25)
            masked += int((~keeps).sum())
            kept = torch.where(keeps, ratio, 0.0)
            total = total + T2.reward[y] * share(lengths, len(y)) * (kept * T2.logps(table, y)).sum()
        return total

    algorithm = replace(SCORE, weighting=of_rows)
    expected = enumerated_gradient(T2, 2, objective, MU2)
    assert masked > 0
    assert_close(uphill(T2, algorithm, [0, 1], MU2, Mismatch("mask", "token", low=0.8, high=1.25)), expected)


def _row(ids: Response, logp_sampler: Response | tuple[float, ...], episode: int = 0) -> Rollout:
    return Rollout((PROMPT,), ids, episode, episode, reward=1.0, logp_sampler=logp_sampler)


def of_rows(rows: list[Rollout], mismatch: Mismatch, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    engine = RecordingEngine(T1.policy())
    _, record = run_update(rows, SCORE, engine, mismatch=mismatch, **options)
    ((gradient,),) = engine.gradients
    return gradient, record.summary()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a15_a_token_that_the_sampler_called_impossible_contributes_nothing_and_harms_nothing(dtype: Any) -> None:
    """The sampler's -100 nats make a ratio of e^99: rejected, the other token alone is left; truncated, 2 of it."""
    own = EXACT["T1"]["logp_per_token"]["theta"][0]
    rows = [_row((0, 0), (-100.0, own[1]))]
    gradient, summary = of_rows(rows, Mismatch("mask", "token", low=0.5, high=5.0), dtype=dtype)
    p = math.exp(own[1])
    assert_close(gradient, [[0.0, 0.0], [p - 1, 1 - p], [0.0, 0.0]], 1e-6)
    assert bool((gradient[0] == 0).all())
    assert summary["mismatch/weight_zero"] == 0.5 and summary["mismatch/weight_mean"] == pytest.approx(0.5, abs=1e-6)
    assert summary["optimizer_steps/nonfinite"] == 0 and summary["loss"] == pytest.approx(-own[1] * 1.0, abs=1e-6)
    gradient, summary = of_rows(rows, Mismatch("truncate", "token", cap=2.0), dtype=dtype)
    p = math.exp(own[0])
    assert_close(gradient[0], [2 * (p - 1), 2 * (1 - p)], 1e-6)
    assert summary["mismatch/max_abs"] == pytest.approx(100 + own[0], abs=1e-4)


def test_a_rejected_response_trains_nothing_and_the_other_keeps_its_half() -> None:
    own = EXACT["T1"]["logp_per_token"]["theta"]
    good, bad = _row((0, 0), tuple(own[0]), 0), _row((1, 1), (-9.0, -9.0), 1)
    both, summary = of_rows([good, bad], Mismatch("mask", "sequence", low=0.5, high=5.0))
    alone, _ = of_rows([good], Mismatch("mask", "sequence", low=0.5, high=5.0))
    assert_close(both, alone / 2)
    assert summary["mismatch/weight_zero"] == 0.5 and summary["rows/trained"] == 2


def test_tool_tokens_are_no_part_of_a_responses_product() -> None:
    """Whatever the sampler reports for them."""

    def with_tool(y: Response, group: int, episode: int) -> list[Rollout]:
        logp = T1.logps(torch.tensor(MU, dtype=torch.float64), y).tolist()
        row = Rollout((PROMPT,), (y[0], TOOL, y[1]), group, episode, (True, False, True), T1.reward[y])
        return [replace(row, logp_sampler=(logp[0], -50.0, logp[1]))]

    for key in ("sequence", "geometric", "token_truncate_cap_1.2"):
        expected = torch.tensor(ESTIMATORS[key]["gradient"], dtype=torch.float64)
        assert_close(uphill(T1, SCORE, [0], MU, CORRECTIONS[key], rows_of=with_tool), expected)


def test_the_rows_of_an_episode_have_one_product() -> None:
    """Each choice in a row of its own: what came before or after it is part of the response all the same. Rows are
    averaged, two for each episode."""

    def in_two_rows(y: Response, group: int, episode: int) -> list[Rollout]:
        logp = T1.logps(torch.tensor(MU, dtype=torch.float64), y).tolist()
        first = Rollout((PROMPT,), (y[0],), group, episode, reward=0.0, logp_sampler=(logp[0],))
        second = Rollout((PROMPT, y[0], TOOL), (y[1],), group, episode, reward=T1.reward[y], logp_sampler=(logp[1],))
        return [first, second]

    for key in ("token", "sequence", "geometric", "sequence_mask_0.8_1.25"):
        expected = torch.tensor(ESTIMATORS[key]["gradient"], dtype=torch.float64)
        assert_close(uphill(T1, SCORE, [0], MU, CORRECTIONS[key], rows_of=in_two_rows), expected / 2)


# ------------------------------------------------------------------ beside a ratio, a leash, a critic

OLD = [[0.2, -0.1], [0.0, 0.4], [-0.1, 0.3]]


def test_the_correction_stops_at_the_old_policy_and_the_ratio_goes_on_from_there() -> None:
    """Three policies: mu sampled, OLD was the trainer's before the batch, theta is now. w = min(OLD/mu, 1.2) is a
    constant factor of the clipped surrogate of theta/OLD."""
    old, mu = (torch.tensor(t, dtype=torch.float64) for t in (OLD, MU))
    num_clipped = 0

    def objective(table: Tensor, ys: tuple[Response, ...]) -> Tensor:
        nonlocal num_clipped
        (y,) = ys
        A = T1.reward[y]
        w = (T1.logps(old, y) - T1.logps(mu, y)).exp().clamp(max=1.2)
        r = (T1.logps(table, y) - T1.logps(old, y)).exp()
        num_clipped += int((r > 1.05).sum()) if A else 0
        return (w * torch.where(r > 1.05, 1.05, r) * A).sum()  # no score is negative

    algorithm = REINFORCE(1, no_baseline, ClippedLoss(0.05, 0.05), epochs_per_batch=2)
    actual = uphill(T1, algorithm, [0], MU, Mismatch("truncate", "token", cap=1.2), old=OLD)
    assert_close(actual / 2, enumerated_gradient(T1, 1, objective, MU))
    assert num_clipped > 0


@pytest.mark.parametrize(
    ("placement", "estimator", "key"),
    [
        ("reward", "k1", "k1_in_reward_to_go"),
        (None, "exact", "exact_in_loss_and_later_states_in_reward"),
    ],
)
def test_with_the_product_of_a_response_the_leash_is_exact_too(placement: Any, estimator: str, key: str) -> None:
    """k1, with all scores 0, for responses from mu: the gradient of KL(pi || ref)."""
    words = {"beta": 0.5, "kl.estimator": estimator, "baseline": "none"}
    algorithm = build_algorithm("reinforce", words | ({"kl.placement": placement} if placement else {}), 16)
    silent = replace(T1, reward=dict.fromkeys(T1.responses, 0.0))
    actual = uphill(silent, algorithm, [0], MU, CORRECTIONS["sequence"], reference=EXACT["T1"]["ref"])
    expected = torch.tensor(EXACT["kl_on_T1"]["placements"][key]["expected_gradient"], dtype=torch.float64)
    assert_close(-actual / 0.5, expected)


def test_the_policy_of_ppo_is_corrected_and_its_critic_is_not() -> None:
    """The critic learns what mu's responses returned; the policy's gradient is grad J whatever the values are."""
    algorithm = PPO(group_size=1, whiten=False, weighting=sum_per_response)
    values = [0.3, -0.2, 0.6]
    plain, corrected = (
        expected_update(T1, algorithm, [0], MU, reported=True, critic=T1.critic(values), mismatch=CORRECTIONS[key])
        for key in ("none", "sequence")
    )
    assert_close(-corrected.gradient, GRAD_J)
    assert float((plain.gradient - corrected.gradient).abs().max()) > 1e-2
    assert_close(corrected.of_critic, plain.of_critic)


def test_weights_are_those_of_the_batch_in_every_minibatch() -> None:
    """Two rows in two minibatches: each step has its own row's weights."""
    own = EXACT["T1"]["logp_per_token"]["theta"]
    rows = [_row((0, 0), (own[0][0] - 0.1, own[0][1]), 0), _row((1, 1), (own[3][0], own[3][1] - 0.2), 1)]
    algorithm = REINFORCE(1, no_baseline, ClippedLoss(), minibatches=2)
    engine = RecordingEngine(T1.policy())
    run_update(rows, algorithm, engine, mismatch=CORRECTIONS["token"])
    weights = {0: (math.exp(0.1), 1.0), 1: (1.0, math.exp(0.2))}
    for (episode,), (gradient,) in zip(engine.episodes, engine.gradients, strict=True):
        token = episode  # 00 or 11
        for state, logp, w in zip((0, 1 + token), own[3 * token], weights[episode], strict=True):
            assert_close(gradient[state, token], -w * (1 - math.exp(logp)))
