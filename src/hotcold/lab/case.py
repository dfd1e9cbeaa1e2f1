"""A case: an algorithm with its keys, on a tiny world, in a situation; in words and numbers, as a user writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hotcold.algorithms.base import Algorithm
from hotcold.algorithms.build import build_algorithm
from hotcold.algorithms.checks import check_algorithm
from hotcold.algorithms.options import resolved_values
from hotcold.algorithms.presets import PRESETS
from hotcold.lab.expectation import Setting
from hotcold.lab.tiny import FIXED, VARIABLE, Tiny, wide, with_gap, with_steps
from hotcold.training.mismatch import Mismatch
from hotcold.training.truncation import Truncation

WORLDS: dict[str, Tiny] = {
    "fixed": FIXED,
    "variable": VARIABLE,
    "fixed, steps": with_steps(FIXED),
    "variable, steps": with_steps(VARIABLE),
    "variable, tool": with_gap(VARIABLE),
    "wide": wide(max_tokens=2, vocabulary=3, seed=1),
}
ABOUT_WORLDS = {
    "fixed": "2 tokens, every response has 2 of them",
    "variable": "2 tokens, a response ends with token 0 or is cut after 3",
    "fixed, steps": "as fixed, with rewards on the way",
    "variable, steps": "as variable, with rewards on the way",
    "variable, tool": "as variable, with a tool's answer after the first token",
    "wide": "3 tokens, a response ends with token 0 or is cut after 2",
}
RATE = 0.5  # of the plain steps between several on one batch: large enough to be seen


@dataclass(frozen=True)
class Situation:
    """Where the responses come from and what surrounds the algorithm."""

    groups: int = 1  # prompts of the step
    sampled_by: Literal["policy", "older policy", "another engine"] = "policy"
    critic: Literal["zero", "wrong", "exact"] = "wrong"
    mismatch: Mismatch | None = None
    truncated: Literal["keep", "mask", "penalty"] = "keep"
    rate: float = RATE


@dataclass(frozen=True)
class Case:
    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)
    world: str = "variable"
    situation: Situation = Situation()

    @property
    def tiny(self) -> Tiny:
        return WORLDS[self.world]

    @property
    def is_ours(self) -> bool:
        return self.algorithm in PRESETS

    @property
    def values(self) -> dict[str, Any]:
        """Every key of a named algorithm with its value."""
        return resolved_values(self.algorithm, dict(self.options))

    @property
    def label(self) -> str:
        return " ".join([self.algorithm, *words_of(self.options)])

    @property
    def where(self) -> str:
        """The world and what is unusual in the situation."""
        return "; ".join([self.world, *words_of_situation(self.situation, self.has_critic, self.num_steps > 1)])

    @property
    def has_critic(self) -> bool:
        return self.is_ours and "lam" in PRESETS[self.algorithm].values

    @property
    def sampled_by(self) -> str:
        return "a data set" if self.algorithm == "sft" else self.situation.sampled_by

    @property
    def num_steps(self) -> int:
        values = self.values if self.is_ours else self.options
        return int(values.get("epochs_per_batch", 1)) * int(values.get("minibatches", 1))

    def build(self) -> Algorithm:
        algorithm = build_algorithm(self.algorithm, dict(self.options), self.tiny.max_tokens)
        check_algorithm(algorithm, self.situation.groups)
        return algorithm

    def on(self, world: str) -> Case:
        return replace(self, world=world)


def words_of(options: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_word(value)}" for key, value in options.items()]


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def words_of_situation(situation: Situation, has_critic: bool, several_steps: bool) -> list[str]:
    words = []
    if situation.groups > 1:
        words.append(f"{situation.groups} prompts")
    if situation.sampled_by != "policy":
        words.append(f"sampled by an {situation.sampled_by}".replace("an another", "another"))
    if situation.mismatch is not None:
        words.append(mismatch_words(situation.mismatch))
    if situation.truncated != "keep":
        words.append(f"truncated={situation.truncated}")
    if has_critic:
        words.append(f"{situation.critic} critic")
    if several_steps and situation.rate == 0:
        words.append("rate 0")
    return words


def mismatch_words(mismatch: Mismatch) -> str:
    limits = f"cap {mismatch.cap:g}" if mismatch.mode == "truncate" else f"{mismatch.low:g} to {mismatch.high:g}"
    return f"mismatch={mismatch.mode}, {mismatch.level}, {limits}"


def setting_of(case: Case, values: list[float] | None = None) -> Setting:
    """What `expected_update` takes. `values`: the critic's."""
    tiny, s = case.tiny, case.situation
    return Setting(
        num_groups=s.groups,
        old=tiny.sampler if s.sampled_by == "older policy" else None,
        sampler=tiny.sampler if case.sampled_by in ("another engine", "a data set") else None,
        mismatch=s.mismatch,
        truncation=truncation_of(case),
        values=values,
        rate=s.rate if case.num_steps > 1 else 0.0,
    )


def truncation_of(case: Case) -> Truncation:
    """The penalty as a run has it by default: over the last fifth of the longest response."""
    longest = case.tiny.max_tokens + case.tiny.gap
    return Truncation(case.situation.truncated, longest, max(1, longest // 5))
