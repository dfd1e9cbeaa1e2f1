import math

import pytest
import torch

from hotcold.equations import (
    approx_kl,
    clip_selected,
    clipped_surrogate,
    importance_weighted,
    masked_mean,
    policy_gradient,
    sequence_log_ratio,
    truncated_is_policy_gradient,
)

from .exact_policies import EXACT, assert_equal, f64

PPO = EXACT["ppo_cases"]
INF, NAN = float("inf"), float("nan")


def cells(rows, *keys):
    return [f64([[row[key] for row in rows]]) for key in keys]


def slope(loss, x):
    return torch.autograd.grad(loss.sum(), x)[0]


def test_the_ppo_cases_by_hand():
    log_ratio, A, loss, dloss = cells(PPO["rows"], "log_ratio", "advantage", "loss", "dloss_dlogp")
    log_ratio.requires_grad_()
    actual = clipped_surrogate(log_ratio, A, PPO["clip_low"], PPO["clip_high"])
    assert_equal(actual, loss)
    assert_equal(slope(actual, log_ratio), dloss)
    selected = clip_selected(log_ratio, A, PPO["clip_low"], PPO["clip_high"])
    assert selected.tolist() == [[row["clip_selected"] for row in PPO["rows"]]]
    assert int(selected.sum()) == PPO["num_clip_selected"]  # 3, though the ratio is outside the band in 6


def test_the_dual_clip_cases_by_hand():
    log_ratio, A = cells(PPO["rows"], "log_ratio", "advantage")
    loss, dloss = cells([row["dual_clip_3"] for row in PPO["rows"]], "loss", "dloss_dlogp")
    log_ratio.requires_grad_()
    actual = clipped_surrogate(log_ratio, A, 0.2, 0.2, dual_clip=3.0)
    assert_equal(actual, loss)
    assert_equal(slope(actual, log_ratio), dloss)


def test_the_dual_clip_scales_with_the_advantage():
    # A = -2, c = 3: the objective -2 r is held at -6 from r = 3 on
    log_ratio = f64([[2.9, 3.1]]).log().requires_grad_()
    loss = clipped_surrogate(log_ratio, f64([[-2.0, -2.0]]), dual_clip=3.0)
    assert_equal(loss, [[5.8, 6.0]])
    assert_equal(slope(loss, log_ratio), [[5.8, 0.0]])


def test_the_cispo_cases_by_hand():
    log_ratio, A = cells(PPO["rows"], "log_ratio", "advantage")
    loss, dloss = cells([row["cispo_0.2_0.28"] for row in PPO["rows"]], "loss_at_logp_minus_1", "dloss_dlogp")
    logp = torch.full_like(A, -1.0).requires_grad_()
    actual = truncated_is_policy_gradient(logp, log_ratio, A, clip_low=0.2, clip_high=0.28)
    assert_equal(actual, loss)
    assert_equal(slope(actual, logp), dloss)


def test_cispo_takes_the_ratio_as_a_constant_and_one_as_no_lower_bound():
    logp = f64([[-1.0, -1.0]]).requires_grad_()
    log_ratio = logp - f64([[-1.0 - math.log(0.01), -1.0]])  # ratios .01 and 1
    loss = truncated_is_policy_gradient(logp, log_ratio, f64([[1.0, 1.0]]), clip_low=1.0, clip_high=0.2)
    assert_equal(loss, [[0.01, 1.0]])
    assert_equal(slope(loss, logp), [[-0.01, -1.0]])


def test_a_higher_upper_bound_A26():
    ratio, A, loss, dloss = cells(PPO["clip_higher_0.2_0.28"], "ratio", "advantage", "loss", "dloss_dlogp")
    log_ratio = ratio.log().requires_grad_()
    actual = clipped_surrogate(log_ratio, A, clip_low=0.2, clip_high=0.28)
    assert_equal(actual, loss)
    assert_equal(slope(actual, log_ratio), dloss)
    expected = [row["clip_selected"] for row in PPO["clip_higher_0.2_0.28"]]
    assert clip_selected(log_ratio, A, clip_low=0.2, clip_high=0.28).tolist() == [expected]
    assert_equal(clipped_surrogate(f64([[1.5]]).log(), f64([[1.0]]), 0.2, 0.28), [[-1.28]])


def test_a_band_wider_than_the_ratio_itself():
    # clip_high 3: stopped at 4 and not before; clip_low 1: never stopped on the way down
    log_ratio = f64([[3.9, 4.1, 1e-9]]).log().requires_grad_()
    A = f64([[1.0, 1.0, -1.0]])
    loss = clipped_surrogate(log_ratio, A, clip_low=1.0, clip_high=3.0)
    assert_equal(loss, [[-3.9, -4.0, 1e-9]])
    assert_equal(slope(loss, log_ratio), [[-3.9, 0.0, 1e-9]])
    assert clip_selected(log_ratio, A, clip_low=1.0, clip_high=3.0).tolist() == [[False, True, False]]


def test_the_report_of_clipping_signs_and_fraction_A26():
    log_ratio = f64([[1.5, 1.5, 0.5, 0.5, 1.1, 0.9]]).log().requires_grad_()
    A = f64([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0]])
    loss = clipped_surrogate(log_ratio, A)
    assert_equal(-loss, [[1.2, -1.5, 0.5, -0.8, 1.1, -0.9]])
    assert (slope(loss, log_ratio) == 0).tolist() == [[True, False, False, True, False, False]]
    log_ratio, A = f64([[1.5, 1.5, 1.5, 0.5]]).log(), torch.ones(1, 4, dtype=torch.float64)
    assert_equal(clipped_surrogate(log_ratio, A).mean(), -1.025)
    assert clip_selected(log_ratio, A).double().mean() == 0.75


def test_the_clipping_table_of_the_chapter():
    ratio, A, unclipped, objective, dobjective = cells(
        EXACT["chapter"]["ppo_table"], "ratio", "advantage", "unclipped", "objective", "dobjective_dlogp"
    )
    log_ratio = ratio.log().requires_grad_()
    loss = clipped_surrogate(log_ratio, A)
    assert_equal(-loss, objective)
    assert_equal(-slope(loss, log_ratio), dobjective)
    assert_equal(-importance_weighted(log_ratio, A), unclipped)
    flows = [row["gradient_flows"] for row in EXACT["chapter"]["ppo_table"]]
    assert (~clip_selected(log_ratio, A)).tolist() == [flows]


def test_the_question_of_the_chapter_on_clipping():
    answer = EXACT["chapter"]["check_your_understanding"]["clip_1.3_advantage_1"]
    log_ratio = f64([[1.3]]).log().requires_grad_()
    loss = clipped_surrogate(log_ratio, f64([[1.0]]))
    assert_equal(-loss, [[answer["objective"]]])
    assert_equal(slope(loss, log_ratio), [[answer["gradient"]]])


def test_at_a_ratio_of_one_every_surrogate_has_the_policy_gradient():
    logp = f64([[-1.0, -2.0]]).requires_grad_()
    A, log_ratio = f64([[2.0, -3.0]]), logp - logp.detach()
    for loss in (
        policy_gradient(logp, A),
        importance_weighted(log_ratio, A),
        clipped_surrogate(log_ratio, A),
        clipped_surrogate(log_ratio, A, clip_low=0.0, clip_high=0.0),  # the band is the point 1
        truncated_is_policy_gradient(logp, log_ratio, A, 0.2, 0.2),
    ):
        (gradient,) = torch.autograd.grad(loss.sum(), logp, retain_graph=True)
        assert_equal(gradient, [[-2.0, 3.0]])


def test_advantages_are_constants():
    x = f64([[0.1]]).requires_grad_()
    for loss in (
        policy_gradient(f64([[-1.0]]), x),
        importance_weighted(f64([[0.1]]), x),
        clipped_surrogate(f64([[0.1]]), x),
        truncated_is_policy_gradient(f64([[-1.0]]), f64([[0.1]]), x, 0.2, 0.2),
    ):
        assert not loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_where_the_objective_is_bounded_an_extreme_ratio_stays_finite(dtype, dual_clip):
    advantages = [1.0, 0.0, 2.5] + ([-1.0] if dual_clip else [])
    for A in advantages:
        log_ratio = torch.tensor([[100.0, -100.0]], dtype=dtype, requires_grad=True)
        loss = clipped_surrogate(log_ratio, torch.full((1, 2), A, dtype=dtype), dual_clip=dual_clip)
        expected = [[-1.2 * A, 0.0]] if A >= 0 else [[3.0, 0.8]]
        assert_equal(loss, expected, tolerance=1e-6)
        assert_equal(slope(loss, log_ratio), [[0.0, 0.0]])
    far = torch.tensor([[100.0, -100.0]], dtype=dtype)
    assert clip_selected(far, torch.ones(1, 2, dtype=dtype)).tolist() == [[True, False]]
    assert clip_selected(far, -torch.ones(1, 2, dtype=dtype)).tolist() == [[False, True]]
    assert clip_selected(far, torch.zeros(1, 2, dtype=dtype)).tolist() == [[False, False]]


def test_without_an_advantage_an_overflowing_ratio_is_worth_nothing():
    log_ratio = torch.tensor([[100.0, -100.0]], requires_grad=True)
    loss = importance_weighted(log_ratio, torch.zeros(1, 2))
    assert loss.tolist() == [[0.0, 0.0]]
    assert slope(loss, log_ratio).tolist() == [[0.0, 0.0]]


def test_without_an_advantage_an_infinite_ratio_is_worth_nothing():
    """The policy before the update excluded the token: log-ratio inf."""
    log_ratio, none = torch.tensor([[INF]], requires_grad=True), torch.zeros(1, 1)
    for loss in (
        importance_weighted(log_ratio, none),
        *(clipped_surrogate(log_ratio, none, dual_clip=c) for c in (None, 3.0)),
    ):
        assert loss.tolist() == [[0.0]]
        assert slope(loss, log_ratio).tolist() == [[0.0]]
    assert clip_selected(log_ratio, none).tolist() == [[False]]


def test_a_dual_clip_below_the_band_leaves_gains_alone():
    """r = 5, A = 1, band up to 10: 5, whatever bounds the losses; A = -1: at least -1.1."""
    log_ratio = f64([[5.0, 5.0]]).log()
    assert_equal(clipped_surrogate(log_ratio, f64([[1.0, -1.0]]), clip_high=9.0, dual_clip=1.1), [[-5.0, 1.1]])


def test_at_the_bound_of_the_dual_clip_the_gradient_still_flows():
    """As at the edges of the band: a token is stopped beyond the bound, not at it."""
    log_ratio = f64([[1.0]]).requires_grad_()
    loss = clipped_surrogate(log_ratio, f64([[-1.0]]), dual_clip=float(log_ratio.detach().exp()))
    assert_equal(slope(loss, log_ratio), [[math.e]])


def test_an_unbounded_objective_saturates_and_its_gradient_keeps_its_sign():
    log_ratio = torch.tensor([[100.0]], requires_grad=True)
    for loss in (clipped_surrogate(log_ratio, -torch.ones(1, 1)), importance_weighted(log_ratio, -torch.ones(1, 1))):
        assert loss > 1e38
        assert slope(loss, log_ratio) > 1e38


@pytest.mark.parametrize("loss_of", [importance_weighted, clipped_surrogate])
def test_a_nan_ratio_outside_the_mask_is_removed_A15a(loss_of):
    logp = torch.zeros(1, 2, requires_grad=True)
    log_ratio = logp - torch.tensor([[0.0, NAN]])
    mask = torch.tensor([[True, False]])
    loss = torch.where(mask, loss_of(log_ratio, torch.ones(1, 2)), 0.0).sum()
    assert loss == -1.0
    assert torch.where(mask, approx_kl(log_ratio), 0.0).sum() == 0
    assert slope(loss, logp).tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("loss_of", [importance_weighted, clipped_surrogate])
def test_an_overflowing_ratio_outside_the_mask_is_removed_A15b(loss_of):
    logp = torch.full((1, 2), -1.0, requires_grad=True)
    log_ratio = logp - torch.tensor([[-1.0, -100.0]])  # exp(99) is inf in float32
    loss = torch.where(torch.tensor([[True, False]]), loss_of(log_ratio, -torch.ones(1, 2)), 0.0).sum()
    assert loss == 1.0
    assert slope(loss, logp).tolist() == [[1.0, 0.0]]


def test_the_gspo_ratio_is_the_exponential_of_the_mean():
    case = EXACT["gspo"]
    log_ratio = f64([case["log_ratio"]]).requires_grad_()
    s = sequence_log_ratio(log_ratio, torch.ones(1, 3, dtype=torch.bool))
    assert_equal(s, [[case["sequence_log_ratio"]] * 3])
    assert_equal(s.exp(), [[case["sequence_ratio"]] * 3])
    assert_equal(slope(s.exp()[:, 0], log_ratio), [[case["d_sequence_ratio_d_logp_each_token"]] * 3])


def test_the_mean_log_ratio_of_one_token_is_its_own():
    mask = torch.tensor([[False, True], [True, True]])
    assert_equal(sequence_log_ratio(f64([[9.0, 0.3], [0.2, 0.4]]), mask), [[0.0, 0.3], [0.3, 0.3]])


def test_the_mean_log_ratio_does_not_see_the_padding_A16a():
    case = EXACT["gspo"]["padded"]
    mask = torch.tensor([case["response_mask"]])
    for garbage in (case["log_ratio"][2], NAN, INF):
        log_ratio = f64([[*case["log_ratio"][:2], garbage]]).requires_grad_()
        s = sequence_log_ratio(log_ratio, mask)
        assert_equal(s.exp()[0, :2], [case["sequence_ratio"]] * 2)
        assert s[0, 2] == 0
        assert_equal(slope(s, log_ratio), [[1.0, 1.0, 0.0]])  # each of 2 tokens has half of the mean of each


def test_a_sequence_advantage_is_the_mean_over_its_own_tokens_A16b():
    A, mask = f64([[1.0, 1.0, 10.0, 10.0]]), torch.tensor([[True, True, False, False]])
    assert masked_mean(A, mask) == 1.0  # 5.5 over the width
    assert masked_mean(importance_weighted(torch.zeros_like(A), A), mask) == -1.0


@pytest.mark.parametrize(
    "options",
    [
        {"clip_low": -0.1},
        {"clip_low": 1.1},
        {"clip_low": NAN},
        {"clip_high": -0.1},
        {"clip_high": NAN},
        {"dual_clip": 1.0},
        {"dual_clip": 0.5},
        {"dual_clip": NAN},
    ],
)
def test_out_of_range_bounds_are_errors(options):
    x, (name,) = torch.zeros(1, 1), options
    with pytest.raises(ValueError, match=name):
        clipped_surrogate(x, x, **options)
    if name != "dual_clip":
        with pytest.raises(ValueError, match=name):
            clip_selected(x, x, **options)
        with pytest.raises(ValueError, match=name):
            truncated_is_policy_gradient(x, x, x, **{"clip_low": 0.2, "clip_high": 0.2, **options})


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_row_without_a_token_makes_no_nan_on_the_way():
    """Its mean would be 0/0: removed in the end, but torch.autograd.detect_anomaly stops at it."""
    log_ratio = f64([[0.1, 0.3], [0.2, 0.4]]).requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        mean = sequence_log_ratio(log_ratio, torch.tensor([[True, True], [False, False]]))
        assert slope(mean, log_ratio).tolist() == [[1.0, 1.0], [0.0, 0.0]]
