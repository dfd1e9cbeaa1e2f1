"""Folders of models, tokenizers and adapters."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.malformed.case import (
    Case,
    Content,
    Make,
    copied,
    cut,
    endless,
    file,
    folder,
    keys_set,
    loop,
    pipe,
    sparse,
)

WEIGHTS, CONFIG, TOKENIZER = "bad/model.safetensors", "bad/config.json", "bad/tokenizer.json"
TOKENIZER_CONFIG, GENERATION = "bad/tokenizer_config.json", "bad/generation_config.json"
INDEX = "bad/model.safetensors.index.json"
DEEP = "[" * 100_000 + "]" * 100_000


def model(name: str, says: str, *changes: Make) -> Case:
    return Case(f"model {name}", says, ("model=bad",), copied("model", "bad", *changes))


def config(says: str, **values: Any) -> Case:
    return model(f"config {str(values)[:50]}", says, keys_set(CONFIG, **values))


def gone(*names: str) -> Make:
    return lambda: [Path("bad", name).unlink() for name in names]


def header(content: bytes, size: int | None = None) -> Make:
    """A safetensors file of this header, which says it has `size` bytes."""
    return file(WEIGHTS, struct.pack("<Q", len(content) if size is None else size) + content)


def tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]], path: str = WEIGHTS) -> Make:
    return lambda: save_file(change(load_file(path)), path, {"format": "pt"})


def entry(**values: Any) -> bytes:
    plain = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return json.dumps({"model.norm.weight": {**plain, **values}}).encode()


def index(content: Any) -> Make:
    return file(INDEX, content if isinstance(content, str) else json.dumps(content))


FOLDERS = [
    Case("model not there", "modle", ("model=modle",)),
    Case("model an empty folder", "config.json", ("model=bad",), folder("bad")),
    Case("model a file", "bad.bin", ("model=bad.bin",), file("bad.bin", b"\x80\x04K\x01.")),
    Case("model a pipe", "./bad", ("model=./bad",), pipe("bad")),
    Case("model a link to itself", "./bad", ("model=./bad",), loop("bad")),
    Case("model a GGUF of text", "bad.gguf", ("model=bad.gguf",), file("bad.gguf", "GGUF")),
    Case("model an empty GGUF", "bad.gguf", ("model=bad.gguf",), file("bad.gguf", "")),
    Case(
        "model a GGUF of absurd counts",
        "bad.gguf",
        ("model=bad.gguf",),
        file("bad.gguf", b"GGUF" + struct.pack("<IQQ", 3, 2**62, 2**62) + b"\xff" * 200),
    ),
    Case("model a GGUF pipe", "bad.gguf", ("model=bad.gguf",), pipe("bad.gguf")),
    model("without a config", "config.json", gone("config.json")),
    model("without weights", "bad has no weights", gone("model.safetensors")),
    model("without a tokenizer", "tokenizer", gone("tokenizer.json")),
    model("with a config that is a pipe", "config.json", pipe(CONFIG)),
    model("with a config without end", "config.json", endless(CONFIG)),
    model("with weights that are a pipe", "model.safetensors", pipe(WEIGHTS)),
    model("with weights without end", "model.safetensors", endless(WEIGHTS)),
    model("with weights of terabytes", "model.safetensors", sparse(WEIGHTS)),
    model("with a config of terabytes", "config.json", sparse(CONFIG)),
    model("with weights that are a folder", "model.safetensors", gone("model.safetensors"), folder(WEIGHTS)),
    Case("reference not there", "reference=modle", ("reference=modle", "beta=0.1")),
    Case(
        "critic not there",
        "critic.init=modle",
        ("train", "ppo", "model=model", "data=prompts.jsonl", "reward=exact", "critic.init=modle", "steps=1"),
    ),
]

CONFIGS = [
    model("config empty", "config.json", file(CONFIG, "")),
    model("config half", "config.json", cut(CONFIG, 100)),
    model("config UTF-16", "config.json", file(CONFIG, '{"model_type": "llama"}'.encode("utf-16"))),
    model("config a list", "config.json", file(CONFIG, "[]")),
    model("config nested too deeply", "config.json", file(CONFIG, f'{{"model_type": {DEEP}}}')),
    model("config with a number of 5000 digits", "config.json", file(CONFIG, f'{{"vocab_size": {"9" * 5000}}}')),
    config("model_type", model_type=None),
    config("model_type", model_type=["llama"]),
    config("model_type", model_type="no-such-model"),
    config("bad lacks", model_type="bert"),
    config("architectures", architectures=5),
    config("architectures", architectures=[{"a": 1}]),
    config("architectures", architectures=["LlamaForSequenceClassification"]),
    config("bad", hidden_size="thirty-two"),
    config("bad", hidden_size=None),
    config("bad", hidden_size=-32),
    config("bad", hidden_size=10**9),
    config("bad", hidden_size=33),
    config("bad", num_hidden_layers=0),
    config("bad", num_hidden_layers=2),
    config("bad", num_hidden_layers=10**7),
    config("bad", num_attention_heads=0),
    config("bad", num_attention_heads=3),
    config("bad", vocab_size=5),
    config("bad", vocab_size=10**12),
    config("bad", intermediate_size=10**12),
    config("bad", max_position_embeddings="many"),
    config("bad", hidden_act="no_such_function"),
    config("bad", rms_norm_eps="small"),
    config("bad", rope_parameters={"rope_type": "nothing"}),
    config("bad", eos_token_id="</s>"),
    config("bad", eos_token_id=[[1]]),
    config("quantised", quantization_config={"quant_method": "bitsandbytes"}),
    config("auto_map", auto_map={"AutoConfig": "code.Config"}),
    model("generation config of text", "generation_config.json", keys_set(GENERATION, eos_token_id="</s>")),
    model("generation config half", "generation_config.json", cut(GENERATION, 10)),
]

STORED = [
    model("weights empty", "model.safetensors", file(WEIGHTS, "")),
    model("weights cut", "model.safetensors", cut(WEIGHTS, 5000)),
    model("weights cut in the header", "model.safetensors", cut(WEIGHTS, 20)),
    model("weights of text", "model.safetensors", file(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n")),
    model("weights with an absurd header", "model.safetensors", header(b"{}", 2**63)),
    model("weights with a header beyond the file", "model.safetensors", header(b"{}", 10**9)),
    model("weights with a list as header", "model.safetensors", header(b"[]")),
    model("weights with half a header", "model.safetensors", header(b'{"a": ')),
    model("weights with a header that is not UTF-8", "model.safetensors", header(b"\xff" * 64)),
    model("weights with negative offsets", "model.safetensors", header(entry(data_offsets=[-8, 0]))),
    model("weights with offsets beyond the file", "model.safetensors", header(entry())),
    model("weights of an absurd shape", "model.safetensors", header(entry(shape=[2**62, 2**62]))),
    model("weights of an unknown type", "model.safetensors", header(entry(dtype="P64"))),
    model("weights with nothing in it", "bad", header(b"{}")),
    model("weights without a tensor", "lacks", tensors(lambda t: {n: v for n, v in t.items() if "norm" not in n})),
    model(
        "weights with a tensor too many",
        "no place",
        tensors(lambda t: {**t, "model.extra": t["model.norm.weight"].clone()}),
    ),
    model("weights of another shape", "shapes", tensors(lambda t: {n: v[:3].clone() for n, v in t.items()})),
    model(
        "weights of NaN",
        "model.norm.weight",
        tensors(lambda t: {**t, "model.norm.weight": t["model.norm.weight"] * float("nan")}),
    ),
    model(
        "weights of infinity",
        "embed_tokens",
        tensors(lambda t: {**t, "model.embed_tokens.weight": t["model.embed_tokens.weight"] / 0}),
    ),
    model("index of nothing", "index", index({})),
    model("index of a list", "index", index([])),
    model("index of half", "index", index('{"weight_map": {')),
    model("index of numbers", "index", index({"weight_map": {"model.norm.weight": 5}})),
    model("index of a list of weights", "index", index({"weight_map": ["model.safetensors"]})),
    model("index of a file not there", "index", index({"weight_map": {"a": "model-00001-of-00002.safetensors"}})),
    model("pickled weights alone", "pickle", gone("model.safetensors"), file("bad/pytorch_model.bin", b"\x80\x04.")),
]

WORDS = [
    model("tokenizer empty", "tokenizer", file(TOKENIZER, "")),
    model("tokenizer half", "tokenizer", cut(TOKENIZER, 300)),
    model("tokenizer an empty object", "tokenizer", file(TOKENIZER, "{}")),
    model("tokenizer a list", "tokenizer", file(TOKENIZER, "[1]")),
    model("tokenizer nested too deeply", "tokenizer", file(TOKENIZER, DEEP)),
    model("tokenizer UTF-16", "tokenizer", file(TOKENIZER, "{}".encode("utf-16"))),
    model("tokenizer a pipe", "tokenizer", pipe(TOKENIZER)),
    model("tokenizer without end", "tokenizer", endless(TOKENIZER)),
    model("tokenizer without a model", "tokenizer", keys_set(TOKENIZER, model=None)),
    model("tokenizer of an unknown kind", "tokenizer", keys_set(TOKENIZER, model={"type": "Nothing", "vocab": {}})),
    model(
        "tokenizer of other ids",
        "tokenizer",
        keys_set(TOKENIZER, model={"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}),
    ),
    model(
        "tokenizer of more words than the model",
        "embedding",
        keys_set(
            TOKENIZER, model={"type": "WordLevel", "vocab": {chr(0x4E00 + i): i for i in range(99)}, "unk_token": "?"}
        ),
    ),
    model("tokenizer config half", "tokenizer_config.json", cut(TOKENIZER_CONFIG, 10)),
    model("tokenizer config a list", "tokenizer_config.json", file(TOKENIZER_CONFIG, "[]")),
    model("tokenizer config of wrong types", "tokenizer", keys_set(TOKENIZER_CONFIG, eos_token=5)),
    model(
        "tokenizer config with code",
        "auto_map",
        keys_set(TOKENIZER_CONFIG, auto_map={"AutoTokenizer": ["code.T", None]}),
    ),
]


def template(name: str, text: Content | int, says: str = "chat template") -> Case:
    make = keys_set(TOKENIZER_CONFIG, chat_template=text)
    return Case(f"template {name}", says, ("model=bad", "chat=true"), copied("model", "bad", make))


TEMPLATES = [
    Case("template not there", "chat template", ("chat=true",)),
    template("with a syntax error", "{% for %}"),
    template("that raises", "{{ raise_exception('no') }}"),
    template("of an unknown name", "{{ nothing.at.all }}"),
    template("that divides by zero", "{{ 1 / 0 }}"),
    template("that is a number", 5, "template"),
    template("of nothing", "{# #}", "has no tokens"),
    template("of too long a range", "{% for i in range(10**9) %}{% endfor %}"),
    template("without end", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
]


def adapter(name: str, says: str, *changes: Make) -> Case:
    return Case(f"adapter {name}", says, ("model=bad",), copied("adapter", "bad", *changes))


def adapter_config(says: str, **values: Any) -> Case:
    return adapter(f"config {str(values)[:50]}", says, keys_set("bad/adapter_config.json", **values))


ADAPTER = "bad/adapter_model.safetensors"
ADAPTERS = [
    adapter("config half", "adapter_config.json", cut("bad/adapter_config.json", 20)),
    adapter("config a list", "adapter_config.json", file("bad/adapter_config.json", "[]")),
    adapter_config("IA3", peft_type="IA3"),
    adapter_config("base_model_name_or_path", base_model_name_or_path=None),
    adapter_config("base_model_name_or_path", base_model_name_or_path="./not-there"),
    adapter_config("bad", r="two"),
    adapter_config("bad", r=0),
    adapter_config("bad", r=3),
    adapter_config("bad", r=10**9),
    adapter_config("bad", lora_alpha="much"),
    adapter_config("bad", target_modules=5),
    adapter_config("bad", target_modules=["nothing"]),
    adapter_config("bad", target_modules="(unclosed"),
    adapter_config("bad", rank_pattern=[1]),
    adapter_config("use_dora", use_dora=True),
    adapter("without weights", "adapter_model.safetensors", lambda: Path(ADAPTER).unlink()),
    adapter("weights cut", "adapter_model.safetensors", cut(ADAPTER, 100)),
    adapter("weights of another shape", "lora_A", tensors(lambda t: {n: v[:1].clone() for n, v in t.items()}, ADAPTER)),
    adapter("weights of NaN", "lora_A", tensors(lambda t: {n: v * float("nan") for n, v in t.items()}, ADAPTER)),
    adapter("beside a whole model", "whole model", file("bad/model.safetensors", b"")),
    adapter("of itself", "adapter", keys_set("bad/adapter_config.json", base_model_name_or_path="bad")),
]
CASES = [*FOLDERS, *CONFIGS, *STORED, *WORDS, *TEMPLATES, *ADAPTERS]
