"""A reward function: found by name or given, its arguments matched by name.

Arguments: `prompt`, `completion`, `response` or `solution_str` (verl's word for the same text), `prompt_ids`,
`completion_ids`, `truncated`, and every column of the prompt's row. A column that such a name would hide is refused.
`**kwargs` receives all of these that are not named, the text once. A class stands for an object of it.
With a text argument in plural (`prompts`, `completions`, `responses`) the function is called once for all responses,
and every argument is a list; in singular once for each response. Without either it is called for each response,
unless `completion_ids` or `prompt_ids` is annotated as a list of lists. A completion is text.
That is the plain form. `dialects` has those of other trainers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hotcold.errors import InputError, NotAvailableError, did_you_mean
from hotcold.prompts.columns import Prompt
from hotcold.rewards.base import Scorable, Service
from hotcold.rewards.code import code
from hotcold.rewards.dialects import DIALECTS, PLAIN, Column, Dialect, detected, of_items, of_rubric
from hotcold.rewards.form import make_format, make_length, make_overlong, make_phrases, make_repetition
from hotcold.rewards.judge import make_judge
from hotcold.rewards.mathematics.reward import make_math
from hotcold.rewards.options import Factory, split_options
from hotcold.rewards.reasoning_gym_task import score_reasoning_gym
from hotcold.rewards.remote import make_remote
from hotcold.rewards.scores import part, values_of
from hotcold.rewards.verifiers import contains, exact, last_number
from hotcold.user_file import describe_error, import_file, pick_function

BUILT_IN: dict[str, Callable[..., Any] | Factory] = {  # a Factory takes options: NAME?key=value
    "exact": exact,
    "last_number": last_number,
    "contains": contains,
    "reasoning_gym": score_reasoning_gym,
    "math": Factory(make_math),
    "code": Factory(code),
    "format": Factory(make_format),
    "length": Factory(make_length),
    "overlong": Factory(make_overlong),
    "repetition": Factory(make_repetition),
    "phrases": Factory(make_phrases),
    "judge": Factory(make_judge),
}
LATER = re.compile(r"model:")

READ_IDS: dict[str, Callable[[Scorable], Any]] = {
    "prompt_ids": lambda item: list(item.prompt_ids),
    "completion_ids": lambda item: list(item.completion_ids),
    "truncated": lambda item: item.truncated,
}
LIST_OF_LISTS = re.compile(r"(list|sequence|tuple|iterable)\[([\w.]+\.)?(list|sequence|tuple)\[", re.IGNORECASE)


@dataclass(frozen=True)
class Needs:
    """What a function asks for. Plain, so that another process can say it of a function that lives there."""

    name: str
    per_batch: bool  # called once for all responses
    columns: tuple[str, ...]  # arguments that only a column can fill
    ours: tuple[str, ...]  # arguments that are always ours
    instead: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of `columns` those that one of several columns can fill
    always: tuple[str, ...] = (*PLAIN.one, *READ_IDS)  # arguments that need no column

    def check(self, columns: Iterable[str]) -> None:
        """Every argument without a default must be one of ours or a column, and never both."""
        known = set(columns)
        self._check_hidden(known)
        missing = [name for name in self.columns if not self.has(name, known)]
        if not missing:
            return
        names = ", ".join(f'"{name}"' for name in missing)
        hint = did_you_mean(missing[0], sorted({*known, *self.always}))
        others = [other for other in self.alternatives(missing[0]) if other != missing[0]]
        stand_in = f" ({' or '.join(others)} would do)" if others else ""
        ours = f"Always there: {', '.join(self.always)}.\n" if self.always else ""
        raise InputError(
            f'reward "{self.name}" needs {names}, which is no column of the data{stand_in}.{hint}\n'
            f"Columns: {', '.join(sorted(known)) or 'none'}.\n"
            f"{ours}"
            "Rename the argument, give it a default, or add the column to the data."
        )

    def alternatives(self, name: str) -> tuple[str, ...]:
        """The columns that can fill the argument."""
        return dict(self.instead).get(name, (name,))

    def has(self, name: str, columns: Iterable[str]) -> bool:
        return not {*columns}.isdisjoint(self.alternatives(name))

    def _check_hidden(self, columns: Iterable[str]) -> None:
        plain = {*PLAIN.one, *PLAIN.many, *READ_IDS}
        for name in sorted({*self.ours} & {*columns}):
            hint = "" if name in plain else ", or set reward_dialect=plain"
            raise InputError(
                f'reward "{self.name}" would never see the column "{name}" of the data: the argument of that name '
                f"is always that of the response at hand.\nRename the column{hint}."
            )


class Reward(Protocol):
    """A reward function, here or in another process."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> Needs: ...


class RewardFunction:
    """A callable with what is known of it from its signature."""

    def __init__(self, function: Callable[..., Any], name: str | None = None, dialect: Dialect | str = "auto") -> None:
        self.function = _instance(function) if inspect.isclass(function) else function
        self.name = name or name_of(function)
        self.file = file_of(function)
        self._parameters = self._signature()
        self._wants_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        self.dialect = dialect if isinstance(dialect, Dialect) else DIALECTS.get(dialect) or self._detected()
        self.per_batch = self._is_per_batch()
        one, many = self.dialect.one, self.dialect.many
        self._reserved: Mapping[str, Callable[[Scorable], Any]] = {**(many if self.per_batch else one), **READ_IDS}
        self._columns: Mapping[str, Column] = self.dialect.many_columns if self.per_batch else self.dialect.one_columns
        self.needs = self._needs()

    def check(self, columns: Iterable[str]) -> None:
        self.needs.check(columns)

    def _needs(self) -> Needs:
        named = self._named()
        known = {*self._reserved, *self.dialect.whole, *(n for n, c in self._columns.items() if c.default)}
        columns = [p.name for p in named if p.default is p.empty and p.name not in known]
        ours = [name for name in self._reserved if self._wants_all or name in {p.name for p in named}]
        instead = tuple((name, self._columns[name].names) for name in columns if name in self._columns)
        always = () if self.dialect.required else (*self._reserved, *self.dialect.whole)
        return Needs(self.name, self.per_batch, (*columns, *self.dialect.required), tuple(ours), instead, always)

    def call(self, items: Sequence[Scorable]) -> Any:
        """What the function returns: for a batch function of all items, else of the one item; maybe an awaitable."""
        for item in items:
            self.needs.check(item.columns)
        if not (self.per_batch and self.dialect.by_group):
            return self._settled(self._call(items))
        groups: dict[int, list[int]] = {}
        for number, item in enumerate(items):
            groups.setdefault(item.row, []).append(number)
        results = [self._call([items[number] for number in numbers]) for numbers in groups.values()]
        if any(inspect.isawaitable(result) for result in results):
            return self._spread_later(results, list(groups.values()), items)
        return self._spread(results, list(groups.values()), items)

    def _call(self, items: Sequence[Scorable]) -> Any:
        columns = list(dict.fromkeys(name for item in items for name in item.columns))
        args, kwargs = [], {}
        for parameter in self._named():
            if not self._is_filled(parameter.name, columns):
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
            extra = self.dialect.extra[self.per_batch]
            kwargs |= {name: self._value(name, items) for name in [*columns, *extra, *READ_IDS] if name not in taken}
        return self.function(*args, **kwargs)

    def _is_filled(self, name: str, columns: Sequence[str]) -> bool:
        if name in self._reserved or name in self.dialect.whole or name in columns:
            return True
        found = self._columns.get(name)
        return found is not None and (found.default is not None or not {*columns}.isdisjoint(found.names))

    def _value(self, name: str, items: Sequence[Scorable]) -> Any:
        if name in self.dialect.whole:
            return self.dialect.whole[name]
        column = self._columns.get(name) or Column((name,), lambda: None)
        read = self._reserved.get(name) or column.of
        values = [read(item) for item in items]
        return values if self.per_batch else values[0]

    def _settled(self, result: Any) -> Any:
        """In the form that is judged."""
        if self.dialect.result is None:
            return result
        return _later(result, self.dialect.result) if inspect.isawaitable(result) else self.dialect.result(result)

    async def _spread_later(
        self, results: Sequence[Any], groups: Sequence[Sequence[int]], items: Sequence[Scorable]
    ) -> list[Any]:
        found = [await result if inspect.isawaitable(result) else result for result in results]
        return self._spread(found, groups, items)

    def _spread(self, results: Sequence[Any], groups: Sequence[Sequence[int]], items: Sequence[Scorable]) -> list[Any]:
        """What was said of each group, in the order of the items."""
        values: list[Any] = [None] * len(items)
        for result, numbers in zip(results, groups, strict=True):
            of_group = values_of(self.name, True, result, [items[number] for number in numbers])
            for number, value in zip(numbers, of_group, strict=True):
                values[number] = value
        return values

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

    def _detected(self) -> Dialect:
        named = self._named()
        return detected([p.name for p in named], self._wants_all, [_annotation(p) for p in named])

    def _is_per_batch(self) -> bool:
        parameters = self._named()
        one = [p.name for p in parameters if p.name in self.dialect.one]
        many = [p.name for p in parameters if p.name in {**self.dialect.many, **self.dialect.many_columns}]
        if self.dialect.always_many:
            return True
        if one and many:
            raise InputError(
                f'reward "{self.name}" takes both "{one[0]}" (one response at a time) and "{many[0]}" (all at once).\n'
                f"Name them alike: all in plural ({', '.join(self.dialect.many)}) or all in singular "
                f"({', '.join(self.dialect.one)})."
            )
        if one or many:
            return bool(many)
        annotated = [_annotation(p) for p in parameters if p.name in ("completion_ids", "prompt_ids")]
        return any(LIST_OF_LISTS.search(text) for text in annotated)


async def _later(result: Awaitable[Any], then: Callable[[Any], Any]) -> Any:
    return then(await result)


class Rubric:
    """A rubric of verifiers: the weighted sum of its functions. One whose weight is 0 is called and does not count."""

    def __init__(self, rubric: Any) -> None:
        objects = dict(getattr(rubric, "class_objects", None) or {})
        if (parser := getattr(rubric, "parser", None)) is not None:
            objects["parser"] = parser
        self.weights = [float(weight) for weight in rubric.weights or [1.0] * len(rubric.funcs)]
        self.functions = [RewardFunction(function, dialect=of_rubric(objects)) for function in rubric.funcs]
        if len(self.weights) != len(self.functions):
            raise InputError(f"the rubric has {len(self.functions)} functions and {len(self.weights)} weights.")

    async def __call__(self, items: Sequence[Scorable]) -> list[float | None]:
        by_function = [await self._scores(function, items) for function in self.functions]
        return [self._total(scores) for scores in zip(*by_function, strict=True)]

    async def _scores(self, function: RewardFunction, items: Sequence[Scorable]) -> list[float | None]:
        chunks = [items] if function.per_batch else [[item] for item in items]
        results = [function.call(chunk) for chunk in chunks]
        found = [await result if inspect.isawaitable(result) else result for result in results]
        values = values_of(function.name, True, found[0], items) if function.per_batch else found
        return [part(function.name, value, item).score for value, item in zip(values, items, strict=True)]

    def _total(self, scores: Sequence[float | None]) -> float | None:
        counted = [(weight, score) for weight, score in zip(self.weights, scores, strict=True) if weight]
        if any(score is None for _, score in counted):
            return None
        return sum(weight * score for weight, score in counted if score is not None)


def is_rubric(value: Any) -> bool:
    return isinstance(getattr(value, "funcs", None), list) and hasattr(value, "weights") and not inspect.isclass(value)


def _of_rubric(rubric: Any, name: str) -> RewardFunction:
    made = Rubric(rubric)
    columns = [column for function in made.functions for column in function.needs.columns]
    return RewardFunction(made, name, of_items(columns))


def check_columns_of_rows(function: Reward, prompts: Sequence[Prompt], source: str = "the data") -> None:
    """What the function needs must stand in every row; a row that lacks it is named. `source` is where they are."""
    for name in function.needs.columns:
        lacking = [prompt for prompt in prompts if not function.needs.has(name, prompt.columns)]
        if 0 < len(lacking) < len(prompts):
            raise InputError(
                f'reward "{function.name}" needs "{name}", which row {lacking[0].index} of {source} lacks '
                f"({len(lacking)} of {len(prompts)} rows do).\n"
                "Fill it there, leave such rows out, or give the argument a default."
            )
    function.needs.check({name for prompt in prompts for name in prompt.columns})


def load_reward(spec: str | Callable[..., Any], dialect: str = "auto") -> RewardFunction:
    """`FILE.py:NAME`, `FILE.py`, a built-in `NAME` or `NAME?key=value`, or a callable.

    `dialect` is that of functions of the user's own; auto: by their parameters.
    """
    if isinstance(spec, RewardFunction):
        return spec
    if not isinstance(spec, str):
        return _of_rubric(spec, name_of(spec)) if is_rubric(spec) else RewardFunction(spec, dialect=dialect)
    if spec.partition("?")[0] in BUILT_IN:
        return _built_in(spec)
    if spec.startswith(("http://", "https://")):
        return _remote(spec)
    path, colon, name = spec.partition(".py:")
    if colon or spec.endswith(".py"):
        return _from_file(Path(f"{path}.py" if colon else spec).expanduser(), name if colon else None, dialect)
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
        return _made(found(name, given), name)
    if given:
        raise InputError(f"reward={name} takes no options: leave {next(iter(given))!r} out.")
    return RewardFunction(found, name, PLAIN)


def _made(function: Callable[..., Any], name: str) -> RewardFunction:
    """A service takes the items themselves."""
    own = getattr(function, "dialect", None) or (of_items(function.columns) if isinstance(function, Service) else PLAIN)
    return RewardFunction(function, name, own)


def _remote(spec: str) -> RewardFunction:
    url, mark, options = spec.partition("#")
    given = split_options(f"{url.partition('?')[0]}?{options}")[1] if mark else {}
    return _made(Factory(make_remote)(url, {"url": url, **given}), "remote")


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


def _from_file(path: Path, name: str | None, dialect: str) -> RewardFunction:
    module = import_file(path)
    found = getattr(module, name or "rubric", None)
    if is_rubric(found) and (name or not hasattr(module, "reward")):
        made = _of_rubric(found, name or "rubric")
        made.file = str(path)
        return made
    function = pick_function(module, path, name, "reward")
    return RewardFunction(function, name, dialect)


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
