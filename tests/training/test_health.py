"""Notes on a run that goes nowhere: when they come, what they say, and that they come once."""

from __future__ import annotations

from typing import Any

import pytest

from hotcold.training.health import RULES, Rule, correlation, first_step_note, notes, spells


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


def test_equal_scores_for_each_prompt_are_a_signal_where_prompts_are_compared() -> None:
    """A critic or a batch mean trains these rows. Where every score of the step is equal, nobody learns anything."""
    by_prompt = step(frac_reward_zero_std=1.0, **{"rows/trained": 8, "rewards/exact/std": 0.5})
    assert said([by_prompt] * 4) == [[]] * 4
    same = {**by_prompt, "rewards/exact/std": 0.0}
    assert "without any signal" in notes([same] * 3)[0]
    skipped = {**by_prompt, "rows/trained": 0}  # a group method
    assert "without any signal" in notes([skipped] * 3)[0]


def test_a_critic_that_warms_up_trains_no_row_of_the_policy_and_that_is_no_fault() -> None:
    waiting = step(entropy=None, **{"rows/trained": None, "optimizer_steps": None, "learning_rate": 0.0})
    assert said([waiting] * 6) == [[]] * 6


# ------------------------------------------------------------------ critic


def test_a_score_that_hardly_reaches_the_first_token_is_said_with_its_share_and_length() -> None:
    """lam 0.95 and 100 tokens: 0.95^99 = 0.00623; at 59 tokens 0.95^58 = 0.051, which is enough."""
    bad = step(**{"gae/score_weight": 0.95**99, "completions/mean_length": 100.0})
    first, second, third, fourth = said([bad] * 4)
    assert first == second == fourth == []
    (text,) = third
    assert "0.62 %" in text and "100 tokens" in text and "lam=1" in text
    assert notes([step(**{"gae/score_weight": 0.95**58})] * 3) == []
    assert notes([step(**{"gae/score_weight": 1.0})] * 3) == []


def critic(number: int, explained: float | None, **changes: Any) -> dict[str, Any]:
    return step(step=number, learning_rate=1e-5, **{"value/explained_variance": explained}, **changes)


def test_a_critic_worse_than_a_constant_is_said_once_the_first_ten_steps_are_over() -> None:
    """Steps 11 to 15 are the first five that count."""
    texts = said([critic(number, -0.3) for number in range(1, 18)])
    assert [number for number, found in enumerate(texts, 1) if found] == [15]
    assert "-0.30" in texts[14][0] and "critic.warmup" in texts[14][0]


def test_steps_of_warm_up_are_not_held_against_a_critic() -> None:
    """The policy's rate is 0 up to step 20: the note comes at step 25."""
    history = [critic(number, -0.3) for number in range(1, 27)]
    history = [m if m["step"] > 20 else {**m, "learning_rate": 0.0} for m in history]
    assert [number for number, found in enumerate(said(history), 1) if found] == [25]


def test_a_critic_that_is_right_or_has_nothing_to_explain_is_left_alone() -> None:
    for explained in (0.0, 0.6, None):  # a constant; a good one; returns that are all equal
        assert said([critic(number, explained) for number in range(11, 18)]) == [[]] * 7
    alternating = [critic(number, -0.3 if number % 4 else 0.1) for number in range(11, 31)]
    assert said(alternating) == [[]] * 20


# ------------------------------------------------------------------ the size of a step


def several(clip: float | None, largest: float | None, **changes: Any) -> dict[str, Any]:
    """A step with several optimiser steps on its batch."""
    seen = {"clip_fraction": clip, "ratio/max": largest, "approx_kl": 0.02, "optimizer_steps": 4}
    return step(learning_rate=1e-5, **seen, **changes)


def test_several_steps_that_never_clip_are_said_at_the_fifth_step() -> None:
    texts = said([several(0.0, 1.0004)] * 7)
    assert [number for number, found in enumerate(texts, 1) if found] == [5]
    assert "1.0004" in texts[4][0] and "learning rate" in texts[4][0]


def test_a_clip_fraction_that_does_not_exist_or_cannot_move_is_no_fault() -> None:
    """E01: null with one optimiser step; a rate of 0; a batch without signal; wide bounds that ratios stay within."""
    healthy = [
        several(None, None),
        {**several(0.0, 1.0), "learning_rate": 0.0},
        {**several(0.0, 1.0), "optimizer_steps": 0},
        {**several(0.0, 1.0), "optimizer_steps": 1},  # the leash in the reward asks for log pi_old all the same
        several(0.0, 3.5),
        several(0.04, 1.6),
        several(0.3, 1.6),
    ]
    for metrics in healthy:
        assert said([metrics] * 7) == [[]] * 7


def test_a_batch_most_of_which_is_clipped_is_said_at_the_third_step() -> None:
    texts = said([several(0.45, 2.5)] * 5)
    assert [number for number, found in enumerate(texts, 1) if found] == [3]
    assert "0.45" in texts[2][0] and "approx_kl 0.02" in texts[2][0] and "epochs_per_batch" in texts[2][0]


def test_a_norm_that_cuts_every_step_is_said_at_the_fifth_with_the_norm_and_the_key() -> None:
    texts = said([step(grad_norm=17.3, **{"grad_norm/clipped": 1.0})] * 7)
    assert [number for number, found in enumerate(texts, 1) if found] == [5]
    assert "17.3" in texts[4][0] and " max_grad_norm" in texts[4][0] and "critic" not in texts[4][0]
    of_critic = {"value/grad_norm": 40.0, "value/grad_norm_clipped": 1.0, "grad_norm/clipped": 0.5}
    (text,) = notes([step(**of_critic)] * 5)
    assert "value/grad_norm 40" in text and "critic.max_grad_norm" in text


def test_a_norm_that_cuts_some_steps_or_no_step_is_no_fault() -> None:
    for share in (0.75, 0.0, None):  # three of four optimiser steps; none; no limit is set
        assert said([step(**{"grad_norm/clipped": share})] * 7) == [[]] * 7


# ------------------------------------------------------------------ the leash


def leash(response: float, per_token: float = 0.01, **changes: Any) -> dict[str, Any]:
    kl = {"kl": per_token, "kl/response": response, "beta": 0.05, "kl/target": 2.0}
    return step(learning_rate=1e-5, optimizer_steps=1, **{**kl, **changes})


def test_a_kl_above_twice_its_target_is_said_with_both_and_beta() -> None:
    texts = said([leash(4.5)] * 5)
    assert [number for number, found in enumerate(texts, 1) if found] == [3]
    assert all(part in texts[2][0] for part in ("4.5", "kl/target 2", "beta 0.05", "kl.horizon"))
    assert said([leash(4.0)] * 5) == [[]] * 5  # twice the target itself is the limit
    no_target = leash(50.0)
    del no_target["kl/target"]
    assert said([no_target] * 5) == [[]] * 5


def test_a_kl_that_stays_exactly_zero_while_the_policy_is_trained_is_said() -> None:
    """D07: policy and reference are one object."""
    stuck = leash(0.0, per_token=0.0)
    texts = said([stuck] * 7)
    assert [number for number, found in enumerate(texts, 1) if found] == [5]
    assert "exactly 0" in texts[4][0] and "reference" in texts[4][0] and "beta 0.05" in texts[4][0]


def test_a_kl_of_zero_is_no_fault_where_nothing_moves_or_nothing_holds() -> None:
    """At the first step both are one model; a rate of 0, a warm-up or an empty batch moves nothing."""
    stuck = leash(0.0, per_token=0.0)
    unmoved = [
        {**stuck, "learning_rate": 0.0},
        {**stuck, "optimizer_steps": 0},
        {**stuck, "optimizer_steps": None},
        {**stuck, "beta": 0.0},
        {**stuck, "kl": None},
    ]
    for metrics in unmoved:
        assert said([metrics] * 7) == [[]] * 7
    assert said([stuck, *[leash(0.1)] * 6]) == [[]] * 7


# ------------------------------------------------------------------ what the responses are like


def first_said(history: list[dict[str, Any]]) -> list[int]:
    return [number for number, found in enumerate(said(history), 1) if found]


def test_many_truncated_responses_are_said_at_the_fifth_step() -> None:
    bad = step(**{"completions/truncated": 0.31, "completions/max_length": 64.0})
    assert first_said([bad] * 7) == [5]
    (text,) = notes([bad] * 5)
    assert "0.31" in text and "64 tokens" in text and "max_tokens" in text and "truncated=mask" in text
    assert said([step(**{"completions/truncated": 0.3})] * 7) == [[]] * 7


def test_responses_that_are_nearly_all_the_same_are_said_while_the_reward_is_low() -> None:
    bad = step(frac_reward_zero_std=0.85, **{"completions/distinct": 0.04, "rewards/exact/mean": 0.4})
    assert first_said([bad] * 7) == [5]
    (text,) = notes([bad] * 5)
    assert "0.04" in text and "0.85" in text and "reward of 0.4" in text
    for change in ({"completions/distinct": 0.05}, {"frac_reward_zero_std": 0.8}, {"rewards/exact/mean": 0.9}):
        assert said([{**bad, **change}] * 7) == [[]] * 7


def test_little_signal_is_said_at_the_fifth_step_unless_the_reward_is_high() -> None:
    bad = step(frac_reward_zero_std=0.95, **{"rewards/exact/mean": 0.05})
    assert first_said([bad] * 7) == [5]
    assert "0.95 of the prompts" in notes([bad] * 5)[0] and "group_size" in notes([bad] * 5)[0]
    for change in ({"frac_reward_zero_std": 0.9}, {"rewards/exact/mean": 0.95}):
        assert said([{**bad, **change}] * 7) == [[]] * 7


def test_a_reward_at_its_top_without_spread_is_saturation_and_not_a_lack_of_signal() -> None:
    done = step(reward=0.99, frac_reward_zero_std=1.0, **{"rewards/exact/mean": 0.99})
    learnt = step(reward=0.9, frac_reward_zero_std=0.5, **{"rewards/exact/mean": 0.9})
    assert first_said([learnt, *[done] * 7]) == [6]
    assert first_said([done] * 7) == [3, 5]  # a constant score looks the same, and teaches nothing
    (text,) = notes([done] * 5)
    assert "at its top" in text and "stop_at" in text and "without any signal" not in text
    assert said([{**done, "frac_reward_zero_std": 0.96}] * 7) == [[]] * 7
    assert "without any signal" in notes([{**done, "rewards/exact/mean": 0.97}] * 3)[0]


def rising(length_after: float, reward_after: float, noise: float = 0.0) -> list[dict[str, Any]]:
    """20 steps in which length (from 40) and reward (from 0.2) rise on a line, the reward with a saw-tooth on it."""
    rows = []
    for i in range(20):
        reward = 0.2 + (reward_after - 0.2) * i / 19 + noise * (-1) ** i
        rows.append(step(reward=reward, **{"completions/mean_length": 40 + (length_after - 40) * i / 19}))
    return rows


def test_length_that_grows_with_the_reward_is_said_once_the_window_is_full() -> None:
    """From step 16 on there is a window; the third look in a row is at step 18. Two straight lines: correlation 1."""
    history = rising(100.0, 0.8)
    assert first_said(history) == [18]
    (text,) = notes(history[:18])
    # steps 3 to 18: the first four have lengths 40 + 60 (2 ... 5)/19, mean 51.05; the last four (14 ... 17)/19: 88.95
    assert "51 to 89 tokens" in text and "correlation 1.00" in text and "penalty" in text


def test_length_that_grows_little_or_apart_from_the_reward_is_no_matter() -> None:
    assert first_said(rising(81.5, 0.8)) == [18]  # 40 + 41.5 x 3.5/19 = 47.6 to 40 + 41.5 x 15.5/19 = 73.9: 1.55
    assert first_said(rising(76.2, 0.8)) == []  # 1.49 in the third window
    assert first_said(rising(100.0, 0.1)) == []  # the reward falls
    assert first_said(rising(100.0, 0.4, noise=0.2)) == []  # the saw-tooth hides it


def test_correlation_is_that_of_a_hand_count() -> None:
    """Deviations (-1, 0, 1) and (-1, 1, 0): 1 over sqrt(2 x 2)."""
    assert correlation([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]) == pytest.approx(0.5)
    assert correlation([1.0, 2.0], [4.0, 4.0]) == 0.0


def test_a_sampler_that_is_another_policy_is_said_unless_it_is_corrected_for() -> None:
    bad = step(**{"mismatch/mean_abs": 0.06, "mismatch/max_abs": 1.5})
    assert first_said([bad] * 5) == [3]
    assert "0.06 on average, at most 1.5" in notes([bad] * 3)[0] and "mismatch=truncate" in notes([bad] * 3)[0]
    assert said([{**bad, "mismatch/mean_abs": 0.05}] * 5) == [[]] * 5
    assert said([{**bad, "mismatch/weight_mean": 0.97}] * 5) == [[]] * 5


# ------------------------------------------------------------------ over a whole run


def rule(about: str) -> Rule:
    return next(rule for rule in RULES if rule.about == about)


def test_spells_are_those_that_lasted_long_enough_with_their_first_and_last_row() -> None:
    bad, good = step(entropy=0.001), step()
    history = [good, bad, bad, bad, bad, good, bad, bad, good, bad, bad, bad]  # four, two (too few), three
    assert spells(rule("entropy"), history) == [(1, 4), (9, 11)]
    assert spells(rule("entropy"), [good] * 6) == spells(rule("entropy"), []) == []


def test_a_spell_of_a_trend_begins_with_its_window() -> None:
    flat = rising(40.0, 0.2)
    history = [*flat, *rising(100.0, 0.8)]
    ((first, last),) = spells(rule("length"), history)
    assert last == 39 and 20 <= first + 15 <= 37, "the window that first shows it reaches into the rising part"
    assert spells(rule("length"), flat) == []
