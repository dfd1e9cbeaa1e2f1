"""The frozen model that the policy is kept close to. It must not follow the policy: no storage is shared."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from hotcold.errors import InputError
from hotcold.models.loading import LoadedModel, load_model


class Reference(Protocol):
    @property
    def sha256(self) -> str:
        """Of the weight files it came from."""

    def module(self) -> AbstractContextManager[nn.Module]:
        """Inside, the module answers as the reference. With LoRA it is the policy's own, its adapter switched off."""


class FrozenReference:
    """A model of its own in eval mode, none of whose parameters can be trained."""

    def __init__(self, frozen_module: nn.Module, sha256: str, source: str = "") -> None:
        self.frozen_module = frozen_module.eval().requires_grad_(False)
        self.sha256 = sha256
        self.source = source  # the folder, for messages

    @contextmanager
    def module(self) -> Iterator[nn.Module]:
        yield self.frozen_module


def copy_as_reference(module: nn.Module, sha256: str, source: str) -> FrozenReference:
    """The module as it is now, copied: training the module leaves the reference where it was."""
    return FrozenReference(copy.deepcopy(module), sha256, source)


def load_reference(spec: str, device: str, policy: LoadedModel) -> FrozenReference:
    """A reference given by path. Its tokens must be the policy's."""
    with said_of("reference", spec):
        loaded = load_model(spec, device)
    check_same_vocabulary(policy, loaded)
    return FrozenReference(loaded.module, loaded.sha256, loaded.source)


@contextmanager
def said_of(key: str, spec: str) -> Iterator[None]:
    """An error about `model=spec` names the key under which the path was given."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace(f"model={spec}", f"{key}={spec}", 1)) from error


def check_apart(policy_parameters: Iterable[Tensor], reference_module: nn.Module) -> None:
    """Raises InputError where the reference has a tensor in the memory of one that is trained."""
    trained = {_memory(p) for p in policy_parameters} - {None}
    tensors = [*reference_module.named_parameters(), *reference_module.named_buffers()]
    shared = [name for name, tensor in tensors if _memory(tensor) in trained]
    if shared:
        raise InputError(
            f"The reference and the policy share {len(shared)} of {len(tensors)} tensors ({shared[0]} ...): it would "
            "follow every update and the KL would stay 0.\n"
            "Load the reference on its own or give a deep copy of the model."
        )


def _memory(tensor: Tensor) -> tuple[str, int] | None:
    storage = tensor.untyped_storage()
    return (str(tensor.device), storage.data_ptr()) if storage.nbytes() and storage.data_ptr() else None


def check_same_vocabulary(policy: LoadedModel, reference: LoadedModel) -> None:
    """Raises InputError unless each token id is the same token in both, and both have as many logits."""
    sizes = [num_embeddings(loaded.module) for loaded in (policy, reference)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"The reference {reference.source} has a vocabulary of {sizes[1]} tokens, the policy {policy.source} of "
            f"{sizes[0]}.\nGive a reference of the same family, such as the model from which the policy was tuned."
        )
    ours, theirs = (loaded.tokenizer.get_vocab() for loaded in (policy, reference))
    differ = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differ:
        raise InputError(
            f"The tokenizers of the reference {reference.source} and of the policy {policy.source} differ in "
            f"{len(differ)} tokens: {token_gap(differ[0], ours, theirs)}.\n"
            "The two models would be asked about different texts. Give a reference with the policy's tokenizer."
        )


def token_gap(token: str, ours: dict[str, int], theirs: dict[str, int]) -> str:
    """'"the" is id 5 in the policy, none there'"""
    return f"{token!r} is id {ours.get(token, 'none')} in the policy, {theirs.get(token, 'none')} there"


def num_embeddings(module: Any) -> int:
    return module.get_input_embeddings().weight.shape[0]
