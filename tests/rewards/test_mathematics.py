"""`reward=math`: verdict tables, what it reads of a response and a row, and where it may be called."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from fractions import Fraction
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotcold.errors import InputError
from hotcold.prompts.columns import Prompt
from hotcold.rewards.base import Scorable, runs_in_worker
from hotcold.rewards.failures import Limits
from hotcold.rewards.functions import check_columns_of_rows, load_reward
from hotcold.rewards.mathematics import symbolic
from hotcold.rewards.mathematics.answers import Rules
from hotcold.rewards.mathematics.reward import is_right, make_math
from hotcold.rewards.scorer import load_scorer

TABLES = Path(__file__).parent / "verdicts"
DOCS = Path(__file__).parents[2] / "docs" / "rewards.md"
SAID = {"right": 1.0, "wrong": 0.0, "missed": 0.0, "none": None}  # missed: it is right, and not recognised


def table(name: str) -> list[list[str]]:
    """Rows without the header; a line break is written as U+23CE, a NUL as U+2400."""
    text = (TABLES / f"{name}.tsv").read_text(encoding="utf-8")
    lines = [line.replace("\u23ce", "\n").replace("\u2400", "\0") for line in text.split("\n")[1:-1]]
    return [line.split("\t") for line in lines]


def boxed(answer: str) -> str:
    return answer if answer.startswith("####") else rf"\boxed{{{answer}}}"


# C10, C12 and C13 are the ids of public bug reports; the first column of a table begins with them.
@pytest.mark.parametrize("name", ["answers", "symbolic"])
def test_every_verdict_on_an_answer_is_the_one_decided_by_hand(name: str) -> None:
    score = make_math()
    wrong = [row for row in table(name) if score(boxed(row[2]), gold=row[1]) != SAID[row[3]]]
    assert wrong == []


def test_every_verdict_on_a_response_is_the_one_decided_by_hand() -> None:
    rows = table("responses")
    wrong = [row for row in rows if make_math(answer=row[3])(row[2], gold=row[1]) != SAID[row[4]]]  # type: ignore[arg-type]
    assert wrong == []


@pytest.mark.parametrize("name", ["answers", "symbolic"])
def test_without_math_verify_a_verdict_is_the_same_or_there_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "is_installed", lambda: False)
    score = make_math()
    assert "pip install 'hotcold[math]'" in score.note and make_math().note == score.note
    for row in table(name):
        said = score(boxed(row[2]), gold=row[1])
        assert said in (SAID[row[3]], None), row
    undecided = [row[0] for row in table("answers") if score(boxed(row[2]), gold=row[1]) != SAID[row[3]]]
    # wrong ones, which are not known to be nonsense: "5 sin", "72 < sin x", ...
    assert undecided == ["unit.47", "hostile.19", *(f"more.{n}" for n in (37, 38, 40, 41, 44, 49))]


def test_the_documentation_counts_the_rows_and_the_false_negatives() -> None:
    rows = [row[:1] + row[-2:] for name in ("answers", "symbolic", "responses") for row in table(name)]
    assert len({row[0] for row in rows}) == len(rows)
    missed = [row for row in rows if row[1] == "missed"]
    page = " ".join(DOCS.read_text(encoding="utf-8").split())
    assert f"{len(rows)} verdicts" in page and f"{len(missed)} right answers are not recognised" in page


@pytest.mark.parametrize("gold", sorted({row[1] for row in table("answers") if row[3] == "right"}))
def test_the_right_answer_as_it_stands_in_the_data_is_right(gold: str) -> None:
    if "\n" not in gold and "boxed" not in gold:
        assert is_right(gold, gold) is True


def written(value: Fraction, way: int) -> str:
    whole, part = divmod(abs(value.numerator), value.denominator)
    sign = "-" if value < 0 else ""
    mixed = rf"{sign}{whole}\frac{{{part}}}{{{value.denominator}}}" if whole and part else str(value)
    return [
        str(value),
        rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}",
        rf"\dfrac{{{value.numerator * 6}}}{{{value.denominator * 6}}}",
        mixed,
        rf"${value}$ apples",
        rf"x = {value}",
        f"{value.numerator:,}/{value.denominator}",
        rf"\left({value}\right)",
    ][way]


NUMBERS = st.fractions(-2000, 2000, max_denominator=40)


@settings(max_examples=200, deadline=None)
@given(NUMBERS, NUMBERS, st.integers(0, 7), st.integers(0, 7))
def test_two_numbers_are_equal_however_they_are_written_and_no_others_are(
    one: Fraction, other: Fraction, way: int, other_way: int
) -> None:
    assert is_right(written(one, way), written(one, other_way)) is True
    assert is_right(written(one, way), written(other, other_way)) is (one == other)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789.,+-*/^!(){}[]\\=<>$%&_ xabe|'\"frcsqt", max_size=40))
def test_no_text_whatever_makes_it_fail(text: str) -> None:
    for gold, answer in (("7/3", text), (text, "7/3"), (text, text)):
        is_right(gold, answer)


@pytest.mark.parametrize(
    ("options", "gold", "answer", "score"),
    [
        ("tolerance=0.01", "3.14", r"\pi", 1.0),  # 0.0016 beside 3.14, and a hundredth of it is allowed
        ("tolerance=0.01", "3.14", "3.2", 0.0),
        ("tolerance=0.01", "2x", "2.001x", 0.0),  # no number
        ("percent=hundredth", "0.5", "50%", 1.0),
        ("percent=hundredth", "50%", r"\frac12", 1.0),
        ("percent=hundredth", "50", "50%", 0.0),
    ],
)
def test_options_change_what_is_equal(options: str, gold: str, answer: str, score: float) -> None:
    one = Scorable("q", rf"\boxed{{{answer}}}", (), (), {"answer": gold})
    assert load_reward(f"math?{options}").call([one]) == score


@pytest.mark.parametrize("column", ["answer", "solution", "target", "gold", "ground_truth"])
def test_the_gold_column_is_found_by_habit(column: str) -> None:
    one = Scorable("q", r"\boxed{72}", (), (), {column: "8 * 9 = 72\n#### 72", "level": 3})
    assert load_reward("math").call([one]) == 1.0


def test_a_gold_column_is_given_by_its_name_and_a_missing_one_is_said_before_the_run() -> None:
    one = Scorable("q", r"\boxed{72}", (), (), {"answer": "71", "label": 72})
    assert load_reward("math?gold=label").call([one]) == 1.0
    with pytest.raises(InputError, match=r'needs "gold", which is no column of the data \(answer or solution or'):
        check_columns_of_rows(load_reward("math"), [Prompt(0, "q", {"level": 1})])
    with pytest.raises(InputError, match=r"tolerance=2: a tolerance of 0 to 1"):
        load_reward("math?tolerance=2")


@pytest.mark.parametrize("gold", [None, True, [], ["1", "2"], {}, float("nan"), ""])
def test_what_is_no_answer_gives_no_score(gold: Any) -> None:
    assert make_math()(r"\boxed{1}", gold) is None


@pytest.mark.parametrize("gold", [72, 72.0, "72", ["72"], Fraction(72)])
def test_a_gold_answer_may_be_a_number_or_alone_in_a_list(gold: Any) -> None:
    assert make_math()(r"\boxed{72}", gold) == 1.0


# ---- C05: where it is called


def in_main(work: Callable[[], Any]) -> Any:
    return work()


def in_thread(work: Callable[[], Any]) -> Any:
    found: Future[Any] = Future()
    threading.Thread(target=lambda: found.set_result(work())).start()
    return found.result(60)


def in_threads(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(8) as pool:
        results = [one.result(60) for one in [pool.submit(work) for _ in range(2)]]
    assert results[0] == results[1]
    return results[0]


@cache
def pool() -> ProcessPoolExecutor:
    """Its process takes seconds to start."""
    return ProcessPoolExecutor(1, get_context("spawn"))


def in_process(work: Callable[[], Any]) -> Any:
    return pool().submit(work).result(60)


def in_loop(work: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return work()

    return asyncio.run(main())


PLACES = [in_main, in_thread, in_threads, in_process, in_loop]
SLOW = """
from hotcold.rewards.mathematics import reward, symbolic
def endless(gold, answer):
    while True: pass
symbolic.equal = endless
score = reward.make_math()
def judge(completion, answer):
    return score(completion, answer)
"""


def score_all(spec: str, *answers: str, timeout: float = 60.0) -> list[float | None]:
    texts = [f"The answer is {boxed(answer)}" for answer in answers]
    items = [Scorable("q", text, (), (), {"answer": "1/3"}, row=n) for n, text in enumerate(texts)]
    scorer = load_scorer([spec], [1.0], Limits(timeout=timeout, retries=0, max_failures=1.0))
    try:
        return [one.total for one in scorer.score(items)]
    finally:
        scorer.close()


def in_a_worker() -> list[float | None]:
    return score_all("math", r"\frac{1}{3}", r"\frac{1}{4}", r"\log_8 2", r"\log_8 3")


class TooSlow:
    """A comparison that never ends, in a worker with a deadline."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __call__(self) -> list[float | None]:
        return score_all(f"{self.file}:judge", r"\frac{1}{3}", r"\log_8 2", timeout=1.5)


@pytest.mark.parametrize("place", PLACES)
def test_c05_it_scores_wherever_it_is_called(place: Callable[[Callable[[], Any]], Any]) -> None:
    assert runs_in_worker("math") and runs_in_worker("math?answer=boxed")
    assert place(in_a_worker) == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("place", PLACES)
def test_c05_a_comparison_that_never_ends_is_ended_wherever_it_is_called(
    place: Callable[[Callable[[], Any]], Any], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    assert place(TooSlow(str(tmp_path / "slow.py"))) == [1.0, None]


NOTED = """
class Judge:
    note = "math-verify is not installed"
    def __call__(self, completion):
        return 1.0
"""


def test_what_is_not_compared_is_said_once_wherever_the_reward_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symbolic, "is_installed", lambda: False)
    (tmp_path / "noted.py").write_text(NOTED, encoding="utf-8")
    here = load_scorer(["math", "math?answer=boxed"], [1.0, 1.0], Limits(workers=0))
    there = load_scorer([f"{tmp_path / 'noted.py'}:Judge"], [1.0], Limits())
    said: list[str] = []
    for scorer in (here, there):
        scorer.listen(said.append, lambda text: None)
        scorer.close()
    assert len(said) == 2 and "pip install 'hotcold[math]'" in said[0] and said[1] == "math-verify is not installed"


def test_in_this_process_it_needs_no_signal() -> None:
    assert in_thread(lambda: is_right(r"\log_8 2", r"\frac13", Rules())) is True
