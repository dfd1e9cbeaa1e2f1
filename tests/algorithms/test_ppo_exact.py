"""PPO through the real update, exactly: without a critic's say, with an exact critic, and while one learns."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotcold.algorithms.base import Objective
from hotcold.algorithms.baselines import no_baseline
from hotcold.algorithms.kl import KLInReward
from hotcold.algorithms.ppo import PPO
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.batch import Batch, Rollout, collate
from hotcold.engines.base import Pass
from hotcold.engines.local import LocalEngine
from hotcold.equations import sum_per_response
from hotcold.models.critic import Critic
from hotcold.training.update import update
from tests.toy_engines import RecordingEngine, Watched, local_engine, settings
from tests.toy_policies import (
    EXACT,
    PROMPT,
    T1,
    T2,
    TOOL,
    Toy,
    assert_close,
    expected_update,
    ragged_rollouts,
    run_update,
    t2_rollouts,
    tiny_llama,
)

PLAIN = PPO(group_size=1, whiten=False, weighting=sum_per_response)
GRAD_J = torch.tensor(EXACT["T1"]["grad_J"], dtype=torch.float64)
STATE_VALUE = EXACT["T1"]["state_value"]


def llama_critic(policy: Any) -> Critic:
    """The product's critic on a copy of the policy's trunk."""
    critic = Critic(copy.deepcopy(policy.model), policy.config.hidden_size)
    critic.requires_grad_(True)
    return critic


# ------------------------------------------------------------------ without a critic's say it is REINFORCE


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("budget", [20, 10**6])
@pytest.mark.parametrize("model", ["table", "llama"])
def test_with_a_critic_at_zero_ppo_takes_the_step_of_reinforce_bit_for_bit(
    model: str, budget: int, optimizer: Any
) -> None:
    """V = 0, gamma = lam = 1, beta 0, no whitening, one update, sum per response, no norm clip."""
    ends = []
    for algorithm in (PLAIN, REINFORCE(group_size=1, baseline=no_baseline)):
        policy = T2.policy() if model == "table" else tiny_llama()
        critic = T2.critic() if model == "table" else llama_critic(policy)
        rows = t2_rollouts() if model == "table" else ragged_rollouts()
        dtype = torch.float64 if model == "table" else torch.float32
        engine = Watched(local_engine(policy, critic=critic, optimizer=optimizer))
        start = engine.parameters()
        run_update(rows, algorithm, engine, dtype=dtype, rate=0.01, tokens_per_microbatch=budget)
        ends.append(engine.parameters())
        assert not any(torch.equal(a, b) for a, b in zip(start, ends[-1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("rows", [1, 2])
def test_with_a_critic_at_zero_ppo_expects_grad_j(rows: int) -> None:
    assert_close(-expected_update(T1, PLAIN, list(range(rows)), critic=T1.critic()).gradient, GRAD_J)


# ------------------------------------------------------------------ several steps on a batch

MANY = PPO(group_size=4, lam=0.95, epochs_per_batch=4, minibatches=3)


def llama_engine() -> Watched:
    policy = tiny_llama()
    return Watched(local_engine(policy, tiny_llama(seed=1), llama_critic(policy)))


@pytest.mark.parametrize("kl", [None, KLInReward(0.1)])
@pytest.mark.parametrize("budget", [20, 10**6])
def test_the_ratio_of_the_first_minibatch_is_exactly_one(kl: Any, budget: int) -> None:
    """A25. With a KL in the reward log pi_old is read before credit, without one after it."""
    engine = llama_engine()
    algorithm = replace(MANY, kl=kl)
    run_update(ragged_rollouts(), algorithm, engine, dtype=torch.float32, rate=0.05, tokens_per_microbatch=budget)
    assert engine.num_steps == {"policy": 12, "critic": 12}
    gaps, clipped = {}, {}
    for step, batch, done in engine.passes:
        assert done.logp is not None and done.logp_old is not None
        gap = (done.logp - done.logp_old).exp().sub(1).abs()[batch.trained]
        gaps[step] = max(gaps.get(step, 0.0), float(gap.max()))
        clipped[step] = clipped.get(step, 0.0) + float(done.metrics["clip_fraction"][batch.trained].sum())
    assert gaps[0] == 0.0 and clipped[0] == 0.0
    assert gaps[1] > 1e-3 and max(clipped.values()) > 0


def test_the_clip_fraction_of_a_large_rate_is_that_of_a_recount() -> None:
    """E01: 4 epochs; a token counts where A > 0 and the ratio is above 1.2, or A < 0 and it is below 0.8."""
    engine = llama_engine()
    algorithm = replace(MANY, minibatches=1)
    _, record = run_update(ragged_rollouts(), algorithm, engine, dtype=torch.float32, rate=0.05)
    count, total = 0, 0
    for _, batch, done in engine.passes:
        assert done.logp is not None and done.logp_old is not None and batch.advantages is not None
        ratio, A = (done.logp - done.logp_old).exp()[batch.trained], batch.advantages[batch.trained]
        count += int(((A > 0) & (ratio > 1.2)).sum() + ((A < 0) & (ratio < 0.8)).sum())
        total += len(ratio)
    assert count > 0
    assert record.summary()["clip_fraction"] == pytest.approx(count / total, abs=1e-7)


@pytest.mark.parametrize("lam", [0.9, 1.0])
def test_a_critic_that_learns_changes_the_policys_run(lam: float) -> None:
    """The first step is the same: the policy is trained on the values of the rollout."""
    algorithm = replace(PLAIN, lam=lam)
    runs = []
    for rate_of_critic in (0.0, 0.5):
        policy = T2.policy()
        engine = Watched(local_engine(policy, critic=T2.critic()))
        tables = []
        rates = {"policy": 0.1, "critic": rate_of_critic}
        for step in (1, 2, 3):
            batch = collate(t2_rollouts(), dtype=torch.float64)
            update(batch, algorithm, {}, engine, settings(), step, lambda o, rates=rates: rates[o.model])
            tables.append(policy.table.detach().clone())
        runs.append(tables)
    assert torch.equal(runs[0][0], runs[1][0])
    assert float((runs[0][1] - runs[1][1]).abs().max()) > 1e-4
    assert float((runs[0][2] - runs[1][2]).abs().max()) > 1e-4


# ------------------------------------------------------------------ GAE


def credited(rewards: list[float], values: list[float], gamma: float, lam: float, **changes: Any) -> Batch:
    """One response with a reward at each token; `values` of the states in which they were chosen."""
    steps = tuple(enumerate(rewards[:-1]))
    row = Rollout((PROMPT,), tuple(range(len(rewards))), 0, 0, reward=rewards[-1], steps=steps)
    batch = collate([row], dtype=torch.float64)
    batch = batch.replace(values_old=torch.tensor([[7.0, *values]], dtype=torch.float64))
    algorithm = PPO(group_size=1, whiten=False, gamma=gamma, lam=lam, **changes)
    return algorithm.credit(batch, {})[0]


@pytest.mark.parametrize("case", EXACT["gae"]["cases"])
def test_credit_has_the_reference_advantages_and_returns(case: dict[str, Any]) -> None:
    """A04."""
    batch = credited(case["token_rewards"], case["values"], case["gamma"], case["lam"])
    assert batch.advantages is not None and batch.returns is not None
    assert_close(batch.advantages[0], [0.0, *case["advantages"]])
    assert_close(batch.returns[0], [0.0, *case["returns"]])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_lam_0_is_the_td_error_and_lam_1_reward_to_go_minus_the_value(gamma: float) -> None:
    """By plain loops, over rows of different lengths with gaps."""
    random = torch.Generator().manual_seed(3)
    rows = [replace(r, steps=((0, 0.5), (2, -0.25))) for r in ragged_rollouts()]
    batch = collate(rows, dtype=torch.float64)
    values = torch.rand(batch.tokens.shape, generator=random, dtype=torch.float64)
    for lam in (0.0, 1.0):
        algorithm = PPO(whiten=False, gamma=gamma, lam=lam)
        out, _ = algorithm.credit(batch.replace(values_old=values), {})
        assert out.advantages is not None and out.returns is not None
        for i in range(len(batch)):
            at = batch.response_mask[i].nonzero().flatten().tolist()
            r, v = batch.token_rewards[i].tolist(), values[i].tolist()
            for n, t in enumerate(at):
                to_go = sum(gamma ** (k - n) * r[at[k]] for k in range(n, len(at)))
                next_value = v[at[n + 1]] if n + 1 < len(at) else 0.0
                expected = r[t] + gamma * next_value - v[t] if lam == 0 else to_go - v[t]
                assert_close(out.advantages[i, t], expected)
                assert_close(out.returns[i, t], expected + v[t])
        assert bool((out.advantages[~batch.response_mask] == 0).all())


def test_the_critics_own_lam_makes_its_returns_and_leaves_the_advantages() -> None:
    """r = (0, 0, 1), V = (.2, .4, .6). TD errors .2, .2, .4; from .95: .4, .58, .751; in full .8, .6, .4.

    Returns are V plus those of the critic's lam: 0: (.4, .6, 1); .95: (.951, .98, 1); 1: (1, 1, 1).
    """
    advantages = {0.0: [0.2, 0.2, 0.4], 0.95: [0.751, 0.58, 0.4], 1.0: [0.8, 0.6, 0.4]}
    returns = {0.0: [0.4, 0.6, 1.0], 0.95: [0.951, 0.98, 1.0], 1.0: [1.0, 1.0, 1.0]}
    for lam in advantages:
        for of_critic in (None, *returns):
            batch = credited([0, 0, 1], [0.2, 0.4, 0.6], 1.0, lam, critic_lam=of_critic)
            assert batch.advantages is not None and batch.returns is not None
            assert_close(batch.advantages[0, 1:], advantages[lam])
            assert_close(batch.returns[0, 1:], returns[lam if of_critic is None else of_critic])


def test_gae_runs_on_from_row_to_row_of_an_episode() -> None:
    """T1's (1, 0) in two rows: the first is worth what the second state is."""
    rows = [
        Rollout((PROMPT,), (1,), 0, 0, reward=0.0),
        Rollout((PROMPT, 1, TOOL), (0,), 0, 0, reward=0.5),
        Rollout((PROMPT,), (0,), 0, 1, reward=0.25),  # another episode that ends after one token
    ]
    engine = RecordingEngine(T1.policy(), critic=T1.critic([0.3, 0.1, 0.7]))
    for lam, first in ((0.0, 0.7 - 0.3), (0.5, (0.7 - 0.3) + 0.5 * (0.5 - 0.7)), (1.0, 0.5 - 0.3)):
        batch, _ = run_update(rows, replace(PLAIN, lam=lam), engine)
        assert batch.advantages is not None
        assert_close(batch.advantages[batch.trained], [first, 0.5 - 0.7, 0.25 - 0.3])


@pytest.mark.parametrize("garbage", [100.0, float("nan"), 1e9])
@pytest.mark.parametrize("place", ["padding", "tool"])
def test_a05_what_the_critic_says_outside_the_mask_reaches_nothing(garbage: float, place: str) -> None:
    """Mask [1, 1, 0], r = [0, 1, 0], V = [0, 0, garbage], lam .95: A = [.95, 1, 0], returns [.95, 1, 0].

    The critic itself says so in the state after the second token, and the stored column holds it too.
    """
    toy = Toy([(), (1,), (1, 1)], T2.logits, [(1, 1)], {(1, 1): 1.0})
    rows = [Rollout((PROMPT,), (1, 1, TOOL), 0, 0, response_mask=(True, True, False), reward=1.0)]
    if place == "padding":
        rows = [Rollout((PROMPT,), (1, 1), 0, 0, reward=1.0)]
    rows.append(Rollout((PROMPT, PROMPT), (TOOL, TOOL), 0, 1, response_mask=(False, False), reward=0.0))  # for width
    critic = toy.critic([0.0, 0.0, 1.0])
    critic.trunk.units.data[2] = garbage
    engine = RecordingEngine(toy.policy(), critic=critic)
    algorithm = PPO(group_size=1, whiten=False, lam=0.95)
    batch, record = run_update(rows, algorithm, engine)
    poisoned = collate(rows, dtype=torch.float64)
    column = torch.where(poisoned.response_mask, 0.0, torch.tensor(garbage, dtype=torch.float64))
    poisoned = poisoned.replace(values_old=column)
    for out in (batch, algorithm.credit(poisoned, {})[0]):
        assert out.advantages is not None and out.returns is not None
        assert_close(out.advantages[0, 1:], [0.95, 1.0, 0.0])
        assert_close(out.returns[0, 1:], [0.95, 1.0, 0.0])
    summary = record.summary()
    assert summary["optimizer_steps/nonfinite"] == 0
    assert summary["value/loss"] == pytest.approx((0.95**2 + 1) / 4, abs=1e-12)  # half the square, mean of two tokens
    ((head, _),) = engine.of_critic
    assert_close(head[0], [-0.95 / 2, -1 / 2, 0.0])


# ------------------------------------------------------------------ an exact critic


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_with_an_exact_critic_the_mean_advantage_is_the_true_one(lam: float) -> None:
    """T1.advantage: A(s, a) = Q - V, the mean over the responses that choose a in s."""
    engine = RecordingEngine(T1.policy(), critic=T1.critic(STATE_VALUE))
    total, mass = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    for y, probability in T1.probabilities().items():
        batch, _ = run_update([T1.rollout(y, 0, 0)], replace(PLAIN, lam=lam), engine)
        assert batch.advantages is not None
        for state, token, A in zip(T1.states(y), y, batch.advantages[0, 1:].tolist(), strict=True):
            total[state, token] += probability * A
            mass[state, token] += probability
    assert_close(total / mass, EXACT["T1"]["advantage"])


@pytest.mark.parametrize(("lam", "key"), [(0.0, "exact_advantage"), (1.0, "state_value"), (0.5, None)])
def test_with_an_exact_critic_ppo_expects_grad_j_with_less_variance(lam: float, key: str | None) -> None:
    """baselines_on_T1: lam 1 multiplies token t by R - V(s_t), lam 0 by A(s_t, y_t)."""
    actual = expected_update(T1, replace(PLAIN, lam=lam), [0], critic=T1.critic(STATE_VALUE))
    assert_close(-actual.gradient, GRAD_J)
    if key is not None:
        variance = actual.mean_square - float(actual.gradient.square().sum())
        assert_close(variance, EXACT["baselines_on_T1"][key]["trace_variance"])
    assert_close(actual.of_critic, [0.0, 0.0, 0.0])  # it is right already


def test_any_critic_leaves_grad_j_at_lam_1_and_a_wrong_one_bends_it_below() -> None:
    wrong = [0.4, -2.0, 3.0]
    exact = -expected_update(T1, PLAIN, [0], critic=T1.critic(wrong)).gradient
    assert_close(exact, GRAD_J)
    bent = -expected_update(T1, replace(PLAIN, lam=0.0), [0], critic=T1.critic(wrong)).gradient
    assert float((bent - GRAD_J).abs().max()) > 0.1


# ------------------------------------------------------------------ warm-up


@dataclass(frozen=True)
class Enumerating:
    """A local engine for batches with every response once: each row's loss counts by its probability."""

    engine: LocalEngine
    share: Tensor  # [episodes], probability times their number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def backward(self, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
        return self.engine.backward(batch, weights * self.share[batch.episode][:, None], objective)


def warmed_up(algorithm: PPO, steps: int) -> tuple[nn.Module, Critic]:
    """T1's policy and a critic from zero after `steps` updates on all responses, at a rate of 1 for both."""
    policy, critic = T1.policy(), T1.critic()
    share = 4 * torch.tensor(list(T1.probabilities().values()), dtype=torch.float64)
    engine = Enumerating(local_engine(policy, critic=critic), share)
    batch = collate([T1.rollout(y, 0, i) for i, y in enumerate(T1.responses)], dtype=torch.float64)
    for step in range(1, steps + 1):
        update(batch, algorithm, {}, engine, settings(), step, lambda _: 1.0)
    return policy, critic


@pytest.mark.parametrize("of_critic", [None, 0.5, 0.0])
def test_warming_up_on_a_fixed_policy_finds_its_value(of_critic: float | None) -> None:
    """V(root) = J = 0.97543557, from the scores (lam 1) and from the critic's own estimates (lam 0.5, 0)."""
    steps = 150
    algorithm = PPO(group_size=4, critic_lam=of_critic, critic_warmup=steps, weighting=sum_per_response)
    policy, critic = warmed_up(algorithm, steps)
    values = (critic.head.weight[0] + critic.head.bias).tolist()
    assert values[0] == pytest.approx(0.97543557, abs=1e-6)
    assert values == pytest.approx(STATE_VALUE, abs=1e-6)
    assert torch.equal(policy.table, T1.policy().table)
    policy, _ = warmed_up(replace(algorithm, critic_warmup=2), 3)  # and the step after it moves
    assert float((policy.table - T1.policy().table).detach().abs().max()) > 0.1


def test_while_the_critic_warms_up_the_policy_has_no_numbers_of_its_own() -> None:
    algorithm = PPO(group_size=1, critic_warmup=2)
    counts = []
    for step in (1, 2, 3):
        engine = RecordingEngine(T2.policy(), critic=T2.critic())
        _, record = run_update(t2_rollouts(), algorithm, engine, step=step)
        counts.append((len(engine.gradients), len(engine.of_critic)))
        seen = record.summary()
        assert (seen["optimizer_steps"], seen["loss"] is None) == ((None, True) if step < 3 else (1, False))
        assert seen["value/optimizer_steps"] == 1
    assert counts == [(0, 1), (0, 1), (1, 1)]


def test_responses_enumerated_so_have_their_expected_gradient() -> None:
    """Guard on the warm-up: with the policy in training, one step at rate 1 is grad J."""
    policy, _ = warmed_up(replace(PLAIN, group_size=4), 1)
    assert_close(policy.table.detach() - T1.policy().table.detach(), GRAD_J)
