import pytest
import torch

from hotcold.equations import clipped_value_loss, explained_variance, value_loss

from .exact_policies import EXACT, assert_equal, f64

NAN = float("nan")


@pytest.mark.parametrize("row", EXACT["critic"]["rows"])
def test_the_value_losses_by_hand(row):
    V = f64([[row["value"]]]).requires_grad_()
    V_old, R = f64([[row["value_old"]]]), f64([[row["return"]]])
    for name, loss in (
        ("value_loss", value_loss(V, R)),
        ("clipped_value_loss", clipped_value_loss(V, V_old, R, EXACT["critic"]["clip"])),
    ):
        assert_equal(loss, [[row[name]]])
        assert_equal(torch.autograd.grad(loss.sum(), V)[0], [[row[f"d{name}_dvalue"]]])


def test_the_clip_holds_on_the_way_down_too():
    # the mirror image of the first case: V fell from 0 to -1 towards R = -2; (-.2 + 2)^2 / 2 = 1.62
    V = f64([[-1.0]]).requires_grad_()
    loss = clipped_value_loss(V, f64([[0.0]]), f64([[-2.0]]), clip=0.2)
    assert_equal(loss, [[1.62]])
    assert_equal(torch.autograd.grad(loss.sum(), V)[0], [[0.0]])


def test_targets_are_constants():
    V, target = f64([[1.0]]), f64([[2.0]]).requires_grad_()
    assert not value_loss(V, target).requires_grad
    assert not clipped_value_loss(V, target, target, 0.2).requires_grad


def test_the_explained_variance_is_a_report_without_gradient():
    constant, moving = f64([[1.0, 3.0]]), f64([[0.0, 2.0]]).requires_grad_()
    mask = torch.tensor([[True, True]])
    assert not explained_variance(moving, constant, mask).requires_grad
    assert not explained_variance(constant, moving, mask).requires_grad


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e30])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_garbage_that_is_masked_away_spoils_no_gradient(garbage, which):
    inputs = [torch.tensor([[1.0, 1.0]]), torch.tensor([[0.9, 1.0]]), torch.tensor([[3.0, 1.0]])]
    inputs[which][0, 1] = garbage
    mask = torch.tensor([[True, False]])
    for f in (lambda V, V_old, R: value_loss(V, R), lambda *x: clipped_value_loss(*x, clip=0.2)):
        V = inputs[0].clone().requires_grad_()
        torch.where(mask, f(V, *inputs[1:]), 0.0).sum().backward()
        assert V.grad.tolist() == [[-2.0, 0.0]]  # V - R inside the clip


def test_a_nan_stays_visible():
    one, nan = torch.ones(1, 1), torch.full((1, 1), NAN)
    assert value_loss(nan, one).isnan() and value_loss(one, nan).isnan()
    for inputs in ((nan, one, one), (one, nan, one), (one, one, nan)):
        assert clipped_value_loss(*inputs, clip=0.2).isnan()


def test_the_explained_variance_by_hand():
    case = EXACT["critic"]["explained_variance"]
    V, R, mask = f64([case["values"]]), f64([case["returns"]]), torch.ones(1, 4, dtype=torch.bool)
    assert_equal(explained_variance(V, R, mask), case["result"])
    assert not explained_variance(V.clone().requires_grad_(), R.clone().requires_grad_(), mask).requires_grad
    assert_equal(explained_variance(torch.full_like(R, 0.7), R, mask), case["of_a_constant_critic"])
    assert_equal(explained_variance(R + 3, R, mask), case["of_returns_plus_a_constant"])


def test_the_explained_variance_does_not_see_the_padding():
    case = EXACT["critic"]["explained_variance"]
    V, R = f64([[NAN, *case["values"], 1e9]]), f64([[7.0, *case["returns"], NAN]])
    mask = torch.tensor([[False, True, True, True, True, False]])
    assert_equal(explained_variance(V, R, mask), case["result"])


def test_returns_without_variance_leave_nothing_to_explain():
    mask = torch.tensor([[True, True, True, False]])
    R = torch.tensor([[0.1, 0.1, 0.1, 5.0]])  # rounding would leave a variance of 1e-17 in float32
    assert explained_variance(torch.zeros(1, 4), R, mask).isnan()
    assert explained_variance(R, R, torch.zeros(1, 4, dtype=torch.bool)).isnan()
    assert explained_variance(R, R, torch.tensor([[True, False, False, False]])).isnan()


@pytest.mark.parametrize("clip", [-0.1, NAN])
def test_a_negative_clip_is_an_error(clip):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="clip"):
        clipped_value_loss(x, x, x, clip)
