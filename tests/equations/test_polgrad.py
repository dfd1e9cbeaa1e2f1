"""Our equations against polgrad (Apache-2.0), written by other people from the same papers, on random ragged batches.

Values and gradients, wherever both define the same thing. Not compared, and why:
- whitening: the variance of the population here, as the batch is all there is to be whitened; of a sample there;
- a mask with gaps in gae, groups of one: polgrad refuses them; here a tool's tokens stand between trained ones, and a
  group of one has advantage 0 or NaN by choice of the baseline;
- eps in the division by the std: none here, where a group without variance is found exactly; compared at eps = 0.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotcold.equations import (
    clip_selected,
    clipped_surrogate,
    clipped_value_loss,
    fixed_length,
    gae,
    group_mean,
    group_std,
    importance_weighted,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_shaped_rewards,
    leave_one_out,
    mean_per_response,
    mean_per_token,
    mismatch_weights,
    policy_gradient,
    sequence_log_ratio,
    sum_per_response,
    terminal_rewards,
    truncated_is_policy_gradient,
    value_loss,
)

polgrad = pytest.importorskip("polgrad")

LENGTHS = (5, 1, 3, 8, 2, 4)
WIDTH = 8
ALL = polgrad.Aggregation
WEIGHTINGS = {
    "token_mean": (ALL.TOKEN_MEAN, mean_per_token),
    "seq_mean_token_mean": (ALL.SEQ_MEAN_TOKEN_MEAN, mean_per_response),
    "seq_mean_token_sum": (ALL.SEQ_MEAN_TOKEN_SUM, sum_per_response),
    "token_sum_norm": (ALL.TOKEN_SUM_NORM, lambda mask: fixed_length(mask, length=7)),
}
SURROGATES = {
    "reinforce": (("REINFORCE", None), lambda logp, d, a: policy_gradient(logp, a)),
    "importance weighted": (("PG", None), lambda logp, d, a: importance_weighted(d, a)),
    "clipped": (("PG_CLIP", (0.2, 0.2)), lambda logp, d, a: clipped_surrogate(d, a, 0.2, 0.2)),
    "clipped higher": (("PG_CLIP", (0.2, 0.28)), lambda logp, d, a: clipped_surrogate(d, a, 0.2, 0.28)),
    "dual clip": (("PG_CLIP", (0.2, 0.2, 1.5)), lambda logp, d, a: clipped_surrogate(d, a, 0.2, 0.2, dual_clip=1.5)),
    "cispo": (("CISPO", (None, 0.5)), lambda logp, d, a: truncated_is_policy_gradient(logp, d, a, 1.0, 0.5)),
    "cispo, both ends": (("CISPO", (0.3, 0.5)), lambda logp, d, a: truncated_is_policy_gradient(logp, d, a, 0.3, 0.5)),
}


class Rows:
    """Ragged rows of random numbers; outside the mask something that must not matter."""

    def __init__(self, seed: int, lengths: Sequence[int] = LENGTHS):
        self.random = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        self.mask = torch.tensor([[t < length for t in range(WIDTH)] for length in lengths])
        self.logp = (-self.normal().abs()).requires_grad_()
        self.old = (self.logp + 0.5 * self.normal()).detach()
        self.ref = (self.logp + 0.7 * self.normal()).detach()
        self.advantages = self.normal()

    def __repr__(self) -> str:
        return f"rows of {self.lengths} tokens"

    def normal(self) -> Tensor:
        return torch.randn(len(self.lengths), WIDTH, dtype=torch.float64, generator=self.random)

    @property
    def log_ratio(self) -> Tensor:
        return torch.where(self.mask, self.logp - self.old, 0.0)

    def cut(self, values: Tensor) -> Tensor:
        return torch.where(self.mask, values, 0.0)


RAGGED = st.builds(Rows, st.integers(0, 2**31 - 1), st.lists(st.integers(1, WIDTH), min_size=1, max_size=7))
GROUPS = st.lists(st.integers(2, 4), min_size=1, max_size=3).map(
    lambda sizes: [g for g, n in enumerate(sizes) for _ in range(n)]
)
fixed = settings(max_examples=25, deadline=None, derandomize=True)


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def same_with_gradient(ours: Tensor, theirs: Tensor, of: Tensor) -> None:
    same(ours, theirs)
    same(*(torch.autograd.grad(total.sum(), of, retain_graph=True)[0] for total in (ours, theirs)))


def their_config(kind: str, clip: tuple | None, aggregation=ALL.TOKEN_MEAN, ratio: str = "TOKEN", **more):
    clip = None if clip is None else polgrad.ClipConfig(*clip)
    ratio, kind = getattr(polgrad.RatioKind, ratio), getattr(polgrad.SurrogateKind, kind)
    return polgrad.PolicyLossConfig(ratio, kind, clip, aggregation, norm_len=7, **more)


def their_loss(config, rows: Rows, **more):
    given = {"logprobs": rows.logp, "old_logprobs": rows.old, "advantages": rows.advantages}
    return polgrad.policy_loss(config, response_mask=rows.mask, **given, **more)


@pytest.mark.parametrize("name", SURROGATES)
@fixed
@given(rows=RAGGED)
def test_surrogates_have_polgrads_value_and_gradient_at_every_token(name: str, rows: Rows) -> None:
    config, ours = SURROGATES[name]
    theirs = their_loss(their_config(*config), rows).per_token_objective
    same_with_gradient(rows.cut(ours(rows.logp, rows.log_ratio, rows.advantages)), theirs, rows.logp)


def test_the_random_rows_reach_every_branch_of_the_clips() -> None:
    rows = Rows(0)
    ratio, up = rows.log_ratio.exp()[rows.mask], rows.advantages[rows.mask] > 0
    for sign in (up, ~up):
        assert bool((sign & (ratio > 1.28)).any()) and bool((sign & (ratio < 0.8)).any())
    assert bool((~up & (ratio > 1.5)).any())


@pytest.mark.parametrize("name", WEIGHTINGS)
@fixed
@given(rows=RAGGED)
def test_a_weighted_loss_is_polgrads_aggregated_one(name: str, rows: Rows) -> None:
    aggregation, weighting = WEIGHTINGS[name]
    loss = clipped_surrogate(rows.log_ratio, rows.advantages)
    same_with_gradient(
        (rows.cut(loss) * weighting(rows.mask)).sum(),
        their_loss(their_config("PG_CLIP", (0.2, 0.2), aggregation), rows).loss,
        rows.logp,
    )


@fixed
@given(rows=RAGGED)
def test_the_sequence_ratio_is_polgrads_and_so_is_its_gradient(rows: Rows) -> None:
    advantages = rows.advantages[:, :1].expand_as(rows.advantages)
    config = their_config("PG_CLIP", (0.1, 0.15), ALL.SEQ_MEAN_TOKEN_MEAN, "SEQUENCE")
    theirs = polgrad.policy_loss(
        config, logprobs=rows.logp, old_logprobs=rows.old, advantages=advantages, response_mask=rows.mask
    )
    loss = clipped_surrogate(sequence_log_ratio(rows.log_ratio, rows.mask), advantages, 0.1, 0.15)
    same_with_gradient((rows.cut(loss) * mean_per_response(rows.mask)).sum(), theirs.loss, rows.logp)


@fixed
@given(rows=RAGGED)
def test_the_clip_fraction_counts_polgrads_tokens(rows: Rows) -> None:
    theirs = their_loss(their_config("PG_CLIP", (0.2, 0.28)), rows)
    ours = clip_selected(rows.log_ratio.detach(), rows.advantages, 0.2, 0.28) & rows.mask
    assert torch.equal(ours, theirs.clipped_low | theirs.clipped_high)


@pytest.mark.parametrize(("kind", "ours"), [("K1", kl_k1), ("K2", kl_k2), ("K3", kl_k3)])
@fixed
@given(rows=RAGGED)
def test_estimates_of_the_kl_are_polgrads(kind: str, ours, rows: Rows) -> None:
    theirs = polgrad.kl_estimate(rows.logp, rows.ref, getattr(polgrad.KLEstimator, kind), response_mask=rows.mask)
    same_with_gradient(rows.cut(ours(rows.logp, rows.ref)), theirs, rows.logp)


@fixed
@given(rows=RAGGED)
def test_rewards_with_the_kl_and_gae_are_polgrads(rows: Rows) -> None:
    scores, values = rows.normal()[:, 0], rows.normal()
    shaped = kl_shaped_rewards(scores, rows.old, rows.ref, rows.mask, beta=0.3)
    terminal = terminal_rewards(scores, rows.mask)
    same(
        shaped,
        polgrad.kl_in_reward(
            terminal, rows.old, rows.ref, kind=polgrad.KLEstimator.K1, coef=0.3, response_mask=rows.mask
        ),
    )
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.9, 0.0)):
        advantages, returns = polgrad.gae(
            shaped, rows.cut(values), config=polgrad.GAEConfig(gamma, lam), response_mask=rows.mask
        )
        ours = gae(shaped, values, rows.mask, gamma, lam)
        same(ours, advantages)
        same(rows.cut(ours + values), returns)


@fixed
@given(group=GROUPS.flatmap(st.permutations), seed=st.integers(0, 2**31 - 1))
def test_advantages_against_the_group_are_polgrads(group: list[int], seed: int) -> None:
    rewards, group = Rows(seed, [1] * len(group)).normal()[:, 0], torch.tensor(group)
    for scale in ("none", "std"):
        theirs = polgrad.grpo_advantages(rewards, group, polgrad.GroupNormConfig(scale=scale, eps=0.0))
        centred = rewards - group_mean(rewards, group)
        same(centred if scale == "none" else centred / group_std(rewards, group), theirs)
    same(rewards - leave_one_out(rewards, group), polgrad.rloo_advantages(rewards, group))


@pytest.mark.parametrize("clip", [None, 0.2])
@fixed
@given(rows=RAGGED)
def test_losses_of_the_critic_are_polgrads(clip: float | None, rows: Rows) -> None:
    values, old, returns = rows.normal().requires_grad_(), rows.normal(), rows.normal()
    theirs = polgrad.value_loss(values, old, returns, rows.mask, clip_eps=clip, aggregation=ALL.TOKEN_MEAN)
    ours = value_loss(values, returns) if clip is None else clipped_value_loss(values, old, returns, clip)
    same_with_gradient((rows.cut(ours) * mean_per_token(rows.mask)).sum(), theirs.loss, values)


@pytest.mark.parametrize("level", ["token", "sequence"])
@fixed
@given(rows=RAGGED)
def test_truncated_weights_against_a_samplers_mismatch_are_polgrads(level: str, rows: Rows) -> None:
    sampler = (rows.old + 0.4 * rows.normal()).detach()
    config = their_config("REINFORCE", None, is_correction=polgrad.ISCorrectionConfig(cap=1.25, level=level))
    theirs = their_loss(config, rows, rollout_logprobs=sampler).per_token_objective
    weights = mismatch_weights(rows.old, sampler, rows.mask, "truncate", cap=1.25, level=level)
    same_with_gradient(rows.cut(weights * policy_gradient(rows.logp, rows.advantages)), theirs, rows.logp)
