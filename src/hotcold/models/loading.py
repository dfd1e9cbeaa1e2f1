"""From a folder, hub name or GGUF file to a model ready for training, and back to a folder."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hotcold.errors import InputError
from hotcold.models.adapters import load_adapter, merged, scalings
from hotcold.models.checks import (
    ADAPTER_WEIGHTS,
    check_folder,
    check_tokenizer,
    has_tokenizer,
    is_adapter,
    looks_like_a_hub_name,
    merge_first,
    missing_folder,
    read_adapter_config,
    weight_files,
)
from hotcold.models.gguf_files import dequantised, file_sha256, smollm2_file
from hotcold.models.hf import context_length

SMOLLM2 = "smollm2"
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # never a pickle, never code
# Masks and rotary tables that old checkpoints hold and the model computes itself.
COMPUTED = re.compile(r"(inv_freq|cos_cached|sin_cached|causal_mask|position_ids|(attn|attention)\.(masked_)?bias)$")
UNUSED_DROPOUT = ("classifier", "summary")  # heads that a language model does not have


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model: fp32, eval mode, no dropout."""

    module: Any  # a transformers PreTrainedModel
    tokenizer: Any
    eos_ids: tuple[int, ...]  # every id that ends a response
    pad_id: int  # only fills; may be an EOS id
    context_length: int | None
    source: str  # the folder it was loaded from; with an adapter: that of its base model
    sha256: str  # of the weight files; with an adapter: of both
    notes: tuple[str, ...]  # what was changed on the way, for the user
    adapter: str | None = None  # the PEFT folder whose adapter is in the module and the only part that trains


def load_model(spec: str, device: str = "cpu", cache_dir: str | Path | None = None) -> LoadedModel:
    """`spec`: a folder in Hugging Face or PEFT format, a .gguf file, `smollm2`, or a hub name."""
    with _quiet():
        cache = Path(cache_dir) if cache_dir is not None else None
        given = resolve_folder(spec, cache)
        adapter = read_adapter_config(given) if is_adapter(given) else None
        folder = given if adapter is None else _base_folder(given, adapter, cache)
        words = given if has_tokenizer(given) else folder
        check_folder(folder)
        check_tokenizer(words)
        config = _load_config(folder)  # before the tokenizer, which reads it too
        tokenizer = _load_tokenizer(words)
        notes = _without_dropout(config)
        module = _load_module(folder, config)
        sha256 = file_sha256(*weight_files(folder))
        if adapter is not None:
            notes += load_adapter(module, given, adapter)
            check_finite(module, str(given))
            sha256 = _sha256_with_adapter(module, given, sha256)
    notes += _without_dropout_modules(module)
    notes += _check_vocabulary(words, module, tokenizer)
    eos_ids = all_eos_ids(module, tokenizer)
    if not eos_ids:
        notes.append("the model names no EOS id: every response runs to the length limit or a stop string")
    length = context_length(config.get_text_config())
    return LoadedModel(
        module.eval().to(device),
        tokenizer,
        eos_ids,
        _pad_id(module, tokenizer, eos_ids),
        length,
        str(folder),
        sha256,
        tuple(notes),
        None if adapter is None else str(given),
    )


def _base_folder(folder: Path, adapter: dict[str, Any], cache_dir: Path | None) -> Path:
    """The folder of the model that an adapter belongs to: as it is named, beside the adapter, or on the hub."""
    name, revision = adapter["base_model_name_or_path"], adapter.get("revision")
    beside = next((p for p in (Path(name).expanduser(), folder / name, folder.parent / name) if p.is_dir()), None)
    try:
        if beside is None and revision and looks_like_a_hub_name(name):
            base = _from_hub(name, revision)
        else:
            base = beside or resolve_folder(name, cache_dir)
    except InputError as error:
        raise InputError(
            f"The adapter in {folder} names its base model as {name!r}, which was found neither there nor beside the "
            f"adapter nor on the hub:\n{str(error).splitlines()[-2:][0][:300]}\n"
            "Correct base_model_name_or_path in its adapter_config.json."
        ) from error
    if is_adapter(base):
        raise merge_first(folder, f"belongs to {base}, which is an adapter itself")
    return base


def _sha256_with_adapter(module: nn.Module, folder: Path, base_sha256: str) -> str:
    """Of what the base and the adapter compute together: both files and the factors, wherever the folders stand."""
    parts = {"base": base_sha256, "adapter": file_sha256(folder / ADAPTER_WEIGHTS), "scalings": scalings(module)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def resolve_folder(spec: str, cache_dir: Path | None = None) -> Path:
    path = _path(spec)
    if spec == SMOLLM2:
        return dequantised(smollm2_file(), cache_dir)
    if path.suffix == ".gguf" and os.path.isfile(path):
        return dequantised(path, cache_dir)
    if os.path.isdir(path):
        return path
    if path.suffix != ".gguf" and looks_like_a_hub_name(spec):
        return _from_hub(spec)
    raise missing_folder(spec)


def _path(spec: str) -> Path:
    try:
        os.stat(path := Path(spec).expanduser())
    except ValueError:
        raise InputError(f"model={spec}: a NUL byte or half of a character is in no name of a folder.") from None
    except OSError:  # a hub name is no path; one that is too long is neither
        pass
    return path


def _from_hub(name: str, revision: str | None = None) -> Path:
    ignored = ["*/*", "consolidated*"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=ignored))
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise InputError(
            f"{str(missing_folder(name)).splitlines()[0]}\nAs a hub name it could not be fetched: "
            f"{type(error).__name__}: {reason[0][:200] if reason else ''}\n"
            "Check the name and the network, or give a folder on this machine (model=smollm2 needs no hub)."
        ) from error


def _first_line(error: Exception) -> str:
    """'KeyError: what' in one line: libraries answer with reports."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _load_config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise InputError(
            f"{folder / 'config.json'} is no config that transformers accepts ({_first_line(error)}).\n"
            "Correct it, or fetch or save the model again."
        ) from error


def _load_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise InputError(
            f"The tokenizer in {folder} could not be loaded ({_first_line(error)}).\n"
            "Save it again with tokenizer.save_pretrained(folder)."
        ) from error


def load_bare(folder: Path, auto: Any) -> tuple[Any, Any]:
    """A model of another class (`auto`: AutoModel ...) under the same rules, and its tokenizer if it has one."""
    with _quiet():
        config = _load_config(folder)
        tokenizer = _load_tokenizer(folder) if has_tokenizer(folder) else None
        _without_dropout(config)
        module = _load_module(folder, config, auto)
    _without_dropout_modules(module)
    return module.eval(), tokenizer


def _load_module(folder: Path, config: Any, auto: Any = AutoModelForCausalLM) -> Any:
    try:
        loaded: Any = auto.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, and refused below
        )
    except Exception as error:
        raise InputError(
            f"The model in {folder} could not be loaded: {_first_line(error)}\n"
            "Its config.json and its weights may not belong together. Fetch or save the model again."
        ) from error
    module, report = loaded
    _check_report(folder, module, report)
    check_finite(module, str(folder))
    return module.float()


def check_finite(module: nn.Module, source: str) -> None:
    """NaN in one parameter is NaN in every logit, and would be found at the first sample only."""
    for name, parameter in module.named_parameters():
        if parameter.numel() and not all(bound.isfinite() for bound in parameter.detach().aminmax()):
            raise InputError(
                f"{source}: {name} has numbers that are not finite (NaN or infinity): the model was spoilt when it was "
                "trained or saved.\nFetch or save the model again, or take an earlier checkpoint."
            )


def _check_report(folder: Path, module: nn.Module, report: dict[str, Any]) -> None:
    """Every tensor of the model was in the files, in its shape, and nothing else was."""
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, needed = mismatched[0]
        raise InputError(
            f"{folder}: {len(mismatched)} tensors have other shapes than config.json says: {name} is {list(stored)}, "
            f"{list(needed)} is needed.\nThe two do not belong together. Fetch or save the model again."
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise InputError(
            f"{folder} lacks {len(missing)} of the model's tensors, which would start at random: "
            f"{', '.join(missing[:3])} ...\nThe folder holds another kind of model, or was saved incompletely."
        )
    buffers = {name for name, _ in module.named_buffers()}
    extra = sorted(n for n in report["unexpected_keys"] if n not in buffers and not COMPUTED.search(n))
    if extra:
        raise InputError(
            f"{folder} holds {len(extra)} tensors that the model of its config.json has no place for: "
            f"{', '.join(extra[:3])} ...\nA model without them is another one. Correct config.json (the number of "
            "layers?), or fetch or save the model again."
        )


def _without_dropout(config: Any) -> list[str]:
    """Sets every dropout rate of the config to 0: the ratio before the first update must be 1."""
    notes = []
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            is_rate = isinstance(value, (int, float)) and not isinstance(value, bool)
            if "drop" in name and is_rate and value > 0 and not name.startswith(UNUSED_DROPOUT):
                setattr(part, name, 0.0)
                notes.append(f"{name} {value} in the config was set to 0")
    return notes


def _without_dropout_modules(module: nn.Module) -> list[str]:
    notes = []
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            notes.append(f"dropout {part.p} in {name} was set to 0")
            part.p = 0.0
    return notes


def _check_vocabulary(folder: Path, module: Any, tokenizer: Any) -> list[str]:
    rows = module.get_input_embeddings().weight.shape[0]
    if tokenizer.vocab_size > rows:
        raise InputError(
            f"The tokenizer in {folder} has {tokenizer.vocab_size} tokens, the model's embedding only {rows} rows.\n"
            "They do not belong together: fetch or save both again."
        )
    beyond = [token for token, i in tokenizer.get_added_vocab().items() if i >= rows]
    return [f"the tokenizer adds {beyond}, for which the model has no embedding: do not use them"] if beyond else []


def _pad_id(module: Any, tokenizer: Any, eos_ids: tuple[int, ...]) -> int:
    """A filler that the embedding has a row for."""
    rows = module.get_input_embeddings().weight.shape[0]
    return next((i for i in (tokenizer.pad_token_id, *eos_ids) if i is not None and i < rows), 0)


def all_eos_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every EOS id of the generation config, the config and the tokenizer, each once, in this order."""
    generation = getattr(module, "generation_config", None)
    found: list[int] = []
    for source in (generation, module.config.get_text_config(), module.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        found += value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(i) for i in found))


def export_model(module: Any, tokenizer: Any, folder: str | Path, eos_ids: Sequence[int]) -> None:
    """A plain Hugging Face folder in float32 safetensors, with the tokenizer, chat template and all EOS ids.

    An adapter is merged into what is written, not into the module.
    """
    assert all(p.dtype == torch.float32 for p in module.parameters() if p.is_floating_point())
    with merged(module), _as_stored(module, eos_ids), _quiet():
        module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_bare(module: Any, folder: str | Path) -> None:
    """A model of another class in float32 safetensors. An adapter is merged into what is written."""
    with merged(module), _quiet():
        module.save_pretrained(folder)


def _is_tied(module: Any) -> bool:
    """Whether head and embedding are one tensor: what is stored decides, not what the config says."""
    head = module.get_output_embeddings()
    return head is not None and head.weight.data_ptr() == module.get_input_embeddings().weight.data_ptr()


@contextmanager
def _as_stored(module: Any, eos_ids: Sequence[int]) -> Iterator[None]:
    """For the time of saving, the configs say what is true; else the head would be lost when the folder is loaded."""
    config, generation = module.config, module.generation_config
    said_tied = config.tie_word_embeddings
    config.tie_word_embeddings = _is_tied(module)
    module.generation_config = _saveable(generation, eos_ids)
    try:
        yield
    finally:
        config.tie_word_embeddings, module.generation_config = said_tied, generation


def _saveable(generation: Any, eos_ids: Sequence[int]) -> Any:
    """A copy with every EOS id. A temperature without `do_sample`, as in many published models, cannot be saved."""
    out = copy.deepcopy(generation)
    if eos_ids:
        out.eos_token_id = eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)
    try:
        out.validate(strict=True)
    except ValueError:
        out.do_sample = True
    return out


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, warnings and reports; errors come as ours."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
