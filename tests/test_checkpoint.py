"""Checkpoints are whole or do not count."""

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from hotcold.checkpoint import newest_checkpoint, prune, read_state, read_tensors, verify, write_checkpoint


def export(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")


def save(root: Path, step: int) -> Path:
    folder = root / f"step_{step:06d}"
    write_checkpoint(folder, export, {"optimizer": {"w.exp_avg": torch.full((2,), float(step))}}, {"step": step})
    return folder


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    assert verify(folder) is None
    assert read_state(folder) == {"step": 3}
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


def test_a_kill_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """D05, with a real SIGKILL after the weights are on disk and before the state is."""
    good = save(tmp_path, 1)
    program = f"""
        import os, signal
        from pathlib import Path
        from hotcold.checkpoint import write_checkpoint
        def export(folder):
            (folder / "model.safetensors").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        write_checkpoint(Path({str(tmp_path)!r}) / "step_000002", export, {{}}, {{}})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert newest_checkpoint(tmp_path) == (good, [])
    save(tmp_path, 2)  # sweeps what the kill left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


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
