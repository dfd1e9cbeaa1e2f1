"""Rows and columns at their edges: words for nothing, extras that are not installed, answers under other names."""

import re
import sys
from pathlib import Path

import pytest

from hotcold.errors import InputError
from hotcold.prompts import PromptOrder, find_column, make_prompts, read_rows

USER, REPLY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


def test_b08_nan_and_none_in_a_csv_are_no_value_and_a_prompt_of_them_names_row_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\n"two\nlines",nan\n1+1,None\nNaN,2\n')
    rows = read_rows(str(path))
    assert [row["answer"] for row in rows] == [None, None, "2"]
    with pytest.raises(InputError, match=r"row 2 \(line 5 of .*a\.csv\), column 'prompt': null"):
        make_prompts(rows)  # the header and a first row of two lines stand before it


def test_a_blank_line_of_jsonl_moves_the_line_and_not_the_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n\n{"prompt": 7}\n')
    with pytest.raises(InputError, match=r"row 1 \(line 3 of .*a\.jsonl\), column 'prompt': 7"):
        make_prompts(read_rows(str(path)))


def test_a_cell_longer_than_the_csv_readers_own_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"prompt\n{'x' * 200_000}\n")  # Python's limit is 131,072 characters
    assert len(read_rows(str(path))[0]["prompt"]) == 200_000


def test_a_parquet_folder_named_like_a_partition_adds_no_column(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "step=3").mkdir()
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "step=3" / "a.parquet")
    assert read_rows(str(tmp_path / "step=3" / "a.parquet")) == [{"prompt": "x"}]


def test_a_split_has_no_effect_on_a_file_and_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(InputError, match=r"data\.split=test has no effect"):
        read_rows(str(tmp_path / "a.jsonl"), "test")


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(InputError, match=re.escape("pip install 'hotcold[datasets]'")):
        read_rows("owner/sums")
    with pytest.raises(InputError, match=re.escape("pip install 'hotcold[reasoning-gym]'")):
        read_rows("reasoning_gym:chain_sum")


def test_an_unknown_option_of_a_task_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(InputError, match='Did you mean "min_terms"'):
        read_rows("reasoning_gym:chain_sum?min_term=2")


def test_a_file_without_the_named_function_says_which_it_has(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def easy():\n    return [{'prompt': 'e'}]\n\n\ndef hard():\n    return [{'prompt': 'h'}]\n")
    with pytest.raises(InputError, match="several public functions: easy, hard"):
        read_rows(str(path))
    assert read_rows(f"{path}:hard") == [{"prompt": "h"}]


def test_a_changed_file_is_run_again_and_its_neighbour_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_rows.py").write_text("WORD = 'near'\n")
    path = tmp_path / "mine.py"
    path.write_text("from neighbour_of_rows import WORD\ndef rows():\n    return [{'prompt': WORD}]\n")
    assert read_rows(str(path)) == [{"prompt": "near"}]
    path.write_text("def rows():\n    return [{'prompt': 'changed'}]\n")
    assert read_rows(str(path)) == [{"prompt": "changed"}]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": [USER], "reward_model": {"ground_truth": "4"}}, "4"),  # verl
        ({"input": "2+2?", "label": "4"}, "4"),  # OpenRLHF
        ({"messages": [USER, REPLY], "label": "5"}, "4"),  # the reference turn goes first
        ({"prompt": "2+2?", "answer": None, "label": "4"}, None),  # an answer of the user's own is never replaced
    ],
)
def test_a_row_without_an_answer_takes_it_from_where_other_trainers_keep_it(row, answer) -> None:
    assert make_prompts([row])[0].columns["answer"] == answer


def test_null_fields_that_parquet_adds_to_messages_do_not_reach_the_template() -> None:
    (prompt,) = make_prompts([{"prompt": [{**USER, "tool_calls": None}]}])
    assert prompt.content == [USER]


def test_messages_without_a_users_turn_and_half_a_surrogate_pair_are_refused() -> None:
    with pytest.raises(InputError, match=r"row 0, column 'messages'.*only the assistant's turn"):
        make_prompts([{"messages": [REPLY]}])
    with pytest.raises(InputError, match=r"row 0, column 'prompt'.*surrogate"):
        make_prompts([{"prompt": "\ud800"}])


def test_the_column_that_was_found_can_be_reported() -> None:
    assert find_column([{"answer": "4", "problem": "2+2?"}]) == "problem"
    assert find_column([{"problem": "2+2?", "prompt": "solve 2+2"}]) == "prompt"


def test_b11_a_step_that_crosses_the_end_of_a_pass_takes_from_both() -> None:
    order = PromptOrder(5, seed=3)
    taken = [order.at(position) for position in range(10)]  # a step of 3 to 6: two of the first pass, two of the second
    assert sorted(taken[:5]) == sorted(taken[5:]) == [0, 1, 2, 3, 4]
