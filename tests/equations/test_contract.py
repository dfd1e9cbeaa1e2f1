"""The rules that hold for all equations: names and signatures, dtypes, shapes, and nothing from outside the mask."""

import inspect
import math

import pytest
import torch

import hotcold.equations as eq
from hotcold.equations.checks import exp, expm1

NAN, INF = float("nan"), float("inf")

SIGNATURES = """\
masked_sum(x, mask)
masked_mean(x, mask)
masked_var(x, mask)
whiten(x, mask, shift_mean=True)
token_logp(logits, tokens, temperature=1.0)
entropy(logits, temperature=1.0)
terminal_rewards(rewards, response_mask)
kl_shaped_rewards(rewards, logp, logp_ref, response_mask, beta)
reward_to_go(token_rewards, response_mask, gamma=1.0)
td_errors(token_rewards, values, response_mask, gamma=1.0)
gae(token_rewards, values, response_mask, gamma=1.0, lam=0.95)
batch_mean(rewards)
group_mean(rewards, group)
group_std(rewards, group, correction=1)
leave_one_out(rewards, group)
policy_gradient(logp, advantages)
importance_weighted(log_ratio, advantages)
clipped_surrogate(log_ratio, advantages, clip_low=0.2, clip_high=0.2, dual_clip=None)
clip_selected(log_ratio, advantages, clip_low=0.2, clip_high=0.2)
sequence_log_ratio(log_ratio, response_mask)
truncated_is_policy_gradient(logp, log_ratio, advantages, clip_low, clip_high)
kl_k1(logp, logp_ref)
kl_k2(logp, logp_ref)
kl_k3(logp, logp_ref)
kl_exact(logits, logits_ref, temperature=1.0)
approx_kl(log_ratio)
value_loss(values, returns)
clipped_value_loss(values, values_old, returns, clip)
explained_variance(values, returns, mask)
sum_per_response(mask)
mean_per_response(mask)
mean_per_token(mask)
fixed_length(mask, length)
mismatch_weights(logp_old, logp_sampler, response_mask, mode='truncate', cap=2.0, low=0.5, high=5.0, level='token')
adaptive_beta(beta, kl, target, horizon, num_responses)
preference_loss(chosen, rejected, margin=0.0)
soft_overlong_penalty(lengths, max_tokens, buffer)
pass_at_k(num_samples, num_correct, k)
""".splitlines()


def test_names_and_signatures_are_the_published_ones():
    def plain(name):
        signature = inspect.signature(getattr(eq, name))
        bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
        return name + str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))

    assert sorted(map(plain, eq.__all__)) == sorted(SIGNATURES)


# [B, T] float inputs of a function, by argument name; `mask` is passed under its own name.
REWARDS = torch.tensor([1.0, -2.0], dtype=torch.float64)
MASKED = {
    "masked_sum": (eq.masked_sum, ["x"], "mask"),
    "masked_mean": (eq.masked_mean, ["x"], "mask"),
    "masked_var": (eq.masked_var, ["x"], "mask"),
    "whiten": (eq.whiten, ["x"], "mask"),
    "whiten, mean kept": (lambda x, mask: eq.whiten(x, mask, shift_mean=False), ["x"], "mask"),
    "kl_shaped_rewards": (
        lambda logp, logp_ref, response_mask: eq.kl_shaped_rewards(
            REWARDS.to(logp.dtype), logp, logp_ref, response_mask, beta=0.1
        ),
        ["logp", "logp_ref"],
        "response_mask",
    ),
    "reward_to_go": (
        lambda token_rewards, response_mask: eq.reward_to_go(token_rewards, response_mask, 0.9),
        ["token_rewards"],
        "response_mask",
    ),
    "td_errors": (eq.td_errors, ["token_rewards", "values"], "response_mask"),
    "gae": (eq.gae, ["token_rewards", "values"], "response_mask"),
    "sequence_log_ratio": (eq.sequence_log_ratio, ["log_ratio"], "response_mask"),
    "explained_variance": (eq.explained_variance, ["values", "returns"], "mask"),
    "mismatch_weights": (eq.mismatch_weights, ["logp_old", "logp_sampler"], "response_mask"),
    "mismatch_weights, sequence": (
        lambda **x: eq.mismatch_weights(**x, level="sequence"),
        ["logp_old", "logp_sampler"],
        "response_mask",
    ),
    "mismatch_weights, masked geometric": (
        lambda **x: eq.mismatch_weights(**x, mode="mask", level="geometric"),
        ["logp_old", "logp_sampler"],
        "response_mask",
    ),
}
UNMASKED = {
    "policy_gradient": (eq.policy_gradient, ["logp", "advantages"]),
    "importance_weighted": (eq.importance_weighted, ["log_ratio", "advantages"]),
    "clipped_surrogate": (eq.clipped_surrogate, ["log_ratio", "advantages"]),
    "clipped_surrogate, dual": (
        lambda log_ratio, advantages: eq.clipped_surrogate(log_ratio, advantages, dual_clip=2.0),
        ["log_ratio", "advantages"],
    ),
    "truncated_is_policy_gradient": (
        lambda **x: eq.truncated_is_policy_gradient(**x, clip_low=0.2, clip_high=0.2),
        ["logp", "log_ratio", "advantages"],
    ),
    "kl_k1": (eq.kl_k1, ["logp", "logp_ref"]),
    "kl_k2": (eq.kl_k2, ["logp", "logp_ref"]),
    "kl_k3": (eq.kl_k3, ["logp", "logp_ref"]),
    "approx_kl": (eq.approx_kl, ["log_ratio"]),
    "value_loss": (eq.value_loss, ["values", "returns"]),
    "clipped_value_loss": (
        lambda **x: eq.clipped_value_loss(**x, clip=0.2),
        ["values", "values_old", "returns"],
    ),
}
T, F = True, False
MASK = torch.tensor([[F, T, T, F, T, F], [F, F, T, T, F, F]])  # a prompt, a gap, padding


def inputs(names, dtype=torch.float64):
    """[2, 6] numbers in -0.9 ... 0.8, other ones for each name."""
    return {
        name: torch.linspace(-0.9, 0.8, 12, dtype=torch.float64).roll(5 * i).reshape(2, 6).to(dtype)
        for i, name in enumerate(names)
    }


def value_and_gradients(f, x, mask, outside):
    """Value and gradients with `outside` put wherever the mask is False."""
    x = {name: torch.where(MASK, value, outside).requires_grad_() for name, value in x.items()}
    value = f(**x, **mask)
    if not value.requires_grad:
        return value, []
    total = (torch.arange(1, 1 + value.numel()).reshape(value.shape) * value).sum()
    gradients = torch.autograd.grad(total, list(x.values()), allow_unused=True)
    return value, [g for g in gradients if g is not None]


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30, -100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_outside_the_mask_enters_a_value_or_a_gradient_A15(name, garbage, dtype):
    f, names, mask_name = MASKED[name]
    x, mask = inputs(names, dtype), {mask_name: MASK}
    value, gradients = value_and_gradients(f, x, mask, outside=garbage)
    clean, clean_gradients = value_and_gradients(f, x, mask, outside=0.0)
    assert value.isfinite().all() and torch.equal(value, clean)
    assert value.dim() == 0 or (value[~MASK] == 0).all()
    for gradient, expected in zip(gradients, clean_gradients, strict=True):
        assert (gradient[~MASK] == 0).all()
        assert gradient.isfinite().all() and torch.equal(gradient, expected)


@pytest.mark.parametrize("name", UNMASKED)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30, -100.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_torch_where_removes_from_a_loss_leaves_no_gradient_A15(name, garbage, dtype):
    f, names = UNMASKED[name]

    def removed(**x):
        return torch.where(MASK, f(**x), 0.0)

    value, gradients = value_and_gradients(removed, inputs(names, dtype), {}, outside=garbage)
    clean, clean_gradients = value_and_gradients(removed, inputs(names, dtype), {}, outside=0.0)
    assert torch.equal(value, clean)
    for gradient, expected in zip(gradients, clean_gradients, strict=True):
        assert (gradient[~MASK] == 0).all() and torch.equal(gradient, expected)


@pytest.mark.parametrize("name", MASKED)
def test_a_nan_inside_the_mask_stays_visible_under_a_mask(name):
    f, names, mask_name = MASKED[name]
    for poisoned in names:
        x = inputs(names)
        x[poisoned][0, 1] = NAN
        assert f(**x, **{mask_name: MASK}).isnan().any()


@pytest.mark.parametrize("name", UNMASKED)
def test_a_nan_stays_visible_in_a_loss(name):
    f, names = UNMASKED[name]
    for poisoned in names:
        x = inputs(names)
        x[poisoned][0, 1] = NAN
        assert f(**x)[0, 1].isnan() and f(**x).isnan().sum() == 1


@pytest.mark.parametrize("name", MASKED)
def test_a_row_of_the_batch_without_a_response_token_gives_zeros(name):
    f, names, mask_name = MASKED[name]
    mask = MASK.clone()
    mask[0] = False
    value = f(**inputs(names), **{mask_name: mask})
    assert value.dim() == 0 or (value[0] == 0).all()


@pytest.mark.parametrize("name", [*MASKED, *UNMASKED])
def test_float64_stays_and_half_precision_and_integers_become_float32(name):
    f, names, mask_name = MASKED[name] if name in MASKED else (*UNMASKED[name], None)
    mask = {mask_name: MASK} if mask_name else {}
    kinds = ((torch.float64, torch.float64), (torch.float32, torch.float32))
    for given, expected in (*kinds, (torch.bfloat16, torch.float32), (torch.float16, torch.float32)):
        assert f(**inputs(names, given), **mask).dtype == expected
    assert f(**inputs(names, torch.int64), **mask).dtype == torch.float32


@pytest.mark.parametrize("name", [n for n in [*MASKED, *UNMASKED] if not n.startswith(("masked_", "explained"))])
def test_one_number_per_row_is_not_broadcast_over_tokens(name):
    f, names, mask_name = MASKED[name] if name in MASKED else (*UNMASKED[name], None)
    mask = {mask_name: MASK} if mask_name else {}
    for wrong in names:
        for shape in ((2,), (6,), (), (2, 1), (1, 6)):
            if len(shape) == 2 and len(names) == 1 and not mask:
                continue  # alone, [2, 1] is a batch of its own
            x = inputs(names)
            x[wrong] = torch.zeros(shape)
            with pytest.raises(ValueError, match="hape"):
                f(**x, **mask)


@pytest.mark.parametrize("f", [eq.masked_sum, eq.masked_mean, eq.masked_var, eq.whiten])
def test_a_mask_has_the_shape_of_what_it_masks(f):
    for shape in ((2,), (6,), (2, 1)):
        with pytest.raises(ValueError, match="Shapes given"):
            f(torch.zeros(2, 6), torch.ones(shape, dtype=torch.bool))


def test_rewards_of_the_wrong_number_or_shape_are_errors():
    x = torch.zeros(2, 6)
    for rewards in (torch.zeros(3), torch.zeros(1), torch.zeros(2, 6), torch.zeros(())):
        with pytest.raises(ValueError, match="one for each row"):
            eq.terminal_rewards(rewards, MASK)
        with pytest.raises(ValueError, match="one for each row"):
            eq.kl_shaped_rewards(rewards, x, x, MASK, beta=0.1)


def test_logits_and_tokens_must_fit():
    tokens = torch.zeros(2, 6, dtype=torch.long)
    for logits in (torch.zeros(2, 5, 3), torch.zeros(2, 6), torch.zeros(6), torch.zeros(1, 6, 3)):
        with pytest.raises(ValueError, match=r"needed|Needed"):
            eq.token_logp(logits, tokens)
    with pytest.raises(ValueError, match="Needed"):
        eq.token_logp(torch.zeros(2, 6, 3), tokens[:, 0])
    with pytest.raises(ValueError, match="Shapes given"):
        eq.kl_exact(torch.zeros(2, 6, 3), torch.zeros(2, 6, 4))
    with pytest.raises(ValueError, match="needed"):
        eq.entropy(torch.zeros(6))


def test_a_message_says_what_was_given_and_what_to_do():
    with pytest.raises(ValueError) as error:
        eq.policy_gradient(torch.zeros(2, 6), torch.zeros(2))
    assert "logp [2, 6], advantages [2]" in str(error.value)
    assert "x[:, None].expand(B, T)" in str(error.value)
    with pytest.raises(ValueError, match="logp is a list"):
        eq.policy_gradient([[0.0]], torch.zeros(1, 1))


def test_a_mask_is_bool_or_integers_of_zero_and_one():
    x = torch.tensor([[1.0, 2.0]])
    assert eq.masked_sum(x, torch.tensor([[0, 1]])) == 2
    for mask in (torch.tensor([[0, 2]]), torch.tensor([[0.0, 1.0]])):
        with pytest.raises(ValueError, match="needed bool"):
            eq.masked_sum(x, mask)


def test_an_empty_batch_passes_through():
    none, mask = torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool)
    assert eq.masked_mean(none, mask) == 0
    assert eq.gae(none, none, mask).tolist() == []
    assert eq.leave_one_out(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []
    assert eq.mean_per_response(mask).tolist() == []
    wide = torch.zeros(2, 0)
    assert eq.gae(wide, wide, wide.bool()).tolist() == [[], []]
    assert eq.terminal_rewards(torch.zeros(2), wide.bool()).tolist() == [[], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("f", [exp, expm1])
def test_the_exponential_saturates_a_little_before_it_overflows(f, dtype):
    """From log(largest) - 0.01 on it is the largest float, with that as its gradient; inf and NaN stay."""
    largest = torch.finfo(dtype).max
    edge = torch.tensor(math.log(largest) - 0.01, dtype=dtype)
    x = torch.stack([edge - 1, edge, edge + 0.005, edge + 0.015, edge * 2]).requires_grad_()
    value = f(x)
    assert value[1:].tolist() == [largest] * 4 and value[0] < 0.4 * largest
    (slope,) = torch.autograd.grad((value / largest).sum(), x)
    assert slope[1:].tolist() == pytest.approx([1.0] * 4) and 0.3 < slope[0] < 0.4
    special = f(torch.tensor([INF, -INF, NAN], dtype=dtype))
    assert special[:2].tolist() == [INF, -1.0 if f is expm1 else 0.0] and special[2].isnan()
