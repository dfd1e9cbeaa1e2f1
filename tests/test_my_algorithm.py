"""The examples of docs/your_algorithm.md, built as the command line builds them; one is recipes/my_algorithm.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hotcold.algorithms.base import Algorithm, TokenLoss
from hotcold.algorithms.build import build_algorithm
from hotcold.algorithms.checks import check_algorithm
from hotcold.algorithms.rehearsal import rehearse
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


# ------------------------------------------------------------------ the example with a leash, a critic and a state


@pytest.fixture(scope="module")
def scaled_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The block of the page in a file of its own."""
    page = (ROOT / "docs" / "your_algorithm.md").read_text(encoding="utf-8")
    (block,) = [
        text.split("```")[0] for text in page.split("```python\n")[1:] if "class Scaled" in text.split("```")[0]
    ]
    file = tmp_path_factory.mktemp("page") / "scaled.py"
    file.write_text(block, encoding="utf-8")
    return file


LEASH = {"beta": 0.7}
ESTIMATES: dict[str, dict[str, Any]] = {"k1": {}, "exact": {"kl.estimator": "exact"}}


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_its_expected_gradient_is_that_of_the_scaled_score_less_the_leash(scaled_file: Path, estimate: str) -> None:
    """grad J / 2 - 0.7 grad KL for a size of 2 and any critic."""
    options = {"size": 2.0, **LEASH, **ESTIMATES[estimate]}
    algorithm = build_algorithm(f"{scaled_file}:Scaled", options, 32)
    expected = expected_update(T1, algorithm, [0, 1], reference=EXACT["T1"]["ref"], critic=T1.critic([0.3, -0.2, 0.9]))
    grad_j, grad_kl = (
        torch.tensor(g, dtype=torch.float64) for g in (EXACT["T1"]["grad_J"], EXACT["kl_on_T1"]["grad_reverse_kl"])
    )
    assert_close(-expected.gradient, grad_j / 2 - 0.7 * grad_kl)
    # The size of a score, over all choices of two responses: the mean of |r|, which are not negative here.
    assert_close(expected.metrics["score/size"], EXACT["T1"]["J"])
    assert expected.metrics["beta"] == pytest.approx(0.7)


def test_it_passes_the_checks_of_a_run_with_and_without_a_leash(scaled_file: Path) -> None:
    for options in ({}, LEASH, {**LEASH, "kl.target": 1.0}, {"critic.warmup": 2}):
        algorithm = build_algorithm(f"{scaled_file}:Scaled", dict(options), 32)
        check_algorithm(algorithm, prompts_per_step=4)
        rehearse(algorithm)
    assert algorithm.objectives[0].start == 2


def test_the_size_is_carried_from_step_to_step_beside_a_beta_that_moves(scaled_file: Path) -> None:
    # Scores 4 and 0: size 2; 0.9 * 1 + 0.1 * 2 = 1.1. log pi = log ref: KL 0, far below its target of 1, so beta falls
    # by a fifth of 2 responses over a horizon of 8: 0.7 (1 - 0.2 * 2 / 8) = 0.665.
    words = {**LEASH, "kl.target": 1.0, "kl.horizon": 8.0}
    algorithm = build_algorithm(f"{scaled_file}:Scaled", words, 32)
    batch = collate([Rollout((9,), (1, 2), 0, i, reward=r) for i, r in enumerate([4.0, 0.0])], dtype=torch.float64)
    zeros = torch.zeros_like(batch.token_rewards)
    batch = batch.replace(logp_old=zeros, logp_ref=zeros, values_old=zeros + 0.5)
    assert algorithm.state() == {"size": 1.0, "beta": 0.7}
    credited, state = algorithm.credit(batch, algorithm.state())
    assert state == pytest.approx({"size": 1.1, "beta": 0.665})
    assert credited.advantages is not None
    assert credited.advantages.tolist() == [[0.0, 3.5, 3.5], [0.0, -0.5, -0.5]]
    again, _ = algorithm.credit(batch, {"size": 4.0, "beta": 0.7})  # a size of 4 divides the scores by 4
    assert again.advantages is not None and again.advantages.tolist() == [[0.0, 0.5, 0.5], [0.0, -0.5, -0.5]]
