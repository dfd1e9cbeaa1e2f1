"""bf16 compute around float32 parameters, and activations that are computed again in the backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CTRLConfig, CTRLLMHeadModel

from hotcold.batch import collate
from hotcold.errors import InputError
from hotcold.models.adapters import LoraSettings, StartingAdapter, add_lora
from hotcold.models.compute import check_recomputing, compute_context, default_dtype, recomputing, supports_bf16
from hotcold.models.critic import Critic, measure_values
from hotcold.models.policy import measure
from hotcold.models.reference import copy_as_reference
from hotcold.sampling.base import Request, SamplingOptions
from hotcold.sampling.transformers_engine import TransformersSampler
from tests.models.test_critic import critic_of
from tests.sampling.tiny import gpt2, letters, llama
from tests.toy_policies import TINY, ragged_rollouts, relative_gap

NEEDS = frozenset({"logp", "entropy", "kl"})
BATCH = collate(ragged_rollouts())


def all_of(module: nn.Module, reference: Any, needs: frozenset[str] = NEEDS) -> dict[str, Tensor]:
    forward = measure(module, BATCH, needs, 0.7, reference).forward
    return {name: value for name, value in vars(forward).items() if value is not None}


# ------------------------------------------------------------------ bf16


def test_full_precision_is_no_context_and_bf16_is_autocast() -> None:
    assert isinstance(compute_context("fp32", "cpu")(), nullcontext)
    make = compute_context("bf16", "cpu")
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    with make():
        half = torch.ones(2, 2) @ torch.ones(2, 2)
    with make():  # every forward has a context of its own
        again = torch.ones(2, 2) @ torch.ones(2, 2)
    assert (product.dtype, half.dtype, again.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)


def test_the_default_is_full_precision_off_a_gpu() -> None:
    assert default_dtype("cpu") == default_dtype("mps") == "fp32"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_bf16_on_a_device_that_does_not_have_it_is_refused() -> None:
    assert default_dtype("cuda") == "fp32"
    for device in ("cuda", "cuda:1"):
        with pytest.raises(InputError, match=f"bf16: the device {device} does not compute in bf16"):
            compute_context("bf16", device)


@pytest.mark.parametrize(("capable", "dtype"), [(True, "bf16"), (False, "fp32")])
def test_the_default_on_a_gpu_is_what_it_computes_in_hardware(
    capable: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(including_emulation: bool = True) -> bool:
        return capable or including_emulation  # an old GPU emulates bf16, slowly

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", answer)
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    assert default_dtype("cuda:0") == dtype and supports_bf16("cuda:0") is capable


def test_an_old_mac_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.mps.is_macos_or_newer", lambda major, minor: major <= 13)
    with pytest.raises(InputError, match="mps does not compute in bf16"):
        compute_context("bf16", "mps")


@pytest.mark.parametrize("dtype", ["fp16", "float32", ""])
def test_another_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(InputError, match="needed is one of fp32, bf16"):
        compute_context(dtype, "cpu")


@pytest.mark.parametrize("name", list(TINY))
def test_under_bf16_results_gradients_and_parameters_stay_float32(name: str) -> None:
    policy = TINY[name]().eval()
    reference = copy_as_reference(TINY[name](seed=1), "abc", "m")
    exact = all_of(policy, reference)
    with compute_context("bf16", "cpu")():
        results = all_of(policy, reference)
    gaps = {key: float((results[key] - exact[key]).detach().abs().max()) for key in NEEDS}
    assert all(0 < gap < 0.2 for gap in gaps.values()), gaps  # bf16 was used: three digits of logits below 8
    assert {value.dtype for value in results.values()} == {torch.float32}
    sum(value.sum() for value in results.values()).backward()
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {torch.float32}
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in policy.parameters())


@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize("one_context", [True, False])
def test_under_bf16_the_ratio_before_the_first_update_is_exactly_one(name: str, one_context: bool) -> None:
    """A25: log-probs without gradient first, as log pi_old is; even in one context the gradient is whole after it."""
    policy, make = TINY[name]().eval(), compute_context("bf16", "cpu")

    def logp() -> Tensor:
        with nullcontext() if one_context else make():
            return all_of(policy, None, frozenset({"logp"}))["logp"]

    with make() if one_context else nullcontext():
        with torch.no_grad():
            old = logp()
        new = logp()
        again = logp()
    assert torch.equal(old, new.detach())
    after = torch.autograd.grad(new.sum(), list(policy.parameters()))
    alone = torch.autograd.grad(again.sum(), list(policy.parameters()))
    assert relative_gap(after, alone) == 0 and all(bool((g != 0).any()) for g in after)


def test_under_bf16_a_reference_in_the_policys_own_parameters_is_seen_at_once() -> None:
    """D07: the starting adapter is the reference; its matrices stand in the policy's while it answers."""
    pytest.importorskip("peft")
    policy = TINY["llama"]().eval()
    add_lora(policy, LoraSettings(rank=2, alpha=4.0), seed=0)
    adapter = [p for p in policy.parameters() if p.requires_grad]
    reference = StartingAdapter(policy, "abc")
    with torch.no_grad():
        for parameter in adapter:
            parameter.add_(0.3)
    exact = all_of(policy, reference)["kl"].detach()
    with compute_context("bf16", "cpu")():
        kl = all_of(policy, reference)["kl"]
    assert float(exact[BATCH.trained].mean()) > 0.01
    assert float(kl.detach()[BATCH.trained].mean()) == pytest.approx(float(exact[BATCH.trained].mean()), rel=0.1)
    gradient = torch.autograd.grad(kl.sum(), adapter)
    assert all(bool((g != 0).any()) for g in gradient)


def test_under_bf16_a_critics_values_are_float32_in_all_their_digits() -> None:
    """A value of 1.25 + 2^-12 needs thirteen bits; bf16 has eight."""
    critic = critic_of("llama", head=False)
    with torch.no_grad():
        critic.head.bias.fill_(1.25 + 2**-12)
    with compute_context("bf16", "cpu")():
        values = measure_values(critic, BATCH)
    assert values.dtype == torch.float32
    assert set(values[BATCH.trained].tolist()) == {1.25 + 2**-12}
    values.sum().backward()
    assert {p.grad.dtype for p in critic.parameters() if p.grad is not None} == {torch.float32}


def test_under_bf16_a_critics_trunk_computes_in_bf16() -> None:
    critic = critic_of("llama")
    with torch.no_grad():
        exact = measure_values(critic, BATCH)
        with compute_context("bf16", "cpu")():
            values = measure_values(critic, BATCH)
    assert 1e-4 < float((values - exact).abs().max()) < 0.5


class OneWeight(nn.Module):
    """y = w x."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.linear.weight, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize(
    ("start", "rate", "count", "end", "rounding"),
    [(1.0, 1e-6, 1000, 0.999, 2**-25), (0.02001953125, 3e-6, 2000, 0.01401953125, 2**-30)],
)
def test_many_tiny_updates_are_not_swallowed_under_bf16_compute(
    start: float, rate: float, count: int, end: float, rounding: float
) -> None:
    """D11: below half a bf16 step each, so bf16 parameters would never move. The gradient of w x at x = 1 is 1.

    Each update is off by at most half a float32 step of the parameter, `rounding`.
    """
    model, x, make = OneWeight(start), torch.ones(1, 1), compute_context("bf16", "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    swallowed = torch.tensor(start, dtype=torch.bfloat16)
    for _ in range(count):
        optimizer.zero_grad()
        with make():
            y = model(x)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        optimizer.step()
        swallowed -= rate
    assert float(swallowed) == start
    assert float(model.linear.weight.detach()) == pytest.approx(end, abs=count * rounding)


def test_the_bf16_view_of_the_parameters_moves_when_they_have_crossed_half_a_step() -> None:
    """D11: below 1 a bf16 step is 2^-8, so 1.0 goes to 0.99609375 once the parameter is 2^-9 below it.

    In float32 an update of 1e-6 near 1 is 17 steps of 2^-24, so that is after 2^-9 / (17 x 2^-24) = 1927.5 updates.
    """
    model, x, make = OneWeight(1.0), torch.ones(1, 1), compute_context("bf16", "cpu")
    seen = []
    with torch.no_grad():
        for _ in range(1960):
            model.linear.weight.sub_(1e-6)
            with make():
                seen.append(float(model(x)))
    assert seen == [1.0] * 1927 + [0.99609375] * (1960 - 1927)


# ------------------------------------------------------------------ recomputing


def layers_of(module: Any) -> list[nn.Module]:
    trunk = module.trunk if isinstance(module, Critic) else module.base_model
    return list(trunk.layers if hasattr(trunk, "layers") else trunk.h)


@contextmanager
def counting(module: nn.Module) -> Iterator[list[int]]:
    """How often the attention of each layer runs."""
    counts = [0] * len(layers_of(module))
    handles = []
    for i, layer in enumerate(layers_of(module)):
        attention = layer.self_attn if hasattr(layer, "self_attn") else layer.attn

        def count(*_: Any, i: int = i) -> None:
            counts[i] += 1

        handles.append(attention.register_forward_pre_hook(count))
    yield counts
    for handle in handles:
        handle.remove()


def flags(module: nn.Module) -> list[Any]:
    """Everything that checkpointing touches."""
    own = [
        (n, m.training, getattr(m, "gradient_checkpointing", None), "_gradient_checkpointing_func" in vars(m))
        for n, m in module.named_modules()
    ]
    hooks = [(n, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in module.named_modules()]
    configs = [copy.deepcopy(m.config.to_dict()) for m in module.modules() if hasattr(m, "config")]
    return [own, hooks, configs]


def subject(kind: str, name: str) -> nn.Module:
    return critic_of(name) if kind == "critic" else TINY[name]().eval()


def loss_of(module: nn.Module) -> Tensor:
    if isinstance(module, Critic):
        return (measure_values(module, BATCH) ** 2).sum()
    results = all_of(module, None, frozenset({"logp", "entropy"}))
    return results["logp"].sum() + results["entropy"].sum()


KINDS = [(kind, name) for kind in ("policy", "critic") for name in TINY]


@pytest.mark.parametrize(("kind", "name"), KINDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recomputed_activations_give_the_same_bits(kind: str, name: str, dtype: str) -> None:
    """And each layer really runs twice: once forward, once more for the backward."""
    results = []
    for on in (False, True):
        module = subject(kind, name)
        with counting(module) as counts, recomputing(module, on):
            with compute_context(dtype, "cpu")():
                loss = loss_of(module)
            assert counts == [1, 1]
            loss.backward()
        assert counts == ([2, 2] if on else [1, 1])
        results.append((loss.detach(), [p.grad for p in module.parameters() if p.grad is not None]))
    (loss, gradient), (loss_again, gradient_again) = results
    assert torch.equal(loss, loss_again)
    assert len(gradient) == len(gradient_again) > 10
    assert all(torch.equal(a, b) for a, b in zip(gradient, gradient_again, strict=True))


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_every_flag_is_as_it_was_afterwards(kind: str, name: str) -> None:
    """D12."""
    module = subject(kind, name)
    before = flags(module)
    for _ in range(2):
        with recomputing(module, True):
            assert flags(module) != before
            loss_of(module).backward()
        assert flags(module) == before


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_every_flag_is_as_it_was_after_an_exception(kind: str, name: str) -> None:
    """D12: Ctrl-C or a failure between forward and backward."""
    module = subject(kind, name)
    before = flags(module)
    with pytest.raises(KeyboardInterrupt), recomputing(module, True):
        loss_of(module)
        raise KeyboardInterrupt
    assert flags(module) == before


def test_a_module_that_a_caller_had_put_into_train_mode_stays_there() -> None:
    module = TINY["llama"]().train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers has renamed it
        module.gradient_checkpointing_enable()
    before = flags(module)
    with recomputing(module, True):
        loss_of(module).backward()
    assert flags(module) == before and module.training


def test_nothing_is_touched_where_it_is_off() -> None:
    module = subject("policy", "llama")
    before = flags(module)
    with recomputing(module, False):
        assert flags(module) == before
    with recomputing(nn.Linear(2, 2), False):  # what cannot be checkpointed need not be
        pass


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_dropout_stays_off_inside(kind: str, name: str) -> None:
    """A25: GPT-2's config says 0.1; the ratio would not be 1."""
    module = subject(kind, name)
    with torch.no_grad():
        outside = loss_of(module)
        with recomputing(module, True):
            assert torch.equal(loss_of(module), outside)
    with recomputing(module, True):
        assert torch.equal(loss_of(module).detach(), outside)


def test_a_frozen_trunk_with_an_adapter_trains_through_recomputed_layers() -> None:
    pytest.importorskip("peft")
    gradients = []
    for on in (False, True):
        module = TINY["llama"]().eval()
        add_lora(module, LoraSettings(rank=2, alpha=4.0), seed=0)
        with counting(module) as counts, recomputing(module, on):
            loss_of(module).backward()
        assert counts == ([2, 2] if on else [1, 1])
        gradients.append([p.grad for p in module.parameters() if p.requires_grad])
    assert all(g is not None for g in gradients[0])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert any(bool((g != 0).any()) for g in gradients[1])


REQUESTS = [Request(ids, i, i) for i, ids in enumerate([(3,), (4, 5, 6), (7, 8), (9, 10, 11, 12, 13)])]
GREEDY = SamplingOptions(max_tokens=32, greedy=True)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_sampling_after_and_within_recomputing_has_its_cache(
    make: Any, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """D12: greedy, 32 tokens, 4 rows with padding on the left, around a training step: a prompt, 31 single tokens."""
    module = make()
    sampler = TransformersSampler(module, letters(), eos_ids=())
    widths: list[int] = []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )

    def tokens() -> list[Any]:
        widths.clear()
        responses = [r.ids for r in sampler.sample(REQUESTS, GREEDY)]
        assert widths == [5] + [1] * 31
        return responses

    plain = tokens()
    assert [len(ids) for ids in plain] == [32] * 4
    with recomputing(module, True):
        loss_of(module).backward()
        assert tokens() == plain
    assert tokens() == plain
    assert [r for r in caplog.records if "cach" in r.getMessage()] == []
    assert [w for w in recwarn.list if "checkpoint" in str(w.message) or "cach" in str(w.message)] == []


def test_a_family_without_checkpointing_is_refused_early() -> None:
    model = CTRLLMHeadModel(CTRLConfig(vocab_size=16, n_embd=16, dff=16, n_layer=1, n_head=2, n_positions=16))
    with pytest.raises(InputError, match=r"gradient_checkpointing: .* a CTRLLMHeadModel") as caught:
        check_recomputing(model)
    assert len(str(caught.value).splitlines()) <= 5
    with pytest.raises(InputError), recomputing(model, True):
        pass
    with pytest.raises(InputError, match="a Linear"):
        check_recomputing(nn.Linear(2, 2))


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_the_families_that_support_it_pass_the_check_untouched(kind: str, name: str) -> None:
    module = subject(kind, name)
    before = flags(module)
    check_recomputing(module)
    assert flags(module) == before
