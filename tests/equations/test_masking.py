import torch

from hotcold.equations import masked_mean, masked_sum, masked_var, whiten

from .exact_policies import EXACT, assert_equal, f64


def test_sum_mean_and_variance_count_only_the_mask():
    x, mask = f64([[1.0, 2.0, 6.0, 100.0]]), torch.tensor([[True, True, True, False]])
    assert_equal(masked_sum(x, mask), 9.0)
    assert_equal(masked_mean(x, mask), 3.0)
    assert_equal(masked_var(x, mask), (4.0 + 1.0 + 9.0) / 3)  # population: divided by 3


def test_an_empty_mask_gives_zero_and_a_zero_gradient():
    x = f64([[float("nan"), 2.0]]).requires_grad_()
    mask = torch.zeros(1, 2, dtype=torch.bool)
    for f in (masked_sum, masked_mean, masked_var):
        value = f(x, mask)
        assert value == 0
        (gradient,) = torch.autograd.grad(value, x)
        assert gradient.tolist() == [[0.0, 0.0]]


def test_the_gradient_of_the_mean_is_one_over_the_count():
    x = f64([[1.0, float("inf"), 3.0]]).requires_grad_()
    masked_mean(x, torch.tensor([[True, False, True]])).backward()
    assert x.grad.tolist() == [[0.5, 0.0, 0.5]]


def test_the_gradient_of_the_variance():
    # var = ((a - m)^2 + (b - m)^2) / 2 = (a - b)^2 / 4 with a = 1, b = 4: d/da = (a - b) / 2 = -1.5
    x = f64([[1.0, 4.0, float("nan")]]).requires_grad_()
    masked_var(x, torch.tensor([[True, True, False]])).backward()
    assert x.grad.tolist() == [[-1.5, 1.5, 0.0]]


def test_a_nan_inside_the_mask_stays_visible():
    x, mask = torch.tensor([[1.0, float("nan")]]), torch.ones(1, 2, dtype=torch.bool)
    assert all(f(x, mask).isnan() for f in (masked_sum, masked_mean, masked_var))
    assert whiten(x, mask).isnan().all()


def test_whitening_of_the_square_exact_whitening():
    case = EXACT["whitening"]["square"]
    x, mask = f64(case["x"]), torch.ones(3, 3, dtype=torch.bool)
    assert_equal(whiten(x, mask), case["shift_mean_true"])
    assert_equal(whiten(x, mask, shift_mean=False), case["shift_mean_false"])


def test_whitening_takes_population_statistics_of_the_mask_only_A10a():
    case = EXACT["whitening"]["masked"]
    x, mask = f64([case["x"]]), torch.tensor([case["mask"]])
    assert_equal(whiten(x, mask), [case["shift_mean_true"]])
    assert_equal(whiten(x, mask, shift_mean=False), [case["shift_mean_false"]])
    assert_equal(whiten(x, mask), [[-1.224745, 0.0, 1.224745, 0.0]], tolerance=1e-6)


def test_whitening_of_one_valid_token_is_finite_A10b():
    x, mask = torch.tensor([[5.0, float("nan")]]), torch.tensor([[True, False]])
    assert whiten(x, mask).tolist() == [[0.0, 0.0]]
    assert whiten(x, mask, shift_mean=False).tolist() == [[5.0, 0.0]]


def test_whitening_of_nothing_is_zero_A10c():
    x, mask = torch.full((2, 2), float("nan")), torch.zeros(2, 2, dtype=torch.bool)
    assert whiten(x, mask).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_whitening_takes_its_statistics_as_constants():
    # x = [1, 3]: mean 2, variance 1. With constant statistics y_0 moves with x_0 alone, by 1/sqrt(1 + 1e-8).
    x = f64([[1.0, 3.0]]).requires_grad_()
    whiten(x, torch.ones(1, 2, dtype=torch.bool))[0, 0].backward()
    assert_equal(x.grad, [[1 / (1 + 1e-8) ** 0.5, 0.0]])
