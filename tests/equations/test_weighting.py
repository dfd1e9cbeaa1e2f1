import itertools

import pytest
import torch

from hotcold.equations import (
    fixed_length,
    mean_per_response,
    mean_per_token,
    policy_gradient,
    sum_per_response,
    token_logp,
)

from .exact_policies import EXACT, T2, assert_equal, f64

HAND = EXACT["weighting_by_hand"]
WEIGHTINGS = {
    "sum_per_response": sum_per_response,
    "mean_per_response": mean_per_response,
    "mean_per_token": mean_per_token,
    "fixed_length_4": lambda mask: fixed_length(mask, 4),
}


def mask_of(*lengths):
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def test_two_responses_by_hand():
    short, long = HAND["losses"]
    loss, mask = f64([short + [99.0] * 5, long]), mask_of(5, 10)
    assert_equal((loss * sum_per_response(mask)).sum(), HAND["sum_per_response"])
    assert_equal((loss * mean_per_response(mask)).sum(), HAND["mean_per_response"])
    assert_equal((loss * mean_per_token(mask)).sum(), HAND["mean_per_token"])
    assert_equal((loss * fixed_length(mask, 10)).sum(), HAND["fixed_length_10"])


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_the_weights_of_the_layout_by_hand(name):
    mask = torch.tensor(EXACT["layout_by_hand"]["response_mask"])
    assert_equal(WEIGHTINGS[name](mask), EXACT["layout_by_hand"]["weights"][name])


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("lengths", [(1, 2, 3), (0, 2, 3)])
def test_a_row_without_a_trained_token_is_not_counted(name, lengths):
    weights = WEIGHTINGS[name](mask_of(*lengths))
    expected = HAND[f"weights_for_lengths_{'_'.join(map(str, lengths))}"][name]
    for row, length, value in zip(weights, lengths, expected, strict=True):
        assert_equal(row, [value] * length + [0.0] * (3 - length))


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_nothing_trained_has_no_weight(name):
    assert_equal(WEIGHTINGS[name](torch.zeros(2, 2, dtype=torch.bool)), [[0.0, 0.0], [0.0, 0.0]])


def test_a_single_token_has_the_whole_weight():
    mask = torch.tensor([[False, True]])
    for weighting in (sum_per_response, mean_per_response, mean_per_token, lambda mask: fixed_length(mask, 1)):
        assert_equal(weighting(mask), [[0.0, 1.0]])


def test_gaps_are_not_counted():
    mask = torch.tensor([[True, False, True], [False, True, False]])
    assert_equal(mean_per_response(mask), [[0.25, 0, 0.25], [0, 0.5, 0]])


def test_the_token_mean_does_not_depend_on_the_cut_A17():
    case = HAND["micro_batches"]
    first, second = case["losses"]
    loss, mask = f64([[*first, 0, 0], second]), mask_of(1, 3)
    weights = mean_per_token(mask)  # of the whole step; each micro-batch takes its rows
    in_parts = sum((loss[b] * weights[b]).sum() for b in range(2))
    assert_equal(in_parts, case["mean_per_token"])
    assert case["mean_per_token"] == 1.0


def expected_gradient_over_batches(batch_size, weighting):
    """Mean over all batches of T2 responses, A = R - J, of the weighted gradient with respect to the log-odds."""
    log_odds = f64(EXACT["T2"]["log_odds"]).requires_grad_()
    table = torch.stack([torch.zeros_like(log_odds), log_odds], dim=1)
    logp = token_logp(T2.logits(table), T2.tokens)
    loss = policy_gradient(logp, (T2.rewards - EXACT["T2"]["J"])[:, None].expand_as(logp))
    probability, total = f64(EXACT["T2"]["prob"]), f64(0.0)
    for batch in itertools.product(range(4), repeat=batch_size):
        rows = torch.tensor(batch)
        weighted = torch.where(T2.mask[rows], loss[rows], 0.0) * weighting(T2.mask[rows])
        total = total + probability[rows].prod() * weighted.sum()
    return -torch.autograd.grad(total, log_odds)[0]


@pytest.mark.parametrize(
    "key, batch_size, weighting",
    [
        ("sum_per_response", 1, sum_per_response),
        ("sum_per_response", 2, sum_per_response),
        ("fixed_length_3", 2, lambda mask: fixed_length(mask, 3)),
        ("mean_per_response", 1, mean_per_response),
        ("mean_per_response", 2, mean_per_response),
        ("mean_per_token_batch_2", 2, mean_per_token),
        ("mean_per_token_batch_4", 4, mean_per_token),
    ],
)
def test_only_sums_and_fixed_lengths_keep_the_direction_of_the_gradient(key, batch_size, weighting):
    case, grad_J = EXACT["weighting_on_T2"][key], f64(EXACT["T2"]["grad_J"])
    gradient = expected_gradient_over_batches(batch_size, weighting)
    assert_equal(gradient, case["gradient"])
    cosine = torch.nn.functional.cosine_similarity(gradient, grad_J, dim=0)
    assert_equal(cosine, case["cosine_with_grad_J"])
    if key == "sum_per_response":
        assert_equal(gradient, grad_J)


def test_weights_are_float64_and_take_a_bool_mask_of_two_axes():
    assert mean_per_token(mask_of(1, 2, 3)).dtype == torch.float64
    for weighting in WEIGHTINGS.values():
        with pytest.raises(ValueError, match=r"\[B, T\]"):
            weighting(torch.ones(3, dtype=torch.bool))
        with pytest.raises(ValueError, match="bool"):
            weighting(torch.full((1, 2), 0.5))


@pytest.mark.parametrize("length", [0, -1, float("nan"), float("inf")])
def test_the_fixed_length_must_be_a_positive_number(length):
    with pytest.raises(ValueError, match="length"):
        fixed_length(mask_of(1, 2), length)
