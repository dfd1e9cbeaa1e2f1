"""What a case is, and how its files are made in the current folder."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Make = Callable[[], object]
Content = str | bytes | Callable[[], bytes]  # a function makes what is large
VERBS = ("train", "eval", "sample", "verify", "demo", "bench")
PLAIN = {
    "model": "model",
    "data": "prompts.jsonl",
    "reward": "exact",
    "max_tokens": "5",
    "prompts_per_step": "3",
    "group_size": "4",
    "steps": "1",
    "run": "runs/one",
}


@dataclass(frozen=True)
class Case:
    """`words` stand in place of those of a plain run of RLOO, or are a whole command; `says` is in the message."""

    name: str
    says: str
    words: tuple[str, ...] = ()
    make: Make | None = None

    @property
    def command(self) -> list[str]:
        if self.words and self.words[0] in VERBS:
            return list(self.words)
        given = {word.partition("=")[0].lstrip("!-") for word in self.words}
        plain = [f"{key}={value}" for key, value in PLAIN.items() if key not in given]
        return ["train", "rloo", *plain, *(word for word in self.words if not word.startswith("!"))]


def nothing() -> None:
    pass


def file(name: str, content: Content) -> Make:
    def make() -> None:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).unlink(missing_ok=True)
        raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        Path(name).write_bytes(raw if isinstance(raw, bytes) else raw())

    return make


def folder(name: str) -> Make:
    return lambda: Path(name).mkdir(parents=True)


def pipe(name: str) -> Make:
    """A named pipe that nobody writes to: whoever opens it waits."""
    return in_place_of(name, lambda: os.mkfifo(name))


def endless(name: str) -> Make:
    """A file that never ends."""
    return in_place_of(name, lambda: os.symlink("/dev/zero", name))


def loop(name: str) -> Make:
    """A link to itself."""
    return in_place_of(name, lambda: os.symlink(Path(name).name, name))


def sparse(name: str, size: int = 1 << 42) -> Make:
    """A file of four terabytes that takes no room."""
    return in_place_of(name, lambda: os.truncate(os.open(name, os.O_CREAT | os.O_WRONLY), size))


def in_place_of(name: str, make: Make) -> Make:
    return all_of(lambda: Path(name).unlink(missing_ok=True), make)


def copied(source: str, target: str, *changes: Make) -> Make:
    """A copy of a good folder, then changed."""
    return all_of(lambda: shutil.copytree(source, target), *changes)


def all_of(*steps: Make) -> Make:
    def make() -> None:
        for step in steps:
            step()

    return make


def keys_set(path: str, without: tuple[str, ...] = (), **values: Any) -> Make:
    """A JSON object with other values."""

    def make() -> None:
        content = {**json.loads(Path(path).read_text()), **values}
        Path(path).write_text(json.dumps({key: value for key, value in content.items() if key not in without}))

    return make


def cut(path: str, size: int) -> Make:
    return lambda: os.truncate(path, size)


def longer(path: str, text: str) -> Make:
    return lambda: Path(path).write_text(Path(path).read_text() + text)
