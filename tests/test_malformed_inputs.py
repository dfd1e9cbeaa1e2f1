"""Input that is wrong in every way we could think of: one short message, exit code 2, nothing left behind."""

import resource
import time
from pathlib import Path

import pytest

from hotcold.prompts import make_prompts, read_rows
from tests.malformed import config, data, fine, models, runs
from tests.malformed.case import Case
from tests.malformed.place import MOST_SECONDS, command, good, here

CASES = [*config.CASES, *data.CASES, *models.CASES, *runs.CASES]
__all__ = ["good", "here"]  # fixtures
MOST_MEMORY = 1_500_000  # KB that a case may add


def left() -> set[str]:
    return {str(path) for path in Path("runs").rglob("*")}


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
