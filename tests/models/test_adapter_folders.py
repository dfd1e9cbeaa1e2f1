"""A run that starts from a folder in PEFT's format: what is loaded, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hotcold.errors import InputError
from hotcold.models.adapters import StartingAdapter, adapter_tensors, save_adapter
from hotcold.models.loading import load_model
from tests.models.test_adapters import llama, logits, saved, train, untied
from tests.tiny_model import EOS, character_tokenizer


def peft_folder(folder: Path, base: Path, named: str | None = None, **config: Any) -> Any:
    """An adapter made and saved by peft alone, its B away from 0; returns peft's model."""
    torch.manual_seed(4)
    settings: dict[str, Any] = {
        "r": 2,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "up_proj"],
        "task_type": "CAUSAL_LM",
    }
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**(settings | config)))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    wrapped.peft_config["default"].base_model_name_or_path = str(base) if named is None else named
    wrapped.save_pretrained(folder)
    return wrapped.eval()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"target_modules": "all-linear"},
        {"target_modules": r".*layers\.1.*(k|o)_proj"},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"up_proj": 3}},
        {"layers_to_transform": [1]},
        {"exclude_modules": ["model.layers.0.self_attn.q_proj"]},
        {"init_lora_weights": "gaussian"},
        {"target_modules": ["lm_head"]},
    ],
)
def test_a_run_starts_from_an_adapter_made_by_peft(tmp_path: Path, config: dict[str, Any]) -> None:
    base = saved(tmp_path / "base", untied())
    theirs = peft_folder(tmp_path / "adapter", base, **config)
    loaded = load_model(str(tmp_path / "adapter"))
    assert type(loaded.module) is LlamaForCausalLM
    assert torch.equal(logits(loaded.module), logits(theirs))
    assert (loaded.source, loaded.adapter) == (str(base), str(tmp_path / "adapter"))
    assert not torch.equal(logits(loaded.module), logits(untied()))
    training = {name for name, p in loaded.module.named_parameters() if p.requires_grad}
    assert training == adapter_tensors(loaded.module).keys()
    assert (loaded.notes, loaded.eos_ids) == ((), (EOS,))
    save_adapter(loaded.module, tmp_path / "again", str(base))
    again = load_model(str(tmp_path / "again"))
    assert torch.equal(logits(again.module), logits(theirs))


def test_the_reference_of_a_run_from_an_adapter_is_that_adapter(tmp_path: Path) -> None:
    theirs = peft_folder(tmp_path / "adapter", saved(tmp_path / "base", llama()))
    loaded = load_model(str(tmp_path / "adapter"))
    reference = StartingAdapter(loaded.module, loaded.sha256)
    train(loaded.module)
    with reference.module() as inside:
        assert torch.equal(logits(inside), logits(theirs))
    assert not torch.equal(logits(loaded.module), logits(theirs))


def test_a_model_without_adapter_says_so(tmp_path: Path) -> None:
    assert load_model(str(saved(tmp_path / "m", llama()))).adapter is None


@pytest.mark.parametrize("named", ["../base", "base", "inside"])
def test_a_relative_base_is_looked_for_beside_the_adapter(tmp_path: Path, named: str) -> None:
    base = saved(tmp_path / "runs" / "base", llama())
    theirs = peft_folder(tmp_path / "runs" / "adapter", base, named)
    if named == "inside":
        base.rename(tmp_path / "runs" / "adapter" / "inside")
    assert torch.equal(logits(load_model(str(tmp_path / "runs" / "adapter")).module), logits(theirs))


def test_a_relative_base_is_looked_for_as_given_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = saved(tmp_path / "here" / "base", llama())
    theirs = peft_folder(tmp_path / "there" / "adapter", base, "base")
    other = llama()
    train(other)
    saved(tmp_path / "there" / "base", other)
    monkeypatch.chdir(tmp_path / "here")
    assert torch.equal(logits(load_model(str(tmp_path / "there" / "adapter")).module), logits(theirs))


def test_the_hash_covers_base_adapter_and_factor_but_not_where_they_stand(tmp_path: Path) -> None:
    base, folder = saved(tmp_path / "base", llama()), tmp_path / "adapter"
    peft_folder(folder, base)
    first = load_model(str(folder)).sha256
    assert first != load_model(str(base)).sha256
    base = base.rename(tmp_path / "moved")
    edit(folder, base_model_name_or_path=str(base))
    assert load_model(str(folder)).sha256 == first
    edit(folder, lora_alpha=9)
    assert load_model(str(folder)).sha256 != first
    edit(folder, lora_alpha=8)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    assert load_model(str(folder)).sha256 != first
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    assert load_model(str(folder)).sha256 == first
    other = llama()
    train(other)
    saved(base, other)
    assert load_model(str(folder)).sha256 != first


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_dropout_of_a_loaded_adapter_is_zero_and_reported(tmp_path: Path) -> None:
    peft_folder(tmp_path / "adapter", saved(tmp_path / "base", llama()), lora_dropout=0.25)
    loaded = load_model(str(tmp_path / "adapter"))
    assert loaded.notes == ("lora_dropout 0.25 of the adapter was set to 0",)
    loaded.module.train()
    assert torch.equal(logits(loaded.module), logits(loaded.module))


def test_an_adapter_in_half_precision_trains_in_float32(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    peft_folder(folder, saved(tmp_path / "base", llama()))
    stored = {name: t.bfloat16() for name, t in load_file(folder / "adapter_model.safetensors").items()}
    save_file(stored, folder / "adapter_model.safetensors", {"format": "pt"})
    tensors = adapter_tensors(load_model(str(folder)).module)
    name = "model.layers.0.self_attn.q_proj.lora_B"
    assert tensors[f"{name}.default.weight"].dtype == torch.float32
    assert torch.equal(tensors[f"{name}.default.weight"], stored[f"base_model.model.{name}.weight"].float())


def test_the_tokenizer_of_the_adapter_goes_before_that_of_its_base(tmp_path: Path) -> None:
    peft_folder(tmp_path / "adapter", saved(tmp_path / "base", llama()))
    assert load_model(str(tmp_path / "adapter")).tokenizer.chat_template is None
    words = character_tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    words.save_pretrained(tmp_path / "adapter")
    assert load_model(str(tmp_path / "adapter")).tokenizer.chat_template == words.chat_template


def setting(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, **changes)


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/adapter-pickle-was-read'\ntR.")


def cut_off(folder: Path) -> None:
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])


def extra_tensor(folder: Path) -> None:
    stored = load_file(folder / "adapter_model.safetensors")
    stored["base_model.model.lm_head.weight"] = torch.zeros(2, 2)
    save_file(stored, folder / "adapter_model.safetensors", {"format": "pt"})


def of_an_adapter(folder: Path) -> None:
    other = folder.parent / "other"
    other.mkdir()
    (other / "adapter_config.json").write_text("{}")
    edit(folder, base_model_name_or_path=str(other))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (setting(peft_type="PREFIX_TUNING"), "PREFIX_TUNING.*only plain LoRA"),
        (setting(use_dora=True), "use_dora 'True'.*only plain LoRA"),
        (setting(modules_to_save=["lm_head"]), "modules_to_save.*only plain LoRA"),  # D09
        (setting(bias="all"), "bias 'all'"),
        (setting(lora_bias=True), "lora_bias"),
        (setting(trainable_token_indices=[1]), "trainable_token_indices"),
        (setting(target_parameters=["x"]), "target_parameters"),
        (setting(a_method_of_the_future={"x": 1}), "a_method_of_the_future"),
        (setting(init_lora_weights="pissa"), "pissa.*changes its base"),
        (setting(target_modules=["embed_tokens"]), "embed_tokens, which is no linear layer"),
        (setting(target_modules=["nosuch"]), "does not fit its base model.*nosuch"),
        (setting(target_modules=["q_proj"]), r"4 tensors differ; it has .*up_proj"),
        (setting(r=3), r"is \[2, 16\], the model needs \[3, 16\]"),
        (setting(base_model_name_or_path=None), "does not say which model"),
        (setting(base_model_name_or_path="no/such/base"), "'no/such/base'.*Correct base_model"),
        (of_an_adapter, "an adapter itself"),
        (extra_tensor, r"1 tensors differ; it has base_model.model.lm_head.weight"),
        (pickled, "pickled weights only.*were not read"),
        (cut_off, "broken or cut off"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "not valid JSON"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_refused_with_what_to_do(
    tmp_path: Path, spoil: Callable[[Path], Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "adapter"
    peft_folder(folder, saved(tmp_path / "base", llama()))
    spoil(folder)
    capfd.readouterr()
    with pytest.raises(InputError, match=f"(?s){said}") as caught:
        load_model(str(folder))
    lines = str(caught.value).splitlines()
    assert 2 <= len(lines) <= 5 or "Save the adapter again" in lines[0] or "Fetch or save" in lines[0]
    assert str(folder) in lines[0]
    assert capfd.readouterr() == ("", "")
    assert not Path("/tmp/adapter-pickle-was-read").exists()
