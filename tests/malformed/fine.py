"""Inputs that look malformed and are not: they must work."""

import datetime
import json
import os
from collections.abc import Callable

import pyarrow as pa

from tests.malformed.case import Case, copied, file, keys_set, longer
from tests.malformed.config import RECIPE
from tests.malformed.data import OTHER, ROW, table
from tests.malformed.runs import RUN

LINES = (ROW + OTHER).replace("+1", "+6")
CELLS = "prompt,answer\n1+6=,2\n2+6=,3\n"
DRY = ("--dry-run",)


def rows(name: str, content: str | bytes, path: str = "fine.jsonl") -> Case:
    """Of two prompts."""
    return Case(f"{path} {name}", path, make=file(path, content))


def columns(name: str, **values: object) -> Case:
    make = table({"prompt": ["1+6=", "2+6="]} | values, "fine.parquet")
    return Case(f"parquet {name}", "fine.parquet", make=make)


def recipe(name: str, content: str | bytes) -> Case:
    return Case(f"recipe {name}", "steps", ("train", "fine.yaml", *DRY), file("fine.yaml", content))


def model(name: str, *changes: Callable[[], object]) -> Case:
    return Case(f"model {name}", "training prompts", ("model=fine", *DRY), copied("model", "fine", *changes))


def resumed(name: str, *changes: Callable[[], object]) -> Case:
    return Case(f"resume {name}", "steps 3 to 3", ("train", f"resume={RUN}", "steps=3"), copied("whole", RUN, *changes))


DAMAGED = copied("whole", RUN, file(f"{RUN}/checkpoints/step_000002/trainer/state.json", "{}"))
FILES = [
    rows("with CRLF", LINES.replace("\n", "\r\n")),
    rows("with a BOM", b"\xef\xbb\xbf" + LINES.encode()),
    rows("without a last line break", LINES.rstrip()),
    rows("with blank lines", "\n\n" + LINES.replace("\n", "\n \n")),
    rows("with a line separator in a text", LINES.replace('"2"', '"a\u2028b\x85c"')),
    rows("with half of a surrogate pair beside the prompt", LINES.replace('"2"', '"\\udc00"')),
    rows("with null beside the prompt", LINES.replace('"2"', "null")),
    rows("with nested columns", LINES.replace('"2"', '{"a": [{"b": [1, [2]]}]}')),
    rows("with a large number", LINES.replace('"2"', "9" * 300)),
    rows("named in capitals", LINES, "FINE.JSONL"),
    rows("with a name of other letters", LINES, "f\u00fcr \u6587 .jsonl"),
    rows("with a name that is not UTF-8", LINES, os.fsdecode(b"fine\xff.jsonl")),
    rows("over several lines", json.dumps([json.loads(x) for x in LINES.splitlines()], indent=1), "fine.json"),
    rows("with CRLF", CELLS.replace("\n", "\r\n"), "fine.csv"),
    rows("with a BOM", b"\xef\xbb\xbf" + CELLS.encode(), "fine.csv"),
    rows("with line breaks in quotes", CELLS.replace("2\n", '"a\nb"\n'), "fine.csv"),
    rows("with quotes in quotes", CELLS.replace("2\n", '"a ""b"""\n'), "fine.csv"),
    columns("with bytes", answer=[b"\xff", b"2"]),
    columns("with dates", answer=[datetime.date(2020, 1, 1), None]),
    columns("of a dictionary", prompt=pa.array(["1+6=", "2+6="]).dictionary_encode()),
    columns("of large strings", prompt=pa.array(["1+6=", "2+6="], pa.large_string())),
]
CASES = [
    recipe("with a BOM", b"\xef\xbb\xbf" + RECIPE.encode()),
    recipe("with CRLF", RECIPE.replace("\n", "\r\n")),
    recipe("with an alias of a number", RECIPE + "max_tokens: &n 5\ngroup_size: *n\n"),
    model("beside pickled weights", file("fine/pytorch_model.bin", b"\x80\x04.")),
    model("without a generation config", lambda: os.unlink("fine/generation_config.json")),
    model("whose tokenizer is of an unknown class", keys_set("fine/tokenizer_config.json", tokenizer_class="NoSuch")),
    model("with unknown keys in its config", keys_set("fine/config.json", mood="good", nested={"a": 1})),
    Case(
        "link to data", "training prompts", ("data=link.jsonl", *DRY), lambda: os.symlink("prompts.jsonl", "link.jsonl")
    ),
    resumed("with half a line of metrics", longer(f"{RUN}/metrics.jsonl", '{"step": 3, "rew')),
    resumed(
        "with metrics of wrong kinds", longer(f"{RUN}/metrics.jsonl", '5\n[1]\n"x"\n{"step": "3"}\n{"attempt": 1}\n')
    ),
    resumed("with a damaged env.json", file(f"{RUN}/env.json", '{"attempts": [5, {"attempt": "x"}]}')),
    Case("resume with a damaged newest checkpoint", "steps 2 to 3", ("train", f"resume={RUN}", "steps=3"), DAMAGED),
    resumed("with damaged rollouts", file(f"{RUN}/rollouts/step_000003.parquet", "x")),
]
