"""Notes on a run that goes nowhere: when they come, what they say, and that they come once."""

from __future__ import annotations

from typing import Any

from hotcold.training.health import first_step_note, notes


def step(**changes: Any) -> dict[str, Any]:
    healthy = {
        "frac_reward_zero_std": 0.3,
        "completions/truncated": 0.1,
        "completions/distinct": 0.9,
        "completions/repeated": 0.1,
        "entropy": 1.2,
        "reward": 0.4,
        "loss": 0.0,
        "grad_norm": 1.0,
    }
    return {**healthy, **changes}


def said(history: list[dict[str, Any]]) -> list[list[str]]:
    """What is said after each step."""
    return [notes(history[: i + 1]) for i in range(len(history))]


def test_a_healthy_run_says_nothing() -> None:
    assert said([step()] * 6) == [[]] * 6
    assert notes([]) == []


def test_everything_truncated_without_signal_is_said_at_the_third_step_once() -> None:
    """E02: names the truncated share and the zero-signal share, both 1."""
    bad = step(**{"frac_reward_zero_std": 1.0, "completions/truncated": 1.0, "reward": 0.0})
    first, second, third, fourth, fifth = said([bad] * 5)
    assert first == second == fourth == fifth == []
    (text,) = third
    assert "zero-variance groups 1.00" in text and "truncated 1.00" in text and "max_tokens" in text


def test_no_signal_without_truncation_names_other_remedies() -> None:
    (text,) = notes([step(frac_reward_zero_std=1.0, reward=0.0)] * 3)
    assert "group_size" in text and "max_tokens" not in text


def test_a_new_spell_is_said_anew() -> None:
    bad, good = step(frac_reward_zero_std=1.0), step()
    counts = [len(texts) for texts in said([bad, bad, good, bad, bad, bad, bad, good, bad, bad, bad])]
    assert counts == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]


def test_a_share_just_below_one_is_a_signal() -> None:
    assert notes([step(frac_reward_zero_std=0.97)] * 3) == []
    assert notes([step(frac_reward_zero_std=None)] * 3) == []  # groups of one have no spread


def test_a_collapse_names_entropy_distinct_and_repeated_shares() -> None:
    """E05: entropy below .01."""
    bad = step(entropy=0.004, **{"completions/distinct": 0.02, "completions/repeated": 0.7})
    (text,) = notes([step(), bad, bad, bad])
    assert "4.0e-03" in text and "distinct responses 0.02" in text and "repeated text 0.70" in text
    assert notes([step(entropy=0.02)] * 3) == []


def test_a_collapse_is_seen_where_no_row_was_computed() -> None:
    """All responses equal: no group has a signal, every row is skipped and there is no entropy to report."""
    bad = step(entropy=None, frac_reward_zero_std=1.0, **{"completions/distinct": 0.02})
    (text,) = notes([bad] * 3)
    assert "distinct responses 0.02" in text and "all the same" in text


def test_a_first_loss_near_zero_is_explained_with_its_gradient() -> None:
    """E01."""
    text = first_step_note(step(loss=3e-9, grad_norm=0.8))
    assert text is not None and "0.8" in text and "by construction" in text
    assert first_step_note(step(loss=0.4, grad_norm=0.8)) is None
    assert first_step_note(step(loss=0.0, grad_norm=0.0)) is None  # nothing was learnt: another matter
    assert first_step_note(step(loss=None)) is None


def test_nothing_to_train_on_is_said_where_there_are_no_groups_to_compare() -> None:
    """Expert iteration that keeps nothing, or a batch mean that equals every score of groups of one."""
    bad = step(frac_reward_zero_std=None, **{"rows/trained": 0, "rows/dropped": 8, "rows/skipped": 0, "reward": 0.0})
    (text,) = notes([bad] * 3)
    assert "3 steps without a response to train on (8 dropped" in text
    assert notes([bad] * 2) == [] and notes([bad] * 4) == []  # once, and not before the third
