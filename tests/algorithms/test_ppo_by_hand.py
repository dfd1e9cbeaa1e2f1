"""PPO's parts through the real update, by hand: clips of ratio and value, whitening, entropy, explained variance."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.baselines import no_baseline
from hotcold.algorithms.build import build_algorithm
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.ppo import PPO
from hotcold.algorithms.presets import PRESETS
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Batch, Rollout, collate
from hotcold.equations import mean_per_token, sum_per_response
from hotcold.training.update import update
from tests.toy_engines import RecordingEngine, Watched, local_engine, settings
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


def states(probabilities: list[float]) -> Toy:
    """One state for each number (7 at most): in state k token 0 has that probability, all others share the rest."""
    size = max(len(probabilities), 2)
    table = [[math.log(p), *[math.log((1 - p) / (size - 1))] * (size - 1)] for p in probabilities]
    return Toy([(k,) for k in range(len(probabilities))], table, [], {})


def row_in_state(k: int, reward: float) -> Rollout:
    """A given first token says which state it is; token 0 is chosen in it."""
    return Rollout((PROMPT,), (k, 0), k, k, response_mask=(False, True), reward=reward)


# ------------------------------------------------------------------ the clips of the ratio

CASES = EXACT["ppo_cases"]


def clipped(rows: list[dict[str, Any]], algorithm: PPO) -> tuple[Tensor, Any]:
    """d loss / d logp of each row, and what was reported. Advantage = score (V = 0); 0.05 was the probability before.

    The gradient of a row reaches the logit of the chosen token as d loss / d logp x (1 - p), over the number of rows.
    """
    new = [0.05 * row["ratio"] for row in rows]
    toy, old = states(new), states([0.05] * len(rows))
    engine = RecordingEngine(toy.policy(), old.policy(), critic=toy.critic())
    _, record = run_update([row_in_state(k, row["advantage"]) for k, row in enumerate(rows)], algorithm, engine)
    (first,), (second,) = engine.gradients
    assert torch.equal(first, second)  # two epochs; nothing moves here
    left = 1 - torch.tensor(new, dtype=torch.float64)
    return first[:, 0] * len(rows) / left, record


TWICE = PPO(group_size=1, whiten=False, epochs_per_batch=2)


@pytest.mark.parametrize("weighting", [sum_per_response, mean_per_token])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("ratios", ["down", "up"])
def test_each_ratio_and_advantage_has_its_loss_and_derivative(
    ratios: str, weighting: Any, dual_clip: float | None
) -> None:
    """A26, and the dual clip: for A < 0 the objective is at least 3 A. Outside the band is not yet clipped."""
    rows = [row for row in CASES["rows"] if (row["ratio"] > 1) == (ratios == "up")]
    expected = rows if dual_clip is None else [row["dual_clip_3"] for row in rows]
    algorithm = replace(TWICE, weighting=weighting, dual_clip=dual_clip)
    derivatives, record = clipped(rows, algorithm)
    assert_close(derivatives, [row["dloss_dlogp"] for row in expected])
    summary = record.summary()
    assert_close(summary["loss"], sum(row["loss"] for row in expected) / 6)
    assert summary["clip_fraction"] == {"down": 1 / 6, "up": 2 / 6}[ratios]
    assert summary["ratio/max"] == pytest.approx(max(row["ratio"] for row in rows))


def test_the_upper_clip_stands_apart_from_the_lower() -> None:
    rows = CASES["clip_higher_0.2_0.28"]
    derivatives, record = clipped(rows, replace(TWICE, clip_high=0.28))
    assert_close(derivatives, [row["dloss_dlogp"] for row in rows])
    assert_close(record.summary()["loss"], sum(row["loss"] for row in rows) / len(rows))
    assert record.summary()["clip_fraction"] == 0.5


def test_grpo_takes_the_dual_clip_too() -> None:
    """Ratio 3.5 with A = -1 (scores -1 and +1 of a group, no std): 3 A, and no gradient."""
    toy, old = states([0.175, 0.175]), states([0.05, 0.05])
    rows = [replace(row_in_state(k, reward), group=0) for k, reward in ((0, -1.0), (1, 1.0))]
    gradients = {}
    for dual_clip in (None, 3.0):
        algorithm = GRPO(group_size=2, scale_by_std=False, epochs_per_batch=2, dual_clip=dual_clip)
        engine = RecordingEngine(toy.policy(), old.policy())
        _, record = run_update(rows, algorithm, engine)
        assert_close(record.summary()["loss"], ((dual_clip or 3.5) - 1.2) / 2)
        gradients[dual_clip] = engine.gradients[0][0][:, 0]
    assert_close(gradients[None], [3.5 * (1 - 0.175) / 2, 0.0])
    assert_close(gradients[3.0], [0.0, 0.0])


# ------------------------------------------------------------------ the clip of the value

VALUES = EXACT["critic"]


@pytest.mark.parametrize(
    ("value_clip", "loss", "derivative"),
    [
        (None, "value_loss", "dvalue_loss_dvalue"),
        (VALUES["clip"], "clipped_value_loss", "dclipped_value_loss_dvalue"),
    ],
)
def test_each_value_has_its_loss_and_derivative(value_clip: float | None, loss: str, derivative: str) -> None:
    """The value of each state is its own number, so its gradient is that of its one row, over four rows."""
    rows = VALUES["rows"]
    toy = states([0.5] * len(rows))
    now, before = (toy.critic([row[key] for row in rows]) for key in ("value", "value_old"))
    engine = RecordingEngine(toy.policy(), critic=now, old_critic=before)
    algorithm = PPO(group_size=1, value_clip=value_clip)
    batch, record = run_update([row_in_state(k, row["return"]) for k, row in enumerate(rows)], algorithm, engine)
    assert batch.returns is not None
    assert_close(batch.returns[:, 2], [row["return"] for row in rows])
    ((head, bias),) = engine.of_critic
    assert_close(head[0] * len(rows), [row[derivative] for row in rows])
    assert_close(bias, [sum(row[derivative] for row in rows) / len(rows)])
    assert_close(record.summary()["value/loss"], sum(row[loss] for row in rows) / len(rows))


def test_the_explained_variance_is_that_of_the_values_at_rollout() -> None:
    """critic.explained_variance: 1 - Var(R - V)/Var(R) = 0.325; null where the returns do not vary."""
    case = VALUES["explained_variance"]
    toy = states([0.5] * 4)
    engine = RecordingEngine(toy.policy(), critic=toy.critic(case["values"]))
    for returns, expected in ((case["returns"], case["result"]), ([0.7] * 4, None)):
        rows = [row_in_state(k, score) for k, score in enumerate(returns)]
        _, record = run_update(rows, PPO(group_size=1), engine)
        summary = record.summary()
        if expected is None:
            assert summary["value/explained_variance"] is None
        else:
            assert_close(summary["value/explained_variance"], expected)
        assert_close(summary["value/mean"], sum(case["values"]) / 4)
        assert_close(summary["returns/mean"], sum(returns) / 4)


def test_the_critic_averages_tokens_whatever_the_policy_averages() -> None:
    """V = 0, scores 1 and 3 for responses of 1 and 3 tokens: loss (1/2 + 3 x 9/2)/4, at the root -(1 + 3)/4."""
    rows = [Rollout((PROMPT,), y, i, i, reward=float(len(y))) for i, y in enumerate([(0,), (1, 1, 0)])]
    for weighting in (sum_per_response, mean_per_token):
        engine = RecordingEngine(T2.policy(), critic=T2.critic())
        _, record = run_update(rows, PPO(group_size=1, weighting=weighting), engine)
        assert record.summary()["value/loss"] == pytest.approx(14 / 4)
        ((head, _),) = engine.of_critic
        assert_close(head[0], [-1.0, -3 / 4, -3 / 4])


# ------------------------------------------------------------------ whitening


def test_advantages_are_whitened_over_the_step_and_returns_are_not() -> None:
    """whitening.square: with V = 0 and lam 0 the advantages are the rewards by token, 1.2 to 2.0 over three rows.

    In three minibatches, so that none of them sees all nine.
    """
    x = EXACT["whitening"]["square"]
    rows = [
        Rollout((PROMPT,), (0, 0, 1), i, i, reward=r[2], steps=((0, r[0]), (1, r[1]))) for i, r in enumerate(x["x"])
    ]
    for minibatches in (1, 3):
        engine = RecordingEngine(T2.policy(), critic=T2.critic())
        batch, _ = run_update(rows, PPO(group_size=1, lam=0.0, minibatches=minibatches), engine)
        assert batch.advantages is not None and batch.returns is not None
        assert_close(batch.advantages[:, 1:], x["shift_mean_true"])
        assert_close(batch.returns[:, 1:], x["x"])


def test_the_critic_learns_the_same_with_and_without_whitening() -> None:
    values = [0.2, -0.4, 0.9]
    of_critic = [
        expected_update(T2, PPO(group_size=1, whiten=whiten), [0, 1], critic=T2.critic(values)).of_critic
        for whiten in (True, False)
    ]
    assert_close(of_critic[0], of_critic[1])
    assert float(of_critic[0].abs().max()) > 0.1


# ------------------------------------------------------------------ entropy


def _entropy_of_states(toy: Toy, table: Tensor, y: Response) -> Tensor:
    """The sum of -sum_a pi(a|s) log pi(a|s) over the states that y visits."""
    rows = [table[state].log_softmax(0) for state in toy.states(y)]
    return torch.stack([-(logp.exp() * logp).sum() for logp in rows]).sum()


@pytest.mark.parametrize("toy", [T1, T2])
def test_the_entropy_bonus_has_the_gradient_of_the_entropy_of_the_visited_states(toy: Toy) -> None:
    """E05. Coefficient 0.3; with all scores 0 nothing else is left."""
    silent = replace(toy, reward=dict.fromkeys(toy.responses, 0.0))
    expected = enumerated_gradient(toy, 1, lambda table, ys: -0.3 * _entropy_of_states(toy, table, ys[0]))
    for algorithm in (
        REINFORCE(group_size=1, baseline=no_baseline, entropy_bonus=0.3),
        RLOO(group_size=2, entropy_bonus=0.3),
        PPO(group_size=1, weighting=sum_per_response, entropy_bonus=0.3),
    ):
        group = [0] * algorithm.group_size
        actual = expected_update(silent, algorithm, group, critic=toy.critic()).gradient
        assert_close(actual, expected)


def test_e05_the_entropy_bonus_is_off_by_default_everywhere() -> None:
    for name in PRESETS:
        assert all("entropy" not in o.needs for o in build_algorithm(name, {}, 16).objectives), name


def test_e05_on_a_constant_score_the_bonus_raises_the_entropy_to_ln_2() -> None:
    """rloo, coefficient 0.1, all responses of T1 alike in score: the only force is the entropy's."""
    algorithm = build_algorithm("rloo", {"group_size": 4, "entropy_bonus": 0.1}, 16)
    policy = T1.policy([[1.5, -0.5], [2.0, 0.5], [-1.0, 1.0]])
    engine = Watched(local_engine(policy))
    batch = collate([replace(T1.rollout(y, 0, i), reward=1.0) for i, y in enumerate(T1.responses)], dtype=torch.float64)
    seen = []
    for step in range(1, 41):
        _, _, record = update(batch, algorithm, {}, engine, settings(), step, lambda _: 10.0)
        seen.append(record.summary()["entropy"])
    assert all(after > before for before, after in itertools.pairwise(seen))
    assert math.log(2) - 1e-4 < seen[-1] <= math.log(2) + 1e-12


# ------------------------------------------------------------------ what the last score weighs


def test_the_weight_of_the_score_at_the_first_token_is_reported() -> None:
    """0.9 x 0.5 for each step back: a response of 1 token 1, of 3 tokens 0.45^2; the mean of both."""
    rows = [Rollout((PROMPT,), y, i, i, reward=1.0) for i, y in enumerate([(0,), (1, 1, 0)])]
    algorithm = PPO(group_size=1, gamma=0.9, lam=0.5)
    batch: Batch = collate(rows, dtype=torch.float64)
    batch, _ = algorithm.credit(batch.replace(values_old=torch.zeros_like(batch.token_rewards)), {})
    assert batch.metrics["gae/score_weight"] == pytest.approx((1 + 0.45**2) / 2)
