"""Checkpoints are whole or do not count."""

import errno
import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from hotcold.checkpoint import (
    newest_checkpoint,
    prune,
    read_state,
    read_tensors,
    sweep,
    verify,
    write_checkpoint,
    write_folder,
)
from tests.kills import killed_before_file_operation


def export(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")


def save(root: Path, step: int, note: str = "") -> Path:
    folder = root / f"step_{step:06d}"
    moments = {"w.exp_avg": torch.tensor([float(step), float(step)])}
    write_checkpoint(folder, export, {"optimizer": moments}, {"step": step, "note": note})
    return folder


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    assert verify(folder) is None
    assert read_state(folder) == {"step": 3, "note": ""}
    assert torch.equal(read_tensors(folder, "optimizer")["w.exp_avg"], torch.tensor([3.0, 3.0]))
    listed = {entry["path"] for entry in json.loads((folder / "MANIFEST.json").read_text())["files"]}
    assert listed == {"config.json", "model.safetensors", "trainer/state.json", "trainer/optimizer.safetensors"}


@pytest.mark.parametrize("name", ["model.safetensors", "trainer/state.json", "trainer/optimizer.safetensors"])
def test_a_missing_cut_or_changed_file_is_found_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    """D05"""
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    whole = (bad / name).read_bytes()
    for broken in (None, whole[:-1], bytes([whole[0] ^ 1]) + whole[1:]):
        if broken is None:
            (bad / name).unlink()
        else:
            (bad / name).write_bytes(broken)
        newest, skipped = newest_checkpoint(tmp_path)
        assert newest == good and skipped[0][0] == "step_000002" and name in skipped[0][1]
        (bad / name).write_bytes(whole)
    assert newest_checkpoint(tmp_path) == (bad, [])


def test_without_a_manifest_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "MANIFEST.json").unlink()
    assert newest_checkpoint(tmp_path) == (None, [("step_000001", "no manifest")])


def test_an_export_that_fails_leaves_the_last_good_checkpoint_and_no_rubbish(tmp_path: Path) -> None:
    good = save(tmp_path, 1)

    def fails(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_checkpoint(tmp_path / "step_000002", fails, {}, {})
    assert newest_checkpoint(tmp_path) == (good, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_kill_before_any_file_operation_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """D05: the one before, or the new one once it is whole; nothing else is left behind."""
    seen = set()
    for number in range(1, 200):
        root = tmp_path / str(number)
        save(root, 1)
        was_killed = killed_before_file_operation(number, root, lambda root=root: save(root, 2))
        at_once, _ = newest_checkpoint(root)
        assert at_once is not None and verify(at_once) is None
        sweep(root)
        newest, skipped = newest_checkpoint(root)
        assert newest is not None and skipped == [] and read_state(newest)["step"] == int(newest.name[-1])
        assert {path.name for path in root.iterdir()} == {"step_000001", newest.name}
        seen.add(newest.name)
        if not was_killed:
            break
    assert number > 15 and newest.name == "step_000002" and seen == {"step_000001", "step_000002"}


def test_a_kill_while_a_step_is_written_again_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """D05: there is a moment when neither stands under its name; `sweep` ends it, as at the start of every run."""
    notes = []
    for number in range(1, 200):
        root = tmp_path / str(number)
        save(root, 2, "old")
        was_killed = killed_before_file_operation(number, root, lambda root=root: save(root, 2, "new"))
        sweep(root)
        newest, skipped = newest_checkpoint(root)
        assert newest is not None and skipped == []
        notes.append(read_state(newest)["note"])
        assert [path.name for path in root.iterdir()] == ["step_000002"]
        if not was_killed:
            break
    assert notes == sorted(notes, reverse=True) and notes[0] == "old" and notes[-1] == "new"


def test_a_kill_while_pruning_leaves_what_is_kept(tmp_path: Path) -> None:
    for number in range(1, 100):
        root = tmp_path / str(number)
        for step in (1, 2):
            save(root, step)
        was_killed = killed_before_file_operation(number, root, lambda root=root: prune(root, 1, set()))
        sweep(root)
        left = sorted(path.name for path in root.iterdir())
        assert left in (["step_000001", "step_000002"], ["step_000002"])
        assert all(verify(root / name) is None for name in left)
        if not was_killed:
            break
    assert left == ["step_000002"]


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    """D05: 60 random flips over all files, the manifest and its white space too."""
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    files = [path for path in sorted(bad.rglob("*")) if path.is_file()]
    draw = random.Random(0)
    for _ in range(60):
        path = draw.choice(files)
        whole = path.read_bytes()
        at = draw.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ draw.randrange(1, 256)]) + whole[at + 1 :])
        newest, skipped = newest_checkpoint(tmp_path)
        assert newest == good and skipped[0][0] == "step_000002"
        path.write_bytes(whole)
    manifest = (bad / "MANIFEST.json").read_text()
    (bad / "MANIFEST.json").write_text(manifest.replace("\n", "\r", 1))  # still the same JSON
    assert verify(bad) == "MANIFEST.json has changed"


def test_a_disk_that_takes_no_more_is_an_os_error_and_leaves_nothing(tmp_path: Path) -> None:
    """safetensors has an error of its own for it. No file over 4 KB can be written here, the state is 40 KB."""
    good = save(tmp_path, 1)
    program = f"""
        import resource
        from pathlib import Path
        import torch
        from hotcold.checkpoint import write_checkpoint
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            moments = {{"w": torch.ones(10000)}}
            write_checkpoint(Path({str(tmp_path)!r}) / "step_000002", lambda _: None, {{"optimizer": moments}}, {{}})
        except OSError as error:
            print(error.errno)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(errno.EFBIG)]
    assert newest_checkpoint(tmp_path) == (good, []) and [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_a_rename_that_fails_puts_the_replaced_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, 1, "old")
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if "partial" in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="Input/output"):
        save(tmp_path, 1, "new")
    assert verify(folder) is None and read_state(folder)["note"] == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_state_without_tensors_is_read_back(tmp_path: Path) -> None:
    """A plain sgd has no state."""
    write_checkpoint(tmp_path / "step_000001", export, {"optimizer": {}}, {})
    assert read_tensors(tmp_path / "step_000001", "optimizer") == {}


def test_a_folder_that_could_not_be_filled_leaves_the_old_one(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", export)

    def fails(folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "model", fails)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_millionth_step_is_newer_than_the_one_before(tmp_path: Path) -> None:
    """Numbers, not names: "step_1000000" sorts before "step_999999"."""
    save(tmp_path, 999_999)
    newest = save(tmp_path, 1_000_000)
    assert newest_checkpoint(tmp_path) == (newest, [])


def test_a_cut_checkpoint_does_not_take_the_place_of_a_whole_one(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step_000003" / "model.safetensors").write_bytes(b"cut")
    prune(tmp_path, keep=2, always=set())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000004"]


def test_old_checkpoints_go_only_behind_a_newer_whole_one(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step_000004" / "MANIFEST.json").unlink()
    prune(tmp_path, keep=2, always={"step_000001"})
    # 4 is broken: the newest whole ones are 3 and 2; 1 is the best one and stays
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000002", "step_000003", "step_000004"]
    save(tmp_path, 4)
    prune(tmp_path, keep=2, always=set())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000004"]


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    write_checkpoint(folder, export, {}, {"step": "again"})
    assert read_state(folder) == {"step": "again"} and verify(folder) is None
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
