"""The one line of a step: what matters for the algorithm at hand, and nothing that it does not have."""

from __future__ import annotations

from typing import Any

from hotcold.training.console import step_line

SAMPLED = {
    "step": 17,
    "reward": 0.43751,
    "rewards/unscored": 0.0,
    "frac_reward_zero_std": 0.25,
    "loss": -0.0123456,
    "grad_norm": 0.871,
    "entropy": 0.4321,
    "completions/mean_length": 118.4,
    "optimizer_steps": 4,
    "time/step": 12.345,
}


def line(**changes: Any) -> str:
    return step_line({**SAMPLED, **changes}, 100, 1045.0)


def test_a_group_method_shows_score_groups_and_update() -> None:
    assert line() == (
        "step 17/100  reward 0.438  no-signal groups 0.25  loss -0.0123  grad norm 0.871  entropy 0.432  length 118  "
        "12.3 s  17 min left"
    )


def test_an_evaluation_stands_after_the_step() -> None:
    assert line(**{"eval/greedy": 0.845}).startswith("step 17/100  held-out 0.845  reward 0.438")


def test_a_leash_shows_its_kl_and_a_critic_what_it_explains() -> None:
    text = line(**{"kl": 0.00123, "value/loss": 0.02, "value/explained_variance": 0.41})
    assert "  kl 0.00123  explained variance 0.41  " in text
    assert "groups" not in text  # a critic needs none
    assert "kl" not in line() and "variance" not in line()


def test_a_warm_up_shows_the_critic_and_not_a_policy_that_is_not_trained() -> None:
    waiting = {"optimizer_steps": None, "loss": None, "grad_norm": None, "entropy": None}
    text = line(**waiting, **{"value/loss": 0.358, "value/explained_variance": None})
    assert text == (
        "step 17/100  reward 0.438  explained variance -  value loss 0.358  length 118  12.3 s  17 min left"
    )


def test_rows_of_a_data_set_have_a_loss_and_no_reward() -> None:
    rows = {"reward": None, "frac_reward_zero_std": None, "loss": 0.0735}
    text = line(**rows, **{"eval/loss": 0.0527})
    assert text.startswith("step 17/100  held-out loss 0.0527  loss 0.0735  grad norm 0.871")
    assert "reward" not in text and "groups" not in text


def test_scores_that_were_asked_for_and_not_given_are_shown_as_missing() -> None:
    assert "  reward -  " in line(reward=None, frac_reward_zero_std=None, **{"rewards/unscored": 8.0})


def test_the_fullest_line_fits_into_a_wide_window() -> None:
    everything = {"step": 8000, "eval/greedy": 0.845, "eval/loss": 1.2345, "kl": 0.00123, "grad_norm": 123.4}
    everything |= {"loss": -0.00123, "value/loss": 0.02, "value/explained_variance": -0.0123, "entropy": 0.00123}
    text = step_line({**SAMPLED, **everything, "reward": 0.0123}, 10000, 36000.0)
    assert len(text) <= 190
    without_evaluation = step_line({**SAMPLED, **everything, "eval/greedy": None, "eval/loss": None}, 10000, 36000.0)
    assert len(without_evaluation) <= 150
