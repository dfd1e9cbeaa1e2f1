"""The models of a run: the policy, and where the algorithm needs them a critic and a frozen reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hotcold.algorithms.base import Algorithm
from hotcold.config.checks import CRITIC_KEYS, check_not_given, check_sampling_keys
from hotcold.config.schema import Config
from hotcold.models.adapters import AdapterOff, LoraSettings, StartingAdapter, add_lora, has_adapter
from hotcold.models.compute import check_recomputing, compute_context
from hotcold.models.critic import Critic, critic_from_policy, load_critic
from hotcold.models.loading import LoadedModel
from hotcold.models.reading import Laying, Reading, choose_laying, choose_reading
from hotcold.models.reference import FrozenReference, Reference, check_apart, copy_as_reference, load_reference

READS_OF_REFERENCE = frozenset({"logp_ref", "kl_old"})


@dataclass(frozen=True)
class Lineup:
    policy: LoadedModel
    critic: Critic | None
    reference: Reference | None
    compute: Callable[[], AbstractContextManager[Any]]
    trains_adapter: bool  # of the policy, and nothing else of it
    reading: Mapping[str, Reading]  # by model: what may be shared and left out
    notes: tuple[str, ...] = ()


def needs_reference(algorithm: Algorithm) -> bool:
    """At beta 0 nothing asks for it, and it is not loaded."""
    return bool(algorithm.reads & READS_OF_REFERENCE) or any("kl" in o.needs for o in algorithm.objectives)


def has_critic(algorithm: Algorithm) -> bool:
    return any(objective.model == "critic" for objective in algorithm.objectives)


def line_up(config: Config, algorithm: Algorithm, policy: LoadedModel) -> Lineup:
    """The policy as it starts; the others beside it. The reference is taken before anything is added to the policy."""
    device, lora = config.device, config.lora
    assert config.dtype is not None
    compute = compute_context(config.dtype, device)
    critic = _critic(config, policy, device) if has_critic(algorithm) else None
    reference = _given_reference(config, policy, device) if needs_reference(algorithm) else None
    if lora.rank:
        add_lora(policy.module, _settings(config), config.seed)
    trains_adapter = has_adapter(policy.module)
    if needs_reference(algorithm) and reference is None:
        reference = _starting_reference(policy)
    if critic is not None and (trains_adapter if lora.critic is None else lora.critic):
        add_lora(critic.trunk, _settings(config), config.seed + 1)
    if isinstance(reference, FrozenReference):
        check_apart(policy.module.parameters(), reference.frozen_module)
    if config.gradient_checkpointing:
        check_recomputing(policy.module)
        if critic is not None:
            check_recomputing(critic)
    reading, notes = _readings(config, policy, critic, reference)
    return Lineup(policy, critic, reference, compute, trains_adapter, reading, notes)


def _readings(
    config: Config, policy: LoadedModel, critic: Critic | None, reference: Reference | None
) -> tuple[dict[str, Reading], tuple[str, ...]]:
    """What each model allows to share and to leave out."""
    of_policy = choose_reading(policy.module)
    reading = {"policy": of_policy, "reference": of_policy}
    if isinstance(reference, FrozenReference) and config.reference is not None:
        reading["reference"] = choose_reading(reference.frozen_module)
    if critic is not None:
        reading["critic"] = Reading(laying=choose_laying(critic.trunk))
    kind = type(policy.module).__name__
    if of_policy.head is None:
        return reading, (f"{kind}: its head does not stand alone, so that logits are computed for whole rows",)
    if of_policy.laying is Laying.ROWS:
        return reading, (f"{kind}: its prompts cannot be shared, so that each response is computed with its own",)
    return reading, ()


def _critic(config: Config, policy: LoadedModel, device: str) -> Critic:
    if config.critic.init is None:
        return critic_from_policy(policy, device)
    return load_critic(config.critic.init, device, policy)


def _given_reference(config: Config, policy: LoadedModel, device: str) -> Reference | None:
    return None if config.reference is None else load_reference(config.reference, device, policy)


def _starting_reference(policy: LoadedModel) -> Reference:
    """The starting model: with an adapter the policy's own module, seen without what is trained; else a copy."""
    if policy.adapter is not None:
        return StartingAdapter(policy.module, policy.sha256)
    if has_adapter(policy.module):
        return AdapterOff(policy.module, policy.sha256)
    return copy_as_reference(policy.module, policy.sha256, policy.source)


def _settings(config: Config) -> LoraSettings:
    rank = config.lora.rank or 8  # of a critic beside a policy that came with its adapter
    return LoraSettings(rank, config.lora.alpha or 2.0 * rank, config.lora.targets)


# ---- keys without effect


def check_keys_have_effect(config: Config, algorithm: Algorithm) -> None:
    """What somebody gave and this algorithm does not use is an error that says what it needs."""
    void = {}
    if not needs_reference(algorithm):
        void["reference"] = "an algorithm with a KL (beta above 0)"
    if not has_critic(algorithm):
        void |= dict.fromkeys(CRITIC_KEYS, "an algorithm that has a critic (ppo)")
    check_not_given(config, void)
    check_sampling_keys(config, samples=algorithm.plan is not None)
