"""`hotcold doctor` on the command line: what it is given, exit codes, JSON, and whole toy runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hotcold.cli import main
from tests.tiny_model import write_tiny

Doctor = Callable[..., tuple[int, str, str]]
TRAIN = ("model=model", "data=sums.jsonl", "max_tokens=4", "prompts_per_step=4", "group_size=4", "eval.every=0")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_tiny(Path("model"))
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(6)]
    Path("sums.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    Path("digits.py").write_text("def reward(completion):\n    return sum(c in '0123' for c in completion) / 8\n")
    Path("never.py").write_text("def reward(completion):\n    return float(len(completion) > 50)\n")
    return tmp_path


@pytest.fixture
def hotcold(here: Path, capfd: pytest.CaptureFixture[str]) -> Doctor:
    def command(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["hotcold", *words])
            main()
        return (int(stop.value.code or 0), *capfd.readouterr())

    return command


# ---- runs


def test_a_run_that_learns_is_healthy_also_as_json(hotcold: Doctor) -> None:
    words = [word for word in TRAIN if not word.startswith("max_tokens")]  # a model of 23 tokens ends after 23 or so
    assert hotcold("train", "rloo", *words, "max_tokens=40", "reward=digits.py", "steps=6", "run=good")[0] == 0
    code, out, _ = hotcold("doctor", "runs/good")
    assert code == 0 and "[problem]" not in out and "6 of 6 steps, finished" in out
    code, out, err = hotcold("doctor", "runs/good", "--json")
    result = json.loads(out)
    assert code == 0 and err == "" and result["finished"] and result["steps"] == {"done": 6, "wanted": 6}
    assert {"sample", "score", "update"} <= set(result["seconds"])


def test_a_run_without_signal_is_a_problem_of_all_its_steps(hotcold: Doctor) -> None:
    assert hotcold("train", "rloo", *TRAIN, "reward=never.py", "steps=6", "run=bad")[0] == 0
    code, out, _ = hotcold("doctor", "runs/bad")
    problems = [line for line in out.splitlines() if line.startswith("[problem]")]
    assert code == 1 and problems[0].startswith("[problem] no signal: steps 1 to 6: 6 steps without any signal")


def test_a_run_that_stopped_goes_on_by_the_command_that_the_doctor_gives(hotcold: Doctor, here: Path) -> None:
    fails_once = "from pathlib import Path\n\ncalls = Path(__file__).with_name('calls')\n\n"
    fails_once += "def reward(completions):\n    n = len(calls.read_text()) if calls.exists() else 0\n"
    fails_once += "    calls.write_text('x' * (n + 1))\n    assert n != 4, 'on purpose'\n"
    fails_once += "    return [len(c) / 8 for c in completions]\n"
    (here / "once.py").write_text(fails_once)
    words = (*TRAIN, "steps=6", "save_every=2", "run=cut", "reward_on_error=stop", "reward_retries=0")
    assert hotcold("train", "rloo", *words, "reward=once.py")[0] == 2
    code, out, _ = hotcold("doctor", "runs/cut")
    (line,) = [line for line in out.splitlines() if line.startswith("[problem] unfinished")]
    assert code == 1 and "stopped after step 2 of 6. It continues from step 2" in line
    assert hotcold(*line.rpartition("hotcold ")[2].split())[0] == 0
    assert "6 of 6 steps, finished" in hotcold("doctor", "runs/cut")[1]


# ---- recipes


def test_a_recipe_by_words_by_file_and_as_json(hotcold: Doctor, here: Path) -> None:
    code, out, err = hotcold("doctor", "rloo", *TRAIN, "reward=digits.py", "steps=6")
    lines = out.splitlines()
    assert code in (0, 1) and lines[0].startswith("rloo on model: ") and "loading model and data" in err
    assert all(line.startswith(("[ok] ", "[note] ", "[problem] ")) for line in lines[1:])
    recipe = "algorithm: rloo\nmodel: model\ndata: sums.jsonl\nreward: digits.py\nmax_tokens: 4\ngroup_size: 4\n"
    (here / "recipe.yaml").write_text(recipe)
    code, out, _ = hotcold("doctor", "recipe.yaml", "prompts_per_step=4", "--json")
    result = json.loads(out)
    assert code == int(any(f["level"] == "problem" for f in result["findings"])) and result["seconds"] < 60
    assert not (here / "runs").exists()


def test_a_score_that_never_comes_is_a_problem_in_the_recipe_before_it_is_one_of_the_run(hotcold: Doctor) -> None:
    code, out, _ = hotcold("doctor", "rloo", *TRAIN, "reward=never.py", "steps=6")
    assert code == 1 and "[problem] signal: 0 of " in out


# ---- what it does not understand


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "doctor of what?"),
        (("nothing",), "'nothing' is no run's folder, no recipe.yaml and no algorithm."),
        (("grop", "model=model"), 'Did you mean "grpo"?'),
        (("model",), "model is a folder and no run"),
        (("digits.py",), "data is missing"),
        (("missing.yaml",), "missing.yaml"),
        (("rloo", "model=model", "stepz=3"), 'Did you mean "steps"?'),
        (("rloo", "model=nowhere", "data=sums.jsonl", "reward=digits.py"), "nowhere"),
        (("reward_model", "model=model"), "not available yet"),
    ],
)
def test_what_is_neither_a_run_nor_a_recipe_is_one_short_error(
    hotcold: Doctor, words: tuple[str, ...], said: str
) -> None:
    code, out, err = hotcold("doctor", *words)
    wrong = [line for line in err.splitlines() if line != "hotcold: loading model and data"]
    assert (code, out) == (2, "") and said in err and len(wrong) <= 5 and "Traceback" not in err


def test_a_run_by_its_bare_name_gets_its_path_and_keys_have_no_effect_on_it(hotcold: Doctor, here: Path) -> None:
    run = here / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("steps: 5\n")
    assert "Did you mean runs/one?" in hotcold("doctor", "one")[2]
    assert "steps has no effect on a run's folder" in hotcold("doctor", "runs/one", "steps=3")[2]
    assert hotcold("doctor", "runs/one")[0] == 1


def test_the_help_names_both_questions_and_the_exit_codes(hotcold: Doctor) -> None:
    code, out, _ = hotcold("doctor", "--help")
    assert code == 0 and "hotcold doctor RUN_FOLDER" in out and "hotcold doctor recipe.yaml" in out
    assert "Exit codes: 0 healthy, or notes alone; 1 a problem; 2 wrong input." in out
