import math

import pytest
import torch

from hotcold.equations import preference_loss

from .exact_policies import EXACT, assert_equal, f64

CASES = EXACT["preference"]


@pytest.mark.parametrize("case", CASES)
def test_the_preference_loss_by_hand(case):
    chosen = f64([case["chosen"]]).requires_grad_()
    loss = preference_loss(chosen, f64([case["rejected"]]), case["margin"])
    assert_equal(loss / case["loss"], [1.0])  # relative: the smallest is 1e-13
    gradient = torch.autograd.grad(loss.sum(), chosen)[0]
    assert_equal(gradient / case["dloss_dchosen"], [1.0])


def test_a_margin_for_each_pair_is_a_constant():
    chosen, rejected, margin = (f64([case[key] for case in CASES]) for key in ("chosen", "rejected", "margin"))
    assert_equal(preference_loss(chosen, rejected, margin.requires_grad_()), [case["loss"] for case in CASES])
    assert not preference_loss(chosen, rejected, margin).requires_grad


def test_a_wide_difference_stays_finite_in_float32():
    chosen = torch.tensor([-500.0, 500.0]).requires_grad_()
    loss = preference_loss(chosen, -chosen.detach())
    assert loss.tolist() == [1000.0, 0.0]
    assert torch.autograd.grad(loss.sum(), chosen)[0].tolist() == [-1.0, 0.0]


def test_wrong_shapes_and_margins_are_errors():
    with pytest.raises(ValueError, match=r"\[pairs\]"):
        preference_loss(torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match=r"\[pairs\]"):
        preference_loss(torch.zeros(2), torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="margin"):
        preference_loss(torch.zeros(2), torch.zeros(2), float("nan"))


def test_a_margin_may_be_a_number_in_a_tensor():
    """0.5 - 0 - 0.5 = 0: log 2 for each pair."""
    chosen, rejected = f64([0.5, 1.5]), f64([0.0, 1.0])
    assert_equal(preference_loss(chosen, rejected, margin=torch.tensor(0.5)), [math.log(2)] * 2)
