"""The reference stays where it is: D07, its three inputs, and a reference given by path."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotcold.batch import collate
from hotcold.errors import InputError
from hotcold.models.loading import LoadedModel, load_model
from hotcold.models.policy import measure
from hotcold.models.reference import (
    FrozenReference,
    Reference,
    check_apart,
    check_same_vocabulary,
    copy_as_reference,
    load_reference,
)
from tests.models.test_loading import edit, llama, saved, tokenizer
from tests.tiny_model import write_tiny
from tests.toy_policies import TINY, ragged_rollouts, tiny_llama


def mean_kl(policy: nn.Module, reference: Reference) -> float:
    batch = collate(ragged_rollouts())
    with torch.no_grad():
        done = measure(policy, batch, frozenset({"logp", "kl"}), 1.0, reference)
    assert done.forward.kl is not None
    return float(done.forward.kl[batch.trained].mean())


def update(policy: nn.Module) -> None:
    batch = collate(ragged_rollouts())
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.1)
    logp = measure(policy, batch, frozenset({"logp"}), 1.0).forward.logp
    assert logp is not None
    (-logp.sum() / batch.trained.sum()).backward()
    optimizer.step()


@pytest.mark.parametrize("name", list(TINY))
def test_one_model_for_both_is_copied_and_the_kl_rises_after_an_update(name: str) -> None:
    """D07, first input: Trainer(policy=m, reference=m)."""
    policy = TINY[name]().eval()
    reference = copy_as_reference(policy, "abc", "model")
    check_apart(policy.parameters(), reference.frozen_module)
    assert abs(mean_kl(policy, reference)) < 1e-6
    before = copy.deepcopy(reference.frozen_module.state_dict())
    update(policy)
    assert mean_kl(policy, reference) > 1e-4
    assert all(torch.equal(x, before[n]) for n, x in reference.frozen_module.state_dict().items())


def test_one_model_for_both_without_a_copy_is_refused() -> None:
    """D07, first input, as an engine would be given it."""
    policy = tiny_llama()
    with pytest.raises(InputError, match=r"share .* the KL would stay 0"):
        check_apart(policy.parameters(), policy)


def test_a_reference_path_equal_to_the_policys_is_another_model(tmp_path: Path) -> None:
    """D07, second input."""
    folder = str(saved(tmp_path / "m"))
    policy = load_model(folder)
    reference = load_reference(folder, "cpu", policy)
    check_apart(policy.module.parameters(), reference.frozen_module)
    assert reference.sha256 == policy.sha256 and reference.source == folder


def test_two_wrappers_around_shared_parameters_are_told_by_their_storage() -> None:
    """D07, third input: other Parameter objects, one of them a view, on the same memory."""
    policy, reference = tiny_llama(seed=0), tiny_llama(seed=1)
    check_apart(policy.parameters(), reference)
    shared = policy.model.layers[1].mlp.up_proj.weight
    reference.model.layers[0].mlp.up_proj.weight = nn.Parameter(shared.detach()[:])
    assert reference.model.layers[0].mlp.up_proj.weight is not shared
    with pytest.raises(InputError, match=r"share 1 of .*model\.layers\.0\.mlp\.up_proj\.weight") as caught:
        check_apart(policy.parameters(), reference)
    assert len(str(caught.value).splitlines()) <= 5


def test_frozen_parameters_of_the_policy_may_be_shared() -> None:
    """What is not trained cannot drift: only the trained parameters are handed to the check."""
    policy, reference = tiny_llama(), tiny_llama(seed=1)
    reference.model.embed_tokens.weight = policy.model.embed_tokens.weight
    policy.model.embed_tokens.weight.requires_grad_(False)
    check_apart([p for p in policy.parameters() if p.requires_grad], reference)


def test_a_reference_is_in_eval_mode_and_has_nothing_to_train() -> None:
    policy = tiny_llama().train()
    reference = copy_as_reference(policy, "abc", "model")
    with reference.module() as module:
        assert not any(m.training for m in module.modules())
        assert not any(p.requires_grad for p in module.parameters())
    assert policy.training and all(p.requires_grad for p in policy.parameters())


def loaded(module: Any, words: Any, source: str) -> LoadedModel:
    return LoadedModel(module, words, (1,), 0, 40, source, "abc", ())


def test_a_reference_with_another_number_of_tokens_is_refused(tmp_path: Path) -> None:
    policy = load_model(str(saved(tmp_path / "m")))
    other = str(saved(tmp_path / "wide", llama(vocab_size=24)))
    with pytest.raises(InputError, match=r"vocabulary of 24 tokens.* of 16") as caught:
        load_reference(other, "cpu", policy)
    assert other in str(caught.value) and len(str(caught.value).splitlines()) <= 5


def test_a_reference_with_other_tokens_is_refused(tmp_path: Path) -> None:
    """Same size, two tokens exchanged: nothing would crash."""
    policy = load_model(str(saved(tmp_path / "m")))
    folder = saved(tmp_path / "swapped")

    def exchange(content: dict[str, Any]) -> None:
        words = content["model"]["vocab"]
        words["a"], words["b"] = words["b"], words["a"]

    edit(folder / "tokenizer.json", exchange)
    with pytest.raises(InputError, match="differ in 2 tokens: 'a' is id 3 in the policy, 4 there") as caught:
        load_reference(str(folder), "cpu", policy)
    assert len(str(caught.value).splitlines()) <= 5


def test_a_token_that_only_one_of_the_tokenizers_has_is_named() -> None:
    ours, theirs = tokenizer(), tokenizer(pad_token="<added>")
    with pytest.raises(InputError, match="differ in 1 tokens: '<added>' is id none in the policy, 16 there"):
        check_same_vocabulary(loaded(llama(), ours, "m"), loaded(llama(), theirs, "n"))


def test_a_tuned_model_of_the_same_family_is_accepted(tmp_path: Path) -> None:
    policy = load_model(str(write_tiny(tmp_path / "m", seed=0)))
    reference = load_reference(str(write_tiny(tmp_path / "n", seed=1)), "cpu", policy)
    assert isinstance(reference, FrozenReference) and reference.sha256 != policy.sha256
