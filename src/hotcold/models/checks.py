"""What a model folder must have before anything in it is loaded. Each refusal says what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hotcold.errors import InputError, did_you_mean

READ = (".json", ".safetensors", ".txt", ".model", ".jinja")  # endings of what libraries open
MOST_BYTES = 500_000_000  # of a JSON file
MOST_RANK = 65536  # of an adapter
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")  # what families call their number of layers
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What makes a plain LoRA adapter, and is handed on to peft ...
ADAPTER_KEYS = {
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "task_type", "base_model_name_or_path", "revision",
}  # fmt: skip
# ... and what says how it was made or stored. Any other key that is set asks for more than W + scaling B A.
NO_EFFECT = {
    "peft_type", "peft_version", "auto_mapping", "inference_mode", "lora_dropout", "fan_in_fan_out",
    "megatron_core", "qalora_group_size", "eva_config",
}  # fmt: skip
IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "grouped_mm")
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")  # of A and B; the others change W
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


def missing_folder(spec: str) -> InputError:
    path = Path(spec).expanduser()
    models = [p.parent.name for p in path.parent.glob("*/config.json")] if path.parent.is_dir() else []
    return InputError(
        f"model={spec}: there is no such folder or file.{did_you_mean(path.name, models)}\n"
        "Needed: a folder in Hugging Face format, a .gguf file, a hub name (owner/name) or smollm2."
    )


def looks_like_a_hub_name(spec: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.\-]*(/[\w.\-]+)?", spec) is not None


def check_folder(folder: Path) -> None:
    """Raises InputError unless the folder is a causal language model with safetensors weights."""
    check_files(folder)
    _check_config(folder)
    _check_generation_config(folder)
    _check_weights(folder)
    _check_layers(folder)


def check_files(folder: Path) -> None:
    """What a library would open must be a file: a pipe is waited for, a device never ends."""
    for path in sorted(folder.iterdir()):
        if path.suffix in READ and not path.is_file():
            raise InputError(
                f"{path} is no file but a folder, a pipe, a device or a broken link. Save the model again."
            )
        if path.suffix == ".json" and path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path} has {path.stat().st_size} bytes; no file of this kind is so large.")


def check_bare_folder(folder: Path) -> dict[str, Any]:
    """The config. Raises InputError unless the folder is a model of any class with safetensors weights."""
    check_files(folder)
    config = _plain_config(folder)
    _check_weights(folder)
    return config


def check_tokenizer(folder: Path) -> None:
    check_files(folder)
    if not has_tokenizer(folder):
        raise InputError(
            f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES[:3])} ...).\n"
            "Save it next to the model: tokenizer.save_pretrained(folder)."
        )
    _check_no_code(_json(folder / "tokenizer_config.json"), folder / "tokenizer_config.json")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The config of a folder in PEFT's format. Raises InputError unless it is plain LoRA in safetensors."""
    if _model_weights(folder) or (folder / "model.safetensors.index.json").is_file():
        raise InputError(
            f"{folder} holds a whole model and an adapter ({ADAPTER_CONFIG}): it is not clear which is meant.\n"
            "Put the adapter into a folder of its own and give one of the two."
        )
    check_files(folder)
    config = _json(folder / ADAPTER_CONFIG)
    _check_no_code(config, folder / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise merge_first(folder, f"is of the kind {config.get('peft_type')!r}")
    if config.get("init_lora_weights", True) not in PLAIN_STARTS:
        raise merge_first(
            folder, f"has init_lora_weights {config['init_lora_weights']!r}, which changes its base model"
        )
    if type(rank := config.get("r", 8)) is not int or not 1 <= rank <= MOST_RANK:
        raise InputError(
            f"{folder / ADAPTER_CONFIG}: r is {rank!r}; a rank from 1 to {MOST_RANK} is needed. Correct it."
        )
    ranks = config.get("rank_pattern") or {}
    if not isinstance(ranks, dict) or not all(type(r) is int and 1 <= r <= MOST_RANK for r in ranks.values()):
        raise InputError(f"{folder / ADAPTER_CONFIG}: rank_pattern is no object of layers and ranks. Correct it.")
    for key, value in config.items():
        known = key in ADAPTER_KEYS or key in NO_EFFECT or key == "init_lora_weights"
        if not known and value not in (None, False, "none", [], {}):
            raise merge_first(folder, f"has {key} {str(value)[:80]!r}")
    if not (isinstance(config.get("base_model_name_or_path"), str) and config["base_model_name_or_path"]):
        raise InputError(
            f"{folder / ADAPTER_CONFIG} does not say which model the adapter belongs to.\n"
            "Write its folder or hub name there as base_model_name_or_path."
        )
    _check_adapter_weights(folder)
    return config


def _check_adapter_weights(folder: Path) -> None:
    path = folder / ADAPTER_WEIGHTS
    if path.is_file():
        return _check_readable(path)
    if pickles := sorted(p.name for pattern in PICKLES for p in folder.glob(pattern)):
        raise InputError(
            f"{folder} has pickled weights only ({', '.join(pickles[:3])}). They were not read, because loading "
            "a pickle runs whatever code is in it.\n"
            "Convert them to safetensors where you trust them: peft's save_pretrained(folder)."
        )
    raise InputError(f"{folder} has no {ADAPTER_WEIGHTS}. Save the adapter again with peft's save_pretrained.")


def merge_first(folder: Path, what: str) -> InputError:
    return InputError(
        f"The adapter in {folder} {what}; only plain LoRA on linear layers can be trained here.\n"
        "Merge it into its base model (peft: merge_and_unload, then save_pretrained) and give that folder."
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model, sorted by name: those of the index if there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in _indexed(index)]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else _model_weights(folder)


def _indexed(path: Path) -> list[str]:
    """The files that an index names. They stand beside it: a path could lead anywhere."""
    weights = _json(path).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        raise InputError(f"{path}: weight_map is no object of tensors and their files. Fetch or save the model again.")
    names = sorted(set(weights.values()))
    if outside := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise InputError(
            f"{path} names {outside[0]!r}, which is no .safetensors file beside it. Nothing else is read.\n"
            "Fetch or save the model again."
        )
    return names


def _model_weights(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("adapter_"))


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}). Fetch or save the model again.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is no JSON object. Fetch or save the model again.")
    return content


def _plain_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(
            f"{folder} has no config.json, so it is not a model in Hugging Face format.\n"
            "Give the folder that save_pretrained wrote (in a run: model/ or checkpoints/step_...)."
        )
    config = _json(path)
    _check_no_code(config, path)
    if "quantization_config" in config:
        raise InputError(
            f"{folder} holds quantised weights, which cannot be trained.\nGive the model in fp32, bf16 or fp16."
        )
    return config


def _check_no_code(config: dict[str, Any], path: Path) -> None:
    """No part of a config may name code: `auto_map`, or a kernel that is fetched from the hub (`owner/name`)."""
    if "auto_map" in config:
        raise _remote_code(path)
    for key, value in config.items():
        if key.endswith(("attn_implementation", "experts_implementation")) and value not in IMPLEMENTATIONS:
            raise InputError(
                f"{path}: {key} is {str(value)[:80]!r}, which may be code from the hub and is never run here.\n"
                f"Remove it, or write one of {', '.join(IMPLEMENTATIONS[1:])}."
            )
        if isinstance(value, dict):
            _check_no_code(value, path)


def _check_config(folder: Path) -> None:
    config = _plain_config(folder)
    kind, named = config.get("model_type"), config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise InputError(f"{folder / 'config.json'}: architectures is {named!r}; a list of names is needed.")
    causal = {name for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _names(value)}
    is_known = isinstance(kind, str) and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not is_known or (named and not causal & set(named)):
        raise InputError(
            f"{folder} is no causal language model that transformers knows: model_type {kind!r}, "
            f"architectures {named}.\nGive a model that AutoModelForCausalLM loads."
        )


def _check_generation_config(folder: Path) -> None:
    """transformers goes on without a file that it cannot read; the EOS ids in it would be lost."""
    path = folder / "generation_config.json"
    value = _json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise InputError(f"{path}: eos_token_id is {value!r}; a token id or a list of them is needed. Correct it.")


def _names(value: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _remote_code(path: Path) -> InputError:
    return InputError(
        f"{path} asks for Python code that comes with the model (auto_map), which is never run here.\n"
        "Use a model whose class is part of transformers; if transformers has the class, remove auto_map from the file."
    )


def _check_weights(folder: Path) -> None:
    files = weight_files(folder)
    if not files:
        pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
        if pickles:
            raise InputError(
                f"{folder} has pickled weights only ({', '.join(pickles[:3])}). They were not read, because loading "
                "a pickle runs whatever code is in it.\n"
                "Convert them to safetensors where you trust them: model.save_pretrained(folder)."
            )
        raise InputError(f"{folder} has no weights (*.safetensors). Save the model with save_pretrained.")
    for path in files:
        if not path.is_file():
            raise InputError(f"{folder} lacks {path.name}, which its index names. Fetch or save the model again.")
        _check_readable(path)


def _check_layers(folder: Path) -> None:
    """Every layer has a tensor at least. Without this check a config of ten million layers would build them all."""
    num_tensors = sum(_num_tensors(path) for path in weight_files(folder))
    config = _json(folder / "config.json")
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in LAYERS:
            if isinstance(part.get(key), int) and part[key] > num_tensors:
                raise InputError(
                    f"{folder / 'config.json'}: {key} is {part[key]}, but the weights have {num_tensors} tensors in "
                    "all.\nThe two do not belong together. Fetch or save the model again."
                )


def _num_tensors(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        return len(file.keys())


def _check_readable(path: Path) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError, MemoryError) as error:
        raise InputError(f"{path} is broken or cut off ({error}).\nFetch or save the model again.") from error
