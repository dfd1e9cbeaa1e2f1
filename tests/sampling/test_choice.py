import math

import pytest
import torch

from hotcold.sampling import choice
from hotcold.sampling.choice import choose, keep_mask

# probabilities 1/2, 1/4, 1/8, 1/8
LOGITS = torch.tensor([[math.log(4.0), math.log(2.0), 0.0, 0.0]])
GRID = (torch.arange(1024, dtype=torch.float64) + 0.5) / 1024


def counts(logits: torch.Tensor, **options: float) -> list[int]:
    ids, _ = choose(logits.expand(1024, -1), GRID, **options)  # type: ignore[arg-type]
    return torch.bincount(ids, minlength=logits.shape[1]).tolist()


def test_a_grid_of_uniforms_gives_each_token_its_exact_share() -> None:
    assert counts(LOGITS) == [512, 256, 128, 128]


def test_temperature_half_squares_the_probabilities() -> None:
    # weights 16, 4, 1, 1 of 22: ends at 16/22 and 20/22 and 21/22 of 1024 = 744.7, 930.9, 977.5; points at i + 1/2
    assert counts(LOGITS, temperature=0.5) == [745, 186, 46, 47]


def test_a_uniform_on_the_border_takes_the_next_token() -> None:
    ids, _ = choose(LOGITS.expand(4, -1), torch.tensor([0.0, 0.5, 0.75, 0.875], dtype=torch.float64))
    assert ids.tolist() == [0, 1, 2, 3]


def test_a_token_of_probability_zero_is_never_chosen_not_even_at_the_ends() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(4, -1)
    ids, logp = choose(logits, torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert ids.tolist() == [1, 1, 3, 3]
    assert logp.tolist() == pytest.approx([-math.log(2)] * 4)


def test_the_largest_uniform_is_inside_whatever_the_total_rounds_to() -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * 5
    ids, _ = choose(logits, torch.full((64,), 1 - 2**-53, dtype=torch.float64))
    assert ids.max() < 1000


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    ids, logp = choose(torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]]), None)
    assert ids.tolist() == [1, 0]
    # e / (1 + 2 e)
    assert logp.tolist() == pytest.approx([1 - math.log(1 + 2 * math.e)] * 2)


def test_log_probabilities_at_temperature_half_are_those_of_the_scaled_logits() -> None:  # A23
    ids, logp = choose(torch.tensor([[2.0, 0.0]] * 2), torch.tensor([0.5, 0.999], dtype=torch.float64), 0.5)
    assert ids.tolist() == [0, 1]
    assert logp.tolist() == pytest.approx([-0.018150, -4.018150], abs=1e-6)


def test_top_k_keeps_the_k_most_likely_and_the_lower_of_equal_ids() -> None:
    assert keep_mask(torch.tensor([[1.0, 4.0, 2.0, 1.0]]), top_k=3).tolist() == [[True, True, True, False]]
    assert counts(LOGITS, top_k=2) == [683, 341, 0, 0]  # 2/3 of 1024 = 682.67


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    weights = torch.tensor([[1.0, 4.0, 2.0, 1.0]])  # .125 .5 .25 .125
    assert keep_mask(weights, top_p=0.5).tolist() == [[False, True, False, False]]
    assert keep_mask(weights, top_p=0.51).tolist() == [[False, True, True, False]]
    assert keep_mask(weights, top_p=0.8).tolist() == [[True, True, True, False]]


def test_top_p_after_top_k_is_of_the_renormalised_rest() -> None:
    # of 4, 2 the first has 2/3 >= .6, though it has only 1/2 of the whole
    assert keep_mask(torch.tensor([[4.0, 2.0, 1.0, 1.0]]), top_k=2, top_p=0.6).tolist() == [[True, False, False, False]]


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert keep_mask(torch.tensor([[1.0, 4.0, 2.0, 0.9]]), min_p=0.25).tolist() == [[True, True, True, False]]


def test_the_most_likely_token_stays_whatever_the_filter() -> None:
    assert keep_mask(torch.tensor([[1.0, 4.0]]), top_p=0.0, min_p=1.0).tolist() == [[False, True]]


def test_filters_change_the_choice_and_not_the_log_probability() -> None:
    ids, logp = choose(LOGITS, torch.tensor([0.9], dtype=torch.float64), top_k=2)
    assert ids.tolist() == [1]
    assert logp.tolist() == pytest.approx([math.log(1 / 4)])


def test_rows_that_are_handled_in_slices_get_what_they_get_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    points = torch.linspace(0.05, 0.95, 7, dtype=torch.float64)
    alone = [choose(logits[i : i + 1], points[i : i + 1]) for i in range(7)]
    monkeypatch.setattr(choice, "SLICE", 100)  # two rows at a time
    ids, logp = choose(logits, points)
    assert ids.tolist() == [int(i) for i, _ in alone]
    assert logp.tolist() == [float(p) for _, p in alone]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_stops_the_sampling(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        choose(torch.tensor([[0.0, bad]]), torch.tensor([0.5], dtype=torch.float64))
