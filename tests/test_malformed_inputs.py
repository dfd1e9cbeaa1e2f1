"""Input that is wrong in every way we could think of: one short message, exit code 2, nothing left behind."""

import faulthandler
import json
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hotcold.chat
from hotcold.cli import main
from hotcold.models.adapters import LoraSettings, add_lora, save_adapter
from hotcold.prompts import make_prompts, read_rows
from tests.malformed import config, data, fine, models, runs
from tests.malformed.case import Case
from tests.tiny_model import character_tokenizer, tiny_llama, write_tiny

CASES = [*config.CASES, *data.CASES, *models.CASES, *runs.CASES]
MOST_SECONDS = 20.0  # of a case; a machine may be slow, what waits for a pipe never ends
MOST_MEMORY = 1_500_000  # KB that a case may add


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["hotcold", *words])
        main()
    return int(stop.value.code or 0)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an adapter, prompts, a reward and a run of two steps."""
    place = tmp_path_factory.mktemp("good")
    write_tiny(place / "model")
    module = tiny_llama()
    add_lora(module, LoraSettings(2, 4.0), 0)
    save_adapter(module, place / "adapter", str(place / "model"))
    character_tokenizer().save_pretrained(place / "adapter")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(4)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "reward.py").write_text("def reward(completion):\n    return float('a' in completion)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        words = [word for word in Case("", "").command if not word.startswith(("steps", "run"))]
        assert command(*words, "steps=2", "save_every=1", "eval.every=0", "run=./whole") == 0
    return place


@pytest.fixture
def here(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the good files as the current one; whatever waits for ever ends the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTCOLD_CACHE", str(tmp_path / "cache"))
    for name in ("model", "adapter", "whole"):
        (tmp_path / name).symlink_to(good / name)
    for name in ("prompts.jsonl", "reward.py"):
        shutil.copy(good / name, tmp_path)
    monkeypatch.setattr(hotcold.chat, "RENDERING", 0.5)
    faulthandler.dump_traceback_later(5 * MOST_SECONDS, exit=True)
    yield tmp_path
    faulthandler.cancel_dump_traceback_later()


def left() -> set[str]:
    return {str(path) for path in Path("runs").rglob("*") if path.name != "stacks.txt"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_malformed_input_is_one_short_message_and_leaves_nothing(
    here: Path, capfd: pytest.CaptureFixture[str], case: Case
) -> None:
    if case.make is not None:
        case.make()
    before, memory, start = left(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    code = command(*case.command)
    seconds, more = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    message = capfd.readouterr().err
    assert code == 2, message
    assert case.says in message
    assert len(message.splitlines()) <= 5 and max(map(len, message.splitlines())) <= 1000
    assert "Traceback" not in message and "This is a bug" not in message
    assert left() == before
    assert seconds < MOST_SECONDS and more < MOST_MEMORY


@pytest.mark.parametrize("case", fine.FILES, ids=lambda case: case.name)
def test_a_file_of_data_that_only_looks_malformed_is_read(here: Path, case: Case) -> None:
    assert case.make is not None
    case.make()
    prompts = make_prompts(read_rows(case.says))
    assert [prompt.content for prompt in prompts] == ["1+6=", "2+6="]


@pytest.mark.parametrize("case", fine.CASES, ids=lambda case: case.name)
def test_what_only_looks_malformed_works(here: Path, capfd: pytest.CaptureFixture[str], case: Case) -> None:
    if case.make is not None:
        case.make()
    code = command(*case.command)
    out, message = capfd.readouterr()
    assert code == 0, message
    assert case.says in out


def test_there_are_as_many_cases_as_promised() -> None:
    assert len({(case.says, *case.words, case.name) for case in CASES}) >= 150
