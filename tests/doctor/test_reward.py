"""`hotcold doctor REWARD data=FILE`: rewards with known faults, each of which is found, and sound ones without any."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hotcold.cli import main

Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hotcold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Doctor:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in (3, 14, 25) for b in (40, 51, 62, 73)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def command(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["hotcold", "doctor", *words])
            main()
        return (int(stop.value.code or 0), *capfd.readouterr())

    return command


def problems(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("[problem]")]


SOUND = {
    "exact": "def reward(completion, answer):\n    return float(completion.strip() == answer)\n",
    "boxed": "def reward(completion, answer):\n    return float(completion.endswith('\\\\boxed{' + answer + '}'))\n",
    "tags": "def reward(completion, answer):\n    return float(f'<answer>{answer}</answer>' in completion)\n",
    "graded": (
        "def reward(completion, answer):\n"
        "    return 1.0 if completion.strip() == answer else -0.5 if completion.strip() else -1.0\n"
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_reward_has_no_problem_whatever_form_it_wants(name: str, hotcold: Doctor) -> None:
    Path("reward.py").write_text(SOUND[name])
    code, out, _ = hotcold("reward.py", "data=sums.jsonl")
    assert (code, problems(out)) == (0, []), out
    assert out.startswith("reward.py on 12 rows of sums.jsonl: 0 problems") and "[ok] determinism" in out


FAULTY = {
    "empty pays": ("return float(len(completion) < 3)", "exploitable: an empty response scores as well"),
    "length pays": ("return float(len(completion))", "exploitable: 'the' 64 times scores as well"),
    "an echo pays": ("return float('What' in completion or completion == answer)", "exploitable: the prompt, repeated"),
    "any number": ("return float(any(c.isdigit() for c in completion))", "exploitable: another row's answer"),
    "anywhere": ("return float(answer in completion)", "exploitable: the answers of all rows at once"),
    "constant": ("return 1.0", "constant: every response scores 1"),
    "random": ("import random\n    return random.random()", "determinism:"),
    "gold is wrong": ("return float(completion == 'x' + answer)", "constant: every response scores 0"),
    "gold is not its form": (
        "return 0.1 * completion.startswith('the') + (completion == 'x')",
        "gold: in 12 of 12 rows (row 0 ...) the right answer (column answer) scores no more",
    ),
    "no score for gold": (
        "return None if completion.strip() == answer or answer in completion else 0.0",
        "gold: the answer",
    ),
    "raises on empty": ("return float(completion.split()[0] == answer)", "12 of 12 empty, 12 of 12 blank"),
    "a text": ("return '1.0'", "returned '1.0' (str)"),
    "not a number": ("return float('nan')", "returned nan"),
    "exits": (
        "import os\n    os._exit(3) if not completion else None\n    return float(completion == answer)",
        "exit code 3",
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_each_fault_is_a_problem_that_names_it(name: str, hotcold: Doctor) -> None:
    body, said = FAULTY[name]
    Path("reward.py").write_text(f"def reward(completion, answer):\n    {body}\n")
    code, out, _ = hotcold("reward.py", "data=sums.jsonl")
    assert code == 1 and any(said in line for line in problems(out)), out
    assert out.count("\n") < 20


def test_a_reward_that_hangs_is_told_with_its_line_and_does_not_keep_anyone(hotcold: Doctor) -> None:
    Path("reward.py").write_text(
        "import time\n\ndef reward(completion, answer):\n"
        "    if not completion:\n        time.sleep(100)\n    return float(completion == answer)\n"
    )
    code, out, _ = hotcold("reward.py", "data=sums.jsonl", "reward_timeout=0.5")
    assert code == 1 and "no answer within reward_timeout=0.5 s" in out and "reward.py:5" in out


def test_none_and_forms_and_token_ids_are_notes(hotcold: Doctor) -> None:
    Path("reward.py").write_text(
        "def reward(completion, answer, completion_ids):\n"
        "    return float(completion == answer) if completion_ids else None\n"
    )
    code, out, _ = hotcold("reward.py", "data=sums.jsonl")
    assert code == 0 and "[note] no score: None for 12 of 12 empty" in out
    assert "[note] form: the right answer has its full score only in the forms: gold" in out
    assert "[note] token ids: reward can read token ids" in out


def test_as_json_it_has_the_scores_of_each_kind(hotcold: Doctor) -> None:
    Path("reward.py").write_text(SOUND["graded"])
    code, out, _ = hotcold("reward.py", "data=sums.jsonl", "--json")
    found = json.loads(out)
    assert code == 0 and found["rows"] == 12 and found["failed"] == {}
    scores = found["scores"]
    assert (scores["gold"], scores["empty"], scores["blank"], scores["wrong"]) == (1.0, -1.0, -1.0, -0.5)
    assert {"truncated", "repeated", "prompt", "boxed", "in tags", "every answer"} <= set(scores)


def test_a_name_with_options_an_own_function_and_a_form_of_another_trainer_are_tried_too(hotcold: Doctor) -> None:
    code, out, _ = hotcold("contains", "data=sums.jsonl")
    assert code == 1 and "the answers of all rows at once scores as well" in out  # as docs/rewards.md says of it
    assert hotcold("exact", "data=sums.jsonl")[0] == 0
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}+1"}], "reward_model": {"ground_truth": str(a + 1)}}
        for a in range(20, 30)
    ]
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("own.py").write_text(
        "def of_trl(completions, answer, **kwargs):\n"
        "    return [float(c[0]['content'] == a) for c, a in zip(completions, answer)]\n"
        "def of_verifiers(completion, answer):\n    return float(completion[-1]['content'] == answer)\n"
    )
    assert hotcold("own.py:of_trl", "data=chat.jsonl")[0] == 0
    assert hotcold("own.py:of_verifiers", "data=chat.jsonl", "reward_dialect=verifiers")[0] == 0


def test_without_a_right_answer_that_is_said_and_the_rest_is_looked_at(hotcold: Doctor) -> None:
    Path("plain.jsonl").write_text('{"prompt": "Tell me a story."}\n')
    Path("reward.py").write_text("def reward(completion):\n    return len(completion)\n")
    code, out, _ = hotcold("reward.py", "data=plain.jsonl")
    assert code == 0 and "[note] gold: the rows have no answer" in out and "[ok] determinism" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("reward.py",), "data is missing"),
        (("reward.py", "data=nowhere.jsonl"), "nowhere.jsonl"),
        (("nowhere.py", "data=sums.jsonl"), "there is no file nowhere.py"),
        (("reward.py:other", "data=sums.jsonl"), "nothing called 'other'"),
        (("reward.py", "data=sums.jsonl", "steps=3"), "steps"),
        (("reward.py", "more", "data=sums.jsonl"), "'more' is not understood"),
        (("contains", "data=bare.jsonl"), '"contains" needs "answer"'),
    ],
)
def test_wrong_words_are_one_short_error(words: tuple[str, ...], said: str, hotcold: Doctor) -> None:
    Path("reward.py").write_text(SOUND["exact"])
    Path("bare.jsonl").write_text('{"prompt": "a"}\n')
    code, out, err = hotcold(*words)
    assert (code, out) == (2, "") and said in err and len(err.splitlines()) <= 5 and "Traceback" not in err
