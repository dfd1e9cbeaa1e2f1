"""Does it learn (E07)? One token, four candidates, a reward for one of them; and two controls with nothing to learn."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hotcold.algorithms.base import Algorithm
from hotcold.algorithms.baselines import greedy_baseline, leave_one_out_baseline, no_baseline
from hotcold.algorithms.expert_iteration import BestOfGroup, ExpertIteration, TopFraction
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.losses import ClippedLoss
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Rollout
from hotcold.engines.local import LocalEngine, Trainee
from tests.toy_policies import PROMPT, TablePolicy, run_update, tiny_llama

TARGET, PROMPTS, GROUP = 2, 2, 8
Reward = Callable[[int, np.random.Generator], float]


def target(token: int, random: np.random.Generator) -> float:
    return float(token == TARGET)


def constant(token: int, random: np.random.Generator) -> float:
    return 0.7


def coin(token: int, random: np.random.Generator) -> float:
    return float(random.random() < 0.5)


class Bandit:
    """Uniform at the start; a draw is the first token whose cumulative probability exceeds a uniform number."""

    def __init__(self, rate: float):
        self.policy = TablePolicy([[0.0] * 4], [()])
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=rate, weight_decay=0.0)
        self.engine = LocalEngine({"policy": Trainee(self.policy, optimizer, remember_start=True)}, 1.0)
        self.rate = rate

    def probabilities(self) -> list[float]:
        return self.policy.table[0].detach().softmax(0).tolist()

    def train(self, algorithm: Algorithm, reward: Reward, steps: int, seed: int = 0) -> float:
        """P(target) at the end."""
        for step in range(1, steps + 1):
            run_update(self._rollouts(reward, step, seed), algorithm, self.engine, step=step, rate=self.rate)
        return self.probabilities()[TARGET]

    def _rollouts(self, reward: Reward, step: int, seed: int) -> list[Rollout]:
        random = np.random.default_rng([seed, step])
        cumulative = np.cumsum(self.probabilities())
        greedy = reward(int(np.argmax(self.probabilities())), random)
        tokens = [min(int(np.searchsorted(cumulative, u, side="right")), 3) for u in random.random(PROMPTS * GROUP)]
        return [
            Rollout((PROMPT,), (token,), i // GROUP, i, reward=reward(token, random), greedy_reward=greedy)
            for i, token in enumerate(tokens)
        ]


LEARNERS: dict[str, Algorithm] = {
    "reinforce none": REINFORCE(baseline=no_baseline),
    "reinforce batch_mean": REINFORCE(),
    "reinforce leave_one_out": REINFORCE(baseline=leave_one_out_baseline),
    "reinforce greedy": REINFORCE(baseline=greedy_baseline),
    "rloo": RLOO(),
    "rloo clipped": RLOO(objective=ClippedLoss(), epochs_per_batch=2, minibatches=2),
    "grpo": GRPO(),
    "grpo without std": GRPO(scale_by_std=False),
    "grpo 2 epochs": GRPO(epochs_per_batch=2, minibatches=2),
    "expert_iteration threshold": ExpertIteration(),
    "expert_iteration best_of_group": ExpertIteration(keep_rule=BestOfGroup()),
    "expert_iteration top_fraction": ExpertIteration(keep_rule=TopFraction(0.25)),
}


@pytest.mark.parametrize("name", list(LEARNERS))
def test_every_algorithm_finds_the_target_within_60_steps(name: str) -> None:
    """From .25 to above .9; 2 prompts x 8 responses a step, Adam at 0.1."""
    bandit = Bandit(rate=0.1)
    assert bandit.probabilities()[TARGET] == 0.25
    assert bandit.train(LEARNERS[name], target, steps=60) > 0.9


def test_expert_iteration_from_the_starting_model_finds_it_in_one_batch() -> None:
    """Every batch starts from the uniform policy again, so one batch has to do: 60 epochs on it."""
    algorithm = ExpertIteration(from_starting=True, epochs_per_batch=60)
    first, third = Bandit(rate=0.1), Bandit(rate=0.1)
    assert first.train(algorithm, target, steps=1) > 0.9
    assert third.train(algorithm, target, steps=3) == pytest.approx(first.probabilities()[TARGET], abs=1e-12)


CENTRED: dict[str, Algorithm] = {
    "reinforce batch_mean": REINFORCE(),
    "reinforce leave_one_out": REINFORCE(baseline=leave_one_out_baseline),
    "reinforce greedy": REINFORCE(baseline=greedy_baseline),
    "rloo": RLOO(),
    "grpo": GRPO(),
    "grpo without std": GRPO(scale_by_std=False),
    "grpo 4 steps": GRPO(epochs_per_batch=2, minibatches=2),
    "expert_iteration best_of_group": ExpertIteration(keep_rule=BestOfGroup()),
}


@pytest.mark.parametrize("name", list(CENTRED))
def test_a_constant_reward_moves_no_bit(name: str) -> None:
    """Control A, on the table policy and on a model in float32."""
    bandit = Bandit(rate=0.1)
    bandit.train(CENTRED[name], constant, steps=3)
    assert torch.equal(bandit.policy.table, torch.zeros(1, 4, dtype=torch.float64))
    model = tiny_llama()
    start = copy.deepcopy(model.state_dict())
    engine = LocalEngine({"policy": Trainee(model, torch.optim.AdamW(model.parameters(), lr=0.1))}, 1.0)
    rows = [Rollout((1, 2), (3 + i, 4), i // 4, i, reward=0.7, greedy_reward=0.7) for i in range(8)]
    run_update(rows, CENTRED[name], engine, dtype=torch.float32, rate=0.1)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), start.values(), strict=True))


@pytest.mark.parametrize("name", ["reinforce none", "rloo", "grpo", "expert_iteration threshold"])
def test_a_coin_for_a_reward_teaches_nothing_on_average(name: str) -> None:
    """Control B: 20 seeds, 15 steps; the mean drift of the target's probability is within 2 standard errors of 0.

    The other candidates are held to 3: among 12 of them one beyond 2 would be chance.
    """
    ends: list[Any] = []
    for seed in range(20):
        bandit = Bandit(rate=0.02)
        bandit.train(LEARNERS[name], coin, steps=15, seed=seed)
        ends.append(bandit.probabilities())
    drift = np.array(ends) - 0.25
    assert float(np.abs(drift).max()) > 0.01  # it did move, each seed its own way
    error = drift.std(axis=0, ddof=1) / math.sqrt(len(drift))
    assert float(abs(drift[:, TARGET].mean()) / error[TARGET]) < 2
    assert bool((np.abs(drift.mean(axis=0)) < 3 * error).all())
