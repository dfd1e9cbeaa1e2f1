"""`reward=code`: which program of a response, which tests of a row, what counts as right. Verdicts decided by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from hotcold.config.schema import EvalConfig, eval_config, train_config
from hotcold.config.show import flat_values, to_yaml
from hotcold.errors import InputError
from hotcold.rewards.base import Scorable
from hotcold.rewards.code_blocks import program_of, same_output
from hotcold.rewards.code_tests import Call, Unusable, equal
from hotcold.rewards.code_tests import tests_of as read_tests
from hotcold.rewards.functions import load_reward
from hotcold.rewards.scorer import FunctionScorer
from hotcold.sandbox import box
from hotcold.sandbox.box import CannotStart, check_level
from tests.rewards.scored import scored

DOUBLE = "def f(x):\n    return 2 * x\n"
READS = "print(2 * int(input()))\n"


def fenced(*blocks: str, language: str = "python") -> str:
    return "Here it is.\n\n" + "\n\nAnd then:\n\n".join(f"```{language}\n{block}```" for block in blocks) + "\nDone."


# ---- C18: which block

BLOCKS: dict[str, tuple[str, set[str], str]] = {
    "one fenced block": (fenced(DOUBLE), {"f"}, DOUBLE),
    "a solution and a demo": (fenced(DOUBLE, "print(f(3))\n"), {"f"}, DOUBLE),
    "two solutions: the last": (fenced("def f(x):\n    return 1\n", DOUBLE), {"f"}, DOUBLE),
    "a script and how to start it": (fenced(READS, "solve()\n"), set(), READS),
    "two scripts: the last": (fenced("print(input())\n", READS), set(), READS),
    "a fence without a language": (fenced(DOUBLE, language=""), {"f"}, DOUBLE),
    "python before blocks without a language": (fenced(READS) + fenced("3\n", language=""), set(), READS),
    "another language is no program": (fenced(DOUBLE) + fenced("f(3)\n", language="bash"), {"f"}, DOUBLE),
    "only another language": (fenced("int main() {}\n", language="cpp"), set(), ""),
    "an unclosed fence": ("```python\n" + DOUBLE, {"f"}, DOUBLE),
    "no fence": (DOUBLE, {"f"}, DOUBLE),
    "names that no block defines": (fenced(DOUBLE, "print(f(3))\n"), {"f", "helper"}, DOUBLE),
    "Windows newlines": (fenced(DOUBLE).replace("\n", "\r\n"), {"f"}, DOUBLE),
    "capital letters": (fenced(DOUBLE, language="Python"), {"f"}, DOUBLE),
    "drafts while thinking": ("<think>" + fenced("def f(x): return 0\n") + "</think>" + DOUBLE, {"f"}, DOUBLE),
    "an indented block": ("1. so:\n   ```python\n   def f(x):\n       return 2 * x\n   ```\n", {"f"}, DOUBLE),
    "a longer fence holds a shorter one": ("````python\nx = '''\n```\n'''\n````\n", set(), "x = '''\n```\n'''\n"),
    "a method counts for the class that holds it": (
        fenced("class Solution:\n    def f(self, x):\n        return 2 * x\n", "Solution().f(1)\n"),
        {"f"},
        "class Solution:\n    def f(self, x):\n        return 2 * x\n",
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_program_of_a_response_is_found(name: str) -> None:
    response, wanted, program = BLOCKS[name]
    assert program_of(response, wanted).strip("\n") == program.strip("\n")


# ---- C18: output

OUTPUTS = [
    ("1 \n2\n", "1\n2", 0.0, True),
    ("1\r\n2\r\n", "1\n2\n", 0.0, True),
    ("1\n2\n\n\n", "1\n2", 0.0, True),
    ("", "\n", 0.0, True),
    ("1\n\n2", "1\n2", 0.0, False),
    (" 1", "1", 0.0, False),
    ("1  2", "1 2", 0.0, False),
    ("1.0", "1", 0.0, False),
    ("1.0", "1", 1e-6, True),
    ("0.3333333", "0.33333334", 1e-6, True),
    ("0.334", "0.333", 1e-6, False),
    ("1000001", "1000000", 1e-6, True),
    ("a 1.00", "a 1", 1e-6, True),
    ("b 1.00", "a 1", 1e-6, False),
    ("nan", "1", 1e-6, False),
    ("inf", "1", 1e-6, False),
    ("1e999", "1", 1e-6, False),
    ("1 1", "1", 1e-6, False),
    ("yes", "Yes", 0.0, False),
]


@pytest.mark.parametrize(("found", "expected", "tolerance", "verdict"), OUTPUTS)
def test_outputs_are_compared_line_by_line(found: str, expected: str, tolerance: float, verdict: bool) -> None:
    assert same_output(found, expected, tolerance) is verdict


VALUES = [
    (4, 4, True), (4, 5, False), (4.0, 4, True), (True, 1, False), (1, True, False), (True, True, True),
    ("4", 4, False), (None, None, True), (0, None, False), ((1, 2), [1, 2], True), ([1, 2], [2, 1], False),
    ([1, (2, 3)], [1, [2, 3]], True), ({1, 2}, [1, 2], False), ({"a": 1}, {"a": 1}, True), ({1: 2}, {"1": 2}, True),
    ({1: 2, "1": 2}, {"1": 2}, False), ({"a": 1}, {"a": 1, "b": 2}, False), ("", [], False), ([], [], True),
    (float("nan"), 1, False), (10**30, 10**30, True), (10**30, 10**30 + 1, False), ([[]], [], False),
]  # fmt: skip


@pytest.mark.parametrize(("found", "expected", "verdict"), VALUES)
def test_values_are_compared_by_kind_and_content(found: Any, expected: Any, verdict: bool) -> None:
    assert equal(found, expected, 0.0) is verdict


# ---- rows of data

FORMS: list[tuple[dict[str, Any], str]] = [
    ({"tests": [{"input": "2\n", "output": "4"}]}, READS),
    ({"tests": [{"call": "f(2)", "expected": 4}]}, DOUBLE),
    ({"tests": json.dumps([{"call": "f(2)", "expected": 4}])}, DOUBLE),
    ({"tests": {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, [6]]}}, DOUBLE),
    ({"input_output": json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})}, READS),
    ({"test_list": ["assert f(2) == 4", "assert f(0) == 0"]}, DOUBLE),
    ({"asserts": "assert f(2) == 4"}, DOUBLE),
    ({"test": "def check(g):\n    assert g(2) == 4\n", "entry_point": "f"}, DOUBLE),
    ({"test": "for x in range(5):\n    assert f(x) == x + x"}, DOUBLE),
]
WRONG = {READS: "print(int(input()) + 3)\n", DOUBLE: "def f(x):\n    return x + 3\n"}


def test_every_form_of_tests_passes_the_right_program_and_fails_the_wrong_one() -> None:
    columns = sorted({name for row, _ in FORMS for name in row})
    rows = {name: [row.get(name) for row, _ in FORMS] for name in columns}
    assert scored([fenced(right) for _, right in FORMS], **rows) == [1.0] * len(FORMS)
    assert scored([fenced(WRONG[right]) for _, right in FORMS], **rows) == [0.0] * len(FORMS)


UNUSABLE: list[dict[str, Any]] = [
    {"tests": []},
    {"tests": "this is no Python"},
    {"tests": "x = 1"},
    {"tests": [{"input": "1"}]},
    {"tests": [{"call": "f(", "expected": 1}]},
    {"tests": {"inputs": ["1"], "outputs": []}},
    {"tests": {"fn_name": "f", "inputs": [1], "outputs": [1]}},
    {"tests": 7},
    {"tests": "assert sum([1, 2]) == 3"},
    {"tests": [{"call": "math.gcd(4, 6)", "expected": 2}]},
    {"tests": None},
]


@pytest.mark.parametrize("row", UNUSABLE)
def test_tests_that_cannot_be_read_give_no_score_and_never_0(row: dict[str, Any]) -> None:
    with pytest.raises(Unusable):
        read_tests(row)
    assert scored([fenced(DOUBLE)], tests=[row["tests"]]) == [None]


def test_inputs_and_outputs_may_be_lists_of_lines() -> None:
    (test,) = read_tests({"tests": {"inputs": [["1", "2"]], "outputs": [["3"]]}})
    assert (test.given, test.expected) == ("1\n2", "3")  # type: ignore[union-attr]


def test_a_call_names_what_the_program_must_define() -> None:
    assert Call(3, "len(f(g, math.pi))").wanted == {"f", "g"}


# ---- what asserts may do with a program

PROGRAM = """
class Stack:
    def __init__(self):
        self.items = []
    def push(self, x):
        self.items.append(x)
    def pop(self):
        return self.items.pop()
    def __len__(self):
        return len(self.items)
def f(x):
    return 2 * x
def sort(items):
    items.sort()
def adder(n):
    return lambda x: x + n
def firsts(n: int) -> Iterator[int]:
    yield from range(n)
def root(x):
    if x < 0:
        raise ValueError("negative")
    return math.sqrt(x)
def point():
    return Stack()
class Odd:
    def __eq__(self, other):
        return True
LIMIT = 3
"""
ASSERTS = {
    "assert f(2) == 4": True,
    "assert f([1]) == [1, 1]": True,
    "assert f(x=2) == 4": True,
    "x = [3, 1]\nsort(x)\nassert x == [1, 3]": True,
    "assert list(firsts(3)) == [0, 1, 2]": True,
    "assert adder(2)(3) == 5": True,
    "s = Stack()\ns.push(3)\nassert len(s) == 1 and s.pop() == 3 and s.items == []": True,
    "assert abs(root(2) - 1.4142) < 1e-3": True,
    "try:\n    root(-1)\n    assert False\nexcept ValueError:\n    pass": True,
    "import math\nassert math.isclose(root(4), 2)": True,
    "assert f(2) == 5": False,
    "assert f(2) == 4, 'fine'\nassert f(2) == 5": False,
    "assert g(2) == 4": False,
    "try:\n    root(1)\n    assert False\nexcept ValueError:\n    pass": False,
    "assert point() == 4": False,  # an object of the program's is no value
    "assert Odd() == 4": False,
    "assert Odd() == Odd()": False,  # nor may it say what it is equal to
    "import sys\nsys.exit(0)\nassert f(2) == 5": False,
    "raise SystemExit\nassert f(2) == 4": False,
}


@pytest.mark.parametrize("source", ASSERTS)
def test_asserts_run_apart_from_the_program_and_ask_it_for_values(source: str) -> None:
    assert scored([PROGRAM], test=[source]) == [float(ASSERTS[source])]


def test_asserts_that_hand_over_a_function_give_no_score_but_not_because_the_program_returned_one() -> None:
    given = ["assert apply(lambda x: x + 1, 2) == 3", "assert f(f(2)) == 8"]
    programs = ["def apply(g, x):\n    return g(x)\n", "def f(x):\n    return lambda: x\n"]
    assert scored(programs, test=given) == [None, 0.0]


def test_partial_credit_is_the_share_of_tests() -> None:
    half = "def f(x):\n    return 4\n"
    calls = [{"call": f"f({x})", "expected": 2 * x} for x in range(4)]
    asserts = "assert f(2) == 4\nassert f(1) == 2\nassert f(0) == 4\nassert f(3) == 4"
    given: list[Any] = [calls, asserts, [{"input": "", "output": "4"}, {"input": "", "output": "5"}]]
    assert scored([half, half, "print(4)"], partial=True, tests=given) == [0.25, 0.75, 0.5]
    assert scored([half, half, "print(4)"], tests=given) == [0.0, 0.0, 0.0]


def test_a_missing_import_of_the_standard_library_is_no_mistake() -> None:
    """C18"""
    program = "def f(x: List[int]) -> Optional[int]:\n    return Counter(x).most_common(1)[0][0] + math.floor(0.5)\n"
    assert scored([program], tests=[[{"call": "f([3, 3, 1])", "expected": 3}]]) == [1.0]


def test_right_output_after_which_the_program_fails_is_not_right() -> None:
    ways = ["raise ValueError", "import os\nos._exit(3)", "import sys\nsys.exit('no')", "import sys\nsys.exit(0)", ""]
    given: list[Any] = [[{"input": "", "output": "4"}]] * len(ways)
    assert scored([f"print(4, flush=True)\n{way}" for way in ways], tests=given) == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_large_inputs_and_outputs_pass_through() -> None:
    given = "7 " * 300_000
    assert scored(["print(len(input().split()))"], tests=[[{"input": given, "output": "300000"}]]) == [1.0]
    assert scored(["print('x' * 900_000)"], tests=[[{"input": "", "output": "x" * 900_000}]]) == [1.0]


def test_a_name_of_the_standard_library_counts_only_where_the_program_defines_it() -> None:
    given: list[Any] = ["assert gcd(4, 6) == 2", [{"call": "gcd(4, 6)", "expected": 2}]] * 3
    own, none, named = "def gcd(a, b):\n    return a if b == 0 else gcd(b, a % b)\n", "pass\n", "x = gcd(4, 2)\n"
    assert scored([own, own, none, none, named, named], tests=given) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert scored(["def bisect(a, x):\n    return 0\n"], tests=["assert bisect([1], 1) == 0"]) == [1.0]


# ---- options and keys


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("code?timeout=0", "timeout is a number of seconds above 0"),
        ("code?memory=10", "at least 64"),
        ("code?tolerance=2", "tolerance is a number from 0"),
        ("code?partail=true", 'Did you mean "partial"'),
    ],
)
def test_wrong_options_are_refused(spec: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_reward(spec)


def item(completion: str, **columns: Any) -> Scorable:
    return Scorable("q", completion, (1,), (2,), columns)


def test_it_is_a_reward_like_any_other() -> None:
    scorer = FunctionScorer([load_reward("code?timeout=5")], [1.0])
    tests = [{"call": "f(2)", "expected": 4}]
    scores = scorer.score([item(fenced(DOUBLE), tests=tests), item("no idea", tests=tests), item("x", tests=None)])
    assert [score.total for score in scores] == [1.0, 0.0, None]


def test_data_without_tests_is_an_error_that_names_the_columns() -> None:
    scorer = FunctionScorer([load_reward("code")], [1.0])
    with pytest.raises(InputError, match=r"tests.*\(test or asserts or test_list or input_output would do\)"):
        scorer.score([item(DOUBLE, answer="4")])


def test_the_required_level_is_read_stored_and_void_without_code(tmp_path: Path) -> None:
    words = ["grpo", "model=m", "data=d.jsonl", "reward='code?timeout=2'", "sandbox.require=strong"]
    config = train_config(words)
    assert flat_values(config)["sandbox.require"] == "strong"
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert train_config([str(tmp_path / "again.yaml")]).sandbox.require == "strong"
    evaluated = eval_config(["m", "data=d.jsonl", "reward=code", "sandbox.require=namespaces"])
    assert isinstance(evaluated, EvalConfig) and evaluated.sandbox.require == "namespaces"
    with pytest.raises(InputError, match=r"sandbox\.require=strong has no effect: it takes effect with reward=code"):
        train_config([*words[:3], "reward=exact", "sandbox.require=strong"])
    with pytest.raises(InputError, match=r"sandbox\.require=much: 'any', 'landlock'"):
        train_config([*words[:4], "sandbox.require=much"])


def test_a_machine_that_offers_less_than_required_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "best_level", lambda: "landlock")
    monkeypatch.setattr(box, "refusal", lambda level: "unshare: Operation not permitted")
    assert check_level("any") == check_level("landlock") == "landlock"
    with pytest.raises(InputError, match=r"sandbox\.require=strong.*offers landlock.*Operation not permitted"):
        check_level("strong")


def test_a_machine_without_any_level_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: object, *_: object) -> None:
        raise CannotStart("a sandbox cannot be started here: no kernel.")

    monkeypatch.setattr(box.Box, "_start", refused)
    monkeypatch.setattr(box, "builder", box.builder.__wrapped__)
    with pytest.raises(InputError, match="cannot be run here") as caught:
        box.best_level.__wrapped__()
    assert "no kernel" in str(caught.value) and len(str(caught.value).splitlines()) <= 5
