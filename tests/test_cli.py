"""The command: verbs, help, exit codes, what stands on stderr. What a verb does with its config is tested elsewhere."""

import errno
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hotcold
from hotcold.cli import main
from hotcold.config.keys import EVAL_KEYS, LATER_KEYS, SAMPLE_KEYS, TRAIN_KEYS
from hotcold.config.schema import Config, EvalConfig, SampleConfig

ENOUGH = ("model=m", "data=d.jsonl", "reward=r.py")
Ran = tuple[int, str, str]
Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    def command(*words: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["hotcold", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return (ended.value.code or 0) if not isinstance(ended.value.code, str) else 1, out, err

    return command


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Stands for hotcold.launch; a test gives it the functions that it calls."""
    module = types.ModuleType("hotcold.launch")
    monkeypatch.setitem(sys.modules, "hotcold.launch", module)
    monkeypatch.setattr(hotcold, "launch", module, raising=False)
    return module


def raising(error: BaseException) -> Callable[..., None]:
    def train(config: Config, echo: Any) -> None:
        raise error

    return train


# ---- help


def test_the_bare_command_and_help_show_examples_and_verbs(run: Run) -> None:
    for words in ([], ["--help"]):
        code, out, err = run(*words)
        assert (code, err) == (0, "")
        assert "hotcold train grpo model=smollm2 data=prompts.jsonl reward=reward.py" in out
        assert all(f"\n  {verb} " in out for verb in ("train", "eval", "sample", "verify", "bench", "doctor", "demo"))


def test_help_of_a_verb_lists_every_key_and_none_of_a_later_version(run: Run) -> None:
    for verb, groups in (("train", TRAIN_KEYS), ("eval", EVAL_KEYS), ("sample", SAMPLE_KEYS)):
        code, out, _ = run(verb, "--help")
        listed = {line.split()[0] for line in out.splitlines() if line.startswith("  ") and line.split()}
        assert code == 0
        assert {key.name for keys in groups.values() for key in keys} <= listed
        assert not listed & LATER_KEYS
        assert "vllm" not in out
    assert all(run(verb, "--help")[0] == 0 for verb in ("demo", "verify", "bench", "doctor"))


def test_the_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version") == (0, "hotcold 0.1.0\n", "")


# ---- wrong input


def test_wrong_input_is_a_short_message_and_exit_code_2(run: Run) -> None:
    code, out, err = run("train", "grpo", *ENOUGH, "stepz=5")
    assert (code, out) == (2, "")
    assert err == "hotcold: unknown key 'stepz'. Did you mean \"steps\"?\n"
    assert run("train", "grpo", *ENOUGH, "tracker=x") == (
        2,
        "",
        "hotcold: tracker is not available yet; leave it out.\n",
    )
    assert run("train", *ENOUGH)[2].startswith("hotcold: algorithm is missing: write it first")
    assert run("eval", "data=d")[2].startswith("hotcold: model is missing: model=FOLDER")
    assert run("--steps", "5")[0] == 2


def test_a_message_has_at_most_five_lines_unless_debug_adds_the_traceback(run: Run) -> None:
    words = ["train", "grpo", *ENOUGH, *(f"key{number}x=1" for number in range(9))]
    _, _, err = run(*words)
    assert len(err.splitlines()) == 5 and "Traceback" not in err
    code, _, err = run(*words, "--debug")
    assert code == 2 and err.startswith("Traceback")


def test_verbs_of_a_later_version_are_not_available_yet_and_others_get_the_nearest(run: Run) -> None:
    for verb in ("report", "view", "compare", "export", "import"):
        code, out, err = run(verb, "x")
        assert (code, out) == (2, "") and err.startswith(f"hotcold: hotcold {verb} is not available yet.")
    assert "there is no verb 'tran'. Did you mean \"train\"?" in run("tran")[2]


# ---- the verbs hand a config over


def test_train_hands_the_config_and_a_way_to_print_over(run: Run, launch: types.ModuleType) -> None:
    def train(config: Config, echo: Callable[[str], None]) -> None:
        echo(f"{config.algorithm} {config.steps} {config.seed} {config.learning_rate} {config.algorithm_options}")

    launch.train = train  # type: ignore[attr-defined]
    code, out, err = run("train", "grpo", *ENOUGH, "--steps", "5", "group_size=4", "--seed=3", "learning_rate=1e-5")
    assert (code, out, err) == (0, "grpo 5 3 1e-05 {'group_size': 4}\n", "")


def test_a_dry_run_trains_nothing(run: Run, launch: types.ModuleType) -> None:
    launch.dry_run = lambda config: f"would train {config.model}"  # type: ignore[attr-defined]
    assert run("train", "grpo", *ENOUGH, "--dry-run") == (0, "would train m\n", "")


def test_a_rate_of_zero_is_warned_of_on_stderr(run: Run, launch: types.ModuleType) -> None:
    launch.train = lambda config, echo: None  # type: ignore[attr-defined]
    code, out, err = run("train", "grpo", *ENOUGH, "learning_rate=0")
    assert (code, out) == (0, "")
    assert err == "hotcold: warning: learning_rate=0: the parameters will not change, nothing will be learnt.\n"


def test_eval_prints_a_table_or_json(run: Run, launch: types.ModuleType) -> None:
    def evaluate(config: EvalConfig) -> dict[str, Any]:
        return {"greedy": {"accuracy": 0.83, "interval": [0.74456, 0.89]}, "prompts": 100, "note": None}

    launch.evaluate = evaluate  # type: ignore[attr-defined]
    code, out, _ = run("eval", "m", "data=d", "reward=r.py")
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert code == 0
    assert lines == [
        ["greedy/accuracy", "0.83"],
        ["greedy/interval", "[0.7446, 0.89]"],
        ["prompts", "100"],
        ["note", "-"],
    ]
    assert json.loads(run("eval", "m", "data=d", "reward=r.py", "--json")[1])["greedy"]["accuracy"] == 0.83


def test_sample_prints_each_prompt_once_or_a_line_of_json_per_response(run: Run, launch: types.ModuleType) -> None:
    def sample(config: SampleConfig) -> Any:
        yield {"prompt": "2 + 3", "response": "5", "finish_reason": "stop"}
        yield {"prompt": "2 + 3", "response": "é", "finish_reason": "length"}

    launch.sample = sample  # type: ignore[attr-defined]
    assert (
        run("sample", "m", "prompt=2 + 3", "n=2")[1] == "prompt: 2 + 3\nresponse: 5\nresponse: é [cut at max_tokens]\n"
    )
    out = run("sample", "m", "prompt=2 + 3", "n=2", "--json")[1]
    assert [json.loads(line)["response"] for line in out.splitlines()] == ["5", "é"]


def test_demo_takes_a_seed_and_a_name_and_ends_with_its_own_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("hotcold.demo")
    module.demo = lambda seed, run: 3 if (seed, run) == (4, "x") else 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hotcold.demo", module)
    assert run("demo", "seed=4", "--run", "x")[0] == 3
    assert run("demo")[0] == 0
    assert "'steps' is not understood" in run("demo", "steps=4")[2]
    assert "seed=x: a whole number is needed" in run("demo", "seed=x")[2]


# ---- how a verb ends


def test_a_fault_of_ours_is_one_line_with_its_place_and_exit_code_1(run: Run, launch: types.ModuleType) -> None:
    launch.train = int  # type: ignore[attr-defined]  # int(config, echo) fails in cli.py itself
    code, _, err = run("train", "grpo", *ENOUGH)
    first, second = err.splitlines()
    assert code == 1 and first.startswith("hotcold: TypeError: 'function' object") and "(cli.py, line " in first
    assert second == "This is a bug in hotcold; run again with --debug for the traceback."
    assert "Traceback" in run("train", "grpo", *ENOUGH, "--debug")[2]


def test_a_disk_that_is_full_or_fails_ends_resumable_with_exit_code_75(run: Run, launch: types.ModuleType) -> None:
    for number in (errno.ENOSPC, errno.EROFS, errno.EIO):
        launch.train = raising(OSError(number, os.strerror(number), "runs/x"))  # type: ignore[attr-defined]
        code, _, err = run("train", "grpo", *ENOUGH)
        assert code == 75 and err.startswith(f"hotcold: {os.strerror(number)} (runs/x). A run continues")
    launch.train = raising(OSError(errno.ENOENT, "gone", "f"))  # type: ignore[attr-defined]
    assert run("train", "grpo", *ENOUGH)[0] != 75


def test_an_exception_in_a_users_file_names_its_line_and_is_not_called_our_bug(
    run: Run, launch: types.ModuleType
) -> None:
    launch.train = raising(KeyError("x"))  # type: ignore[attr-defined]  # this file stands for the user's
    code, _, err = run("train", "grpo", *ENOUGH)
    assert code == 2 and err.startswith("hotcold: KeyError: 'x' (") and "test_cli.py:" in err and "bug" not in err


def test_ctrl_c_ends_with_130_and_sigterm_with_143(run: Run, launch: types.ModuleType) -> None:
    launch.train = raising(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert run("train", "grpo", *ENOUGH)[0] == 130

    def killed(config: Config, echo: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()  # never reached: the handler raises before

    launch.train = killed  # type: ignore[attr-defined]
    before = signal.getsignal(signal.SIGTERM)
    code, _, err = run("train", "grpo", *ENOUGH)
    assert (code, err) == (143, "hotcold: stopped.\n")
    assert signal.getsignal(signal.SIGTERM) == before


# A program that puts its own `launch` in place, then runs the command; its reader closes the pipe at once.
PROGRAM = """\
import sys, types, pathlib
launch = types.ModuleType("hotcold.launch")
def train(config, echo):
    for step in range(20000):
        echo(f"step {step}")
    pathlib.Path(config.run).write_text("done")
def sample(config):
    while True:
        yield {"prompt": "p", "response": "r" * 1000}
launch.train, launch.sample = train, sample
sys.modules["hotcold.launch"] = launch
from hotcold.cli import main
main()
"""


def first_line(*words: str) -> tuple[str, int, str]:
    """What `hotcold WORDS | head -1` shows, the command's exit code, and its stderr."""
    command = [sys.executable, "-c", PROGRAM, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    return line, process.returncode, err


def test_a_pipe_that_is_closed_early_is_no_error(tmp_path: Path) -> None:
    assert first_line("sample", "m", "prompt=p") == ("prompt: p\n", 0, "")


def test_training_goes_on_when_the_reader_of_its_progress_leaves(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    assert first_line("train", "grpo", *ENOUGH, f"run={proof}") == ("step 0\n", 0, "")
    assert proof.read_text() == "done"
