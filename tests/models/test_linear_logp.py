"""log pi from hidden states against the equations of whole logits, with gradients, in chunks of a few rows."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotcold.equations.logprobs import selected_logp, state_entropy
from hotcold.models import chunks
from hotcold.models import linear_logp as module
from hotcold.models.linear_logp import HEAD, linear_logp
from hotcold.models.reading import Head

N, H, V = 11, 6, 20
AFTER = [(HEAD, 1.0), (Head(0.25), 1.0), (Head(1.0, 3.0), 1.0), (Head(0.5, 2.0), 0.7), (HEAD, 1.6), (Head(0.5), 0.5)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 4 * V)  # 4, 4 and 3 rows in a product
    monkeypatch.setattr(module, "SLICE_ELEMENTS", 3 * V)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = (3 * torch.randn(s, dtype=dtype) for s in ((N, H), (V, H), (V,)))
    return hidden, weight, bias, torch.randint(0, V, (N,))


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head) -> Tensor:
    z = head.scale * torch.nn.functional.linear(hidden, weight, bias)
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


@pytest.mark.parametrize(("head", "temperature"), AFTER)
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_the_whole_logits(head: Head, temperature: float, with_bias: bool) -> None:
    hidden, weight, bias, ids = inputs()
    bias = bias if with_bias else None
    given = [x.requires_grad_() for x in (hidden, weight, bias) if x is not None]
    logp, entropy = linear_logp(hidden, weight, bias, ids, head, temperature)
    z = logits_of(hidden, weight, bias, head)
    expected = selected_logp(z, ids, temperature)
    torch.testing.assert_close(logp, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(entropy, state_entropy(z, temperature), atol=1e-12, rtol=1e-12)
    assert not entropy.requires_grad
    share = torch.linspace(-1, 1, N, dtype=torch.float64)  # of a loss that takes tokens up and down
    found = torch.autograd.grad((logp * share).sum(), given)
    for ours, theirs in zip(found, torch.autograd.grad((expected * share).sum(), given), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(("head", "temperature"), AFTER)
def test_the_gradient_is_that_of_finite_differences(head: Head, temperature: float) -> None:
    hidden, weight, bias, ids = inputs()
    given = tuple(0.3 * x.detach() for x in (hidden, weight, bias))
    for x in given:
        x.requires_grad_()
    assert torch.autograd.gradcheck(lambda *xs: linear_logp(*xs, ids, head, temperature)[0], given)


def test_a_token_that_cannot_be_chosen_has_no_part_and_a_state_without_a_distribution_shows() -> None:
    hidden, weight, bias, ids = inputs()
    bias[3] = float("-inf")
    ids[ids == 3] = 4
    logp, entropy = linear_logp(hidden, weight, bias, ids)
    kept = [v for v in range(V) if v != 3]
    z = logits_of(hidden, weight[kept], bias[kept], HEAD)
    place = torch.tensor([kept.index(i) for i in ids.tolist()])
    torch.testing.assert_close(logp, selected_logp(z, place), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(entropy, state_entropy(z), atol=1e-12, rtol=1e-12)
    hidden[2] = 1e308  # its logits overflow
    hidden.requires_grad_()
    weight.requires_grad_()
    logp, entropy = linear_logp(hidden, weight, None, ids)
    assert logp.isnan().tolist() == entropy.isnan().tolist() == [i == 2 for i in range(N)]
    logp[torch.arange(N) != 2].sum().backward()
    others = weight.grad
    assert others is not None and bool(others.isfinite().all()) and bool(hidden.grad[[0, 1, 3]].isfinite().all())


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gave."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def test_no_tensor_of_all_tokens_by_all_words_is_ever_whole() -> None:
    hidden, weight, _, ids = inputs(torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    with Largest() as largest:
        linear_logp(hidden, weight, None, ids)[0].sum().backward()
    assert largest.numel == max(V * H, 4 * V) < N * V


def test_float32_is_as_near_as_the_sum_allows() -> None:
    """A vocabulary of 50 thousand: a plain running sum would be off by about 1e-4."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 32), torch.randn(50_000, 32)
    ids = torch.randint(0, 50_000, (5,))
    logp, entropy = linear_logp(hidden, weight, None, ids)
    z = (hidden.double() @ weight.double().T) - 0.0
    torch.testing.assert_close(logp.double(), selected_logp(z, ids), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), state_entropy(z), atol=1e-4, rtol=0)
