"""Optimisers: the plain step, the rate, state by name."""

import pytest
import torch
from torch import nn

from hotcold.errors import InputError
from hotcold.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors, rate_at
from tests.tiny_model import tiny_llama


def quadratic(w: nn.Parameter) -> torch.Tensor:
    return (w**2).sum()


def test_sgd_moves_by_rate_times_gradient() -> None:
    w = nn.Parameter(torch.tensor([3.0, -1.0]))
    optimizer = make_optimizer("sgd", [("w", w)], 0.1)
    quadratic(w).backward()
    optimizer.step()
    assert torch.allclose(w, torch.tensor([3 - 0.1 * 6, -1 + 0.1 * 2]))


def test_the_first_adam_step_has_torchs_placement_of_eps() -> None:
    """The bias-corrected first step is g / (|g| + eps): with g = 1e-8 = eps it is half the rate."""
    w = nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.float64))
    optimizer = make_optimizer("adamw", [("w", w)], 1e-3)
    w.grad = torch.tensor([1e-8, 4.0], dtype=torch.float64)
    optimizer.step()
    assert torch.allclose(1 - w, torch.tensor([0.5e-3, 1e-3], dtype=torch.float64), rtol=1e-6)


def test_adam_does_not_decay_weights() -> None:
    w = nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer("adamw", [("w", w)], 0.1)
    w.grad = torch.zeros(1)
    optimizer.step()
    assert w.item() == 1.0


def test_the_rate_rises_over_three_steps_and_stays() -> None:
    assert [rate_at(step, 3.0, 3) for step in (1, 2, 3, 4, 100)] == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert rate_at(1, 3.0, 0) == 3.0  # no warm-up


def test_state_by_name_continues_bit_for_bit() -> None:
    """Two steps, then a third in a fresh optimiser with the saved state: as three in one."""

    def run(w: nn.Parameter, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            quadratic(w).backward()
            optimizer.step()

    whole = nn.Parameter(torch.tensor([1.0, -2.0]))
    run(whole, make_optimizer("adamw", [("w", whole)], 0.1), 3)
    first = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = make_optimizer("adamw", [("w", first)], 0.1)
    run(first, optimizer, 2)
    saved = optimizer_tensors(optimizer, [("w", first)])
    assert set(saved) == {"w.step", "w.exp_avg", "w.exp_avg_sq"}
    second = nn.Parameter(first.detach().clone())
    fresh = make_optimizer("adamw", [("w", second)], 0.1)
    load_optimizer_tensors(fresh, [("w", second)], saved)
    run(second, fresh, 1)
    assert torch.equal(whole, second)


def test_state_of_an_unknown_parameter_is_refused() -> None:
    w = nn.Parameter(torch.zeros(1))
    with pytest.raises(InputError, match=r"other\.exp_avg"):
        load_optimizer_tensors(make_optimizer("adamw", [("w", w)], 0.1), [("w", w)], {"other.exp_avg": torch.zeros(1)})


def test_state_of_another_shape_is_refused() -> None:
    w = nn.Parameter(torch.zeros(2))
    saved = {"w.exp_avg": torch.zeros(3), "w.exp_avg_sq": torch.zeros(2), "w.step": torch.tensor(1.0)}
    with pytest.raises(InputError, match=r"w\.exp_avg has shape \[3\], the parameter \[2\]"):
        load_optimizer_tensors(make_optimizer("adamw", [("w", w)], 0.1), [("w", w)], saved)


def test_a_tied_weight_is_stepped_once() -> None:
    """D10: embedding and head are one tensor; two steps on it would be twice the update."""
    model = tiny_llama()
    named = list(model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(p is model.lm_head.weight for _, p in named) == 1
    before = model.lm_head.weight.detach().clone()
    optimizer = make_optimizer("sgd", named, 1.0)
    model.lm_head.weight.grad = torch.ones_like(before)
    optimizer.step()
    assert torch.equal(model.lm_head.weight, before - 1)


def test_float32_parameters_keep_steps_that_bf16_would_lose() -> None:
    """D11: 1000 steps of 1e-6 from 1.0; half a bf16 step at 1 is 0.0039 downwards, so bf16 would stay at 1."""
    w = nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer("sgd", [("w", w)], 1e-6)
    for _ in range(1000):
        w.grad = torch.ones(1)
        optimizer.step()
    assert w.item() == pytest.approx(0.999, abs=2e-5)  # fp32 rounds each step to 17 of its own
