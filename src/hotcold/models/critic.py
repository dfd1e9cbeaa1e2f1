"""The value of a state: a language model's trunk with a scalar head that starts at zero."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from hotcold.batch import Batch
from hotcold.errors import InputError
from hotcold.models.adapters import merged
from hotcold.models.checks import check_bare_folder, is_adapter
from hotcold.models.loading import LoadedModel, load_bare, load_model, resolve_folder, save_bare
from hotcold.models.policy import scatter
from hotcold.models.reading import Laying, read_hidden
from hotcold.models.reference import num_embeddings, said_of, token_gap

VALUE_HEAD = "value_head.safetensors"
KEY = "critic.init"
LEAK = 1e-4  # how far, relative to its size, a state may move when a later token changes


class Critic(nn.Module):
    """`trunk`: a Hugging Face model without a language model's head. `head`: from its last hidden state to a number.

    Weight and bias of the head are 0, so V = 0 everywhere at the first step and the advantages are those without a
    critic. The bias is there so that the head can say a constant whatever the hidden states are: a constant added to
    every score then moves one number.
    """

    def __init__(self, trunk: nn.Module, width: int) -> None:
        super().__init__()
        parameter = next(trunk.parameters())
        self.trunk = trunk
        self.head = nn.Linear(width, 1, bias=True, dtype=parameter.dtype, device=parameter.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, **inputs: Any) -> Tensor:
        """[b, T] the value of the state after each position."""
        return self.values(self.trunk(**inputs).last_hidden_state)

    def values(self, hidden: Tensor) -> Tensor:
        """Of hidden states [..., H]. The head computes in its own precision: under bf16 a value has three digits."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype))[..., 0]


def measure_values(critic: Critic, batch: Batch, laying: Laying = Laying.ROWS) -> Tensor:
    """[B, T] the value of the state in which each trained token was chosen; 0 outside `batch.trained`.

    It is read at the position before the token, as its log-probability is, and nowhere else: what stands in the padding
    reaches neither a value nor a gradient.
    """
    row, at = batch.trained.nonzero(as_tuple=True)
    if not len(row):
        return torch.zeros(batch.trained.shape, dtype=critic.head.weight.dtype, device=batch.tokens.device)
    return scatter(critic.values(read_hidden(critic.trunk, batch, row, at, laying)), batch.trained)


def critic_from_policy(loaded: LoadedModel, device: str) -> Critic:
    """A copy of the policy's trunk as it is now, an adapter of the policy merged into it. It shares no memory."""
    return _around(_copied_trunk(loaded.module, loaded.source), loaded.source, device)


def load_critic(spec: str, device: str, policy: LoadedModel) -> Critic:
    """`spec`: what `save_critic` wrote, a reward model (a classifier with one label), or anything `load_model` takes.

    Of the last two only the trunk is used. Raises InputError unless it reads the policy's tokens.
    """
    with said_of(KEY, spec):
        folder = resolve_folder(spec)
        names = [] if is_adapter(folder) else check_bare_folder(folder).get("architectures") or []
        if (folder / VALUE_HEAD).is_file():
            return _load_saved(folder, device, policy)
        if any(str(name).endswith("ForSequenceClassification") for name in names):
            return _load_classifier(folder, device, policy)
        loaded = load_model(spec)
    _check_tokens(loaded.module, loaded.tokenizer, loaded.source, policy)
    return critic_from_policy(loaded, device)


def save_critic(critic: Critic, folder: str | Path) -> None:
    """The trunk in Hugging Face format (an adapter merged into what is written) and the head beside it."""
    save_bare(critic.trunk, folder)
    head = {name: tensor.detach().cpu().contiguous() for name, tensor in critic.head.state_dict().items()}
    save_file(head, Path(folder) / VALUE_HEAD, {"format": "pt"})


def trunk_of(module: Any, source: str) -> Any:
    """What a causal LM or classifier computes hidden states with, by the names that model families use for it."""
    decoder = module.get_decoder() if hasattr(module, "get_decoder") else module
    for candidate in (getattr(module, "base_model", module), decoder):
        if candidate is not module and _stands_alone(candidate):
            return candidate
    raise InputError(
        f"{source}: a {type(module).__name__} has no trunk that stands alone, so no critic can be made of it.\n"
        f"Give {KEY} another model with the same tokens, or an algorithm without a critic."
    )


def _stands_alone(trunk: Any) -> bool:
    """Whether AutoModel makes this class of its config: else it could be saved but not loaded."""
    mapping: Any = MODEL_MAPPING
    known = mapping.get(type(getattr(trunk, "config", None)), ())
    return type(trunk) in (known if isinstance(known, tuple) else (known,))


def _copied_trunk(module: nn.Module, source: str) -> Any:
    with merged(module):
        return copy.deepcopy(trunk_of(module, source))


def _around(trunk: Any, source: str, device: str) -> Critic:
    trunk.eval().requires_grad_(True)
    return Critic(trunk, _hidden_width(trunk, source)).eval().to(device)


@torch.no_grad()
def _hidden_width(trunk: Any, source: str) -> int:
    """The size of the trunk's hidden states, from a forward of two short rows that differ in the last token."""
    rows = torch.tensor([[0, 0], [0, num_embeddings(trunk) - 1]], device=next(trunk.parameters()).device)
    try:
        hidden = trunk(input_ids=rows, use_cache=False).last_hidden_state
        first, second = hidden[:, 0]
    except Exception as error:  # whatever a foreign family meets
        raise InputError(
            f"{source}: the trunk of this model ({type(trunk).__name__}) gives no hidden states for token ids alone: "
            f"{type(error).__name__}: {str(error)[:200]}\nGive {KEY} a decoder-only language model."
        ) from error
    if float((first - second).abs().max()) > LEAK * float(first.abs().max()):
        raise InputError(
            f"{source}: this model ({type(trunk).__name__}) reads later tokens too, so its value of a state would know "
            f"what comes next.\nGive {KEY} a decoder-only language model."
        )
    return hidden.shape[-1]


def _load_saved(folder: Path, device: str, policy: LoadedModel) -> Critic:
    trunk, tokenizer = load_bare(folder, AutoModel)
    _check_tokens(trunk, tokenizer, str(folder), policy)
    critic = _around(trunk, str(folder), device)
    path = folder / VALUE_HEAD
    try:
        critic.head.load_state_dict(load_file(path))
    except (SafetensorError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{path} is no value head for this trunk: {reason}\nSave the critic again.") from error
    return critic


def _load_classifier(folder: Path, device: str, policy: LoadedModel) -> Critic:
    labels = check_bare_folder(folder).get("id2label", ("LABEL_0", "LABEL_1"))  # transformers' default is two
    if len(labels) != 1:
        raise InputError(
            f"{folder} is a classifier with {len(labels)} labels; a reward model has one.\n"
            f"Give {KEY} a reward model, a causal language model or a saved critic."
        )
    classifier, tokenizer = load_bare(folder, AutoModelForSequenceClassification)
    _check_tokens(classifier, tokenizer, str(folder), policy)
    return _around(trunk_of(classifier, str(folder)), str(folder), device)


def _check_tokens(module: Any, tokenizer: Any, source: str, policy: LoadedModel) -> None:
    """The critic reads the policy's ids. Tokens that only the critic has (a reward model's pad token) do no harm."""
    rows, needed = num_embeddings(module), num_embeddings(policy.module)
    if rows < needed or (tokenizer is None and rows != needed):
        raise InputError(
            f"{KEY}: {source} has a vocabulary of {rows} tokens, the policy {policy.source} of {needed}.\n"
            "Give a model of the policy's family, or leave it out: the critic is then a copy of the policy's trunk."
        )
    ours = {token: i for token, i in policy.tokenizer.get_vocab().items() if i < needed}
    theirs = ours if tokenizer is None else tokenizer.get_vocab()
    if differ := sorted(token for token, i in ours.items() if theirs.get(token) != i):
        raise InputError(
            f"{KEY}: the tokenizers of {source} and of the policy {policy.source} differ in {len(differ)} tokens: "
            f"{token_gap(differ[0], ours, theirs)}.\nGive a model with the policy's tokenizer."
        )
