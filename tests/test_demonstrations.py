"""Demonstrations from rows: where the response is found, what is refused, what is held out."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hotcold.errors import InputError
from hotcold.prompts import (
    Demonstration,
    Prompt,
    apart_from,
    distinct_demonstrations,
    fingerprint_demonstrations,
    hold_out,
    hold_out_demonstrations,
    make_demonstrations,
    make_prompts,
    read_rows,
)
from hotcold.prompts.demonstrations import RESPONSE_HABITS

USER, REPLY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "be brief"}
MORE, THEN = {"role": "user", "content": "and 3?"}, {"role": "assistant", "content": "7"}


def one(row: dict[str, Any], *columns: str | None) -> Demonstration:
    (made,) = make_demonstrations([row], *columns)
    return made


@pytest.mark.parametrize("column", ["response", "completion", "output", "answer", "chosen"])
def test_the_response_is_found_by_habit_beside_the_prompt(column: str) -> None:
    made = one({"question": "2+2?", column: "4", "level": 3})
    assert made == Demonstration(Prompt(0, "2+2?", {"question": "2+2?", column: "4", "level": 3}), "4")
    assert (made.turns, made.opening, made.last_text) == ([], "2+2?", "4")


def test_the_first_habit_that_any_row_has_wins_and_a_named_column_goes_before_it() -> None:
    row = {"prompt": "2+2?", "answer": "4", "response": "It is 4."}
    assert one(row).response == "It is 4."
    assert one(row, None, "answer").response == "4"
    assert one({"prompt": "no", "task": "2+2?", "label": "4"}, "task", "label").response == "4"
    assert one({"answer": "What has the answer 4?", "chosen": "2+2"}, "answer").response == "2+2"
    with pytest.raises(InputError, match='"answer"'):
        one(row, None, "answers")
    with pytest.raises(InputError, match="column of the prompts too"):
        one(row, "prompt", "prompt")


def test_every_assistant_turn_of_messages_is_a_response_and_the_last_is_not_in_the_prompt() -> None:
    made = one({"messages": [SYSTEM, USER, REPLY, MORE, THEN], "answer": "seven"})
    assert made.prompt.content == [SYSTEM, USER, REPLY, MORE]  # what a held-out question asks
    assert made.prompt.columns["answer"] == "seven"  # still there for a reward
    assert made.response == [SYSTEM, USER, REPLY, MORE, THEN]
    assert (made.turns, made.opening, made.last_text) == ([2, 4], [SYSTEM, USER], "7")


def test_a_turn_of_the_user_may_stand_last_and_an_assistants_greeting_first() -> None:
    assert one({"messages": [USER, REPLY, MORE]}).turns == [1]
    assert one({"messages": [THEN, USER, REPLY]}).turns == [2]


def test_beside_messages_that_ask_a_column_has_the_response_and_earlier_turns_are_given() -> None:
    made = one({"prompt": [USER, REPLY, MORE], "completion": "7"})
    assert (made.response, made.num_given, made.turns) == ([USER, REPLY, MORE, THEN], 3, [3])
    assert made.opening == [USER, REPLY, MORE]
    named = one({"messages": [USER, REPLY], "label": "four"}, None, "label")  # the trailing turn gives way
    assert named.response == [USER, {"role": "assistant", "content": "four"}]


def test_a_response_of_messages_follows_the_prompt_or_repeats_it() -> None:
    expected = [USER, REPLY]
    for prompt in ([USER], "2+2?"):  # a text is one user message where the response is messages
        for response in ([REPLY], [USER, REPLY]):
            made = one({"prompt": prompt, "chosen": response})
            assert (made.prompt.content, made.response, made.turns) == ([USER], expected, [1])
    with pytest.raises(InputError, match=r"row 0, column 'chosen'.*not how the prompt begins"):
        one({"prompt": [MORE], "chosen": [USER, REPLY]})


def test_a_preference_pair_is_two_demonstrations_of_one_prompt() -> None:
    rows = [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}]
    chosen, rejected = make_demonstrations(rows), make_demonstrations(rows, response_column="rejected")
    assert (chosen[0].response, rejected[0].response) == ("4", "5") and chosen[0].prompt == rejected[0].prompt


def test_a_turn_may_call_a_tool_in_place_of_words() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    made = one({"messages": [USER, call, {"role": "tool", "content": "4"}, REPLY]})
    assert made.turns == [1, 3] and made.response[1] == {"role": "assistant", "tool_calls": call["tool_calls"]}


GOOD = {"prompt": "ok", "response": "yes"}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "1+1"}, r"column 'response': missing \(the row has prompt\)"),
        ({"prompt": "1+1", "response": None}, "column 'response': null"),
        ({"prompt": "1+1", "response": ""}, "column 'response': empty text"),
        ({"prompt": "1+1", "response": " \n"}, "column 'response': only blanks"),
        ({"prompt": "1+1", "response": 2}, r"column 'response': 2 \(int\); text or messages are needed"),
        ({"prompt": "1+1", "response": float("nan")}, "column 'response': nan"),
        ({"prompt": "1+1", "response": "\ud83d"}, "column 'response'.*surrogate"),
        ({"prompt": "1+1", "response": []}, "column 'response': no assistant turn"),
        ({"prompt": "1+1", "response": ["2"]}, "column 'response', message 0"),
        ({"prompt": "1+1", "response": [{"role": "tool", "content": "2"}]}, "column 'response': the messages begin"),
        ({"prompt": [USER], "response": [USER]}, "column 'response': no assistant turn"),
        ({"prompt": "1+1", "response": [{"role": "assistant", "content": " "}]}, "column 'response', message 0"),
        ({"prompt": "", "response": "2"}, "column 'prompt': empty text"),
        ({"response": "2"}, "column 'prompt': missing"),
    ],
)
def test_b08_a_bad_row_is_refused_with_row_and_column(row: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=rf"row 1\b.*{told}") as refused:
        make_demonstrations([GOOD, row])
    assert len(str(refused.value).splitlines()) <= 5


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([USER], "no assistant turn"),
        ([REPLY, USER], "no assistant turn after another"),
        ([REPLY], "a user's turn is needed"),
        ([USER, {"role": "assistant", "content": ""}], "message 1: empty text"),
        ([USER, {"role": "assistant", "content": "  "}, MORE, THEN], "message 1: only blanks"),
        ([USER, {"role": "assistant", "content": None}], "message 1.*null"),
        ([USER, {"content": "4"}], "message 1"),
        (None, "null"),
        ("2+2?", "messages are needed"),
    ],
)
def test_b08_bad_messages_are_refused_with_row_column_and_message(messages: Any, told: str) -> None:
    with pytest.raises(InputError, match=rf"row 1, column 'messages'.*{told}"):
        make_demonstrations([{"messages": [USER, REPLY]}, {"messages": messages}])


def test_b08_rows_without_any_response_say_what_was_looked_for_and_how_to_name_it(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n" + json.dumps({"prompt": "2+2?", "reply": "4"}))
    with pytest.raises(InputError, match=r"row 0 \(line 2 of .*rows\.jsonl\).*reply.*response.*chosen") as refused:
        make_demonstrations(read_rows(str(file)))
    assert "data.response=COLUMN" in str(refused.value)
    with pytest.raises(InputError, match="no rows"):
        make_demonstrations([])


# ------------------------------------------------------------------ held out, recognised


def asked(number: int, answer: str = "yes") -> dict[str, Any]:
    return {"prompt": f"is {number} one?", "response": answer}


def test_equal_prompts_stay_on_one_side_whatever_their_responses() -> None:
    """40 prompts with 2 responses each: 2 of 40 are held out, once each; the other 38 x 2 rows are trained."""
    rows = make_demonstrations([asked(i, a) for a in ("yes", "no") for i in range(40)])
    train, held = hold_out_demonstrations(rows)
    assert (len(train), len(held)) == (76, 2) and {d.response for d in held} == {"yes"}
    assert not {d.opening for d in train} & {d.opening for d in held}
    assert hold_out_demonstrations(rows, seed=1)[1] != held


def test_a_question_is_held_out_or_not_whether_it_is_sampled_or_imitated() -> None:
    rows = [asked(i) for i in range(40)]
    held = hold_out(make_prompts(rows))[1]
    assert [d.prompt for d in hold_out_demonstrations(make_demonstrations(rows))[1]] == held


def test_a_conversation_that_goes_on_is_on_the_side_of_its_beginning() -> None:
    """Else the answer to a held-out question would be trained as the first turn of a longer conversation."""
    rows = make_demonstrations([{"messages": m} for m in ([USER, REPLY], [USER, REPLY, MORE, THEN], [MORE, THEN])])
    assert distinct_demonstrations(rows) == [rows[0], rows[2]]
    for seed in range(8):
        train, held = hold_out_demonstrations(rows, seed=seed)
        assert (train, held) in (([rows[2]], [rows[0]]), ([rows[0], rows[1]], [rows[2]]))


def test_rows_whose_question_is_asked_elsewhere_are_left_out() -> None:
    rows = make_demonstrations([asked(0), asked(1, "no"), asked(2)])
    assert apart_from(rows, make_demonstrations([asked(1)])) == [rows[0], rows[2]]
    assert apart_from(rows, make_prompts([asked(2)])) == rows[:2]


def test_the_fingerprint_covers_the_responses_and_what_is_trained_of_them() -> None:
    kinds = [
        [asked(1)],
        [asked(1, "no")],
        [{"messages": [USER, REPLY, MORE, THEN]}],
        [{"messages": [USER, REPLY, MORE], "response": "7"}],
        [{"messages": [USER, REPLY, MORE, REPLY]}],
    ]
    prints = {fingerprint_demonstrations(make_demonstrations(rows)) for rows in kinds}
    assert len(prints) == len(kinds)
    assert fingerprint_demonstrations(make_demonstrations([asked(1)])) in prints
    row = {"messages": [USER, REPLY, MORE, THEN], "x": "7"}  # the same messages, of which one or two are trained
    both, last = make_demonstrations([row]), make_demonstrations([row], None, "x")
    assert both[0].response == last[0].response and fingerprint_demonstrations(both) != fingerprint_demonstrations(last)


# ------------------------------------------------------------------ docs/data.md


def test_the_rows_and_the_columns_of_the_data_page_are_those_of_the_code() -> None:
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```jsonl\n(.*?)```", page, flags=re.DOTALL)
    rows = [json.loads(line) for line in block.splitlines()]
    assert [one(row).last_text for row in rows] == ["12", "12", "12"]
    names = [f"`{name}`" for name in RESPONSE_HABITS]
    assert f"a column {', '.join(names[:-1])} or {names[-1]}, the first that exists" in page
