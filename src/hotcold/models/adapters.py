"""LoRA: small trainable matrices in the linear layers of a frozen model, put into the module itself.

The module keeps its class and its forward; peft's layers stand in the places of its linear layers. What uses the
model as it was (the reference, the export) takes those layers out for a while and puts them back. Nothing is ever
added to a base parameter. peft is imported when the first adapter is made or read.
"""

from __future__ import annotations

import copy
import importlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hotcold.errors import InputError, did_you_mean
from hotcold.models.checks import ADAPTER_KEYS, ADAPTER_WEIGHTS, merge_first

INSTALL_LORA = "pip install 'hotcold[lora]'"
NAME = "default"  # peft's name of the one adapter that a module has here
PREFIX = "base_model.model."  # of every tensor in PEFT's files
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraSettings:
    rank: int
    alpha: float  # the adapter's output is multiplied by alpha / rank
    targets: tuple[str, ...] | None = None  # ends of layer names; None: every linear layer of the trunk


@dataclass(frozen=True)
class _Place:
    """Where an adapted layer stands."""

    name: str  # from the root of the module
    parent: nn.Module
    child: str
    layer: Any  # peft's lora.Linear around the base layer


def add_lora(module: nn.Module, settings: LoraSettings, seed: int) -> None:
    """Puts an adapter into the module. Only the adapter trains, in float32, and at first it changes nothing.

    A is drawn from `seed` alone (the same on every device), B is 0. Raises InputError for targets that the module
    does not have, and for a module that has an adapter.
    """
    if rank := adapter_rank(module):
        raise InputError(
            f"The model is an adapter of rank {rank} already, and that is the rank that is trained.\n"
            "Leave lora.rank, lora.alpha and lora.targets out, or start from the adapter's base model."
        )
    if settings.rank < 1 or settings.alpha <= 0:
        raise InputError(
            f"LoRA of rank {settings.rank}, alpha {settings.alpha}: the rank must be at least 1, alpha > 0."
        )
    names = target_names(module, settings.targets)
    _inject(
        module,
        r=settings.rank,
        lora_alpha=int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        target_modules=names,
        task_type="CAUSAL_LM" if _is_causal_lm(module) else None,
    )
    places = _places(module)
    assert {place.name for place in places} == set(names), "peft adapted other layers than it was told to"
    _draw(places, seed)


def target_names(module: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """The full names of the layers to adapt: all linear ones of the trunk, or those whose name ends in a target."""
    linear = [name for name, part in module.named_modules() if isinstance(part, (nn.Linear, Conv1D))]
    if targets is None or tuple(targets) == (ALL_LINEAR,):
        trunk = getattr(module, "base_model", module)  # of a causal LM: all but the head
        inside = {id(part) for part in trunk.modules()}
        return [name for name in linear if id(module.get_submodule(name)) in inside]
    found = {target: [n for n in linear if n == target or n.endswith(f".{target}")] for target in targets}
    if unknown := [target for target in targets if not found[target]]:
        ends = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
        raise InputError(
            f"lora.targets: the model has no linear layer {unknown[0]!r}.{did_you_mean(unknown[0], ends)}\n"
            f"It has: {', '.join(ends[:30])}. Give some of these, or leave lora.targets out for all but the head."
        )
    chosen = {name for names in found.values() for name in names}
    return [name for name in linear if name in chosen]


def has_adapter(module: nn.Module) -> bool:
    return bool(_places(module))


def adapter_rank(module: nn.Module) -> int | None:
    """The rank of the module's adapter (the largest, where its layers differ), None without one."""
    return max((place.layer.r[NAME] for place in _places(module)), default=None)


def adapter_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A and B of every adapted layer by their names in the module, copied to the CPU: for a checkpoint."""
    return {name: parameter.detach().cpu().clone() for name, parameter in _parameters(module).items()}


def load_adapter_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `adapter_tensors`, bit for bit. Raises InputError unless the names and shapes are the module's."""
    _load(_parameters(module), tensors, "the checkpoint")


def save_adapter(module: nn.Module, folder: str | Path, base: str) -> None:
    """A folder in PEFT's format. `base`: what plain peft is told to load the adapter into (a folder or hub name)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = copy.copy(_configs(module)[NAME])
    config.base_model_name_or_path, config.inference_mode = base, True
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)  # a set: its order would differ between processes
    config.save_pretrained(str(folder))
    tensors = {PREFIX + _without_name(name): tensor for name, tensor in adapter_tensors(module).items()}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / ADAPTER_WEIGHTS, {"format": "pt"})


def load_adapter(module: nn.Module, folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Puts the adapter of a checked PEFT folder into its base model, to be trained on. Returns notes for the user."""
    kept = {key: value for key, value in config.items() if key in ADAPTER_KEYS and value is not None}
    try:
        _inject(module, **kept)
    except InputError:
        raise
    except Exception as error:  # whatever peft makes of a value of another kind
        reason = str(error).strip().splitlines() or [""]
        raise InputError(
            f"The adapter in {folder} does not fit its base model: {type(error).__name__}: {reason[0][:300]}\n"
            "Give the base model it was made for."
        ) from error
    for place in _places(module):
        if not isinstance(place.layer.base_layer, (nn.Linear, Conv1D)):
            raise merge_first(folder, f"adapts {place.name}, which is no linear layer")
    ours = {PREFIX + _without_name(name): parameter for name, parameter in _parameters(module).items()}
    stored = load_file(folder / ADAPTER_WEIGHTS)
    _load(ours, _without_copies(module, stored), str(folder / ADAPTER_WEIGHTS))
    rate = config.get("lora_dropout") or 0
    return [f"lora_dropout {rate} of the adapter was set to 0"] if rate else []


def scalings(module: nn.Module) -> dict[str, float]:
    """By what the output of each adapted layer's adapter is multiplied."""
    return {place.name: float(place.layer.scaling[NAME]) for place in _places(module)}


class AdapterOff:
    """A `Reference`: the policy's own module without its adapter, which is the model that it started from."""

    def __init__(self, policy: nn.Module, sha256: str) -> None:
        self.policy = policy
        self.sha256 = sha256

    @contextmanager
    def module(self) -> Iterator[nn.Module]:
        with without_adapter(self.policy):
            yield self.policy


class StartingAdapter:
    """A `Reference`: the policy's own module with its adapter as it was when this object was made."""

    def __init__(self, policy: nn.Module, sha256: str) -> None:
        self.policy = policy
        self.sha256 = sha256
        self.start = {name: parameter.detach().clone() for name, parameter in _parameters(policy).items()}
        assert self.start, "the policy has no adapter"

    @contextmanager
    def module(self) -> Iterator[nn.Module]:
        parameters = _parameters(self.policy)
        trained = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = self.start[name].to(parameter.device)
            yield self.policy
        finally:
            for name, parameter in parameters.items():
                parameter.data = trained[name]


@contextmanager
def without_adapter(module: nn.Module) -> Iterator[None]:
    """Inside, the module is its base model: the plain layers stand in their places, under their plain names."""
    places = _places(module)
    try:
        for place in places:
            setattr(place.parent, place.child, place.layer.base_layer)
        yield
    finally:
        for place in places:
            setattr(place.parent, place.child, place.layer)


@contextmanager
def merged(module: nn.Module) -> Iterator[None]:
    """Inside, the module is a plain model with W + scaling B A in place of W, in float32.

    The sums are new tensors (a copy of the adapted layers, no more); the base parameters are set aside untouched.
    A head that is tied to the embedding is a tensor of its own inside if it has an adapter. Without an adapter
    nothing happens.
    """
    places = _places(module)
    base = [place.layer.base_layer.weight for place in places]
    sums = [nn.Parameter(_sum(place.layer), requires_grad=False) for place in places]
    with without_adapter(module):
        try:
            for place, weight in zip(places, sums, strict=True):
                place.layer.base_layer.weight = weight
            yield
        finally:
            for place, weight in zip(places, base, strict=True):
                place.layer.base_layer.weight = weight


@torch.no_grad()
def _sum(layer: Any) -> Tensor:
    return layer.base_layer.weight + layer.get_delta_weight(NAME)  # float32, as the adapter is, whatever the base is


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise InputError(f"LoRA needs the package peft, which is not installed.\nRun: {INSTALL_LORA}") from error


def _inject(module: nn.Module, **config: Any) -> None:
    peft = _peft()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):  # peft draws on the CPU, before it moves
        warnings.simplefilter("ignore")  # what it says of Conv1D and tied heads is taken care of
        peft.inject_adapter_in_model(peft.LoraConfig(**config), module, adapter_name=NAME)
    module.requires_grad_(False)
    for place in _places(module):
        for part in (place.layer.lora_A, place.layer.lora_B):
            part.float().requires_grad_(True)


@torch.no_grad()
def _draw(places: list[_Place], seed: int) -> None:
    """A as peft draws it, uniform in +-1/sqrt(inputs), but in the order of the layers and from this seed."""
    generator = torch.Generator().manual_seed(seed)
    for place in places:
        weight = place.layer.lora_A[NAME].weight
        bound = 1 / math.sqrt(weight.shape[1])
        weight.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))
        place.layer.lora_B[NAME].weight.zero_()


def _places(module: nn.Module) -> list[_Place]:
    """The adapted layers, in the module's order. peft need not be imported to see that there is none."""
    found = []
    for prefix, parent in module.named_modules():
        for child, layer in parent.named_children():
            if hasattr(layer, "base_layer") and hasattr(layer, "lora_A"):
                found.append(_Place(f"{prefix}.{child}" if prefix else child, parent, child, layer))
    return found


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A and B of every adapted layer, by their names in `module.named_parameters()`."""
    return {
        f"{place.name}.{part}.{name}": parameter
        for place in _places(module)
        for part in ("lora_A", "lora_B")
        for name, parameter in getattr(place.layer, part).named_parameters()
    }


def _without_name(name: str) -> str:
    """'q_proj.lora_A.default.weight' as PEFT's files have it: 'q_proj.lora_A.weight'."""
    stem, _, last = name.rpartition(".")
    return f"{stem.removesuffix(f'.{NAME}')}.{last}"


def _without_copies(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without those that are the base's own, bit for bit: peft stores an adapted head's weight too."""
    base = module.state_dict()
    same = {n for n, t in tensors.items() if (own := base.get(n.removeprefix(PREFIX))) is not None and own.equal(t)}
    return {name: tensor for name, tensor in tensors.items() if name not in same}


def _configs(module: Any) -> dict[str, Any]:
    assert has_adapter(module), "the module has no adapter"
    return module.peft_config


def _is_causal_lm(module: Any) -> bool:
    return hasattr(module, "can_generate") and bool(module.can_generate())


@torch.no_grad()
def _load(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], source: str) -> None:
    """Every tensor has its place and every place its tensor, else nothing is changed."""
    if wrong := sorted(parameters.keys() ^ tensors.keys()):
        says = "lacks" if wrong[0] in parameters else "has"
        raise InputError(
            f"{source} holds another adapter than the model has place for: {len(wrong)} tensors differ; it {says} "
            f"{wrong[0]}.\nGive the adapter that belongs to this model, of the same targets."
        )
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            raise InputError(
                f"{source}: {name} is {list(tensors[name].shape)}, the model needs {list(parameter.shape)}.\n"
                "Give the adapter that belongs to this model, of the same rank."
            )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
