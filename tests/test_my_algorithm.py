"""recipes/my_algorithm.py, the example of docs/your_algorithm.md: built as the command line builds it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hotcold.algorithms.base import Algorithm, TokenLoss
from hotcold.algorithms.build import build_algorithm
from hotcold.algorithms.checks import check_algorithm
from hotcold.batch import Rollout, collate
from hotcold.equations import importance_weighted
from hotcold.errors import InputError
from tests.toy_policies import EXACT, T1, T2, assert_close, expected_update

ROOT = Path(__file__).parents[1]


def my_algorithm(group_size: int) -> Algorithm:
    return build_algorithm(f"{ROOT / 'recipes' / 'my_algorithm.py'}:MyAlgorithm", {"group_size": group_size}, 32)


def test_the_advantage_is_the_score_minus_the_median_of_the_others() -> None:
    # Group 5: scores 1, 0, 4; medians of the others: (0 + 4)/2 = 2, (1 + 4)/2 = 2.5, (1 + 0)/2 = 0.5.
    # Group 2: scores 3, 7; each other's score. Rows are mixed; the second response of group 5 has two tokens.
    rows = [(5, 1.0, 1), (2, 3.0, 1), (5, 0.0, 2), (2, 7.0, 1), (5, 4.0, 1)]
    batch = collate([Rollout((9,), (1,) * n, group, i, reward=r) for i, (group, r, n) in enumerate(rows)])
    algorithm = my_algorithm(3)
    assert bool(algorithm.keep(batch).all())
    credited, _ = algorithm.credit(batch, algorithm.state())
    assert credited.advantages is not None
    expected = [[0, -1.0, 0], [0, -4.0, 0], [0, -2.5, -2.5], [0, 4.0, 0], [0, 3.5, 0]]
    assert credited.advantages.tolist() == expected


def test_a_response_that_has_lost_its_group_is_not_kept() -> None:
    scores = [1.0, None, 0.0, 1.0]
    batch = collate([Rollout((9,), (1,), i // 2, i, reward=r) for i, r in enumerate(scores)])
    assert (my_algorithm(2).keep(batch) & batch.keep).tolist() == [False, False, True, True]


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_its_expected_gradient_is_grad_j(group_size: int) -> None:
    """The check of a new baseline that docs/your_algorithm.md shows: all groups of all responses, by probability."""
    expected = expected_update(T1, my_algorithm(group_size), [0] * group_size)
    assert_close(-expected.gradient, EXACT["T1"]["grad_J"])


def test_its_expected_gradient_is_grad_j_where_lengths_vary() -> None:
    expected = expected_update(T2, my_algorithm(3), [0, 0, 0])
    assert_close(-expected.gradient[:, 1], EXACT["T2"]["grad_J"])


def test_it_passes_the_checks_of_a_run_and_refuses_a_group_of_one() -> None:
    check_algorithm(my_algorithm(8), prompts_per_step=4)
    with pytest.raises(InputError, match="group_size=1"):
        my_algorithm(1)


def test_an_option_that_it_does_not_have_is_named() -> None:
    with pytest.raises(InputError, match="clip_low has no effect"):
        build_algorithm(f"{ROOT / 'recipes' / 'my_algorithm.py'}:MyAlgorithm", {"clip_low": 0.1}, 32)


def test_the_page_shows_the_recipe_as_it_is() -> None:
    page = (ROOT / "docs" / "your_algorithm.md").read_text(encoding="utf-8")
    recipe = (ROOT / "recipes" / "my_algorithm.py").read_text(encoding="utf-8")
    assert recipe.split('"""\n', 1)[1].strip() in page


def test_the_loss_of_the_page_has_the_policy_gradient_and_reports_its_metric() -> None:
    page = (ROOT / "docs" / "your_algorithm.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"torch": torch, "TokenLoss": TokenLoss, "importance_weighted": importance_weighted}
    exec(page.split("```python\ndef my_loss")[1].split("```")[0].join(["def my_loss", ""]), names)
    algorithm = my_algorithm(2)

    class WithMyLoss:
        plan, reads, state, keep, credit = (
            algorithm.plan,
            algorithm.reads,
            algorithm.state,
            algorithm.keep,
            algorithm.credit,
        )
        objectives = (replace(algorithm.objectives[0], loss=names["my_loss"]),)

    expected = expected_update(T1, WithMyLoss(), [0, 0])
    assert_close(-expected.gradient, EXACT["T1"]["grad_J"])
    # Groups of equal scores are skipped and report nothing; everywhere else the ratio is 1.
    prob = EXACT["T1"]["prob"]["theta"]
    assert expected.metrics["ratio/mean"] == pytest.approx(1 - sum(p * p for p in prob))


def test_a_median_that_counts_the_response_itself_is_not_grad_j() -> None:
    """That the check above can fail: the same algorithm, but each response is among its own others."""
    algorithm = my_algorithm(3)

    class Biased:
        plan, reads, objectives = algorithm.plan, algorithm.reads, algorithm.objectives

        def state(self) -> dict[str, float]:
            return {}

        def keep(self, batch):  # type: ignore[no-untyped-def]
            return torch.ones_like(batch.keep)

        def credit(self, batch, state):  # type: ignore[no-untyped-def]
            advantages = (batch.rewards - batch.rewards.quantile(0.5))[:, None]
            return batch.replace(advantages=torch.where(batch.response_mask, advantages, 0.0)), state

    gradient = -expected_update(T1, Biased(), [0, 0, 0]).gradient
    assert float((gradient - torch.tensor(EXACT["T1"]["grad_J"])).abs().max()) > 0.01
