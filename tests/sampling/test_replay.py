"""Recorded rollouts: written and read back equal; what does not fit is refused by row and column."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotcold.batch import Rollout
from hotcold.errors import InputError
from hotcold.sampling.replay import ReplayRollouts
from hotcold.sampling.rollout_files import read_rollouts, write_rollouts

FULL = Rollout(
    prompt_ids=(5, 6),
    response_ids=(7, 8, 2),
    group=11,
    episode=4,
    response_mask=(True, False, True),
    reward=0.25,
    steps=((0, 0.5), (2, -1.0)),
    logp_sampler=(-0.5, -1.25, -0.125),
    truncated=True,
    version=3,
    greedy_reward=1.0,
    unit=9,
    parts={"reward": 0.25, "format": None},
    text="a\ufffd\U0001f604",
    prompt_text="q",
    finish_reason="length",
    prompt_index=17,
    draw=11,
)
BARE = Rollout(prompt_ids=(5,), response_ids=(), group=0, episode=0)


def test_every_field_comes_back_as_it_was(tmp_path: Path) -> None:
    """B04: text with a replacement character and an emoji too."""
    write_rollouts(tmp_path / "r.parquet", 10, [FULL, BARE])
    assert read_rollouts(tmp_path / "r.parquet") == {10: [FULL, BARE]}


def rows(**changes: Any) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "step": [4, 4, 9],
        "group": [0, 0, 1],
        "episode": [0, 1, 2],
        "prompt_ids": [[1], [1], [2, 3]],
        "response_ids": [[5, 6], [7], [8]],
        "reward": [1.0, None, 0.5],
    }
    return {**columns, **changes}


def write(path: Path, columns: dict[str, list[Any]]) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_steps_are_taken_in_order_and_null_is_no_score(tmp_path: Path) -> None:
    replay = ReplayRollouts(write(tmp_path / "r.parquet", rows()))
    assert replay.steps == [4, 9]
    assert [r.reward for r in replay.rollouts(1)] == [1.0, None]
    assert [r.response_ids for r in replay.rollouts(2)] == [(8,)]
    assert replay.rollouts(1)[0].response_mask is None  # absent: all true
    with pytest.raises(InputError, match="has 2 steps"):
        replay.rollouts(3)


def test_intermediate_rewards_may_be_pairs(tmp_path: Path) -> None:
    columns = rows(steps=[[[0.0, 0.5], [1.0, 1.5]], None, []])
    assert ReplayRollouts(write(tmp_path / "r.parquet", columns)).rollouts(1)[0].steps == ((0, 0.5), (1, 1.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_mask": [[True], [True], [True]]}, r"row 0: response_mask has 1 entries, response_ids has 2"),
        ({"logp_sampler": [[-1.0, -1.0], [-1.0, -2.0], [-1.0]]}, r"row 1: logp_sampler has 2 entries"),
        ({"reward": [1.0, float("nan"), 0.0]}, r"row 1: reward is nan.*null"),
        ({"reward": ["1", "0", "1"]}, r"column reward is string, double is needed"),
        ({"response_ids": [[5, -6], [7], [8]]}, r"row 0: response_ids .* negative"),
        ({"prompt_ids": [[1], None, [2]]}, r"row 1: prompt_ids is null"),
        ({"steps": [[[5.0, 1.0]], None, None]}, r"row 0: steps has \(5, 1.0\); the response has the tokens 0 to 1"),
        ({"group": [0, None, 1]}, r"row 1: group is null"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ReplayRollouts(write(tmp_path / "r.parquet", rows(**changes)))


def test_a_missing_column_an_empty_file_and_no_parquet_are_errors(tmp_path: Path) -> None:
    columns = rows()
    del columns["reward"]
    with pytest.raises(InputError, match="lacks the column reward"):
        ReplayRollouts(write(tmp_path / "r.parquet", columns))
    empty = pa.table(rows()).slice(0, 0)
    pq.write_table(empty, tmp_path / "empty.parquet")
    with pytest.raises(InputError, match="no row"):
        ReplayRollouts(str(tmp_path / "empty.parquet"))
    (tmp_path / "text.parquet").write_text("step,group\n")
    with pytest.raises(InputError, match="could not be read as parquet"):
        ReplayRollouts(str(tmp_path / "text.parquet"))
    with pytest.raises(InputError, match="no such file"):
        ReplayRollouts(str(tmp_path / "none.parquet"))
