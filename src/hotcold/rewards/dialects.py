"""How other trainers call a reward: what each argument holds, and how their forms are told apart.

A function is called as TRL, verl, OpenRLHF or verifiers would call it. Completions are messages where the prompt is
messages in TRL and verifiers, text everywhere else; an argument `response` (`responses`) is the text in any of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hotcold.errors import RewardError
from hotcold.rewards.base import Scorable

Read = Callable[[Scorable], Any]


@dataclass(frozen=True)
class Column:
    """An argument that a column fills, under one of several names."""

    names: tuple[str, ...]  # the first that the row has
    default: Callable[[], Any] | None = None  # None: one of the columns must be there
    read: Callable[[Any], Any] = lambda value: value

    def of(self, item: Scorable) -> Any:
        for name in self.names:
            if name in item.columns:
                return self.read(item.columns[name])
        return None if self.default is None else self.default()


@dataclass(frozen=True)
class Dialect:
    name: str
    one: Mapping[str, Read]  # arguments of a function that is called for each response
    many: Mapping[str, Read]  # of one that is called with lists
    one_columns: Mapping[str, Column] = field(default_factory=dict)
    many_columns: Mapping[str, Column] = field(default_factory=dict)
    whole: Mapping[str, Any] = field(default_factory=dict)  # the same for every response
    extra: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # what **kwargs gets beside the columns: one, many
    always_many: bool = False
    by_group: bool = False  # a call with lists is for the responses to one prompt
    result: Callable[[Any], Any] | None = None  # what a call returned, in the form that is judged
    required: tuple[str, ...] = ()  # columns that no argument names


def messages(item: Scorable) -> Any:
    """The completion in the form of the prompt."""
    return item.completion if isinstance(item.prompt, str) else [{"role": "assistant", "content": item.completion}]


def prompt_text(item: Scorable) -> str:
    """Messages without template: their texts, a line each."""
    if isinstance(item.prompt, str):
        return item.prompt
    return "\n".join(str(message.get("content", "")) for message in item.prompt)


def _prompt(item: Scorable) -> Any:
    return item.prompt


def _completion(item: Scorable) -> str:
    return item.completion


def _plural(reads: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}s": read for name, read in reads.items()}


# ---- each library


class Unknown:
    """TRL's state of its trainer. It may be asked for and left alone; what it holds is not known to a reward here."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state.{name} is not known to a reward here. Make the reward do without it.")


def _not_kept(*args: Any, **kwargs: Any) -> None:
    """TRL's log_metric and log_extra: nothing is logged."""


class Parser:
    """verifiers' parser where the function comes without one: the text of the last assistant message."""

    def parse(self, text: str) -> str:
        return text.strip()

    def parse_answer(self, completion: Any) -> str:
        return self.parse(completion if isinstance(completion, str) else str(completion[-1]["content"]))


def _as_dict(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value else value or {}


ANSWER = Column(("answer",), str)
INFO = Column(("info",), dict, _as_dict)
TASK = Column(("task",), lambda: "default")


def _state(item: Scorable) -> dict[str, Any]:
    return {
        "prompt": item.prompt,
        "completion": messages(item),
        "answer": ANSWER.of(item),
        "info": INFO.of(item),
        "task": TASK.of(item),
        "is_truncated": item.truncated,
        "trajectory": [],
    }


def _openrlhf_result(result: Any) -> Any:
    """`rewards` of the dict that it documents; a column [B, 1] as B numbers."""
    if isinstance(result, dict):
        key = next((key for key in ("rewards", "scores") if key in result), None)
        if key is None:
            raise RewardError(f'a dict with the keys {list(result)} was returned; "rewards" or "scores" is needed.')
        result = result[key]
    return result.reshape(-1) if getattr(result, "ndim", 1) == 2 and result.shape[1] == 1 else result


_TEXTS = {"prompt": _prompt, "completion": _completion, "response": _completion}
_CHAT = {"prompt": _prompt, "completion": messages, "response": _completion}
_VERL = {
    "data_source": Column(("data_source",)),
    "ground_truth": Column(("ground_truth", "answer")),
    "extra_info": Column(("extra_info",), dict, lambda value: {} if value is None else value),
}
_VERIFIERS = {"answer": ANSWER, "info": INFO, "task": TASK}

PLAIN = Dialect(
    "plain",
    one=_TEXTS | {"solution_str": _completion},
    many=_plural(_TEXTS),
    extra=(("prompt", "completion"), ("prompts", "completions")),
)
TRL = Dialect(
    "trl",
    one={},
    many=_plural(_CHAT),
    whole={"trainer_state": Unknown(), "log_extra": _not_kept, "log_metric": _not_kept, "environments": None},
    extra=((), ("prompts", "completions", "trainer_state", "log_extra", "log_metric")),
    always_many=True,
)
VERL = Dialect(
    "verl",
    one={"solution_str": _completion, "response": _completion},
    many={"solution_strs": _completion, "responses": _completion},
    one_columns=_VERL,
    many_columns={
        "data_sources": _VERL["data_source"],
        "ground_truths": _VERL["ground_truth"],
        "extra_infos": _VERL["extra_info"],
    },
    extra=(("solution_str",), ("solution_strs",)),
)
OPENRLHF = Dialect(
    "openrlhf",
    one={},
    many={
        "queries": lambda item: prompt_text(item) + item.completion,
        "prompts": prompt_text,
        "responses": _completion,
    },
    many_columns={"labels": Column(("label", "labels", "answer"))},
    always_many=True,
    result=_openrlhf_result,
)
VERIFIERS = Dialect(
    "verifiers",
    one=_CHAT | {"state": _state},
    many=_plural(_CHAT | {"state": _state}),
    one_columns=_VERIFIERS,
    many_columns=_plural(_VERIFIERS),
    whole={"parser": Parser()},
    extra=(("prompt", "completion", "state", "info", "task"), ("prompts", "completions", "states", "infos", "tasks")),
    by_group=True,
)
DIALECTS = {dialect.name: dialect for dialect in (PLAIN, TRL, VERL, OPENRLHF, VERIFIERS)}


def detected(names: Collection[str], has_kwargs: bool, annotations: Sequence[str] = ()) -> Dialect:
    """By the parameters that no other library has. TRL hands on every column, so its functions take **kwargs."""
    given = set(names)
    if "queries" in given and given & {"prompts", "labels"}:
        return OPENRLHF
    if given >= {"solution_str", "ground_truth"} or given >= {"solution_strs", "ground_truths"}:
        return VERL
    if given & {"trainer_state", "log_extra", "log_metric"} or ("completions" in given and has_kwargs):
        return TRL
    if given & {"state", "states", "parser"} or any("Messages" in text for text in annotations):
        return VERIFIERS
    return PLAIN


def of_rubric(parts: Mapping[str, Any]) -> Dialect:
    """verifiers with the objects that a rubric hands to its functions."""
    return replace(VERIFIERS, whole={**VERIFIERS.whole, **parts})


def of_items(required: Sequence[str]) -> Dialect:
    """A function of ours that takes the items themselves, and needs these columns."""
    return Dialect(
        "items", one={}, many={"items": lambda item: item}, always_many=True, required=tuple(dict.fromkeys(required))
    )
