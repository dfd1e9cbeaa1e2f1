"""The good files that malformed ones stand beside, made once, and the command run in this process."""

import faulthandler
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import hotcold.chat
from hotcold.cli import main
from hotcold.models.adapters import LoraSettings, add_lora, save_adapter
from tests.malformed.case import Case
from tests.tiny_model import character_tokenizer, tiny_llama, write_tiny

MOST_SECONDS = 20.0  # of a case; a machine may be slow, what waits for a pipe never ends


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
    clock = threading.Timer(5 * MOST_SECONDS, _give_up)
    clock.daemon = True
    clock.start()
    yield tmp_path
    clock.cancel()


def _give_up() -> None:
    """Ends all the tests: no exception reaches what waits in C."""
    faulthandler.dump_traceback()
    os._exit(70)
