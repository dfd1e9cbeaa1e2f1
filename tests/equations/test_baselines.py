import math

import pytest
import torch

from hotcold.equations import batch_mean, group_mean, group_std, leave_one_out

from .exact_policies import EXACT, assert_equal, f64

NAN = float("nan")


def all_outcomes(size):
    """[2^size, size] every group of zeros and ones."""
    return ((torch.arange(2**size)[:, None] >> torch.arange(size)) & 1).double()


def probability(outcomes, p):
    return torch.where(outcomes == 1, f64(p), f64(1 - p))


@pytest.mark.parametrize("case", EXACT["group_advantages"]["one_group"])
def test_the_groups_of_exact_group_advantages_A12(case):
    rewards = f64(case["rewards"])
    group = torch.full(rewards.shape, 7)
    mean, loo = group_mean(rewards, group), leave_one_out(rewards, group)
    assert_equal(mean, [case["group_mean"]] * len(rewards))
    assert_equal(batch_mean(rewards), [case["group_mean"]] * len(rewards))
    assert_equal(loo, case["leave_one_out_baseline"])
    assert_equal(rewards - mean, case["minus_group_mean"])
    assert_equal(rewards - loo, case["minus_leave_one_out"])
    population, sample = group_std(rewards, group, correction=0), group_std(rewards, group)
    assert_equal(population, [case["population_std"]] * len(rewards))
    assert_equal(sample, [case["sample_std"]] * len(rewards))
    assert_equal((rewards - mean) / population, case["over_population_std"])
    assert_equal((rewards - mean) / sample, case["over_sample_std"])
    assert_equal((rewards - mean) / (sample + 1e-4), case["over_sample_std_eps_1e-4"])
    assert_equal((rewards - mean) / (sample + 1e-6), case["over_sample_std_eps_1e-6"])


def test_groups_go_by_id_not_by_place_A11():
    case = EXACT["group_advantages"]["two_groups_interleaved"]
    rewards, group = f64(case["rewards"]), torch.tensor(case["group"])
    assert_equal(batch_mean(rewards), [case["batch_mean"]] * 8)
    assert_equal(group_mean(rewards, group), case["group_mean"])
    assert_equal(leave_one_out(rewards, group), case["leave_one_out_baseline"])
    assert_equal(rewards - group_mean(rewards, group), case["minus_group_mean"])
    assert_equal(rewards - leave_one_out(rewards, group), case["minus_leave_one_out"])
    order = torch.tensor([3, 7, 0, 5, 1, 6, 2, 4])
    for baseline in (group_mean, group_std, leave_one_out):
        assert_equal(baseline(rewards[order], group[order]), baseline(rewards, group)[order])


def test_group_ids_may_be_any_integers():
    rewards, group = f64([1.0, 0.0, 0.0]), torch.tensor([-5, 10**12, -5])
    assert_equal(group_mean(rewards, group), [0.5, 0.0, 0.5])
    assert_equal(group_mean(rewards, torch.tensor([3, 250, 3], dtype=torch.uint8)), [0.5, 0.0, 0.5])


def test_a_nan_reward_stays_in_its_group():
    rewards, group = f64([1.0, NAN, 0.0, 4.0]), torch.tensor([0, 1, 0, 1])
    for baseline, expected in ((group_mean, 0.5), (group_std, 0.5**0.5), (leave_one_out, None)):
        result = baseline(rewards, group)
        assert_equal(result[[0, 2]], [0.0, 1.0] if expected is None else [expected] * 2)
        assert result[3].isnan()


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1, -0.7])
@pytest.mark.parametrize("size", [3, 7, 10])
def test_a_constant_group_has_exactly_its_mean_and_no_deviation_in_float32(reward, size):
    rewards, group = torch.full((size,), reward), torch.zeros(size, dtype=torch.long)
    for baseline in (batch_mean(rewards), group_mean(rewards, group), leave_one_out(rewards, group)):
        assert (rewards - baseline).tolist() == [0.0] * size
    assert group_std(rewards, group).tolist() == [0.0] * size
    assert group_std(rewards, group, correction=0).tolist() == [0.0] * size


def test_a_group_of_one_has_a_mean_and_no_deviation_but_no_others_A12():
    rewards, group = f64([5.0, 1.0, 3.0]), torch.tensor([4, 2, 2])
    assert_equal(group_mean(rewards, group), [5.0, 2.0, 2.0])
    assert_equal(group_std(rewards, group), [0.0, 2**0.5, 2**0.5])
    with pytest.raises(ValueError, match=r"group size 1 \(first: group 4\)"):
        leave_one_out(rewards, group)


def test_std_scaled_advantages_do_not_see_scale_and_shift_A12():
    rewards, group = f64([1.0, 0.0, 0.0, 0.5]), torch.zeros(4, dtype=torch.long)

    def scaled(r):
        return (r - group_mean(r, group)) / group_std(r, group)

    assert_equal(scaled(2 * rewards + 5), scaled(rewards))
    moved = 2 * rewards + 5
    assert_equal(moved - group_mean(moved, group), 2 * (rewards - group_mean(rewards, group)))


def test_whole_number_and_half_precision_rewards_become_float32():
    for rewards in (torch.tensor([1, 0]), torch.tensor([1, 0], dtype=torch.bfloat16), torch.tensor([True, False])):
        assert batch_mean(rewards).dtype == torch.float32
        assert batch_mean(rewards).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("row", EXACT["bernoulli_group"]["rows"])
def test_expected_updates_of_a_bernoulli_group(row):
    """All 2^8 groups as one batch of 256 groups. The score of a success is 1 - p, of a failure -p."""
    p, size = row["p"], EXACT["bernoulli_group"]["group_size"]
    outcomes = all_outcomes(size)
    rewards = outcomes.flatten()
    group = torch.arange(len(outcomes)).repeat_interleave(size)
    weight = probability(outcomes, p).prod(1).repeat_interleave(size) / size

    def update(advantage):
        return (weight * advantage * (rewards - p)).sum()

    centred = rewards - group_mean(rewards, group)
    assert_equal(update(rewards - leave_one_out(rewards, group)), row["leave_one_out"])
    assert_equal(update(centred), row["group_mean"])
    for correction, key in ((0, "over_population_std"), (1, "over_sample_std")):
        std = group_std(rewards, group, correction)
        assert_equal(update(torch.where(std > 0, centred / std, 0.0)), row[key])
    flat = group_std(rewards, group) == 0
    assert_equal((weight * flat).sum(), row["share_of_zero_variance_groups"])


@pytest.mark.parametrize("row", EXACT["zero_variance_groups"])
def test_the_share_of_groups_without_signal_E03(row):
    """0.1819 is the p of the report: .702375, .449041, .200657, .040263 for G = 2, 4, 8, 16."""
    for size in (2, 4, 8, 16):
        outcomes = all_outcomes(size)
        group = torch.arange(len(outcomes)).repeat_interleave(size)
        flat = (group_std(outcomes.flatten(), group) == 0).reshape(len(outcomes), size)[:, 0]
        share = (probability(outcomes, row["p"]).prod(1) * flat).sum()
        assert_equal(share, row["share"][str(size)])


def test_wrong_shapes_and_ids_are_errors():
    with pytest.raises(ValueError, match=r"rewards has shape \[3\], group \[2\]"):
        group_mean(torch.ones(3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="rewards has shape"):
        batch_mean(torch.ones(2, 2))
    with pytest.raises(ValueError, match="integer ids"):
        leave_one_out(torch.ones(2), torch.zeros(2))
    with pytest.raises(ValueError, match="correction"):
        group_std(torch.ones(2), torch.tensor([0, 0]), correction=2)


def test_a_group_without_variance_has_no_gradient_of_its_std_and_no_nan() -> None:
    """Of two, s = |a - b| / sqrt 2, in both rows: the gradient of the sum is 2 / sqrt 2. Equal ones or one alone: 0."""
    rewards = torch.tensor([1.0, 0.0, 5.0, 5.0, 3.0], dtype=torch.float64, requires_grad=True)
    group_std(rewards, torch.tensor([0, 0, 1, 1, 2])).sum().backward()
    root = math.sqrt(2)
    assert rewards.grad.tolist() == pytest.approx([root, -root, 0.0, 0.0, 0.0])
