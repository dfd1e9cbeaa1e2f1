"""Whole runs whose reward in a file misbehaves."""

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.test_end_to_end import here, hotcold, metrics, train

__all__ = ["here"]  # the fixture


def test_a_run_with_a_flaky_reward_goes_on_with_the_responses_that_have_a_score(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of ten texts never get a score; which ones is a function of the text."""
    rule = "hashlib.sha256(completion.encode()).digest()[0] % 10 < 3"
    body = f"    if {rule}:\n        raise RuntimeError('flaky')\n    return float('a' in completion)\n"
    (here / "flaky.py").write_text(f"import hashlib\n\ndef reward(completion):\n{body}")
    assert train("reward=flaky.py", "learning_rate=0.02", "eval.every=0", steps=10) == 0
    out = capsys.readouterr().out
    assert out.count("RuntimeError: flaky") == 1 and "flaky.py:5" in out and "the response has no score" in out
    num_failed = 0
    for row in metrics("runs/one"):
        rollouts = pq.read_table(f"runs/one/rollouts/step_{row['step']:06d}.parquet").to_pylist()
        failed = [r for r in rollouts if hashlib.sha256(r["text"].encode()).digest()[0] % 10 < 3]
        assert [r for r in rollouts if r["reward"] is None] == failed
        assert all(r["reward"] == float("a" in r["text"]) for r in rollouts if r not in failed)
        assert row["rewards/failed"] == row["rewards/retried"] == row["rewards/unscored"] == len(failed)
        assert row["rewards/timeouts"] == row["rewards/workers_replaced"] == 0
        num_failed += len(failed)
    assert num_failed > 10


def test_a_reward_that_hangs_or_dies_each_time_stops_the_run_with_its_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "hangs.py").write_text("import time\n\ndef reward(completion):\n    time.sleep(1000)\n")
    assert train("reward=hangs.py", "reward_timeout=0.5", "eval.every=0") == 2
    message = capsys.readouterr().err
    assert "no answer within reward_timeout=0.5 s" in message and "hangs.py:4" in message
    assert not Path("runs/one").exists()
    (here / "dies.py").write_text("import os\n\ndef reward(completion):\n    os._exit(9)\n")
    assert train("reward=dies.py", "group_size=2", "eval.every=0") == 2
    message = capsys.readouterr().err
    assert "8 responses in a row ended their worker" in message and "exit code 9" in message and "dies.py" in message


def test_eval_takes_the_keys_of_rewards_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "fails.py").write_text("def reward(completion):\n    return float(completion)\n")
    words = ("eval", "model", "data=prompts.jsonl", "reward=fails.py", "max_tokens=3", "--json")
    assert hotcold(*words, "reward_on_error=0.25", "reward_max_failures=1") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["eval/sampled"] <= 9.0 and "the response is scored 0.25" in err
    assert hotcold(*words) == 2
    assert "responses have no score" in capsys.readouterr().err
    assert hotcold(*words[:3], "reward=exact", "reward_timeout=5") == 2
    assert "takes effect with a reward in a file" in capsys.readouterr().err
    assert hotcold(*words, "reward_workers=0", "reward_timeout=5") == 2
    assert "takes effect with reward_workers above 0" in capsys.readouterr().err
