import pytest

from hotcold.equations import pass_at_k

from .exact_policies import EXACT, assert_equal, f64


@pytest.mark.parametrize("case", EXACT["pass_at_k"])
def test_pass_at_k_by_hand(case):
    result = pass_at_k(case["num_samples"], case["num_correct"], case["k"])
    assert_equal(f64(result), case["result"])


def test_pass_at_1_is_the_share_and_pass_at_all_asks_for_one():
    assert pass_at_k(8, 3, 1) == 0.375
    assert pass_at_k(8, 1, 8) == 1.0
    assert pass_at_k(1, 1, 1) == 1.0 and pass_at_k(1, 0, 1) == 0.0


@pytest.mark.parametrize(
    "n, c, k", [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1), (4, 1, 1.5), (4, 1, float("nan")), (4, "x", 1)]
)
def test_impossible_counts_are_errors(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)
