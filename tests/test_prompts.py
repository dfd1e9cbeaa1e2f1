"""Rows from files, prompts from rows, the held-out part and the order."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotcold.errors import InputError
from hotcold.prompts import PromptOrder, distinct, fingerprint, hold_out, make_prompts, read_rows

ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}]


def written(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def lines(ending: str = "\n") -> str:
    return ending.join(json.dumps(row) for row in ROWS) + ending


def test_jsonl_json_csv_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert read_rows(written(tmp_path, "rows.jsonl", lines())) == ROWS
    assert read_rows(written(tmp_path, "rows.json", json.dumps(ROWS, indent=1))) == ROWS
    assert read_rows(written(tmp_path, "rows.csv", "prompt,answer\n1+1,2\n2+2,4\n")) == ROWS
    assert read_rows(str(tmp_path / "rows.parquet")) == ROWS


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_the_rows(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    assert read_rows(written(tmp_path, "rows.jsonl", mark + lines("\r\n").encode())) == ROWS
    assert read_rows(written(tmp_path, "rows.csv", mark + b"prompt,answer\r\n1+1,2\r\n2+2,4\r\n")) == ROWS


def test_a_line_separator_inside_a_json_text_does_not_end_the_line(tmp_path: Path) -> None:
    assert read_rows(written(tmp_path, "rows.jsonl", '{"prompt": "a\u2028b"}\n')) == [{"prompt": "a\u2028b"}]


def test_b08_an_empty_csv_cell_never_becomes_the_text_nan_or_none(tmp_path: Path) -> None:
    (row,) = read_rows(written(tmp_path, "rows.csv", "prompt,answer\n1+1,\n"))
    assert row["prompt"] == "1+1" and row["answer"] in ("", None)
    with pytest.raises(InputError, match=r"row 0.*prompt"):
        make_prompts(read_rows(written(tmp_path, "rows.csv", "prompt,answer\n,2\n")))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', "line 2"),
        ("a.jsonl", b'{"prompt": "x"}\n\nnull\n', "line 3: null"),
        ("a.jsonl", b"", "empty"),
        ("a.jsonl", b"\n \n", "empty"),
        ("a.jsonl", '{"prompt": "x"}'.encode("utf-16"), "UTF-16"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "\0"}\n', "line 2.*NUL"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "\xe9"}\n', "line 2.*UTF-8"),
        (
            "a.jsonl",
            b'{"prompt": "x"}\n{"prompt": "x", "answer": "1", "answer": "2"}\n',
            'line 2.*"answer" stands twice',
        ),
        ("a.jsonl", b'{"prompt": "x", "level": {"a": 1, "a": 2}}\n', 'line 1.*"a" stands twice'),
        ("a.json", b'[{"prompt": "7+5", "prompt": "x"}]', '"prompt" stands twice.*7\\+5'),
        ("a.json", b'{"prompt": "x"}', "list of objects"),
        ("a.json", b'[{"prompt": "x"}, null]', "row 1.*null"),
        ("a.json", b"[]", "no rows"),
        ("a.csv", b"prompt,answer\n1+1,2,3\n", "line 2: 3 cells"),
        ("a.csv", b"prompt,prompt\n1+1,2\n", "prompt"),
        ("a.csv", b"prompt,answer\n", "no rows"),
        ("a.parquet", b"PAR1", "[Pp]arquet"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name_and_the_place(
    tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    with pytest.raises(InputError, match=told) as refused:
        read_rows(written(tmp_path, name, content))
    assert name in str(refused.value)


def test_a_file_that_is_not_there_is_answered_with_the_one_beside_it(tmp_path: Path) -> None:
    written(tmp_path, "sums.jsonl", lines())
    with pytest.raises(InputError, match=r"sums\.jsonl"):
        read_rows(str(tmp_path / "sum.jsonl"))
    with pytest.raises(InputError, match=r"nowhere/deep\.jsonl"):
        read_rows("nowhere/deep.jsonl")
    with pytest.raises(InputError, match="folder"):
        read_rows(str(tmp_path))


def test_a_python_function_gives_rows_and_its_failure_names_the_users_line(tmp_path: Path) -> None:
    source = 'def rows():\n    return [{"prompt": "hi"}]\n\n\ndef broken():\n    return 1 / 0\n'
    source += "\n\ndef leaves():\n    raise SystemExit(0)\n"
    file = written(tmp_path, "mine.py", source)
    assert read_rows(f"{file}:rows") == [{"prompt": "hi"}]
    with pytest.raises(InputError, match=r"mine\.py.*6") as refused:  # `return 1 / 0` is line 6
        read_rows(f"{file}:broken")
    assert "ZeroDivisionError" in str(refused.value)
    with pytest.raises(InputError, match="leaves failed: SystemExit"):
        read_rows(f"{file}:leaves")
    with pytest.raises(InputError, match='"rows"'):
        read_rows(f"{file}:row")


def test_a_reasoning_gym_task_has_as_many_rows_as_asked_and_a_seed_repeats_them() -> None:
    first = read_rows("reasoning_gym:chain_sum?size=3&seed=7")
    assert len(first) == 3 and first == read_rows("reasoning_gym/chain_sum?size=3&seed=7")
    assert read_rows("reasoning_gym:chain_sum?size=3") == read_rows("reasoning_gym:chain_sum?size=3&seed=0")
    prompts = make_prompts(first)
    assert prompts[0].content == first[0]["question"] and prompts[0].columns["answer"] == first[0]["answer"]
    with pytest.raises(InputError, match='"chain_sum"'):
        read_rows("reasoning_gym:chain_sums")


USER, REPLY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("row", "content", "column", "value"),
    [
        ({"prompt": "2+2?", "level": 3}, "2+2?", "level", 3),
        ({"prompt": [USER], "level": 3}, [USER], "level", 3),
        ({"messages": [USER, REPLY]}, [USER], "answer", "4"),
        ({"messages": [USER, REPLY], "answer": "four"}, [USER], "answer", "four"),
        ({"question": "2+2?", "answer": "4"}, "2+2?", "answer", "4"),
        ({"problem": "2+2?", "solution": "4"}, "2+2?", "solution", "4"),
        ({"prompt": [USER], "reward_model": {"ground_truth": "4"}}, [USER], "ground_truth", "4"),  # verl
        ({"input": "2+2?", "label": "4"}, "2+2?", "label", "4"),  # OpenRLHF
        ({"prompt": "ok", "answer": None}, "ok", "answer", None),
    ],
)
def test_the_prompt_is_found_by_habit_and_the_other_columns_keep_their_names(row, content, column, value) -> None:
    (prompt,) = make_prompts([row])
    assert (prompt.index, prompt.content, prompt.columns[column]) == (0, content, value)


def test_a_named_column_goes_before_habit_and_a_misspelt_one_is_answered() -> None:
    assert make_prompts([{"prompt": "no", "task": "yes"}], "task")[0].content == "yes"
    with pytest.raises(InputError, match='"task"'):
        make_prompts([{"task": "yes"}], "tasks")
    with pytest.raises(InputError, match="instruction"):  # `input` beside it is half of a prompt
        make_prompts([{"instruction": "add", "input": "2 2"}])


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"prompt": None},
        {"prompt": ""},
        {"prompt": " \n\t"},
        {"prompt": [{"role": "system", "content": ""}, {"role": "user", "content": " "}]},
        {"prompt": []},
        {"prompt": 7},
        {"prompt": float("nan")},
        {"prompt": [{"role": "user", "content": None}]},
        {"prompt": [{"content": "x"}]},
        {"prompt": ["x"]},
    ],
)
def test_b08_an_unusable_prompt_is_refused_with_row_and_column(row) -> None:
    with pytest.raises(InputError, match=r"row 1\b.*prompt"):
        make_prompts([{"prompt": "ok"}, row])


def test_b08_no_rows_and_rows_that_are_no_objects_are_errors() -> None:
    with pytest.raises(InputError, match="no rows"):
        make_prompts([])
    with pytest.raises(InputError, match="row 1"):
        make_prompts([{"prompt": "ok"}, None])  # type: ignore[list-item]


def numbered(count: int, copies: int = 1) -> list:
    return make_prompts([{"prompt": f"add {i}"} for i in range(count)] * copies)


@pytest.mark.parametrize(("distinct", "held"), [(1, 0), (2, 1), (40, 2), (100, 5), (5000, 200)])
def test_five_percent_of_the_distinct_prompts_are_held_out_at_least_one_and_at_most_two_hundred(
    distinct: int, held: int
) -> None:
    train, held_out = hold_out(numbered(distinct))
    assert (len(train), len(held_out)) == (distinct - held, held)


def test_a_held_out_prompt_is_there_once_as_its_first_row_and_its_copies_are_on_neither_side() -> None:
    train, held_out = hold_out(numbered(40, copies=3))  # 5 % of 40 distinct prompts is 2; 38 x 3 stay for training
    assert len(held_out) == 2 and all(p.index < 40 for p in held_out)
    assert len(train) == 114 and not {p.content for p in train} & {p.content for p in held_out}


def test_the_first_row_stands_for_a_prompt_that_occurs_again() -> None:
    prompts = make_prompts([{"prompt": "a", "x": 1}, {"prompt": "b"}, {"prompt": "a", "x": 2}])
    assert [p.index for p in distinct(prompts)] == [0, 1]


def test_what_is_held_out_depends_on_text_and_seed_and_not_on_the_order_of_rows() -> None:
    def held(prompts, seed: int) -> set:
        return {p.content for p in hold_out(prompts, seed=seed)[1]}

    prompts = numbered(100)
    assert held(prompts, 0) == held(prompts[::-1], 0) != held(prompts, 1)


def test_b11_every_pass_takes_every_prompt_once_in_an_order_of_its_own_that_the_seed_repeats() -> None:
    order, again, other = PromptOrder(20, 0), PromptOrder(20, 0), PromptOrder(20, 1)
    first, second = [order.at(i) for i in range(20)], [order.at(i) for i in range(20, 40)]
    assert sorted(first) == sorted(second) == list(range(20)) and first != second
    assert [again.at(i) for i in reversed(range(40))][::-1] == first + second  # no state: any order of asking
    assert [other.at(i) for i in range(20)] != first


def test_the_fingerprint_changes_with_content_columns_and_order_and_takes_values_that_json_has_not() -> None:
    prompts = make_prompts([{"prompt": "a", "x": 1}, {"prompt": "b", "x": {1, 2}}])
    assert fingerprint(prompts) == fingerprint(make_prompts([{"x": 1, "prompt": "a"}, {"x": {2, 1}, "prompt": "b"}]))
    others = [prompts[::-1], make_prompts([{"prompt": "a", "x": 2}, {"prompt": "b", "x": {1, 2}}]), prompts[:1]]
    assert fingerprint(prompts) not in {fingerprint(other) for other in others}
