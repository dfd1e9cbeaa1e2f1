"""Files from strangers: whatever they hold, nothing in them is run, and the answer is a refusal or the rest works."""

import os
import pickle
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hotcold.config.schema import Config, train_config
from hotcold.errors import InputError
from tests.malformed.case import Case
from tests.malformed.hostile import CANARY, CASES, CODE, PICKLES, REMOTE, WORKS, Bomb
from tests.malformed.place import command, good, here

__all__ = ["good", "here"]  # fixtures
WATCHED = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn")
NETWORK = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
_heard: list[str] | None = None  # a hook cannot be taken away again


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _heard is not None and event in (*WATCHED, *NETWORK):
        _heard.append(f"{event} {args!r:.200}")


sys.addaudithook(_hook)


@contextmanager
def listening(*prefixes: str) -> Iterator[list[str]]:
    """What Python itself reports of events that begin so."""
    global _heard
    found: list[str] = []
    _heard = found
    try:
        yield found
    finally:
        _heard = None
        found[:] = [event for event in found if event.startswith(prefixes)]


WITH_DEBUG = [case for case in (*PICKLES, *REMOTE) if case.says != WORKS]


@pytest.mark.parametrize(
    ("case", "debug"),
    [*((case, False) for case in CASES), *((case, True) for case in WITH_DEBUG)],
    ids=lambda value: value.name if isinstance(value, Case) else "debug" if value else "",
)
def test_nothing_in_a_hostile_file_is_run(
    here: Path, capfd: pytest.CaptureFixture[str], case: Case, debug: bool
) -> None:
    assert case.make is not None
    case.make()
    before = set(sys.modules)
    with listening(*WATCHED) as heard:
        code = command(*case.command, *(["--debug"] if debug else []))
    out, err = capfd.readouterr()
    assert code in (0, 2), err
    assert not Path(CANARY).exists() and heard == []
    new = [sys.modules[name] for name in set(sys.modules) - before]
    assert not [module for module in new if str(here) in str(getattr(module, "__file__", ""))]
    assert case.says in (err if code else out), err + out
    if not debug:
        assert len(err.splitlines()) <= 5 and "Traceback" not in err and "This is a bug" not in err


def test_the_canary_sings(here: Path) -> None:
    """The check above would see a pickle that is loaded and code that is run."""
    with listening(*WATCHED) as heard:
        pickle.loads(pickle.dumps(Bomb())).close()
    assert Path(CANARY).exists() and heard != []
    Path(CANARY).unlink()
    exec(CODE)
    assert Path(CANARY).exists()
    Path(CANARY).unlink()


def test_links_in_a_run_folder_are_taken_away_but_not_what_they_lead_to(here: Path) -> None:
    case = next(case for case in CASES if case.name == "run with a link for an older checkpoint")
    assert case.make is not None
    case.make()
    inside = sorted(p.name for p in Path("elsewhere").iterdir())
    assert command(*case.command) == 0
    assert sorted(p.name for p in Path("elsewhere").iterdir()) == inside
    assert sorted(p.name for p in Path("runs/one/checkpoints").iterdir()) == ["step_000003"]


def test_remote_code_cannot_be_asked_for(here: Path) -> None:
    for words in (["trust_remote_code=true"], ["--trust_remote_code", "true"]):
        with pytest.raises(InputError, match="code that comes with a model is never run"):
            train_config(["rloo", "model=model", "data=prompts.jsonl", "reward=exact", *words])
    with pytest.raises(InputError, match="never run"):
        Config.from_keys(model="m", data="d", reward="exact", algorithm="rloo", trust_remote_code=True)


LOCAL = (["reward=reward.py"], ["lora.rank=2"], ["model=adapter"], ["beta=0.1", "reference=model"])


@pytest.mark.parametrize("words", LOCAL, ids=lambda words: words[0])
def test_a_run_on_local_files_opens_no_connection(here: Path, words: list[str]) -> None:
    with listening(*NETWORK) as heard:
        assert command(*Case("", "", tuple(words)).command) == 0
        assert command("sample", "model", "prompt=1+1=", "max_tokens=2") == 0
    assert heard == []


TELLS = """\
import os

def reward(completion):
    print(dict(os.environ))
    if "a" in completion:
        raise RuntimeError(str(dict(os.environ)))
    return float("1" in completion)
"""
SECRETS = {
    "HF_TOKEN": "hf_x7Kq93LmPw",
    "OPENAI_API_KEY": "sk-Zt51VbQe8R",
    "WANDB_API_KEY": "w4Jn6YcHd2",
    "MY_PASSWORD": "Gs0TfAu3Mk",
}


def test_secrets_of_the_environment_stand_in_no_file_of_a_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the reward prints all that it sees and fails with it."""
    Path("tells.py").write_text(TELLS)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    assert command(*Case("", "", ("reward=tells.py", "reward_max_failures=1", "steps=2")).command) == 0
    files = [path for path in Path("runs/one").rglob("*") if path.is_file()]
    assert any(b"'PATH'" in path.read_bytes() for path in files)  # what it says is kept
    for path in files:
        raw = path.read_bytes()
        assert not [name for name, value in SECRETS.items() if value.encode() in raw], path


def test_only_the_owner_reads_a_run_folder(here: Path) -> None:
    before = os.umask(0)
    try:
        assert command(*Case("", "", ()).command) == 0
        mode = stat.S_IMODE(Path("runs/one").stat().st_mode)
        assert mode == 0o700
        Path("runs/one").chmod(0o755)
        assert command("train", "resume=runs/one", "steps=2") == 0
        assert stat.S_IMODE(Path("runs/one").stat().st_mode) == 0o700
    finally:
        os.umask(before)
