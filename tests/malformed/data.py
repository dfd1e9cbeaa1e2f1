"""Files of prompts and their columns, and the code of rewards."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.malformed.case import Case, Content, Make, all_of, cut, endless, file, folder, loop, pipe, sparse

ROW = '{"prompt": "1+1=", "answer": "2"}\n'
OTHER = '{"prompt": "2+1=", "answer": "3"}\n'
BOMB = "[" * 100_000 + "]" * 100_000


def rows(name: str, says: str, content: Content, *words: str, ending: str = "jsonl") -> Case:
    return Case(f"{ending} {name}", says, (f"data=bad.{ending}", *words), file(f"bad.{ending}", content))


def second(name: str, row: str) -> Case:
    """The second of three rows is the malformed one."""
    return rows(name, "line 2", ROW + row + "\n" + OTHER)


JSONL = [
    rows("empty", "bad.jsonl", ""),
    rows("of blanks", "bad.jsonl", "\n  \n"),
    rows("of a BOM", "bad.jsonl", b"\xef\xbb\xbf"),
    rows("UTF-16", "bad.jsonl", (ROW + OTHER).encode("utf-16")),
    rows("UTF-16 without a BOM", "bad.jsonl, line 1", (ROW + OTHER).encode("utf-16-le")),
    rows("UTF-32", "bad.jsonl", (ROW + OTHER).encode("utf-32")),
    rows("Latin-1", "bad.jsonl, line 2", ROW.encode() + '{"prompt": "caf\xe9"}\n'.encode("latin-1")),
    rows("half a UTF-8 character", "bad.jsonl, line 2", ROW.encode() + b'{"prompt": "\xe2\x82"}\n'),
    rows("a lone surrogate in UTF-8", "bad.jsonl, line 2", ROW.encode() + b'{"prompt": "\xed\xa0\x80"}\n'),
    rows("NUL bytes at the end", "bad.jsonl, line 2", ROW + "\0" * 4096),
    rows("only NUL bytes", "bad.jsonl", "\0" * 4096),
    rows("50 MB of garbage on one line", "bad.jsonl, line 1", lambda: b"garbage " * 6_250_000),
    rows("50 MB of brackets", "bad.jsonl, line 1", lambda: b"[" * 50_000_000),
    rows("50 MB of a text that does not end", "bad.jsonl, line 1", lambda: b'{"prompt": "' + b"x" * 50_000_000),
    rows(
        "50 MB of a name of a column", "no column", lambda: b'{"' + b"x" * 50_000_000 + b'": 1}', "data.prompt=question"
    ),
    rows("a ZIP archive", "bad.jsonl, line 1", b"PK\x03\x04" + bytes(range(256)) * 8),
    rows("a list over several lines", "bad.jsonl, line 1", json.dumps([json.loads(ROW)], indent=1)),
    rows("CSV in it", "bad.jsonl, line 1", "prompt,answer\n1+1=,2\n"),
    rows("carriage returns alone", "bad.jsonl, line 1", (ROW + OTHER).replace("\n", "\r")),
    second("half an object", '{"prompt": "1+'),
    second("a comma too many", '{"prompt": "1+1=",}'),
    second("two objects on a line", ROW.strip() + " " + OTHER.strip()),
    second("single quotes", "{'prompt': '1+1='}"),
    second("a list", '["1+1="]'),
    second("a number", "5"),
    second("null", "null"),
    second("an empty object", "{}"),
    second("a key twice", '{"prompt": "1+1=", "prompt": "2+2="}'),
    second("NaN", '{"prompt": "1+1=", "answer": NaN}'),
    second("Infinity", '{"prompt": "1+1=", "answer": -Infinity}'),
    second("a number of 5000 digits", '{"prompt": "1+1=", "answer": ' + "9" * 5000 + "}"),
    second("a bomb of brackets", '{"prompt": "1+1=", "answer": ' + BOMB + "}"),
    second("nested deeply", '{"prompt": "1+1=", "answer": ' + "[" * 800 + "]" * 800 + "}"),
    second("a prompt that is null", '{"prompt": null}'),
    second("a prompt that is a number", '{"prompt": 5}'),
    second("a prompt that is an object", '{"prompt": {"text": "1+1="}}'),
    second("an empty prompt", '{"prompt": ""}'),
    second("a prompt of blanks", '{"prompt": " \\n\\t\\u2003"}'),
    second("no prompt", '{"question": "1+1="}'),
    second("half of a surrogate pair", '{"prompt": "\\ud83d"}'),
    second("no messages", '{"prompt": []}'),
    second("a message that is text", '{"prompt": ["1+1="]}'),
    second("a message without a role", '{"prompt": [{"content": "1+1="}]}'),
    second("a message without content", '{"prompt": [{"role": "user", "content": null}]}'),
    second("a message with half of a pair", '{"prompt": [{"role": "user", "content": "\\ud83d"}]}'),
    second("the assistant alone", '{"prompt": [{"role": "assistant", "content": "2"}]}'),
    rows("prompts longer than the context", "100 tokens", ROW + json.dumps({"prompt": "1" * 100, "answer": ""}) + "\n"),
    rows("no column of prompts", "data.prompt", '{"text": "1+1="}\n'),
    rows("another column than is named", "question", ROW, "data.prompt=question"),
    rows(
        "messages without a template", "chat template", '{"prompt": [{"role": "user", "content": "1"}], "answer": ""}\n'
    ),
    rows("terminal codes in a name", "\\x1b", '{"\\u001b[2J\\u0007": "1+1="}\n'),
    rows("a row of one row", "eval.data", ROW, "eval.data=bad.jsonl"),
]

JSON = [
    rows("half a list", "bad.json", '[{"prompt": "1+1="}', ending="json"),
    rows("an object", "bad.json", '{"rows": []}', ending="json"),
    rows("an empty list", "bad.json", "[]", ending="json"),
    rows("lines", "bad.json", ROW + OTHER, ending="json"),
    rows("a list of texts", "bad.json, row 1", '[{"prompt": "1"}, "1+1="]', ending="json"),
    rows("a bomb", "bad.json", BOMB, ending="json"),
    rows("null", "bad.json", "null", ending="json"),
]

CSV = [
    rows("only a header", "bad.csv", "prompt,answer\n", ending="csv"),
    rows("a name twice", "bad.csv", "prompt,prompt\n1,2\n", ending="csv"),
    rows("a cell too many", "bad.csv, line 3", "prompt,answer\n1+1=,2\n1,2,3\n", ending="csv"),
    rows("a cell too few", "bad.csv, line 2", "prompt,answer\n1+1=\n", ending="csv"),
    rows("a quote that does not end", "bad.csv, line 2", 'prompt,answer\n"1+1=,2\n3,4\n', ending="csv"),
    rows("text after a quote", "bad.csv, line 2", 'prompt,answer\n"1"+1=,2\n', ending="csv"),
    rows("semicolons", "prompt;answer", "prompt;answer\n1+1=;2\n", ending="csv"),
    rows("no prompt in a row", "line 3", "prompt,answer\n1+1=,2\n,2\n", ending="csv"),
    rows("NaN for a prompt", "line 2", "prompt,answer\nNaN,2\n", ending="csv"),
    rows("NUL bytes", "bad.csv, line 2", "prompt,answer\n1\0+1=,2\n", ending="csv"),
    rows("UTF-16", "bad.csv", "prompt,answer\n1,2\n".encode("utf-16"), ending="csv"),
    rows("50 MB of a quote that does not end", "bad.csv", lambda: b'prompt\n"' + b"x" * 50_000_000, ending="csv"),
]


def table(columns: dict[str, Any], path: str = "bad.parquet") -> Make:
    return lambda: pq.write_table(pa.table(columns), path)


def not_utf8() -> pa.Array:
    offsets = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 2)))
    return pa.StringArray.from_buffers(1, offsets, pa.py_buffer(b"\xff\xfe"))


def twice_named() -> None:
    pq.write_table(pa.table([["1+1="], ["2"]], names=["prompt", "prompt"]), "bad.parquet")


def many_rows() -> None:
    """So many rows in a few bytes: nulls take no room."""
    pq.write_table(pa.table({"prompt": pa.nulls(300_000, pa.string())}), "bad.parquet")


def parquet(name: str, says: str, make: Make) -> Case:
    return Case(f"parquet {name}", says, ("data=bad.parquet",), make)


def damaged(change: Callable[[bytes], bytes]) -> Make:
    def make() -> None:
        table({"prompt": ["1+1=", "2+1="] * 50})()
        Path("bad.parquet").write_bytes(change(Path("bad.parquet").read_bytes()))

    return make


PARQUET = [
    parquet("empty", "bad.parquet", file("bad.parquet", "")),
    parquet("of text", "bad.parquet", file("bad.parquet", ROW)),
    parquet("cut off", "bad.parquet", all_of(table({"prompt": ["1+1="] * 100}), cut("bad.parquet", 200))),
    parquet("with its end only", "bad.parquet", damaged(lambda raw: raw[-200:])),
    parquet("with a damaged page", "bad.parquet", damaged(lambda raw: raw[:4] + b"\xff" * 60 + raw[64:])),
    parquet("with an absurd footer", "bad.parquet", damaged(lambda raw: raw[:-8] + b"\xff\xff\xff\x7fPAR1")),
    parquet("without rows", "bad.parquet", table({"prompt": pa.array([], pa.string())})),
    parquet("of null prompts", "row 0", table({"prompt": pa.nulls(3, pa.string())})),
    parquet("of many null prompts", "row 0", many_rows),
    parquet("of numbers", "row 0", table({"prompt": [1, 2]})),
    parquet("of bytes", "row 0", table({"prompt": [b"1+1="]})),
    parquet("that is not UTF-8", "bad.parquet", table({"prompt": not_utf8()})),
    parquet("with a column twice", "bad.parquet", twice_named),
    parquet(
        "with dates out of range",
        "bad.parquet",
        table({"prompt": ["1+1="], "when": pa.array([2**62], pa.timestamp("us"))}),
    ),
    parquet("a folder", "bad.parquet", folder("bad.parquet")),
    parquet("a pipe", "bad.parquet", pipe("bad.parquet")),
    parquet("without end", "bad.parquet", endless("bad.parquet")),
    parquet("of terabytes", "bad.parquet", sparse("bad.parquet")),
]

PLACES = [
    Case("data not there", "promts.jsonl", ("data=promts.jsonl",)),
    Case("data a folder", "bad.jsonl", ("data=bad.jsonl",), folder("bad.jsonl")),
    Case("data a pipe", "bad.jsonl", ("data=bad.jsonl",), pipe("bad.jsonl")),
    Case("data without end", "bad.jsonl", ("data=bad.jsonl",), endless("bad.jsonl")),
    Case("data a link to itself", "bad.jsonl", ("data=bad.jsonl",), loop("bad.jsonl")),
    Case("data of terabytes", "bad.jsonl", ("data=bad.jsonl",), sparse("bad.jsonl")),
    Case("data of another ending", "bad.txt", ("data=bad.txt",), file("bad.txt", ROW)),
    Case("data with a long name", "cannot be read", (f"data={'x' * 300}.jsonl",)),
    Case("data of eval without end", "bad.csv", ("eval.data=bad.csv",), endless("bad.csv")),
    Case("data all in eval.data", "eval.data", ("eval.data=prompts.jsonl",)),
]


def code(name: str, says: str, content: Content, *words: str) -> Case:
    return Case(f"rows from Python {name}", says, ("data=bad.py", *words), file("bad.py", content))


FUNCTIONS = [
    code("that raise", "bad.py:2", "def rows():\n    raise ValueError('no')\n"),
    code("that exit", "bad.py", "def rows():\n    raise SystemExit(0)\n"),
    code("that are text", "bad.py", "def rows():\n    return 'prompt'\n"),
    code("that are texts", "row 0", "def rows():\n    return ['1+1=']\n"),
    code("that are none", "bad.py", "def rows():\n    return []\n"),
    code("that end in an error", "bad.py:3", "def rows():\n    yield {'prompt': '1+1='}\n    raise KeyError('x')\n"),
    code("that recurse", "bad.py", "def rows():\n    return rows()\n"),
    code(
        "that interrupt with an own exception", "bad.py", "class Odd(BaseException): pass\ndef rows(): raise Odd('x')\n"
    ),
]


def reward(name: str, says: str, content: Content, *words: str) -> Case:
    return Case(f"reward {name}", says, ("reward=bad.py", *words), file("bad.py", content))


GIVES = "def reward(completion):\n    return {}\n"
FAILS = "class R:\n    def __init__(self): 1 / 0\n"
REWARDS = [
    Case("reward not there", "rewards.py", ("reward=rewards.py",)),
    Case("reward a folder", "bad.py", ("reward=bad.py",), folder("bad.py")),
    Case("reward a pipe", "bad.py", ("reward=bad.py",), pipe("bad.py")),
    Case("reward without end", "bad.py", ("reward=bad.py",), endless("bad.py")),
    Case("reward of no function", "score", ("reward=reward.py:score",)),
    Case("reward of an unknown name", "exactly", ("reward=exactly",)),
    reward("empty", "bad.py", ""),
    reward("of two functions", "bad.py", "def a(completion): return 1\ndef b(completion): return 1\n"),
    reward("with a syntax error", "bad.py:1", "def reward(:\n"),
    reward("with NUL bytes", "bad.py", "def reward(completion):\n    return 1\n\0"),
    reward("of UTF-16", "bad.py", GIVES.encode("utf-16")),
    reward("that raises at import", "bad.py:1", "raise RuntimeError('no')\n"),
    reward("that exits at import", "bad.py:2", "import sys\nsys.exit(0)\n"),
    reward("that raises an own exception at import", "bad.py", "class Odd(BaseException): pass\nraise Odd('x')\n"),
    reward("that recurses at import", "bad.py", "def f(): return f()\nf()\n"),
    reward("that imports nothing there is", "bad.py:1", "import no_such_module_anywhere\n"),
    reward("nested too deeply", "bad.py", "x = " + "(" * 5000 + ")" * 5000 + "\n"),
    reward("that needs no column", "solution", "def reward(completion, solution):\n    return 1\n"),
    reward("of one and all", "completion", "def reward(completion, prompts):\n    return 1\n"),
    Case("reward of a class that fails", "bad.py:2", ("reward=bad.py:R",), file("bad.py", FAILS)),
    Case(
        "reward of a class that is not called", "class R", ("reward=bad.py:R",), file("bad.py", "class R:\n    pass\n")
    ),
    reward("of text", "row 0", GIVES.format("'good'")),
    reward("of NaN", "reward", GIVES.format("float('nan')")),
    reward("of a list", "reward", GIVES.format("[1]")),
    reward("of numbers too large", "reward", GIVES.format("10**400")),
    reward("of a dict without a score", "score", GIVES.format("{'points': 1}")),
    reward("of a generator", "reward", "def reward(completion):\n    yield 1\n"),
    reward("of too few scores", "1 scores", "def reward(completions):\n    return [1]\n"),
    reward("that always raises", "bad.py:2", GIVES.format("1 / 0")),
]
CASES = [*JSONL, *JSON, *CSV, *PARQUET, *PLACES, *FUNCTIONS, *REWARDS]
