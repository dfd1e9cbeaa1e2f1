"""Products for a few rows are those of the layer; after the block the layer is what it was."""

import pytest
import torch
from torch import nn

from hotcold.models.products import FEW, for_few_rows
from tests.sampling.tiny import gpt2, llama


@pytest.mark.parametrize("shape", [(1, 16), (7, 16), (8, 16), (3, 5, 16), (32, 1, 16), (56, 16), (57, 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_the_layer_s(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 24, bias=bias), torch.randn(shape)
    with torch.no_grad():
        plain = layer(x)
        with for_few_rows(layer):
            found = layer(x)
    assert found.shape == plain.shape and found.is_contiguous()
    torch.testing.assert_close(found, plain, atol=1e-6, rtol=0)
    assert "forward" not in vars(layer)


def test_a_model_gives_its_logits_and_a_layer_with_its_own_forward_keeps_it() -> None:
    for module in (llama(), gpt2()):
        ids = torch.arange(24).reshape(8, 3)
        with torch.no_grad():
            plain = module(input_ids=ids).logits
            with for_few_rows(module):
                torch.testing.assert_close(module(input_ids=ids).logits, plain, atol=1e-5, rtol=0)
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    with for_few_rows(layer):
        assert torch.equal(layer(torch.ones(min(FEW), 4)), torch.ones(min(FEW), 4))
    assert "forward" in vars(layer)


def test_gradients_are_untouched() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(8, 4)
    layer(x).sum().backward()
    expected = layer.weight.grad
    layer.weight.grad = None
    with for_few_rows(layer):
        layer(x).sum().backward()
    assert torch.equal(layer.weight.grad, expected)
