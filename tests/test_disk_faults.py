"""A disk that takes no more, at any write of a run: exit code 75, nothing lost, the same end once it is repaired."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hotcold import files
from hotcold.checkpoint import newest_checkpoint, read_state, write_checkpoint
from hotcold.errors import DiskError
from hotcold.launch import as_disk_error
from tests.test_end_to_end import here, train

__all__ = ["here"]  # the fixture

FAULTS = (errno.ENOSPC, errno.EIO, errno.EACCES)
WORDS = ["save_every=1", "eval.every=0", "learning_rate=0.01", "epochs_per_batch=2", "minibatches=2"]


class Disk:
    """Counts what is written, synced and renamed, and fails at one of them and at all that follow."""

    def __init__(self, fails_at: int | None = None, fault: int = errno.ENOSPC) -> None:
        self.fails_at, self.fault = fails_at, fault
        self.seen: list[tuple[str, str]] = []

    def before(self, kind: str, path: Path) -> None:
        self.seen.append((kind, path.name))
        if self.fails_at is not None and len(self.seen) > self.fails_at:
            raise OSError(self.fault, os.strerror(self.fault), str(path))


@pytest.fixture
def disk() -> Iterator[Disk]:
    found, before = Disk(), files.before
    files.before = found.before
    yield found
    files.before = before


def save(folder: Path, step: int) -> None:
    def export(target: Path) -> None:
        (target / "model.bytes").write_bytes(bytes([step]) * 100)

    tensors = {"optimizer": {"w": torch.full((3,), float(step))}}
    write_checkpoint(folder / f"step_{step:06d}", export, tensors, {"step": step})


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_operation_of_a_save_fails_the_checkpoint_before_it_stays(
    tmp_path: Path, disk: Disk, fault: int
) -> None:
    save(tmp_path, 1)
    num = len(disk.seen)
    assert {kind for kind, _ in disk.seen} == {"write", "sync", "rename"} and num >= 12
    for place in range(num):
        disk.seen, disk.fails_at, disk.fault = [], place, fault
        with pytest.raises(OSError) as raised:
            save(tmp_path, 2)
        assert raised.value.errno == fault
        newest, _ = newest_checkpoint(tmp_path)
        assert newest is not None
        if newest.name == "step_000002":  # it was renamed, and only the sync of the folder around it failed
            assert disk.seen[place][0] == "sync" and place == num - 1
            shutil.rmtree(newest)
        else:
            assert read_state(newest) == {"step": 1}
        assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    disk.seen, disk.fails_at = [], None
    save(tmp_path, 2)
    newest, skipped = newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "step_000002" and skipped == []


def run(*words: str, name: str) -> int:
    return train(*WORDS, *words, algorithm="grpo", run=f"runs/{name}", steps=2)


def result(name: str) -> dict[str, object]:
    return json.loads(Path("runs", name, "result.json").read_text())


def test_a_run_that_meets_a_fault_anywhere_ends_resumable_and_goes_on_to_the_same_end(
    here: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name="whole") == 0
    num = len(disk.seen)
    places = [*range(0, num, num // 9), num - 1]
    for count, place in enumerate(places):
        fault = FAULTS[count % len(FAULTS)]
        disk.seen, disk.fails_at, disk.fault = [], place, fault
        name = f"cut{place}"
        assert run("resume=auto", name=name) == 75, disk.seen[place]
        said = capsys.readouterr().err
        assert said.startswith(f"hotcold: {os.strerror(fault)} (") and len(said.strip().splitlines()) == 1
        disk.fails_at = None
        assert run("resume=auto", name=name) == 0, disk.seen[place]
        assert result(name) == result("whole"), disk.seen[place]


# ---- a real one, in a mount namespace of its own

SCRIPT = """
set -e
mount -t tmpfs -o size=64m tmpfs "$PLACE"
set +e
BREAK
$TRAIN; echo "code $?"
REPAIR
$TRAIN; echo "code $?"
cp "$PLACE/one/result.json" "$FOUND"
"""
FILLS = """import os, pathlib

def reward(completion):
    log = pathlib.Path('calls')
    n = int(log.read_text()) if log.exists() else 0
    log.write_text(str(n + 1))
    if n == 20:
        try:
            open('PLACE/filler', 'wb').write(bytes(64 * 2**20))
        except OSError:
            pass
    return float('a' in completion)
"""
CASES = {
    "full in the middle of a step": (FILLS, "", "rm $PLACE/filler"),
    "read-only when it goes on": (
        FILLS.replace("n == 20", "False"),
        "$FIRST; mount -o remount,ro $PLACE",
        "mount -o remount,rw $PLACE",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_full_or_read_only_disk_ends_resumable(here: Path, case: str) -> None:
    """Tests may run as root, to whom permissions mean nothing: the disk itself is full, or mounted read-only."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    reward, breaks, repair = CASES[case]
    assert train(*WORDS, algorithm="grpo", run="runs/whole", steps=3) == 0
    place = here / "disk"
    place.mkdir()
    (here / "filling.py").write_text(reward.replace("PLACE", str(place)))
    words = [sys.executable, "-m", "hotcold", "train", "grpo", "model=model", "data=prompts.jsonl"]
    words += ["reward=filling.py", "max_tokens=5", "prompts_per_step=3", "group_size=4", "threads=1", *WORDS]
    words += [f"run={place}/one", "resume=auto"]
    commands = {"TRAIN": " ".join([*words, "steps=3"]), "FIRST": " ".join([*words, "steps=1"])}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", SCRIPT.replace("BREAK", breaks).replace("REPAIR", repair)],
        env={**os.environ, "PLACE": str(place), "FOUND": str(here / "found.json"), **commands},
        capture_output=True,
        text=True,
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("code")] == ["code 75", "code 0"], done.stderr
    assert "Traceback" not in done.stderr
    # the reward is another file that says the same
    assert json.loads((here / "found.json").read_text()) == result("whole")


def test_another_error_of_the_system_is_not_taken_for_the_disks() -> None:
    error = OSError(errno.EINVAL, "Invalid argument")
    assert as_disk_error(error, Path("runs/one"), "") is error
    assert isinstance(as_disk_error(OSError(errno.ENOSPC, "No space left"), Path("runs/one"), ""), DiskError)
