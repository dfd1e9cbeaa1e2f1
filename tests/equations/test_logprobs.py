import math

import pytest
import torch

from hotcold.equations import entropy, policy_gradient, token_logp
from hotcold.equations.logprobs import selected_logp, shift_right, state_entropy

from .exact_policies import EXACT, T1, T2, assert_equal, f64, probabilities, table

LAYOUT = EXACT["layout_by_hand"]
BIGRAM = f64(EXACT["logits_by_hand"]["bigram"]["next_given_current"]).log()
INF, NAN = float("inf"), float("nan")


def test_what_is_said_at_a_position_belongs_to_the_next_token():
    x = f64([[1.0, 2.0, NAN]]).requires_grad_()
    shifted = shift_right(x)
    assert shifted.tolist() == [[0.0, 1.0, 2.0]]
    (gradient,) = torch.autograd.grad((shifted * f64([[5.0, 6.0, 7.0]])).sum(), x)
    assert gradient.tolist() == [[6.0, 7.0, 0.0]]


def test_logp_reads_the_logits_before_the_token_A01():
    tokens = torch.tensor([[0, 1, 2, 0, 1]])
    logp = token_logp(BIGRAM[tokens], tokens)
    assert_equal(logp, [EXACT["logits_by_hand"]["bigram"]["token_logp"]])
    # prompt length 3: ln .6 and ln .5; not ln .2 and ln .1, which stand at the tokens' own positions
    assert_equal(logp[:, 3:], [[math.log(0.6), math.log(0.5)]])
    # the ratio of the model against itself, from the table: exactly 1
    sampler = torch.stack([BIGRAM[2, 0], BIGRAM[0, 1]])
    assert (logp[0, 3:] - sampler).exp().tolist() == [1.0, 1.0]


def test_a_single_row_needs_no_batch_axis():
    tokens = torch.tensor([0, 1, 2, 0, 1])
    assert_equal(token_logp(BIGRAM[tokens], tokens), EXACT["logits_by_hand"]["bigram"]["token_logp"])


@pytest.mark.parametrize("temperature", ["1.0", "0.7"])
def test_logp_and_entropy_of_the_layout_by_hand(temperature):
    logits, tokens = f64(LAYOUT["logits"]), torch.tensor(LAYOUT["tokens"])
    assert_equal(token_logp(logits, tokens, float(temperature)), LAYOUT["token_logp"][temperature])
    assert_equal(entropy(logits, float(temperature)), LAYOUT["entropy"][temperature])


def test_logp_at_the_sampling_temperature_A23():
    case = EXACT["logits_by_hand"]["two_logits"]
    logits = f64([case["logits"]] * 2)
    assert_equal(selected_logp(logits, torch.tensor([0, 1])), case["logp_temperature_1"])
    assert_equal(selected_logp(logits, torch.tensor([0, 1]), 0.5), case["logp_temperature_0.5"])


@pytest.mark.parametrize("temperature", ["0.7", "1.0", "2.0"])
def test_logp_and_entropy_of_three_logits(temperature):
    case = EXACT["logits_by_hand"]["three_logits"]
    logits = f64([case["logits"]] * 3)
    assert_equal(selected_logp(logits, torch.arange(3), float(temperature)), case["logp"][temperature])
    assert_equal(state_entropy(logits, float(temperature)), [case["entropy"][temperature]] * 3)


def test_the_entropy_of_equal_logits_is_log_of_their_number():
    assert_equal(state_entropy(f64([0.3, 0.3, 0.3])), EXACT["logits_by_hand"]["three_logits"]["entropy_of_uniform_3"])


def test_logp_of_the_enumerated_policies():
    for name in ("theta", "ref", "mu"):
        logp = token_logp(T1.logits(table(name)), T1.tokens)
        assert_equal(logp[:, 1:], EXACT["T1"]["logp_per_token"][name])
        assert_equal(logp.sum(1).exp(), probabilities(name))
    logp = token_logp(T2.logits(f64(EXACT["T2"]["logits"])), T2.tokens)
    assert_equal(torch.where(T2.mask, logp, 0.0).sum(1).exp(), EXACT["T2"]["prob"])


def test_tokens_outside_a_kept_set_have_no_part_in_value_or_gradient():
    # kept: the first two, with probabilities 1/4 and 3/4
    logits = f64([0.0, math.log(3.0), -INF]).requires_grad_()
    logp = selected_logp(logits, torch.tensor(1))
    assert_equal(logp, math.log(0.75))
    (gradient,) = torch.autograd.grad(logp, logits)
    assert_equal(gradient, [-0.25, 0.25, 0.0])
    H = state_entropy(logits)
    assert_equal(H, 0.25 * math.log(4) + 0.75 * math.log(4 / 3))
    (gradient,) = torch.autograd.grad(H, logits)
    # dH/dz_v = -p_v (log p_v + H)
    expected = [-0.25 * (math.log(0.25) + H.item()), -0.75 * (math.log(0.75) + H.item()), 0.0]
    assert_equal(gradient, expected)


def test_a_token_outside_the_kept_set_has_probability_zero_and_a_finite_gradient():
    logits = f64([0.0, -INF]).requires_grad_()
    logp = selected_logp(logits, torch.tensor(1))
    assert logp == -INF
    assert torch.autograd.grad(logp, logits)[0].isfinite().all()


@pytest.mark.parametrize("bad", [-INF, NAN, INF])
def test_a_broken_row_of_logits_that_is_masked_away_spoils_no_gradient_A15c(bad):
    logits = torch.zeros(1, 4, 3)
    logits[0, 1] = bad  # predicts token 2
    logits.requires_grad_()
    logp = token_logp(logits, torch.tensor([[0, 1, 2, 0]]))
    assert logp[0, 2].isnan()  # visible where it is used
    mask = torch.tensor([[False, True, False, True]])
    torch.where(mask, policy_gradient(logp, torch.ones(1, 4)) - entropy(logits), 0.0).sum().backward()
    # d(-logp)/dz = p - onehot with p = 1/3; the entropy of equal logits has gradient 0
    third = 1 / 3
    assert_equal(logits.grad[0, 0], [third, third - 1, third], tolerance=1e-6)
    assert_equal(logits.grad[0, 2], [third - 1, third, third], tolerance=1e-6)
    assert logits.grad[0, [1, 3]].tolist() == [[0.0] * 3] * 2


def test_half_precision_logits_are_computed_in_float32():
    for dtype in (torch.bfloat16, torch.float16):
        logits = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]], dtype=dtype)
        logp, H = token_logp(logits, torch.tensor([[0, 0]])), entropy(logits)
        assert logp.dtype == H.dtype == torch.float32
        assert_equal(logp, [[0.0, -0.1269280110429726]], tolerance=1e-6)
        # p = (1/(1 + e^-2), 1/(1 + e^2)) = (.880797, .119203)
        assert_equal(H, [[0.0, 0.880797 * 0.126928 + 0.119203 * 2.126928]], tolerance=1e-5)


def test_large_logits_do_not_overflow():
    assert_equal(selected_logp(torch.tensor([1e4, 1e4]), torch.tensor(0)), -math.log(2), tolerance=1e-6)


def test_ids_outside_the_vocabulary_are_an_error():
    with pytest.raises(ValueError, match="V = 3"):
        token_logp(torch.zeros(1, 2, 3), torch.tensor([[0, 3]]))
    with pytest.raises(ValueError, match="from -100"):
        token_logp(torch.zeros(1, 2, 3), torch.tensor([[0, -100]]))
    with pytest.raises(ValueError, match="integer"):
        token_logp(torch.zeros(1, 2, 3), torch.zeros(1, 2))


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF])
def test_the_temperature_must_be_above_zero_A23c(temperature):
    with pytest.raises(ValueError, match="temperature"):
        token_logp(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long), temperature)
    with pytest.raises(ValueError, match="temperature"):
        entropy(torch.zeros(1, 2, 3), temperature)


def test_float32_log_probs_over_a_large_vocabulary_are_close_to_float64() -> None:
    """torch's float32 log_softmax is 2e-6 off here: it adds 50 thousand probabilities one by one."""
    logits = 3 * torch.randn(64, 49152, generator=torch.Generator().manual_seed(0))
    ids = logits.argmax(-1)
    exact = selected_logp(logits.double(), ids)
    assert (selected_logp(logits, ids).double() - exact).abs().max() <= 5e-7
