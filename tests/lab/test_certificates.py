"""Certificates against numbers by hand, theory against measurement, and the sums that are stated against exact.json."""

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.kl import KLInLoss, KLInReward
from hotcold.algorithms.rloo import RLOO
from hotcold.equations import kl_k3
from hotcold.errors import InputError
from hotcold.lab.case import Case, Situation
from hotcold.lab.catalogue import case_of, catalogue, full_product
from hotcold.lab.certificate import agrees_with, certify, exact_scale, near_one
from hotcold.lab.kl_parts import name_of
from hotcold.lab.numbers import policy_of
from hotcold.lab.own import Own, certify_own, check_size, stated_by
from hotcold.lab.predicted import Predicted, predicted
from hotcold.lab.refused import refusals
from hotcold.lab.stated import World, critic_values, stated_update
from hotcold.lab.tiny import FIXED, VARIABLE, with_steps
from hotcold.lab.truth import state_values, truth
from hotcold.training.mismatch import Mismatch

EXACT = json.loads((Path(__file__).parents[1] / "vectors" / "exact.json").read_text())
ENGINE = {"sampled_by": "another engine"}


def stated(case: Case) -> tuple[np.ndarray, float]:
    found = stated_update(case)
    assert found is not None
    return found


# ------------------------------------------------------------------ the stated sums are right by another reckoning


def test_the_stated_sums_of_reinforce_are_grad_j_with_the_variance_of_the_file() -> None:
    """baselines_on_T1.none."""
    mean, variance = stated(case_of("reinforce", "fixed", baseline="none", group_size=1))
    assert np.allclose(mean, EXACT["T1"]["grad_J"], rtol=0, atol=1e-12)
    assert variance == pytest.approx(EXACT["baselines_on_T1"]["none"]["trace_variance"], abs=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_the_stated_sums_of_grpo_are_those_of_the_file(size: int) -> None:
    """group_estimators_on_T1.group_mean_over_std, sample_std; the mean per response halves it."""
    mean, _ = stated(case_of("grpo", "fixed", group_size=size))
    expected = np.array(EXACT["group_estimators_on_T1"]["group_mean_over_std"][str(size)]["sample_std"]["gradient"])
    assert np.allclose(mean, expected / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("placement", "estimator", "key"),
    [
        ("reward", "k1", "k1_in_reward_to_go"),
        ("loss", "k2", "k2_in_loss_per_token"),
        ("loss", "k3", "k3_in_loss_per_token"),
        ("loss_times_ratio", "k3", "ratio_times_k3_in_loss_per_token"),
        (None, "exact", "exact_in_loss_and_later_states_in_reward"),
    ],
)
def test_the_stated_sums_of_a_kl_are_those_of_the_file(placement: str | None, estimator: str, key: str) -> None:
    """kl_on_T1.placements: the update with beta minus that without."""
    where = {} if placement is None else {"kl.placement": placement}
    options = {"baseline": "none", "group_size": 1}
    with_kl, _ = stated(Case("reinforce", {**options, "beta": 0.5, "kl.estimator": estimator, **where}, "fixed"))
    without, _ = stated(Case("reinforce", options, "fixed"))
    expected = np.array(EXACT["kl_on_T1"]["placements"][key]["expected_gradient"])
    assert np.allclose(without - with_kl, 0.5 * expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("none", None),
        ("token", Mismatch("truncate", "token", cap=1e9)),
        ("sequence", Mismatch("truncate", "sequence", cap=1e9)),
        ("geometric", Mismatch("truncate", "geometric", cap=1e9)),
        ("token_mask_0.8_1.25", Mismatch("mask", "token", low=0.8, high=1.25)),
        ("sequence_truncate_cap_1.2", Mismatch("truncate", "sequence", cap=1.2)),
    ],
)
def test_the_stated_sums_of_a_correction_are_those_of_the_file(key: str, rule: Mismatch | None) -> None:
    """off_policy_on_T1.estimators."""
    case = case_of("reinforce", "fixed", {**ENGINE, "mismatch": rule}, baseline="none", group_size=1)
    expected = EXACT["off_policy_on_T1"]["estimators"][key]["gradient"]
    assert np.allclose(stated(case)[0], expected, rtol=0, atol=1e-12)


def test_an_exact_critic_has_the_values_of_the_states() -> None:
    """T1.state_value; with a KL in the reward also minus beta times the KL still to pay."""
    case = case_of("ppo", "fixed", {"critic": "exact"}, group_size=1)
    assert critic_values(case) == pytest.approx(EXACT["T1"]["state_value"], abs=1e-12)
    with_kl = case_of("ppo", "fixed", {"critic": "exact"}, group_size=1, beta=0.5)
    assert critic_values(with_kl) == pytest.approx(state_values(FIXED, beta=0.5), abs=1e-12)
    wrong = critic_values(replace(case, situation=Situation(critic="wrong")))
    assert np.array(wrong) - EXACT["T1"]["state_value"] == pytest.approx([0.3, -0.4, 0.3], abs=1e-12)


def test_plain_numbers_and_autograd_agree_on_the_kl_of_responses() -> None:
    """E_pi of the sum of log-ratios, and its gradient through the scores, on a world with unequal lengths."""
    policy, reference = policy_of(VARIABLE, VARIABLE.logits), policy_of(VARIABLE, VARIABLE.reference)
    total, gradient = 0.0, np.zeros_like(policy.probability)
    for y in VARIABLE.responses:
        d = sum(policy.logp(y)) - sum(reference.logp(y))
        total += policy.of_response(y) * d
        gradient += policy.of_response(y) * d * policy.scores(y)
    assert total == pytest.approx(truth(VARIABLE).reverse_kl, abs=1e-12)
    assert np.allclose(gradient, truth(VARIABLE).grad_reverse_kl.numpy(), rtol=0, atol=1e-12)


# ------------------------------------------------------------------ theory


@pytest.mark.parametrize(
    ("case", "factor"),
    [
        (case_of("rloo"), 1.0),
        (case_of("reinforce", group_size=4), 3 / 4),
        (case_of("reinforce", situation={"groups": 2}), 3 / 4),  # 4 rows
        (case_of("dr_grpo", "variable", group_size=3), 2 / 3 / 3),  # L is 3
        (case_of("dr_grpo", "fixed", weighting="fixed_length:5"), 1 / 2 / 5),
        (case_of("rloo", "fixed", weighting="mean_per_token"), 1 / 2),  # always 2 tokens
        (case_of("rloo", "variable", weighting="mean_per_token"), None),
        (case_of("grpo", "fixed"), None),
        (case_of("rloo", beta=0.5), 1.0),
        (case_of("rloo", beta=0.5, kl__estimator="k2"), None),
        (case_of("reinforce", beta=0.5), 1 / 2),  # the KL is in the totals that the mean is taken of
        (case_of("reinforce", beta=0.5, kl__estimator="exact"), None),
        (case_of("reinforce", entropy_bonus=0.1), None),
        (case_of("rloo", entropy_bonus=0.1), 1.0),
        (case_of("ppo", whiten=False, weighting="sum_per_response", lam=0.5), None),
        (case_of("ppo", situation={"critic": "exact"}, whiten=False, weighting="sum_per_response", lam=0.5), 1.0),
        (case_of("rloo", gamma=0.9), None),
        (case_of("rloo", "fixed", ENGINE), None),
        (case_of("rloo", "fixed", {**ENGINE, "mismatch": Mismatch("truncate", "sequence", cap=2.0)}), 1.0),
        (case_of("rloo", "fixed", {**ENGINE, "mismatch": Mismatch("truncate", "sequence", cap=1.2)}), None),
        (case_of("rloo", "fixed", {**ENGINE, "mismatch": Mismatch("truncate", "token", cap=2.0)}), None),
        (case_of("rloo", "fixed", {"truncated": "mask"}), 1.0),  # nothing is cut there
        (case_of("rloo", "variable", {"truncated": "mask"}), None),
        (case_of("rloo", "variable", {"truncated": "penalty"}), 1.0),
        (case_of("expert_iteration"), None),
        (case_of("sft", weighting="sum_per_response"), 1.0),
    ],
    ids=lambda value: f"{value.label}; {value.where}" if isinstance(value, Case) else "",
)
def test_theory_names_the_factor_or_elsewhere(case: Case, factor: float | None) -> None:
    theory = predicted(case)
    assert theory.factor == pytest.approx(factor) if factor is not None else theory.factor is None and theory.reasons


def test_dropping_groups_scales_by_how_often_the_others_have_the_step_for_themselves() -> None:
    """q = sum of pi(y)^2: both responses the same, as all rewards differ. Refill 2: 1 + q + q^2; two prompts: 1 + q."""
    policy = policy_of(VARIABLE, VARIABLE.logits)
    q = math.fsum(policy.of_response(y) ** 2 for y in VARIABLE.responses)
    once = predicted(case_of("dr_grpo")).factor
    refilled = predicted(case_of("dr_grpo", drop_zero_variance=True, refill=2)).factor
    two = predicted(case_of("dr_grpo", drop_zero_variance=True, situation={"groups": 2})).factor
    assert once is not None and refilled == pytest.approx(once * (1 + q + q * q))
    assert two == pytest.approx(once * (1 + q))


def test_a_factor_that_is_not_the_predicted_one_is_a_difference() -> None:
    assert agrees_with(Predicted(0.75), 0.75) and not agrees_with(Predicted(0.75), 0.76)
    assert not agrees_with(Predicted(0.75), None)
    assert not agrees_with(Predicted(None, ("std",)), 0.5) and agrees_with(Predicted(None, ("std",)), None)


# ------------------------------------------------------------------ certificates


def test_the_certificate_of_rloo_by_hand() -> None:
    """Two responses: the variance is (E|g|^2 - |grad J|^2) of the file's estimator, relative to half of 1.1088."""
    found = certify(case_of("rloo", "fixed"))
    assert found.verdict == "unbiased" and found.agrees and found.bias < 1e-12
    assert found.noise == pytest.approx(found.variance / (EXACT["baselines_on_T1"]["none"]["trace_variance"] / 2))
    best = EXACT["baselines_on_T1"]["best_constant"]["trace_variance"]
    assert found.noise_to_best == pytest.approx(found.variance / (best / 2))


def test_the_variance_is_compared_at_the_same_length_of_the_expected_gradient() -> None:
    """dr_grpo is rloo times a constant where each response has one score: (G - 1)/G/L times it."""
    rloo, dr_grpo = certify(case_of("rloo", "variable")), certify(case_of("dr_grpo", "variable"))
    assert dr_grpo.verdict == "unbiased up to 0.1667"
    assert dr_grpo.variance == pytest.approx(rloo.variance / 36) and dr_grpo.noise == pytest.approx(rloo.noise)


def test_verdicts_say_where_and_why() -> None:
    grpo = certify(case_of("grpo", "variable"))
    assert grpo.verdict == (
        f"points elsewhere: cosine {grpo.cosine:.3f}, because mean per response on varying lengths; "
        "division by the group's std"
    )
    assert grpo.agrees and grpo.scale is None


def test_a_scale_is_exact_or_none() -> None:
    target = np.array([[1.0, 2.0]])
    assert exact_scale(0.25 * target, target) == 0.25
    assert exact_scale(-target, target) == -1.0
    assert exact_scale(np.array([[1.0, 2.0 + 1e-6]]), target) is None
    assert exact_scale(0 * target, target) is None


def test_a_cosine_has_the_digits_that_tell_it_from_1() -> None:
    assert [near_one(c) for c in (0.9, 0.99964, 0.99999999)] == ["0.900", "0.999640", "1 within 1e-6"]


@pytest.mark.parametrize(
    "case",
    [
        case_of("rloo", "variable, steps", beta=0.5),
        case_of("grpo", "variable, tool", beta=0.5),
        case_of("ppo", "variable, steps"),
        case_of("dapo", "variable"),
        case_of("gspo", "fixed", epochs_per_batch=2),
        case_of("reinforce_pp", "variable", situation={"groups": 2}),
        case_of("cispo", "fixed", {"sampled_by": "older policy", "rate": 0.0}, epochs_per_batch=2),
        case_of("sft", "variable", minibatches=2),
        case_of("expert_iteration", "variable", keep_rule="top_fraction"),
    ],
    ids=lambda case: f"{case.label}; {case.where}",
)
def test_what_is_measured_is_what_is_stated(case: Case) -> None:
    found = certify(case)
    assert found.agrees
    assert (found.off_stated is None) == (case.values["minibatches"] > 1)
    assert found.off_stated is None or found.off_stated <= 1e-12


# ------------------------------------------------------------------ the catalogue


def test_the_catalogue_has_every_algorithm_axis_and_pair_once() -> None:
    sections = catalogue()
    cases = [case for section in sections for case in section.cases]
    assert 300 <= len(cases) <= 450
    assert len({(case.algorithm, str(sorted(case.values.items(), key=str)), case.where) for case in cases}) == len(
        cases
    )
    of = {section.title: section.cases for section in sections}
    assert {case.algorithm for case in of["named"]} >= {"reinforce", "rloo", "grpo", "ppo", "dapo", "sft"}
    placements = {case.values.get("kl.placement") for case in cases}
    assert placements >= {"reward", "loss", "loss_times_ratio"}
    rules = {case.situation.mismatch for case in of["another engine"]} - {None}
    assert {(r.mode, r.level) for r in rules if r} == {
        (mode, level) for mode in ("truncate", "mask") for level in ("token", "sequence", "geometric")
    }


def test_the_full_product_is_larger_than_anybody_would_list_by_hand() -> None:
    first = next(full_product())
    assert first.algorithm == "reinforce" and next(islice(full_product(), 10_000, None), None) is not None


# ------------------------------------------------------------------ what is refused


def test_what_is_refused_is_shown_to_point_elsewhere_by_an_algorithm_that_does_it_anyway() -> None:
    found = {refusal.label: refusal for refusal in refusals()}
    assert all(refusal.holds for refusal in found.values())
    k1 = found["rloo beta=0.5 kl.placement=loss kl.estimator=k1"]
    assert "its expected gradient is 0" in k1.reason
    assert k1.anyway is not None and "the KL has no gradient at all" in k1.anyway.verdict
    k3 = found["rloo beta=0.5 kl.placement=reward kl.estimator=k3"]
    assert k3.anyway is not None and "cosine -0.985 with what lowers the KL" in k3.anyway.verdict


# ------------------------------------------------------------------ algorithms that nothing is known of


@pytest.mark.parametrize(
    ("kl", "said"),
    [
        (KLInLoss(0.5), "the KL(pi || ref) of each visited state, later states' share missing"),
        (KLInLoss(0.5, kl_k3), "the KL(ref || pi) of each visited state, the other direction"),
    ],
)
def test_whose_gradient_a_kl_term_is_is_found_out(kl: Any, said: str) -> None:
    found = certify_own(Own("mine", RLOO(group_size=2, kl=kl), {}), "variable, steps")
    assert not found.agrees and f"the KL term lowers {said}" in found.verdict


def test_a_right_kl_is_unbiased_and_its_factor_is_told_apart() -> None:
    right = certify_own(Own("mine", RLOO(group_size=2, kl=KLInReward(0.5)), {}, "unbiased"), "variable")
    assert right.agrees and right.verdict == "unbiased"
    shrunk = GRPO(group_size=2, scale_by_std=False, kl=KLInLoss(0.5, kl_k3))
    assert "KL(ref || pi)" in certify_own(Own("mine", shrunk, {}), "fixed").verdict


def test_nothing_is_said_of_what_is_the_gradient_of_nothing() -> None:
    assert name_of(np.array([[1.0, -1.0], [0.0, 0.0], [2.0, -2.0]]), FIXED) is None
    assert name_of(np.zeros((3, 2)), FIXED) == "the KL has no gradient at all"


def test_what_an_author_states_is_held_against_the_measurement() -> None:
    dr_grpo = GRPO(group_size=2, scale_by_std=False)
    assert certify_own(Own("mine", dr_grpo, {}, "multiple"), "fixed").agrees
    assert not certify_own(Own("mine", dr_grpo, {}, "unbiased"), "fixed").agrees
    assert not certify_own(Own("mine", dr_grpo, {}, "multiple"), "variable").agrees
    assert certify_own(Own("mine", dr_grpo, {}, "elsewhere"), "variable").agrees
    with pytest.raises(InputError, match="expect='maybe' is unknown"):
        stated_by(dr_grpo, "maybe")


def test_a_group_that_is_too_large_to_enumerate_is_refused_with_one_that_is_not() -> None:
    """4 responses: C(4 + n - 1, n) groups; of 21 there are 2024, of 20 1771."""
    check_size(20, 4)
    with pytest.raises(InputError, match="group_size=20 or less"):
        check_size(21, 4)


def test_rewards_on_the_way_are_part_of_j() -> None:
    """1.5 for a first token 1, -0.7 for a second token 0, from the probabilities by hand."""
    policy, steps = policy_of(FIXED, FIXED.logits), truth(with_steps(FIXED))
    first = 1.5 * (policy.of_response((1, 0)) + policy.of_response((1, 1)))
    second = -0.7 * (policy.of_response((0, 0)) + policy.of_response((1, 0)))
    expected = truth(FIXED).J + first + second
    assert abs(steps.J - expected) < 1e-12


def test_worlds_are_not_shared_between_prompts_and_imitation() -> None:
    """sft's rows come from the world's other policy: E log pi has the gradient sum of mu(y) grad log pi(y)."""
    found = certify(case_of("sft", "fixed", weighting="sum_per_response"))
    mu, policy = policy_of(FIXED, FIXED.sampler), policy_of(FIXED, FIXED.logits)
    expected = np.sum([mu.of_response(y) * policy.scores(y) for y in FIXED.responses], axis=0)
    assert found.verdict == "unbiased" and np.allclose(found.gradient, expected, rtol=0, atol=1e-12)
    assert World(found.case).sampler.logits == mu.logits
