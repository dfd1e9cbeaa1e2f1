"""LoRA: the module keeps its class, the base its bits, and plain peft and transformers read what is written."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from hotcold.errors import InputError
from hotcold.models import adapters
from hotcold.models.adapters import (
    AdapterOff,
    LoraSettings,
    StartingAdapter,
    adapter_rank,
    adapter_tensors,
    add_lora,
    has_adapter,
    load_adapter_tensors,
    merged,
    save_adapter,
    target_names,
)
from hotcold.models.hf import accepts, supports_logits_to_keep
from hotcold.models.loading import export_model
from hotcold.sampling.base import Request, SamplingOptions
from hotcold.sampling.transformers_engine import TransformersSampler
from tests.tiny_model import EOS, character_tokenizer

IDS = torch.tensor([[3, 4, 5, 6, 7], [1, 9, 2, 8, 0]])
SETTINGS = LoraSettings(rank=2, alpha=4.0)
LLAMA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": EOS + 1, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 40,
        "bos_token_id": None, "eos_token_id": EOS, "tie_word_embeddings": True,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def untied() -> LlamaForCausalLM:
    return llama(tie_word_embeddings=False)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"vocab_size": EOS + 1, "n_positions": 40, "n_embd": 16, "n_layer": 2, "n_head": 2}
    rates = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **rates, eos_token_id=EOS, bos_token_id=EOS)).eval()


def saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def logits(module: Any) -> Tensor:
    with torch.no_grad():
        return module(input_ids=IDS).logits


def bits(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter that does not train, by its plain name, copied."""
    with adapters.without_adapter(module):
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def train(module: Any, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)
    for _ in range(steps):
        module(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(make: Callable[[], Any] = llama, settings: LoraSettings = SETTINGS) -> Any:
    module = make()
    add_lora(module, settings, seed=0)
    train(module)
    return module


@pytest.mark.parametrize("make", [llama, untied, gpt2])
def test_a_new_adapter_changes_no_logit_no_class_and_no_random_number(make: Callable[[], Any]) -> None:
    module, plain = make(), make()
    state = torch.get_rng_state()
    add_lora(module, SETTINGS, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(module) is type(plain)
    assert supports_logits_to_keep(module) and accepts(module, "position_ids")
    assert torch.equal(logits(module), logits(plain))


@pytest.mark.parametrize(
    ("make", "layers", "num_tensors"),
    [
        (llama, LLAMA_LAYERS, 28),  # A and B of 7 layers in 2 blocks
        (untied, LLAMA_LAYERS, 28),
        (gpt2, ["c_attn", "c_proj", "c_fc"], 16),  # of 4 layers: attention and MLP have a c_proj each
    ],
)
def test_every_linear_layer_of_the_trunk_is_adapted_and_nothing_else_trains(
    make: Callable[[], Any], layers: list[str], num_tensors: int
) -> None:
    module = make()
    add_lora(module, SETTINGS, seed=0)
    training = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert training.keys() == adapter_tensors(module).keys()
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in training} == set(layers)
    assert {p.dtype for p in training.values()} == {torch.float32}
    assert len(training) == num_tensors


def test_a_is_a_function_of_the_seed_and_b_is_zero() -> None:
    first, again, other = llama(), llama(), llama()
    torch.manual_seed(1)
    add_lora(first, SETTINGS, seed=7)
    torch.manual_seed(2)
    add_lora(again, SETTINGS, seed=7)
    add_lora(other, SETTINGS, seed=8)
    assert same(adapter_tensors(first), adapter_tensors(again))
    for name, tensor in adapter_tensors(first).items():
        if "lora_B" in name:
            assert not tensor.any()
        else:
            assert not torch.equal(tensor, adapter_tensors(other)[name])
            bound = 1 / tensor.shape[1] ** 0.5  # uniform between -bound and bound
            assert 0.7 * bound < tensor.abs().max() <= bound


def test_the_output_is_that_of_w_plus_alpha_over_rank_times_b_a() -> None:
    module = untied()
    add_lora(module, LoraSettings(rank=2, alpha=6.0, targets=("lm_head",)), seed=0)
    tensors = adapter_tensors(module)
    b = torch.arange(2.0 * (EOS + 1)).reshape(EOS + 1, 2) / 50
    load_adapter_tensors(module, tensors | {"lm_head.lora_B.default.weight": b})
    expected = untied()
    with torch.no_grad():
        expected.lm_head.weight += 3.0 * b @ tensors["lm_head.lora_A.default.weight"]
    torch.testing.assert_close(logits(module), logits(expected), rtol=0, atol=1e-5)


def test_targets_are_ends_of_layer_names() -> None:
    module = llama()
    add_lora(module, LoraSettings(2, 4.0, ("q_proj", "layers.1.mlp.up_proj")), seed=0)
    assert {name.split(".lora_")[0] for name in adapter_tensors(module)} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }
    assert target_names(llama(), ("all-linear",)) == target_names(llama(), None)


@pytest.mark.parametrize("wrong", ["q_porj", "proj", "embed_tokens"])
def test_an_unknown_target_names_the_layers_that_exist_and_leaves_the_module_alone(wrong: str) -> None:
    module = llama()
    with pytest.raises(InputError, match=f"'{wrong}'") as caught:
        add_lora(module, LoraSettings(2, 4.0, ("v_proj", wrong)), seed=0)
    assert all(layer in str(caught.value) for layer in [*LLAMA_LAYERS, "lm_head"])
    assert len(str(caught.value).splitlines()) <= 5
    assert not has_adapter(module) and all(p.requires_grad for p in module.parameters())


def test_a_second_adapter_is_refused_with_the_rank_of_the_first() -> None:
    module = llama()
    add_lora(module, LoraSettings(3, 6.0), seed=0)
    with pytest.raises(InputError, match=r"rank 3 already.*\n.*Leave lora\.rank"):
        add_lora(module, SETTINGS, seed=0)
    assert adapter_rank(module) == 3 and adapter_rank(llama()) is None


@pytest.mark.parametrize(("rank", "alpha"), [(0, 1.0), (2, 0.0)])
def test_a_rank_or_alpha_below_its_least_is_refused(rank: int, alpha: float) -> None:
    with pytest.raises(InputError, match="at least 1"):
        add_lora(llama(), LoraSettings(rank, alpha), seed=0)


@pytest.mark.parametrize("make", [llama, untied, gpt2])
def test_training_moves_every_adapter_tensor_and_not_one_bit_of_the_base(make: Callable[[], Any]) -> None:  # D09
    module = make()
    add_lora(module, SETTINGS, seed=0)
    base, adapter = bits(module), adapter_tensors(module)
    train(module)
    assert same(bits(module), base) and same(base, {n: p.detach() for n, p in make().named_parameters()})
    assert all(not torch.equal(tensor, adapter[name]) for name, tensor in adapter_tensors(module).items())


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_reference_without_adapter_is_the_base_model_bit_for_bit(make: Callable[[], Any]) -> None:  # D07
    base, module = logits(make()), make()
    add_lora(module, SETTINGS, seed=0)
    reference = AdapterOff(module, "of the base")
    for _ in range(2):
        with reference.module() as inside:
            assert inside is module and torch.equal(logits(inside), base)
        train(module)
        assert (logits(module) - base).abs().max() > 1e-3  # the policy has left its reference
    names = [name for name, _ in module.named_parameters()]
    with pytest.raises(KeyError), reference.module():
        raise KeyError
    assert [name for name, _ in module.named_parameters()] == names
    assert not torch.equal(logits(module), base)
    assert reference.sha256 == "of the base"


def test_the_reference_may_be_asked_between_a_forward_and_its_backward() -> None:
    module = trained()
    copies = copy.deepcopy(module)
    for reference in (AdapterOff(module, ""), StartingAdapter(module, "")):
        module.zero_grad()
        copies.zero_grad()
        loss = module(input_ids=IDS, labels=IDS).loss
        with reference.module() as inside:
            logits(inside)
        loss.backward()
        copies(input_ids=IDS, labels=IDS).loss.backward()
        grads = [[p.grad for p in m.parameters() if p.requires_grad] for m in (module, copies)]
        assert all(torch.equal(a, b) and a.any() for a, b in zip(*grads, strict=True))


def test_the_starting_adapter_stays_what_it_was_while_the_policy_trains() -> None:
    module = trained()
    start = logits(module)
    reference = StartingAdapter(module, "of both")
    train(module)
    policy, tensors = logits(module), adapter_tensors(module)
    assert not torch.equal(policy, start)
    for _ in range(2):
        with reference.module() as inside:
            assert inside is module and torch.equal(logits(inside), start)
        assert torch.equal(logits(module), policy)
    with pytest.raises(KeyError), reference.module():
        raise KeyError
    assert same(adapter_tensors(module), tensors)
    train(module)  # an optimiser made after it still reaches the module's own tensors
    assert not torch.equal(logits(module), policy)


def test_sampling_with_a_cache_goes_through_the_adapter() -> None:
    module, plain, base = trained(), llama(), llama()
    with merged(module):
        plain.load_state_dict(module.state_dict())
    options = SamplingOptions(max_tokens=5)
    requests = [Request((3, 4, 5), 0), Request((6, 7), 1)]
    sampled = [
        TransformersSampler(m, character_tokenizer(), ()).sample(requests, options) for m in (module, plain, base)
    ]
    ours, merge, start = (torch.tensor([response.logp for response in responses]) for responses in sampled)
    torch.testing.assert_close(ours, merge, rtol=0, atol=1e-5)
    assert (ours - start).abs().max() > 1e-3


@pytest.mark.parametrize("make", [llama, untied, gpt2])
def test_plain_peft_loads_what_is_saved(tmp_path: Path, make: Callable[[], Any]) -> None:
    base = saved(tmp_path / "base", make())
    module = trained(make)
    save_adapter(module, tmp_path / "adapter", str(base))
    plain = AutoModelForCausalLM.from_pretrained(base)
    read = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    assert torch.equal(logits(read.eval()), logits(module))
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (2, 4, str(base))
    assert said["target_modules"] == sorted(said["target_modules"])


class WithHead(nn.Module):
    """A trunk and a scalar head, as a critic has them."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.trunk = copy.deepcopy(llama().model)
        self.head = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.trunk(input_ids=ids).last_hidden_state)[..., 0]


def test_the_trunk_of_a_critic_takes_an_adapter_and_its_head_stays_trainable(tmp_path: Path) -> None:
    torch.manual_seed(3)
    critic = WithHead()
    before = critic(IDS).detach()
    add_lora(critic.trunk, SETTINGS, seed=0)
    assert torch.equal(critic(IDS), before)
    assert len(adapter_tensors(critic)) == 2 * 2 * len(LLAMA_LAYERS)
    training = {name for name, p in critic.named_parameters() if p.requires_grad}
    assert training == adapter_tensors(critic).keys() | {"head.weight", "head.bias"}
    base = bits(critic.trunk)
    optimizer = torch.optim.AdamW([p for p in critic.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(20):
        loss = (critic(IDS) - 1.0).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 4 and same(bits(critic.trunk), base)
    save_adapter(critic.trunk, tmp_path / "critic", "base")
    llama().model.save_pretrained(tmp_path / "trunk")
    read = PeftModel.from_pretrained(AutoModel.from_pretrained(tmp_path / "trunk"), str(tmp_path / "critic"))
    assert torch.equal(read.eval()(input_ids=IDS).last_hidden_state, critic.trunk(input_ids=IDS).last_hidden_state)


def test_adapter_tensors_come_back_bit_for_bit_through_a_file(tmp_path: Path) -> None:
    module, other = trained(), llama()
    save_file(adapter_tensors(module), tmp_path / "adapter.safetensors")
    add_lora(other, SETTINGS, seed=9)
    load_adapter_tensors(other, load_file(tmp_path / "adapter.safetensors"))
    assert torch.equal(logits(other), logits(module))
    kept = adapter_tensors(module)
    train(module)
    assert not same(adapter_tensors(module), kept)  # they are copies


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.lora_A.default.weight"), r"1 tensors differ; it lacks .*up_proj"),
        (lambda t: t.update(unknown=torch.zeros(1)), r"1 tensors differ; it has unknown"),
        (lambda t: t.update({n: torch.zeros(3, v.shape[1]) for n, v in t.items() if "lora_A" in n}), r"is \[3, "),
    ],
)
def test_tensors_of_another_adapter_are_refused_and_change_nothing(change: Any, said: str) -> None:  # D09
    module = trained()
    kept = adapter_tensors(module)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in kept.items()}
    change(tensors)
    with pytest.raises(InputError, match=said):
        load_adapter_tensors(module, tensors)
    assert same(adapter_tensors(module), kept)


def test_a_merge_leaves_the_weight_of_the_known_case_alone() -> None:  # D09: 2^-8 in bf16, a delta of 2^-16
    module = nn.Sequential(nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        module[0].weight.fill_(2**-8)
    module.bfloat16()
    add_lora(module, LoraSettings(rank=1, alpha=1.0), seed=0)
    assert {n: p.dtype for n, p in module.named_parameters()} == {
        "0.base_layer.weight": torch.bfloat16,
        "0.lora_A.default.weight": torch.float32,
        "0.lora_B.default.weight": torch.float32,
    }
    ones = {"0.lora_A.default.weight": torch.ones(1, 1), "0.lora_B.default.weight": torch.full((1, 1), 2**-16)}
    load_adapter_tensors(module, ones)
    for _ in range(3):
        with merged(module):
            assert module[0].weight.item() == 2**-8 + 2**-16
        assert module[0].weight.item() == 0.00390625


def test_a_hundred_merges_of_a_thousand_random_weights_change_none() -> None:  # D09
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1000, 1, bias=False)).bfloat16()
    before = module[0].weight.detach().clone()
    add_lora(module, LoraSettings(rank=2, alpha=4.0), seed=0)
    load_adapter_tensors(module, {n: 0.01 * torch.randn(t.shape) for n, t in adapter_tensors(module).items()})
    for _ in range(100):
        with merged(module):
            assert not torch.equal(module[0].weight, before.float())
    assert torch.equal(module[0].weight, before)


def test_a_merge_ends_with_an_exception_as_it_ends_without() -> None:
    module = trained()
    base, before = bits(module), logits(module)
    with pytest.raises(KeyError), merged(module):
        raise KeyError
    assert same(bits(module), base) and torch.equal(logits(module), before)


def test_fifty_exports_change_not_one_bit(tmp_path: Path) -> None:  # D09
    module = trained()
    base, adapter, tokenizer = bits(module), adapter_tensors(module), character_tokenizer()
    for i in range(50):
        export_model(module, tokenizer, tmp_path / str(i), (EOS,))
    assert same(bits(module), base) and same(adapter_tensors(module), adapter)
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in ("0", "49"))
    assert same(first, last)


HEAD = LoraSettings(2, 4.0, ("q_proj", "lm_head"))


@pytest.mark.parametrize(
    ("make", "settings", "tied"),
    [
        (llama, SETTINGS, True),
        (untied, SETTINGS, False),
        (gpt2, SETTINGS, True),
        (untied, HEAD, False),
        (llama, HEAD, False),  # the sum of head and adapter is no longer the embedding
    ],
)
def test_an_export_is_a_plain_model_with_the_policys_logits_and_the_right_head(
    tmp_path: Path, make: Callable[[], Any], settings: LoraSettings, tied: bool
) -> None:  # D09, D10
    module, plain = trained(make, settings), make()
    said = module.config.tie_word_embeddings
    export_model(module, character_tokenizer(), tmp_path, (EOS,))
    assert sorted(p.name for p in tmp_path.glob("adapter*")) == []
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [name for name, _ in again.named_modules()] == [name for name, _ in plain.named_modules()]
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    torch.testing.assert_close(logits(again.eval()), logits(module), rtol=0, atol=1e-5)
    assert (logits(again) - logits(plain)).abs().max() > 1e-3
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) is tied
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    assert module.config.tie_word_embeddings is said and has_adapter(module)
    assert torch.equal(again.get_input_embeddings().weight, plain.get_input_embeddings().weight)


def test_checkpointing_of_activations_reaches_the_adapter_of_a_frozen_base() -> None:
    module = trained()
    copies = copy.deepcopy(module)
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for each in (module, copies):
        each.train()
        each(input_ids=IDS, labels=IDS).loss.backward()
    for ours, theirs in zip(module.parameters(), copies.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            assert ours.grad.any() and torch.equal(ours.grad, theirs.grad)


def test_without_peft_the_command_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"pip install 'hotcold\[lora\]'"):
        add_lora(llama(), SETTINGS, seed=0)


def test_a_model_without_adapter_is_loaded_used_and_exported_without_peft(tmp_path: Path) -> None:
    saved(tmp_path / "m", llama())
    code = f"""
import sys
import hotcold
from hotcold.models.loading import export_model, load_model
from hotcold.models.adapters import adapter_rank
loaded = load_model({str(tmp_path / "m")!r})
assert adapter_rank(loaded.module) is None
export_model(loaded.module, loaded.tokenizer, {str(tmp_path / "out")!r}, loaded.eos_ids)
print("peft" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
