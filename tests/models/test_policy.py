"""What `measure` says of tokens: the exact KL of each state, its gradient, and where it is 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.batch import Batch, Rollout, collate
from hotcold.models.policy import measure
from hotcold.models.reference import FrozenReference
from tests.engines.test_local import BIGRAM, Bigram
from tests.toy_policies import TINY, assert_close, ragged_rollouts, relative_gap

OTHER = [[0.5, 0.25, 0.25], [0.3, 0.3, 0.4], [0.2, 0.2, 0.6]]
KL = frozenset({"logp", "kl"})


def batch_of(*rows: Rollout, pad_id: int = 0) -> Batch:
    return collate(rows, pad_id, torch.float64)


def row(prompt: tuple[int, ...], response: tuple[int, ...], **fields: Any) -> Rollout:
    return Rollout(prompt, response, 0, 0, reward=1.0, **fields)


def frozen(table: list[list[float]]) -> FrozenReference:
    return FrozenReference(Bigram(table), "abc")


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def kl_of(done: Any) -> Tensor:
    assert done.forward.kl is not None
    return done.forward.kl


def test_the_kl_of_a_token_is_that_of_the_state_in_which_it_was_chosen() -> None:
    """A01 for KL: [0, 1, 2 | 0, 1] has its trained tokens after 2 and after 0."""
    done = measure(Bigram(BIGRAM), batch_of(row((0, 1, 2), (0, 1))), KL, 1.0, frozen(OTHER))
    assert_close(kl_of(done), [[0, 0, 0, kl(BIGRAM[2], OTHER[2]), kl(BIGRAM[0], OTHER[0])]])
    assert kl_of(done).dtype == torch.float64


def test_both_distributions_of_the_kl_are_at_the_sampling_temperature() -> None:
    """A23: at temperature 0.5 a distribution is its squares, normalised."""

    def squared(p: list[float]) -> list[float]:
        return [x * x / sum(y * y for y in p) for x in p]

    done = measure(Bigram(BIGRAM), batch_of(row((0,), (1,))), KL, 0.5, frozen(OTHER))
    assert_close(kl_of(done)[0, 1], kl(squared(BIGRAM[0]), squared(OTHER[0])))


def test_the_kl_is_zero_where_nothing_is_trained() -> None:
    gap = row((0,), (1, 2, 0), response_mask=(True, False, True))
    rejected = Rollout((0,), (2,), 0, 1, reward=None)
    done = measure(Bigram(BIGRAM), batch_of(gap, row((0, 1), (2,)), rejected), KL, 1.0, frozen(OTHER))
    assert (kl_of(done) != 0).int().tolist() == [[0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]


def test_the_kl_sends_its_gradient_to_the_policy_alone() -> None:
    """d KL / d z_i = p_i (log(p_i / q_i) - KL) for one softmax row."""
    policy, reference = Bigram(BIGRAM), frozen(OTHER)
    kl_of(measure(policy, batch_of(row((0,), (1,))), KL, 1.0, reference)).sum().backward()
    p, q = BIGRAM[0], OTHER[0]
    assert policy.table.grad is not None
    assert_close(policy.table.grad[0], [a * (math.log(a / b) - kl(p, q)) for a, b in zip(p, q, strict=True)])
    assert bool((policy.table.grad[1:] == 0).all())
    assert all(x.grad is None for x in reference.frozen_module.parameters())


def test_a_reference_that_could_be_trained_gets_no_gradient() -> None:
    """With a starting adapter as the reference the module's parameters are the policy's own."""

    class Trainable:
        sha256 = "abc"
        own = Bigram(OTHER)

        def module(self) -> Any:
            return nullcontext(self.own)

    policy, reference = Bigram(BIGRAM), Trainable()
    kl_of(measure(policy, batch_of(row((0,), (1,))), KL, 1.0, reference)).sum().backward()
    assert policy.table.grad is not None and reference.own.table.grad is None


def test_without_gradient_the_kl_has_none_and_the_same_value() -> None:
    policy, batch = Bigram(BIGRAM), batch_of(row((0, 1), (2, 0)))
    with_gradient = kl_of(measure(policy, batch, KL, 1.0, frozen(OTHER)))
    with torch.no_grad():
        without = kl_of(measure(policy, batch, KL, 1.0, frozen(OTHER)))
    assert with_gradient.requires_grad and not without.requires_grad
    assert torch.equal(with_gradient, without)


def test_a_kl_that_nobody_needs_is_not_computed() -> None:
    class Untouched:
        sha256 = "abc"

        def module(self) -> Any:
            raise AssertionError("the reference was run")

    done = measure(Bigram(BIGRAM), batch_of(row((0,), (1,))), frozenset({"logp"}), 1.0, Untouched())
    assert done.forward.kl is None


def test_a_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(AssertionError, match="needs a reference"):
        measure(Bigram(BIGRAM), batch_of(row((0,), (1,))), KL, 1.0)


def test_a_batch_without_a_trained_token_has_zero_kl() -> None:
    """B09: an empty response."""
    done = measure(Bigram(BIGRAM), batch_of(row((0,), ())), KL | {"entropy"}, 1.0, frozen(OTHER))
    assert kl_of(done).tolist() == [[0]] and done.forward.entropy is not None


@pytest.mark.parametrize("make", list(TINY.values()), ids=list(TINY))
def test_the_kl_of_real_architectures_is_that_of_plain_forwards_row_by_row(make: Callable[..., Any]) -> None:
    """A07: the same row alone, without padding, by transformers alone."""
    policy, other = make().eval(), make(seed=1).eval()
    rows = [row((5, 6), (7, 8, 9)), row((1, 2, 3, 4, 5, 6, 7, 8, 9), (11, 12, 13, 14, 15, 16, 17))]
    with torch.no_grad():
        together = kl_of(measure(policy, batch_of(*rows), KL, 1.0, FrozenReference(other, "abc")))
        for i, r in enumerate(rows):
            ids = torch.tensor([[*r.prompt_ids, *r.response_ids]])
            p, q = (m(input_ids=ids).logits.double().log_softmax(-1)[0] for m in (policy, other))
            start = len(r.prompt_ids)
            alone = (p.exp() * (p - q)).sum(-1)[start - 1 : -1]
            assert float((together[i, start : ids.shape[1]] - alone).abs().max()) < 1e-5
            assert bool((together[i, ids.shape[1] :] == 0).all()) and bool((together[i, :start] == 0).all())


@pytest.mark.parametrize("make", list(TINY.values()), ids=list(TINY))
def test_a_kl_in_the_measurement_leaves_log_prob_and_entropy_as_they_were(make: Callable[..., Any]) -> None:
    batch, needs = batch_of(*ragged_rollouts()), frozenset({"logp", "entropy"})
    reference, results = FrozenReference(make(seed=1), "abc"), []
    for done in (
        measure(policy := make().eval(), batch, needs, 0.7),
        measure(policy, batch, needs | {"kl"}, 0.7, reference),
    ):
        assert done.forward.logp is not None and done.forward.entropy is not None
        loss = done.forward.logp.sum() + done.forward.entropy.sum()
        gradient = torch.autograd.grad(loss, list(policy.parameters()))
        results.append((done.forward.logp, done.forward.entropy, gradient))
    (logp, entropy, gradient), (logp_kl, entropy_kl, gradient_kl) = results
    assert torch.equal(logp, logp_kl) and torch.equal(entropy, entropy_kl)
    assert relative_gap(gradient, gradient_kl) < 1e-6
