import numpy as np
import pytest

from hotcold.sampling.counter import uniforms

MASK = 2**64 - 1


def philox_block(counter: int, key: int) -> list[int]:
    """Philox4x64-10 in plain integers, from the paper: multiply, swap, add the key; bump the key; ten rounds."""
    c = [counter >> 64 * i & MASK for i in range(4)]
    k = [key & MASK, key >> 64 & MASK]
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [b >> 64 ^ c[1] ^ k[0], b & MASK, a >> 64 ^ c[3] ^ k[1], a & MASK]
        k = [k[0] + 0x9E3779B97F4A7C15 & MASK, k[1] + 0xBB67AE8584CAA73B & MASK]
    return c


def test_the_plain_philox_of_this_test_gives_the_published_known_answer() -> None:
    # Random123's kat_vectors: philox4x64 10, counter 0, key 0
    known = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox_block(0, 0) == known


def test_uniforms_are_philox_words_at_the_position_under_the_documented_key() -> None:
    row = uniforms(seed=7, stream=2, draws=[5], samples=[3], num_tokens=6)[0]
    key = 7 | (2 << 60 | 5 << 20 | 3) << 64
    words = philox_block(1, key) + philox_block(2, key)  # numpy counts from 1, four words at each count
    assert row.tolist() == [(word >> 11) / 2**53 for word in words[:6]]


def test_a_row_does_not_depend_on_its_neighbours_its_place_or_the_length_asked_for() -> None:
    together = uniforms(1, 0, [9, 4, 4], [0, 1, 0], 20)
    assert (uniforms(1, 0, [4], [1], 5)[0] == together[1, :5]).all()
    assert (uniforms(1, 0, [4, 9], [0, 0], 20) == together[[2, 0]]).all()


def test_seed_stream_draw_and_sample_each_give_other_numbers() -> None:
    rows = [uniforms(*args, 4)[0] for args in [
        (0, 0, [0], [0]), (1, 0, [0], [0]), (0, 1, [0], [0]), (0, 0, [1], [0]), (0, 0, [0], [1]), (-1, 0, [0], [0])
    ]]  # fmt: skip
    assert len({tuple(row) for row in rows}) == 6


def test_draws_and_samples_at_their_limits_do_not_share_a_key() -> None:
    rows = uniforms(0, 0, [0, 1, 2**40 - 1], [2**20 - 1, 0, 2**20 - 1], 4)
    assert len(np.unique(rows)) == 12
    with pytest.raises(AssertionError):
        uniforms(0, 0, [0], [2**20], 4)
