"""Recorded rollouts: written and read back equal; what does not fit is refused by row and column."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


NUMBERS = st.floats(-1e38, 1e38)  # finite as float32
LOGPS = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)
IDS = st.lists(st.integers(0, 2**31), max_size=4)
COUNTS = st.integers(0, 2**40)


@st.composite
def any_rollout(draw: st.DrawFn, episode: int) -> Rollout:
    response = draw(IDS)
    length = {"min_size": len(response), "max_size": len(response)}
    steps = st.lists(st.tuples(st.integers(0, len(response) - 1), NUMBERS), max_size=3) if response else st.just([])
    return Rollout(
        prompt_ids=tuple(draw(IDS)),
        response_ids=tuple(response),
        group=draw(COUNTS),
        episode=episode,
        response_mask=draw(st.none() | st.lists(st.booleans(), **length).map(tuple)),
        reward=draw(st.none() | NUMBERS),
        steps=tuple(draw(steps)),
        logp_sampler=draw(st.none() | st.lists(LOGPS, **length).map(tuple)),
        truncated=draw(st.booleans()),
        version=draw(COUNTS),
        greedy_reward=draw(st.none() | NUMBERS),
        unit=draw(st.none() | COUNTS),
        parts=draw(st.dictionaries(st.text(), st.none() | NUMBERS, max_size=3)),
        text=draw(st.text()),
        prompt_text=draw(st.text()),
        finish_reason=draw(st.sampled_from(["", "stop", "length"])),
        prompt_index=draw(st.integers(-1, 9)),
        draw=draw(st.integers(-1, 9)),
    )


@settings(max_examples=40, deadline=None)
@given(step=st.integers(0, 10**6), drawn=st.tuples(*[any_rollout(episode) for episode in (3, 1, 2)]))
def test_any_rollouts_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, step: int, drawn: tuple[Rollout, ...]
) -> None:
    path = tmp_path_factory.mktemp("rollouts") / "r.parquet"
    write_rollouts(path, step, drawn)
    assert repr(read_rollouts(path)) == repr({step: list(drawn)})  # repr tells -0.0 from 0.0


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
        (
            {"steps": [[[5.0, 1.0]], None, None]},
            r"row 0: steps has position 5.0, value 1.0; the response has 2 tokens",
        ),
        ({"group": [0, None, 1]}, r"row 1: group is null"),
        ({"group": [0, 5, 1], "episode": [7, 7, 7]}, r"step 4: the episode 7 is in the groups 0 and 5"),
        ({"prompt_ids": [["1"], ["1"], ["2"]]}, r"column prompt_ids is list<.*string>, list<.*int64> is needed"),
        ({"prompt_ids": [1, 2, 3]}, r"column prompt_ids is int64"),
        ({"group": [0.0, 0.5, 1.0]}, r"column group is double, int64 is needed"),
        ({"steps": [[[0.5, 1.0]], None, None]}, r"row 0: steps has position 0.5"),
        ({"steps": [None, [[0.0]], None]}, r"row 1: steps has \[0.0\]"),
        ({"steps": [0.5, None, None]}, r"row 0: steps is 0.5; a list of pairs"),
        ({"steps": [None, None, [[0.0, float("nan")]]]}, r"row 2: steps has position 0.0, value nan"),
        ({"steps": [None, [None], None]}, r"row 1: steps has None"),
        ({"steps": [None, None, [{"position": 0, "value": None}]]}, r"row 2: steps has {'position': 0, 'value': None}"),
        ({"logp_sampler": [[-1.0, float("nan")], [-1.0], [-1.0]]}, r"row 0: logp_sampler .* not finite"),
        ({"logp_sampler": [[-1.0, None], [-1.0], [-1.0]]}, r"row 0: logp_sampler has a null entry"),
        ({"logp_sampler": [[-1.0, -1.0], [0.25], [-1.0]]}, r"row 1: logp_sampler has 0.25; .* never above 0"),
        ({"reward": [1.0, 0.0, 1e300]}, r"row 2: reward is 1e\+300.*float32"),
        ({"greedy_reward": [None, -1e39, None]}, r"row 1: greedy_reward is -1e\+39.*float32"),
        ({"steps": [[[0.0, 1e39]], None, None]}, r"row 0: steps has position 0.0, value 1e\+39"),
        ({"reward": [3e38, 0.0, 1.0], "steps": [[[0.0, 3e38]], None, None]}, r"row 0: .* 6e\+38"),
        ({"greedy_reward": [None, float("inf"), None]}, r"row 1: greedy_reward is inf"),
        ({"parts": ["{}", "[1]", "{}"]}, r"row 1: parts is no JSON object"),
        ({"parts": ["{}", "{", "{}"]}, r"row 1: parts is no JSON object"),
        (
            {"response_masks": [[True, True], [True], [True]]},
            r'response_masks is not known. Did you mean "response_mask"',
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ReplayRollouts(write(tmp_path / "r.parquet", rows(**changes)))


def test_columns_of_ones_own_and_narrow_types_are_read(tmp_path: Path) -> None:
    """The ids as int32, rewards as int8 and as bool, a column that means nothing here."""
    table = pa.table(rows(prompt=["a", "b", "c"], logp=[0.0, 0.0, 0.0]))
    table = table.set_column(4, "response_ids", pa.array([[5, 6], [7], [8]], pa.list_(pa.int32())))
    for rewards in (pa.array([1, None, 0], pa.int8()), pa.array([True, None, False])):
        pq.write_table(table.set_column(5, "reward", rewards), tmp_path / "r.parquet")
        read = read_rollouts(tmp_path / "r.parquet")
        assert [(r.response_ids, r.reward) for r in read[4]] == [((5, 6), 1.0), ((7,), None)]
        assert [(r.response_ids, r.reward) for r in read[9]] == [((8,), 0.0)]


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


def test_a_log_probability_may_be_a_rounding_error_above_0(tmp_path: Path) -> None:
    columns = rows(logp_sampler=[[1e-6, -1.0], [0.0], [-1.0]])
    assert ReplayRollouts(write(tmp_path / "r.parquet", columns)).rollouts(1)[0].logp_sampler == (1e-6, -1.0)


def test_the_name_of_a_folder_is_no_column(tmp_path: Path) -> None:
    (tmp_path / "step=77").mkdir()
    assert ReplayRollouts(write(tmp_path / "step=77" / "r.parquet", rows())).steps == [4, 9]
