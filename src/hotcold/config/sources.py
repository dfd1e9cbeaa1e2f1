"""Keys and values from where a user writes them: the command line, a YAML recipe, Python keywords."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hotcold.config.keys import SHORT
from hotcold.errors import InputError

# Taken from the command line as they stand: a run called 007 is no number, a prompt may look like YAML.
TEXT_KEYS = frozenset(
    {"model", "reference", "critic.init", "data.path", "data.prompt", "data.response", "data.split", "eval.data"}
    | {"run", "prompt", "algorithm"}
)
PATH_KEYS = frozenset({"model", "reference", "critic.init", "data.path", "eval.data", "reward", "algorithm", "sampler"})

MOST_DIGITS = 400  # of a whole number; Python refuses to read some thousands, and a float of that size is infinite
MOST_BYTES = 1_000_000  # of a recipe
MOST_LEVELS = 20

_KEY_EQUALS = r"[+~]*[A-Za-z_][\w.-]*="


@dataclass(frozen=True)
class Given:
    """A value and who gave it. `where` stands before an error, `reason` in --dry-run."""

    value: Any
    where: str = ""
    reason: str = "given on the command line"


Keys = dict[str, Given]


def whole_name(key: str) -> str:
    return SHORT.get(key, key)


# ---- values


def plain_value(text: str) -> Any:
    """A word as YAML 1.2 reads it: 1e-5 is a number, `no` is a word, 007 is 7, 12:30 and 2024-01-01 are text."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return int(text) if len(text) < MOST_DIGITS else float(text)
    if re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+\.?[0-9]*)([eE][-+]?[0-9]+)?", text):
        return float(text)
    if re.fullmatch(r"[-+]?\.?(inf|nan)", text.lower()):
        return float(text.lower().replace(".", ""))
    return text


class _Loader(yaml.SafeLoader):
    """Safe YAML whose plain words are read by `plain_value`."""

    yaml_implicit_resolvers = {None: [("!plain", re.compile("(?s).*"))], "": [("!plain", re.compile(""))]}  # noqa: RUF012


_Loader.add_constructor("!plain", lambda loader, node: plain_value(node.value))


def argument_value(key: str, text: str) -> Any:
    """A value as written on the command line: a word, a number, a [list] or a "quoted text" with escapes."""
    if key in TEXT_KEYS:
        return None if text == "null" and key != "prompt" else text
    if text[:1] not in ("[", '"', "'"):
        return plain_value(text.strip()) if text.strip() else text
    try:
        _refuse_copies(text)
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError):
        raise InputError(
            f"{key}={text[:200]}: neither a list nor a quoted text.\n"
            f"""Write a list as {key}='[one, "two words"]'; a text that begins with such a sign as {key}='"..."'."""
        ) from None


# ---- the command line


def read_arguments(tokens: Sequence[str]) -> tuple[list[str], Keys]:
    """(words, keys) of `word key=value --key value --key=value`. A key may be given once."""
    words: list[str] = []
    keys: Keys = {}
    rest = iter(tokens)
    for token in rest:
        pair = _pair(token, rest)
        if pair is None:
            words.append(token)
            continue
        key, text = whole_name(pair[0]), pair[1]
        if text == "":
            raise InputError(f"{pair[0]}= has no value. Leave the key out for its default.")
        _put(keys, key, Given(argument_value(key, text)))
    return words, keys


def _pair(token: str, rest: Iterator[str]) -> tuple[str, str] | None:
    if token.startswith("--"):
        name, equals, text = token[2:].partition("=")
        if not equals:
            following = next(rest, None)
            if following is None or following.startswith("--") or _is_next_key(name, following):
                raise InputError(f"--{name} has no value: write --{name} VALUE or {name}=VALUE.")
            text = following
        return name, text
    if not re.match(_KEY_EQUALS, token):
        return None
    name, _, text = token.partition("=")
    return name, text


def _is_next_key(name: str, following: str) -> bool:
    """`--steps model=x`: the value was forgotten. A text may look like that: `--prompt "x=3, so 2x is"`."""
    return whole_name(name) not in TEXT_KEYS and re.match(_KEY_EQUALS, following) is not None


def _put(keys: Keys, key: str, given: Given) -> None:
    if key in keys:
        places = ", ".join(g.where.rstrip(": ") for g in (keys[key], given) if g.where)
        raise InputError(f"{key} is given twice{f' ({places})' if places else ''}. Keep one of them.")
    keys[key] = given


# ---- a recipe


def read_recipe(path: str) -> Keys:
    """The keys of a YAML file, nested ones with dots, each with its line."""
    try:
        text = _recipe_text(Path(path))
        _refuse_copies(text)
        node = yaml.compose(text, Loader=_Loader)
    except FileNotFoundError:
        raise InputError(f"there is no recipe {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"recipe {path} cannot be read: {error}") from None
    except RecursionError:
        raise InputError(f"{path}: lists or groups are nested too deeply.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{at}: not valid YAML: {getattr(error, 'problem', error)}.") from None
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{path}: a recipe is a list of `key: value` lines, e.g. `algorithm: grpo`.")
    keys: Keys = {}
    for key, child, line in _leaves(node, path):
        value = _construct(child, f"{path}, line {line}")
        if key in PATH_KEYS:
            value = _beside(value, Path(path).parent)
        _put(keys, key, Given(value, f"{path}, line {line}: ", f"recipe {path}"))
    return keys


def _recipe_text(path: Path) -> str:
    """Of a plain file: a pipe would be waited for, and a device never ends."""
    about = path.stat()
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
        raise InputError(f"{path} is a pipe or a device; a recipe is a file.")
    if about.st_size > MOST_BYTES:
        raise InputError(f"{path} has {about.st_size} bytes; a recipe has a few lines of `key: value`.")
    return path.read_text(encoding="utf-8")


def _refuse_copies(text: str) -> None:
    """Raises YAMLError for an alias of a list or group: copies of copies explode, and one of itself never ends.

    RecursionError for what is nested deeply, long before Python's own, because PyYAML takes its time.
    """
    several: set[str] = set()
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_LEVELS:
            raise RecursionError
        if isinstance(event, yaml.AliasEvent) and event.anchor in several:
            what = f"*{event.anchor} stands for a list or a group, which is not read: write it out"
            raise yaml.composer.ComposerError(None, None, what, event.start_mark)  # type: ignore[arg-type]
        if isinstance(event, yaml.CollectionStartEvent) and event.anchor:
            several.add(event.anchor)


def _leaves(node: yaml.MappingNode, path: str, prefix: str = "") -> Iterator[tuple[str, yaml.Node, int]]:
    for key_node, child in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError(f"{path}, line {line}: a key is one word, like `steps`.")
        key = f"{prefix}{key_node.value}"
        if isinstance(child, yaml.MappingNode):
            yield from _leaves(child, path, f"{key}.")
        else:
            yield whole_name(key), child, line


def _construct(node: yaml.Node, where: str) -> Any:
    loader = _Loader("")
    try:
        return loader.construct_object(node, deep=True)
    except yaml.YAMLError as error:
        raise InputError(f"{where}: {getattr(error, 'problem', error)}.") from None
    except (ValueError, LookupError, AttributeError):  # PyYAML's answers to a tag on a value that does not fit it
        raise InputError(
            f"{where}: the value does not fit its tag {node.tag.rpartition(':')[2]}: leave it out."
        ) from None
    finally:
        loader.dispose()


def _beside(value: Any, folder: Path) -> Any:
    """A relative path that is not below the current directory is looked for beside the recipe."""
    if isinstance(value, list):
        return [_beside(item, folder) for item in value]
    if not isinstance(value, str):
        return value
    head = "replay:" if value.startswith("replay:") else ""
    file, colon, name = value.removeprefix(head).partition(":")
    looks_like_path = "/" in file or "." in file
    if not looks_like_path or os.path.exists(file) or not os.path.exists(folder / file):
        return value
    return f"{head}{folder / file}{colon}{name}"


# ---- Python


def read_keywords(keywords: Mapping[str, Any]) -> Keys:
    """The keys of a call: `eval={"every": 5}`, `eval__every=5` and `**{"eval.every": 5}` are the same."""
    keys: Keys = {}
    for key, value in _flat(keywords.items()):
        _put(keys, whole_name(key), Given(value, reason="given in Python"))
    return keys


def _flat(items: Iterable[tuple[str, Any]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in items:
        key = f"{prefix}{name}".replace("__", ".")
        if isinstance(value, Mapping):
            yield from _flat(value.items(), f"{key}.")
        else:
            yield key, value
