"""Credit and keeping by hand: groups in any order, lost scores, rows of one episode, keep rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hotcold.algorithms.base import Algorithm, Forward
from hotcold.algorithms.baselines import (
    batch_mean_baseline,
    episodes_in_group,
    greedy_baseline,
    group_mean_baseline,
    leave_one_out_baseline,
    no_baseline,
)
from hotcold.algorithms.expert_iteration import BestOfGroup, ExpertIteration, Threshold, TopFraction
from hotcold.algorithms.grpo import GRPO, varies_in_group
from hotcold.algorithms.kl import ExactKL, KLInLoss, KLInReward, complete_names, kl_from_names, with_kl
from hotcold.algorithms.losses import TruncatedISLoss, log_ratio
from hotcold.algorithms.ppo import PPO
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Batch, Rollout, collate
from hotcold.equations import kl_k3
from hotcold.errors import InputError
from hotcold.training.collect import kept
from tests.toy_policies import EXACT, assert_close


def batch_of(rewards: list[float | None], group: list[int] | None = None) -> Batch:
    """One row of two tokens for each reward."""
    group = group or [0] * len(rewards)
    rows = [
        Rollout((1,), (3, 4), g, episode, reward=r) for episode, (r, g) in enumerate(zip(rewards, group, strict=True))
    ]
    return collate(rows, dtype=torch.float64)


def advantages(algorithm: Algorithm, batch: Batch) -> dict[int, float]:
    """By episode: the advantage of the rows that take part, which is the same at both of their tokens."""
    batch = batch.select(kept(batch, algorithm))
    credited, _ = algorithm.credit(batch, algorithm.state())
    assert credited.advantages is not None
    assert torch.equal(credited.advantages[:, 1], credited.advantages[:, 2])
    assert bool((credited.advantages[:, 0] == 0).all())
    return dict(zip(credited.episode.tolist(), credited.advantages[:, 1].tolist(), strict=True))


GROUP_MEAN = GRPO(group_size=2, scale_by_std=False)

# ------------------------------------------------------------------ A11


INTERLEAVED = EXACT["group_advantages"]["two_groups_interleaved"]


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        (GROUP_MEAN, "minus_group_mean"),
        (RLOO(group_size=4), "minus_leave_one_out"),
        (REINFORCE(baseline=leave_one_out_baseline), "minus_leave_one_out"),
    ],
)
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [5, 2, 7, 0, 1, 6, 3, 4]])
def test_groups_are_formed_by_prompt_wherever_their_rows_stand(algorithm: Any, key: str, order: list[int]) -> None:
    """A11: prompts 0 1 0 1 1 0 1 0, rewards 1 0 1 0 1 0 0 1; a permutation of rows permutes the answer."""
    batch = batch_of(INTERLEAVED["rewards"], INTERLEAVED["group"]).select(order)
    actual = advantages(algorithm, batch)
    assert list(actual) == order
    assert_close([actual[e] for e in range(8)], INTERLEAVED[key])


def test_the_batch_mean_is_over_all_prompts() -> None:
    batch = batch_of(INTERLEAVED["rewards"], INTERLEAVED["group"])
    actual = advantages(REINFORCE(baseline=batch_mean_baseline), batch)
    assert list(actual.values()) == [0.5, -0.5, 0.5, -0.5, 0.5, -0.5, -0.5, 0.5]


# ------------------------------------------------------------------ A12


@pytest.mark.parametrize("entry", EXACT["group_advantages"]["one_group"])
def test_one_group_has_the_reference_numbers(entry: dict[str, Any]) -> None:
    """A12: three 1s and five 0s, and {1, 1, 2}."""
    batch = batch_of(entry["rewards"])
    for algorithm, key in (
        (RLOO(), "minus_leave_one_out"),
        (GROUP_MEAN, "minus_group_mean"),
        (GRPO(), "over_sample_std"),
    ):
        assert_close(list(advantages(algorithm, batch).values()), entry[key])


def test_scaling_by_the_std_removes_the_scale_of_the_score() -> None:
    """A12: r against 2 r + 5."""
    rewards = [1.0, 0.25, 0.0, 0.0]
    scaled = [2 * r + 5 for r in rewards]
    a, b = advantages(GRPO(), batch_of(list(rewards))), advantages(GRPO(), batch_of(list(scaled)))
    assert_close(list(b.values()), list(a.values()))
    a, b = advantages(GROUP_MEAN, batch_of(list(rewards))), advantages(GROUP_MEAN, batch_of(list(scaled)))
    assert_close(list(b.values()), [2 * v for v in a.values()])


@pytest.mark.parametrize(
    "make",
    [
        lambda: RLOO(group_size=1),
        lambda: GRPO(group_size=1),
        lambda: GRPO(group_size=1, scale_by_std=False),
        lambda: REINFORCE(group_size=1, baseline=leave_one_out_baseline),
        lambda: REINFORCE(group_size=1, baseline=group_mean_baseline),
        lambda: ExpertIteration(group_size=1, keep_rule=BestOfGroup()),
        lambda: REINFORCE(group_size=0, baseline=no_baseline),
    ],
)
def test_a_group_of_one_is_an_error_that_names_the_group_size(make: Any) -> None:
    """A12."""
    with pytest.raises(InputError, match="group_size="):
        make()


def test_a_group_of_one_is_fine_without_a_group_baseline() -> None:
    for baseline in (no_baseline, batch_mean_baseline, greedy_baseline):
        assert REINFORCE(group_size=1, baseline=baseline).plan.group_size == 1


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 7.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_have_advantage_exactly_zero(reward: float, dtype: torch.dtype) -> None:
    """Not a rounding error, and not one divided by another: nothing may move on a constant score."""
    rows = [Rollout((1,), (3, 4), i // 7, i, reward=reward) for i in range(14)]
    algorithms = [RLOO(), GRPO(), GROUP_MEAN, REINFORCE(), REINFORCE(baseline=leave_one_out_baseline)]
    for algorithm in algorithms:
        credited, _ = algorithm.credit(collate(rows, dtype=dtype), {})
        assert credited.advantages is not None and bool((credited.advantages == 0).all()), algorithm


# ------------------------------------------------------------------ scores that are missing


def test_a_response_without_a_score_leaves_the_statistics_of_its_group() -> None:
    """[1, None, 0, 1]: mean 2/3, others' means 1/2, 1, 1/2."""
    batch = batch_of([1.0, None, 0.0, 1.0])
    third = 1 / 3
    assert advantages(GROUP_MEAN, batch) == pytest.approx({0: third, 2: -2 * third, 3: third})
    assert advantages(RLOO(), batch) == pytest.approx({0: 0.5, 2: -1.0, 3: 0.5})
    # sample std of {1, 0, 1}: sqrt((1/9 + 4/9 + 1/9)/2) = 1/sqrt 3
    root = math.sqrt(3)
    assert advantages(GRPO(), batch) == pytest.approx({0: root / 3, 2: -2 * root / 3, 3: root / 3})
    assert advantages(REINFORCE(baseline=batch_mean_baseline), batch) == pytest.approx(
        {0: third, 2: -2 * third, 3: third}
    )


def test_the_lone_survivor_of_a_group_has_nobody_to_be_compared_with() -> None:
    """Group 0 keeps two of three, group 1 one of three: the one is dropped where the others are the baseline."""
    batch = batch_of([1.0, None, 0.0, None, 1.0, None], [0, 0, 0, 1, 1, 1])
    assert advantages(RLOO(), batch) == {0: 1.0, 2: -1.0}
    assert advantages(REINFORCE(baseline=leave_one_out_baseline), batch) == {0: 1.0, 2: -1.0}
    assert advantages(GROUP_MEAN, batch)[4] == 0.0 and advantages(GRPO(), batch)[4] == 0.0


def test_without_a_group_baseline_no_row_is_turned_away() -> None:
    """A lost score is not the algorithm's to judge: the loop drops the row."""
    assert REINFORCE().keep(batch_of([1.0, None], [0, 1])).tolist() == [True, True]


def test_only_rows_that_take_part_say_whether_scores_differ() -> None:
    """Groups: 1 and 1, and a 0 that was dropped; 1 and 0; 2 and a row without a score that is kept nevertheless."""
    batch = batch_of([1.0, 1.0, 0.0, 1.0, 0.0, 2.0, None], [0, 0, 0, 1, 1, 2, 2])
    batch = batch.replace(keep=torch.tensor([True, True, False, True, True, True, True]))
    assert varies_in_group(batch).tolist() == [False, False, False, True, True, False, False]


def test_a_step_without_any_score_keeps_nothing() -> None:
    batch = batch_of([None, None, None])
    for algorithm in (RLOO(), GRPO(), REINFORCE(), ExpertIteration(), ExpertIteration(keep_rule=BestOfGroup())):
        assert not kept(batch, algorithm).any(), algorithm
    assert not kept(batch, ExpertIteration(keep_rule=TopFraction(0.5))).any()


def test_a_prompt_whose_greedy_response_has_no_score_is_dropped() -> None:
    rows = [Rollout((1,), (3, 4), g, g, reward=1.0, greedy_reward=b) for g, b in ((0, 0.25), (1, None))]
    algorithm = REINFORCE(group_size=1, baseline=greedy_baseline)
    assert algorithm.plan.greedy and algorithm.reads == {"greedy_rewards"}
    assert advantages(algorithm, collate(rows, dtype=torch.float64)) == {0: 0.75}


# ------------------------------------------------------------------ gaps, several rows in an episode


def test_advantages_are_zero_on_tool_tokens_and_padding() -> None:
    rows = [
        Rollout((1,), (3, 9, 4), 0, 0, reward=1.0, response_mask=(True, False, True)),
        Rollout((1, 1), (3,), 0, 1, reward=0.0),
    ]
    for algorithm in (RLOO(), GROUP_MEAN, REINFORCE(), ExpertIteration()):
        credited, _ = algorithm.credit(collate(rows, dtype=torch.float64), {})
        assert credited.advantages is not None
        assert (credited.advantages != 0).int().tolist() == [[0, 1, 0, 1], [0, 0, 1, 0]], algorithm


def test_an_episode_of_several_rows_counts_once_in_the_baseline() -> None:
    """Episodes: A in rows 0 and 2 (0.5 + 1.5 = 2), B in row 1 (0), C in row 3 (1).

    Group mean (2 + 0 + 1)/3 = 1, not a mean over four rows; others' means 0.5, 1.5, 1.
    """
    rows = [
        Rollout((1,), (3, 4), 0, 10, reward=0.5),
        Rollout((1,), (3, 4), 0, 11, reward=0.0),
        Rollout((1,), (3, 4), 0, 10, reward=1.5),
        Rollout((1,), (3, 4), 0, 12, reward=1.0),
    ]
    batch = collate(rows, dtype=torch.float64)
    assert group_mean_baseline.rows(batch).tolist() == [1, 1, 1, 1]
    assert batch_mean_baseline.rows(batch).tolist() == [1, 1, 1, 1]
    assert leave_one_out_baseline.rows(batch).tolist() == [0.5, 1.5, 0.5, 1.0]
    assert episodes_in_group(batch).tolist() == [3, 3, 3, 3]
    mean, _ = GROUP_MEAN.credit(batch, {})
    # reward-to-go minus the baseline: the episode's second row has 1.5 still to come
    assert mean.advantages is not None and mean.advantages[:, 2].tolist() == [1, -1, 0.5, 0]
    rloo, _ = RLOO().credit(batch, {})  # row 0 is followed by row 2 of its episode: 0.5 + 1.5 - 0.5
    assert rloo.advantages is not None and rloo.advantages[:, 2].tolist() == [1.5, -1.5, 1.0, 0.0]
    std, _ = GRPO().credit(batch, {})  # sample std of {2, 0, 1} is 1
    assert std.advantages is not None and std.advantages[:, 2].tolist() == [1, -1, 0.5, 0]


def test_two_rows_of_one_episode_are_no_group_of_two() -> None:
    rows = [Rollout((1,), (3, 4), 0, 10, reward=0.5), Rollout((1,), (3, 4), 0, 10, reward=1.5)]
    assert not kept(collate(rows), RLOO(group_size=2)).any()


def test_reward_to_go_leaves_out_what_came_before() -> None:
    """Rewards by token (0.5, 0.25 + 1); totals 1.75 and 0; leave-one-out baselines 0 and 1.75."""
    rows = [
        Rollout((1,), (3, 4), 0, 0, reward=1.0, steps=((0, 0.5), (1, 0.25))),
        Rollout((1,), (3, 4), 0, 1, reward=0.0),
    ]
    credited, _ = RLOO(group_size=2).credit(collate(rows, dtype=torch.float64), {})
    assert credited.advantages is not None
    assert credited.advantages.tolist() == [[0, 1.75, 1.25], [0, -1.75, -1.75]]


# ------------------------------------------------------------------ expert iteration


def keeps(rule: Any, rewards: list[float | None], group: list[int] | None = None) -> list[int]:
    batch = batch_of(rewards, group)
    return kept(batch, ExpertIteration(group_size=2, keep_rule=rule)).int().tolist()


def test_a_threshold_is_reached_by_equality() -> None:
    assert keeps(Threshold(1.0), [1.0, 0.99, 2.0, None]) == [1, 0, 1, 0]
    assert keeps(Threshold(0.0), [0.0, -0.1, None]) == [1, 0, 0]


def test_best_of_group_keeps_ties_and_learns_nothing_from_equal_scores() -> None:
    group = [0, 1, 0, 1, 0, 1]
    assert keeps(BestOfGroup(), [0.5, 1.0, 0.5, 1.0, 0.0, 1.0], group) == [1, 0, 1, 0, 0, 0]
    # an unscored response is neither best nor worst, even where all scores are negative
    assert keeps(BestOfGroup(), [-2.0, 1.0, None, 0.0, -1.0, None], group) == [0, 1, 0, 0, 1, 0]


def test_the_top_fraction_is_rounded_up_and_keeps_ties() -> None:
    assert keeps(TopFraction(0.25), [3.0, 1.0, 2.0, 0.0, -1.0]) == [1, 0, 1, 0, 0]  # 1.25 of 5: two
    assert keeps(TopFraction(0.2), [3.0, 3.0, 2.0, 0.0, -1.0]) == [1, 1, 0, 0, 0]  # one, and its equal
    assert keeps(TopFraction(1.0), [3.0, 1.0]) == [1, 1]
    assert keeps(TopFraction(0.5), [-3.0, None, -1.0, None]) == [0, 0, 1, 0]  # of two scored ones, one


def test_a_keep_rule_itself_compares_scored_responses_only() -> None:
    """Lost scores would be 0, the best of these: not kept as the best, not counted in the fraction of -1 and -2."""
    assert BestOfGroup()(batch_of([0.0, -1.0, None])).tolist() == [True, False, False]
    assert TopFraction(0.25)(batch_of([-1.0, -2.0, None]))[:2].tolist() == [True, False]


def test_keep_rules_out_of_range_are_refused() -> None:
    for fraction in (0.0, 1.5, -0.1, math.nan):
        with pytest.raises(InputError, match="fraction="):
            TopFraction(fraction)
    with pytest.raises(InputError, match="threshold is NaN"):
        Threshold(math.nan)


def test_expert_iteration_gives_every_kept_token_advantage_one() -> None:
    assert advantages(ExpertIteration(), batch_of([1.0, 0.0, 3.0])) == {0: 1.0, 2: 1.0}


def test_only_expert_iteration_may_take_many_steps_with_policy_gradient() -> None:
    assert [o.on_policy for o in ExpertIteration().objectives] == [False]
    assert [o.on_policy for a in (RLOO(), REINFORCE(), GRPO()) for o in a.objectives] == [True] * 3
    assert [o.restart for o in ExpertIteration(from_starting=True).objectives] == [True]
    assert [o.restart for o in ExpertIteration().objectives] == [False]


def test_credit_changes_nothing_but_advantages_and_returns() -> None:
    batch = batch_of([1.0, 0.0, 3.0])
    for algorithm in (RLOO(), GRPO(), REINFORCE(), ExpertIteration()):
        credited, state = algorithm.credit(batch, {"a": 1.0})
        assert state == {"a": 1.0}
        assert torch.equal(credited.token_rewards, batch.token_rewards) and credited.tokens is batch.tokens


# ------------------------------------------------------------------ rows without a score, in a batch that has them


def with_a_lost_score() -> Batch:
    """One episode: a first row without a score, a second one with 1. Tokens 1 and 2 of each are the response."""
    rows = [Rollout((1,), (3, 4), 0, 7, reward=r) for r in (None, 1.0)]
    number = torch.tensor([[8.0, 0.5, 0.25], [8.0, 2.0, 1.0]], dtype=torch.float64)
    batch = collate(rows, dtype=torch.float64)
    return batch.replace(logp_old=number, logp_ref=torch.zeros_like(number), kl_old=number, values_old=number)


def test_a_kl_is_measured_on_trained_tokens_and_is_a_constant() -> None:
    batch = with_a_lost_score()
    batch = batch.replace(logp_old=batch.logp_old.requires_grad_(), kl_old=batch.kl_old.requires_grad_())
    for term in (KLInReward(0.5), KLInLoss(0.5), ExactKL(0.5)):
        kl = term.measured(batch)
        assert kl.tolist() == [[0, 0, 0], [0, 2, 1]] and not kl.requires_grad


def test_what_is_not_known_is_not_measured() -> None:
    batch = with_a_lost_score()
    assert KLInLoss(0.5).measured(batch.replace(logp_old=None)) is None
    assert KLInLoss(0.5).measured(batch.replace(logp_ref=None)) is None
    assert ExactKL(0.5).measured(batch.replace(kl_old=None)) is None


def test_a_row_without_a_score_is_charged_nothing() -> None:
    """Beta 0.5. In the reward: 1 - 0.5 x 1 at the end, -0.5 x 2 before. Exact: a token pays for the state after it."""
    charged, _ = with_kl(KLInReward(0.5), with_a_lost_score(), {})
    assert charged.token_rewards.tolist() == [[0, 0, 0], [0, -1.0, 0.5]]
    charged, _ = with_kl(ExactKL(0.5), with_a_lost_score(), {})
    assert charged.token_rewards.tolist() == [[0, 0, 0], [0, -0.5, 1.0]]


def test_k3_times_the_ratio_sends_no_gradient_from_outside_the_response() -> None:
    logp = torch.tensor([[0.0, -1.0, -1.0]] * 2, dtype=torch.float64).requires_grad_()
    batch = with_a_lost_score()
    batch = batch.replace(logp_old=torch.where(batch.trained, -1.0, math.nan).double())
    loss = KLInLoss(0.5, kl_k3, times_ratio=True).loss(Forward(logp=logp), batch)
    torch.where(batch.trained, loss, 0.0).sum().backward()
    # d/dlogp r (exp(-d) - 1 + d) at r = 1, d = -1: (e - 2) + (1 - e) = -1
    assert_close(logp.grad, [[0, 0, 0], [0, -1, -1]])


def test_a_row_without_a_score_has_no_advantage_and_no_return_in_ppo() -> None:
    """lam 1: A = 1 - V, return 1, at both tokens of the scored row; its values are 2 and 1."""
    credited, _ = PPO(whiten=False).credit(with_a_lost_score(), {})
    assert credited.returns.tolist() == [[0, 0, 0], [0, 1, 1]]
    assert credited.advantages.tolist() == [[0, 1, 1], [0, -1, 0]]  # the first row leads to the second, which earns 1


def test_the_weight_of_a_score_at_the_first_token_is_over_rows_that_are_trained() -> None:
    """lam 0.5 and two tokens: a half; the row without a score has none."""
    credited, _ = PPO(lam=0.5).credit(with_a_lost_score(), {})
    assert credited.metrics["gae/score_weight"] == 0.5


def test_the_log_ratio_is_zero_outside_the_trained_tokens() -> None:
    batch = with_a_lost_score()
    assert log_ratio(torch.full((2, 3), 3.0), batch).tolist() == [[0, 0, 0], [0, 1, 2]]


def test_truncated_ratios_are_counted_outside_the_band() -> None:
    """Bounds 0.8 and 1.28. A ratio at a bound is not truncated."""
    batch = batch_of([1.0])
    zeros = torch.zeros(1, 3, dtype=torch.float64)
    batch = batch.replace(advantages=zeros, logp_old=zeros)
    for ratios, low, high, expected in (
        ((0.79, 0.81), 0.2, 0.28, [1, 0]),
        ((1.27, 1.29), 0.2, 0.28, [0, 1]),
        ((1.0, 1.0), 0.0, 0.0, [0, 0]),
    ):
        logp = torch.tensor([[1.0, *ratios]], dtype=torch.float64).log()
        counted = TruncatedISLoss(low, high)(Forward(logp=logp), batch).metrics["clip_fraction"]
        assert counted[0, 1:].tolist() == expected


def test_a_name_that_is_left_out_is_that_of_the_preset_or_of_the_place() -> None:
    """GRPO's own estimator in its loss is k3, everybody else's k2."""
    assert complete_names("loss", None, ("loss", "k3")) == ("loss", "k3")
    assert complete_names("loss", None, ("reward", "k1")) == ("loss", "k2")
    assert complete_names("reward", None, ("loss", "k3")) == ("reward", "k1")
    assert complete_names("loss_times_ratio", None, ("reward", "k1")) == ("loss_times_ratio", "k3")
    assert complete_names(None, "k1", ("loss", "k3")) == ("reward", "k1")
    assert complete_names(None, "k3", ("reward", "k1")) == ("loss", "k3")
    assert complete_names(None, "exact", ("reward", "k1")) == (None, "exact")
    assert complete_names(None, None, ("loss", "k3")) == ("loss", "k3")


def test_the_exact_kl_of_an_imitator_is_in_no_reward() -> None:
    assert kl_from_names(0.1, None, None, None, (None, "exact")) == ExactKL(0.1, in_reward=False)
    assert kl_from_names(0.1, None, "exact", None, ("reward", "k1")) == ExactKL(0.1, in_reward=True)


def test_an_estimate_from_samples_is_refused_where_rows_are_chosen() -> None:
    for placement, estimator in ((None, "k2"), ("loss", "k3"), ("reward", None)):
        with pytest.raises(InputError, match="does not fit an algorithm that imitates"):
            kl_from_names(0.1, placement, estimator, None, (None, "exact"))
