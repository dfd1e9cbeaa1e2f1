"""A reward function: found by name or given, its arguments matched by name.

Arguments: `prompt`, `completion`, `response` or `solution_str` (verl's word for the same text), `prompt_ids`,
`completion_ids`, `truncated`, and every column of the prompt's row. A column that such a name would hide is refused.
`**kwargs` receives all of these that are not named, the text once. A class stands for an object of it.
With a text argument in plural (`prompts`, `completions`, `responses`) the function is called once for all responses,
and every argument is a list; in singular once for each response. Without either it is called for each response,
unless `completion_ids` or `prompt_ids` is annotated as a list of lists. A completion is always text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hotcold.errors import InputError, NotAvailableError, did_you_mean
from hotcold.prompts.columns import Prompt
from hotcold.rewards.base import Scorable
from hotcold.rewards.options import Factory, split_options
from hotcold.rewards.reasoning_gym_task import score_reasoning_gym
from hotcold.rewards.verifiers import contains, exact, last_number
from hotcold.user_file import describe_error, import_file, pick_function

BUILT_IN: dict[str, Callable[..., Any] | Factory] = {  # a Factory takes options: NAME?key=value
    "exact": exact,
    "last_number": last_number,
    "contains": contains,
    "reasoning_gym": score_reasoning_gym,
}
LATER = re.compile(r"(math|code|judge)$|(model:|https?://)")

READ: dict[str, Callable[[Scorable], Any]] = {
    "prompt": lambda item: item.prompt,
    "completion": lambda item: item.completion,
    "response": lambda item: item.completion,
}
ONE = READ | {"solution_str": READ["completion"]}
READ_IDS: dict[str, Callable[[Scorable], Any]] = {
    "prompt_ids": lambda item: list(item.prompt_ids),
    "completion_ids": lambda item: list(item.completion_ids),
    "truncated": lambda item: item.truncated,
}
READ_ALL = {f"{name}s": read for name, read in READ.items()}
LIST_OF_LISTS = re.compile(r"(list|sequence|tuple|iterable)\[([\w.]+\.)?(list|sequence|tuple)\[", re.IGNORECASE)


@dataclass(frozen=True)
class Needs:
    """What a function asks for. Plain, so that another process can say it of a function that lives there."""

    name: str
    per_batch: bool  # called once for all responses
    columns: tuple[str, ...]  # arguments that only a column can fill
    ours: tuple[str, ...]  # arguments that are always ours

    def check(self, columns: Iterable[str]) -> None:
        """Every argument without a default must be one of ours or a column, and never both."""
        known = set(columns)
        self._check_hidden(known)
        missing = [name for name in self.columns if name not in known]
        if not missing:
            return
        reserved = reserved_names(self.per_batch)
        names = ", ".join(f'"{name}"' for name in missing)
        hint = did_you_mean(missing[0], sorted({*known, *reserved}))
        raise InputError(
            f'reward "{self.name}" needs {names}, which is no column of the data.{hint}\n'
            f"Columns: {', '.join(sorted(known)) or 'none'}.\n"
            f"Always there: {', '.join(reserved)}.\n"
            "Rename the argument, give it a default, or add the column to the data."
        )

    def _check_hidden(self, columns: Iterable[str]) -> None:
        for name in sorted({*self.ours} & {*columns}):
            raise InputError(
                f'reward "{self.name}" would never see the column "{name}" of the data: the argument of that name '
                "is always that of the response at hand.\nRename the column."
            )


def reserved_names(per_batch: bool) -> dict[str, Callable[[Scorable], Any]]:
    return (READ_ALL if per_batch else ONE) | READ_IDS


class Reward(Protocol):
    """A reward function, here or in another process."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> Needs: ...


class RewardFunction:
    """A callable with what is known of it from its signature."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = _instance(function) if inspect.isclass(function) else function
        self.name = name or name_of(function)
        self.file = file_of(function)
        self._parameters = self._signature()
        self.per_batch = self._is_per_batch()
        self._reserved = reserved_names(self.per_batch)
        self._wants_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        self.needs = Needs(self.name, self.per_batch, tuple(self._of_columns()), tuple(self._of_ours()))

    def check(self, columns: Iterable[str]) -> None:
        self.needs.check(columns)

    def _of_columns(self) -> list[str]:
        return [p.name for p in self._named() if p.default is p.empty and p.name not in self._reserved]

    def _of_ours(self) -> list[str]:
        named = {p.name for p in self._named()}
        return [name for name in self._reserved if self._wants_all or name in named]

    def call(self, items: Sequence[Scorable]) -> Any:
        """What the function returns: for a batch function of all items, else of the one item; maybe an awaitable."""
        for item in items:
            self.needs.check(item.columns)
        columns = list(dict.fromkeys(name for item in items for name in item.columns))
        args, kwargs = [], {}
        for parameter in self._named():
            if parameter.name not in self._reserved and parameter.name not in columns:
                if parameter.kind is parameter.POSITIONAL_ONLY:
                    args.append(parameter.default)
                continue
            value = self._value(parameter.name, items)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                args.append(value)
            else:
                kwargs[parameter.name] = value
        if self._wants_all:
            taken = self._parameters.keys() | self._bound()
            texts = ["prompts", "completions"] if self.per_batch else ["prompt", "completion"]
            kwargs |= {name: self._value(name, items) for name in [*columns, *texts, *READ_IDS] if name not in taken}
        return self.function(*args, **kwargs)

    def _value(self, name: str, items: Sequence[Scorable]) -> Any:
        read = self._reserved.get(name) or (lambda item: item.columns.get(name))
        values = [read(item) for item in items]
        return values if self.per_batch else values[0]

    def _named(self) -> list[inspect.Parameter]:
        """Parameters that we fill; what `functools.partial` has bound stays bound."""
        bound = self._bound()
        return [
            p
            for p in self._parameters.values()
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in bound
        ]

    def _bound(self) -> set[str]:
        return set(self.function.keywords) if isinstance(self.function, partial) else set()

    def _signature(self) -> dict[str, inspect.Parameter]:
        try:
            return dict(inspect.signature(self.function).parameters)
        except ValueError as error:
            raise InputError(
                f'reward "{self.name}": its arguments cannot be read ({error}).\nWrap it: lambda completion: ...'
            ) from error

    def _is_per_batch(self) -> bool:
        parameters = self._named()
        one = [p.name for p in parameters if p.name in ONE]
        many = [p.name for p in parameters if p.name in READ_ALL]
        if one and many:
            raise InputError(
                f'reward "{self.name}" takes both "{one[0]}" (one response at a time) and "{many[0]}" (all at once).\n'
                f"Name them alike: all in plural ({', '.join(READ_ALL)}) or all in singular ({', '.join(READ)})."
            )
        if one or many:
            return bool(many)
        annotated = [_annotation(p) for p in parameters if p.name in ("completion_ids", "prompt_ids")]
        return any(LIST_OF_LISTS.search(text) for text in annotated)


def check_columns_of_rows(function: Reward, prompts: Sequence[Prompt], source: str = "the data") -> None:
    """What the function needs must stand in every row; a row that lacks it is named. `source` is where they are."""
    for name in function.needs.columns:
        lacking = [prompt for prompt in prompts if name not in prompt.columns]
        if 0 < len(lacking) < len(prompts):
            raise InputError(
                f'reward "{function.name}" needs "{name}", which row {lacking[0].index} of {source} lacks '
                f"({len(lacking)} of {len(prompts)} rows do).\n"
                "Fill it there, leave such rows out, or give the argument a default."
            )
    function.needs.check({name for prompt in prompts for name in prompt.columns})


def load_reward(spec: str | Callable[..., Any]) -> RewardFunction:
    """`FILE.py:NAME`, `FILE.py`, a built-in `NAME` or `NAME?key=value`, or a callable."""
    if isinstance(spec, RewardFunction):
        return spec
    if not isinstance(spec, str):
        return RewardFunction(spec)
    if spec.partition("?")[0] in BUILT_IN:
        return _built_in(spec)
    path, colon, name = spec.partition(".py:")
    if colon or spec.endswith(".py"):
        return _from_file(Path(f"{path}.py" if colon else spec).expanduser(), name if colon else None)
    if LATER.match(spec):
        raise NotAvailableError(f"reward={spec} is not available yet: give a Python function, FILE.py:NAME.")
    name = spec.partition("?")[0]
    raise InputError(
        f"reward={spec} is neither FILE.py:NAME nor a known name.{did_you_mean(name, list(BUILT_IN))}\n"
        f"Known names: {', '.join(BUILT_IN)}."
    )


def _built_in(spec: str) -> RewardFunction:
    name, given = split_options(spec)
    found = BUILT_IN[name]
    if isinstance(found, Factory):
        return RewardFunction(found(name, given), name)
    if given:
        raise InputError(f"reward={name} takes no options: leave {next(iter(given))!r} out.")
    return RewardFunction(found, name)


def name_of(function: Callable[..., Any]) -> str:
    """The function's own name; of a partial that of its function, of an instance that of its class."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda" if name == "<lambda>" else str(name)


def file_of(function: Callable[..., Any]) -> str | None:
    """The file that the user wrote the function in, as tracebacks name it."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return None if code is None else code.co_filename


def _from_file(path: Path, name: str | None) -> RewardFunction:
    function = pick_function(import_file(path), path, name, "reward")
    return RewardFunction(function, name)


def _instance(cls: type) -> Callable[..., Any]:
    try:
        made = cls()
    except (Exception, SystemExit) as error:
        raise InputError(
            f"reward: {cls.__name__}() failed: {describe_error(error, inspect.getsourcefile(cls))}\n"
            "A class must be made without arguments; from Python, give an object."
        ) from error
    if not callable(made):
        raise InputError(f"reward: the class {cls.__name__} has no __call__: give it one, or name a function.")
    return made


def _annotation(parameter: inspect.Parameter) -> str:
    return "" if parameter.annotation is parameter.empty else str(parameter.annotation).replace(" ", "")
