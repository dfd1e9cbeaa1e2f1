"""The leash to a reference through the real update: every allowed row of the table has its stated gradient, exactly,
and what is refused would have a wrong one.

`placements`: kl_on_T1 of tests/vectors. Where those end (variable length, discounts) autograd of an enumerated sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Forward, Objective, Plan, TokenLoss
from hotcold.algorithms.baselines import no_baseline
from hotcold.algorithms.build import build_algorithm
from hotcold.algorithms.kl import Adaptive, ExactKL, KLInLoss, KLInReward
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.batch import Batch, Rollout, collate
from hotcold.equations import kl_k1, kl_k2, kl_k3, reward_to_go, sum_per_response
from hotcold.errors import InputError
from hotcold.training.update import update
from tests.toy_engines import Watched, local_engine, settings
from tests.toy_policies import (
    EXACT,
    PROMPT,
    T1,
    T2,
    TOOL,
    Response,
    Toy,
    assert_close,
    enumerated_gradient,
    expected_update,
)

PLACEMENTS = EXACT["kl_on_T1"]["placements"]
REF = {"T1": EXACT["T1"]["ref"], "T2": [[0.0, -0.5], [0.0, 1.0], [0.3, 0.0]]}
BETA = 0.7
# the allowed rows: placement and estimator as on the command line, and the entry of the vectors
ALLOWED: dict[str, tuple[str | None, str]] = {
    "k1_in_reward_to_go": ("reward", "k1"),
    "k2_in_loss_per_token": ("loss", "k2"),
    "k3_in_loss_per_token": ("loss", "k3"),
    "ratio_times_k3_in_loss_per_token": ("loss_times_ratio", "k3"),
    "exact_in_loss_and_later_states_in_reward": (None, "exact"),
}


def placement_gradient(key: str) -> Tensor:
    return torch.tensor(PLACEMENTS[key]["expected_gradient"], dtype=torch.float64)


def built(name: str, placement: str | None, estimator: str, **options: Any) -> Algorithm:
    """The algorithm that these words on the command line stand for."""
    own = {"baseline": "none"} if name == "reinforce" else {}
    words = {"beta": BETA, "kl.estimator": estimator} | ({} if placement is None else {"kl.placement": placement})
    return build_algorithm(name, {"group_size": 2, **own, **words, **options}, max_tokens=16)


def unscored(toy: Toy) -> Toy:
    """Every score 0: what is left of the gradient is the KL's."""
    return replace(toy, reward=dict.fromkeys(toy.responses, 0.0))


def of_kl(toy: Toy, algorithm: Any, group: list[int], ref: Any, **options: Any) -> Tensor:
    """The expected gradient of the KL part, per unit of beta."""
    return expected_update(unscored(toy), algorithm, group, reference=ref, **options).gradient / BETA


# ------------------------------------------------------------------ what the rows of the table expect, by enumeration


def state_kls(toy: Toy, table: Tensor, ref: Tensor, y: Response, forward: bool = False) -> list[Tensor]:
    """KL(pi || ref), or KL(ref || pi), of each state that y visits."""
    out = []
    for state in toy.states(y):
        p, q = table[state].log_softmax(0), ref[state].log_softmax(0)
        p, q = (q, p) if forward else (p, q)
        out.append((p.exp() * (p - q)).sum())
    return out


def grad_kl(toy: Toy, ref: Any) -> Tensor:
    """grad KL(pi || ref) over responses, by autograd of sum_y pi(y) (log pi(y) - log ref(y))."""
    table, frozen = (torch.tensor(t, dtype=torch.float64) for t in (toy.logits, ref))
    table.requires_grad_()
    logps = [(toy.logp(table, y), toy.logp(frozen, y)) for y in toy.responses]
    (gradient,) = torch.autograd.grad(torch.stack([p.exp() * (p - q) for p, q in logps]).sum(), table)
    return gradient


def grad_of_states(toy: Toy, ref: Any, forward: bool = False) -> Tensor:
    """sum over visited states of the gradient of their own KL."""
    frozen = torch.tensor(ref, dtype=torch.float64)
    return enumerated_gradient(toy, 1, lambda table, ys: sum(state_kls(toy, table, frozen, ys[0], forward)))


EXPECTED: dict[str, Callable[[Toy, Any], Tensor]] = {
    "k1_in_reward_to_go": grad_kl,
    "k2_in_loss_per_token": grad_of_states,
    "k3_in_loss_per_token": lambda toy, ref: grad_of_states(toy, ref, forward=True),
    "ratio_times_k3_in_loss_per_token": grad_of_states,
    "exact_in_loss_and_later_states_in_reward": grad_kl,
}


@pytest.mark.parametrize("key", list(ALLOWED))
def test_the_enumeration_here_agrees_with_the_vectors(key: str) -> None:
    assert_close(EXPECTED[key](T1, REF["T1"]), placement_gradient(key))


# ------------------------------------------------------------------ allowed rows


@pytest.mark.parametrize(("name", "group"), [("reinforce", [0]), ("rloo", [0, 0])])
@pytest.mark.parametrize("key", list(ALLOWED))
def test_every_allowed_row_has_its_stated_gradient(key: str, name: str, group: list[int]) -> None:
    algorithm = built(name, *ALLOWED[key])
    assert_close(of_kl(T1, algorithm, group, REF["T1"]), placement_gradient(key))
    assert_close(of_kl(T2, algorithm, group, REF["T2"]), EXPECTED[key](T2, REF["T2"]))


@pytest.mark.parametrize("key", list(ALLOWED))
def test_the_leash_adds_to_the_gradient_of_the_score(key: str) -> None:
    """With the scores in, the difference between beta and beta 0 is the same."""
    leashed = expected_update(T1, built("rloo", *ALLOWED[key]), [0, 0], reference=REF["T1"]).gradient
    free = expected_update(T1, build_algorithm("rloo", {"group_size": 2}, 16), [0, 0]).gradient
    assert_close((leashed - free) / BETA, placement_gradient(key))


def test_without_the_later_states_the_exact_kl_is_that_of_each_state() -> None:
    term = ExactKL(BETA, in_reward=False)
    algorithm = REINFORCE(group_size=1, baseline=no_baseline, kl=term)
    assert_close(of_kl(T1, algorithm, [0], REF["T1"]), placement_gradient("exact_in_loss_per_state"))
    assert_close(of_kl(T2, algorithm, [0], REF["T2"]), grad_of_states(T2, REF["T2"]))


def test_k3_times_the_ratio_is_a_kl_of_the_new_policy_after_the_first_step_too() -> None:
    """Samples from mu: E_mu[(pi / mu) k3] has, at the first token of T1, the gradient of KL(pi || ref) there.

    Without the ratio it is a mean under mu of k3, no KL of pi at all: the gradient of KL(pi || ref) is missed.
    """
    toy, ref, mu = unscored(T1), REF["T1"], EXACT["T1"]["mu"]
    table = torch.tensor(T1.logits[0], dtype=torch.float64, requires_grad=True)
    p, q = table.log_softmax(0), torch.tensor(ref[0], dtype=torch.float64).log_softmax(0)
    (expected,) = torch.autograd.grad((p.exp() * (p - q)).sum(), table)
    gaps = []
    for placement in ("loss_times_ratio", "loss"):
        algorithm = built("reinforce", placement, "k3", objective="clipped_surrogate", epochs_per_batch=2)
        two_steps = expected_update(toy, algorithm, [0], sampled_by=mu, reference=ref).gradient / (2 * BETA)
        gaps.append(float((two_steps[0] - expected).abs().max()))
    assert gaps[0] < 1e-12 and gaps[1] > 1e-2


# ------------------------------------------------------------------ discounts, gaps, several rows


def discounted(toy: Toy, ref: Any, gamma: float) -> Tensor:
    """sum_t of the state's own KL, and of the later ones, discounted from t on, as a cost of the token at t."""
    frozen = torch.tensor(ref, dtype=torch.float64)

    def objective(table: Tensor, ys: tuple[Response, ...]) -> Any:
        kls, logps = state_kls(toy, table, frozen, ys[0]), toy.logps(table, ys[0])
        total = 0.0
        for t in range(len(kls)):
            later = sum(gamma ** (k - t) * kls[k].item() for k in range(t + 1, len(kls)))
            total = total + kls[t] + later * logps[t]
        return total

    return enumerated_gradient(toy, 1, objective)


@pytest.mark.parametrize("gamma", [0.0, 0.6])
@pytest.mark.parametrize("key", ["k1_in_reward_to_go", "exact_in_loss_and_later_states_in_reward"])
def test_with_a_discount_a_token_pays_less_for_what_comes_later(key: str, gamma: float) -> None:
    """k1 and the exact KL expect the same: E[d_k grad log pi_t] = E[KL_k grad log pi_t] for k > t."""
    for name, toy in (("T1", T1), ("T2", T2)):
        algorithm = built("reinforce", *ALLOWED[key], gamma=gamma)
        expected = discounted(toy, REF[name], gamma)
        assert_close(of_kl(toy, algorithm, [0], REF[name]), expected)
        assert float((expected - grad_kl(toy, REF[name])).abs().max()) > 1e-3
    assert_close(discounted(T1, REF["T1"], 0.0), placement_gradient("k1_in_reward_gamma_0"))


def with_tool(y: Response, group: int, episode: int) -> list[Rollout]:
    """Two tokens of a tool between the choices."""
    ids = (y[0], TOOL, TOOL, y[1])
    return [Rollout((PROMPT,), ids, group, episode, response_mask=(True, False, False, True), reward=0.0)]


def in_two_rows(y: Response, group: int, episode: int) -> list[Rollout]:
    """Each choice in a row of its own, as in a dialogue of two turns."""
    first = Rollout((PROMPT,), (y[0],), group, episode, reward=0.0)
    return [first, Rollout((PROMPT, y[0], TOOL), (y[1],), group, episode, reward=0.0)]


@pytest.mark.parametrize(("name", "group"), [("reinforce", [0]), ("rloo", [0, 0])])
@pytest.mark.parametrize("key", list(ALLOWED))
def test_a_tool_token_or_a_second_row_changes_no_kl(key: str, name: str, group: list[int]) -> None:
    """Rows are averaged, two for each episode: half of what one row per episode expects."""
    algorithm = built(name, *ALLOWED[key])
    assert_close(of_kl(T1, algorithm, group, REF["T1"], rows_of=with_tool), placement_gradient(key))
    assert_close(of_kl(T1, algorithm, group, REF["T1"], rows_of=in_two_rows), placement_gradient(key) / 2)


@pytest.mark.parametrize("rows_of", [with_tool, in_two_rows])
def test_a_discount_jumps_over_tool_tokens_and_runs_on_from_row_to_row(rows_of: Any) -> None:
    for key in ("k1_in_reward_to_go", "exact_in_loss_and_later_states_in_reward"):
        algorithm = built("reinforce", *ALLOWED[key], gamma=0.6)
        factor = 2 if rows_of is in_two_rows else 1
        actual = of_kl(T1, algorithm, [0], REF["T1"], rows_of=rows_of)
        assert_close(factor * actual, discounted(T1, REF["T1"], 0.6))


# ------------------------------------------------------------------ what is refused, and why


def shaped_by(estimate: Callable[[Batch], Tensor], batch: Batch) -> Batch:
    """A KL of the user's own as a cost that is credited as reward-to-go."""
    cost = torch.where(batch.trained, estimate(batch), 0.0)
    return batch.replace(advantages=reward_to_go(batch.token_rewards - BETA * cost, batch.response_mask))


@dataclass(frozen=True)
class Forbidden:
    """A user's algorithm that does what the names refuse: the KL estimate where it does not belong."""

    cost: Callable[[Batch], Tensor] | None = None
    in_loss: Callable[[Forward, Batch], Tensor] | None = None
    reads: frozenset[str] = frozenset({"logp_old", "logp_ref", "kl_old"})
    plan = Plan()

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return (Objective(self.loss, sum_per_response, needs=frozenset({"logp", "kl"})),)

    def loss(self, forward: Forward, batch: Batch) -> TokenLoss:
        loss = policy_gradient_loss(forward, batch).loss
        return TokenLoss(loss if self.in_loss is None else loss + BETA * self.in_loss(forward, batch))

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch.keep)

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        return shaped_by(self.cost or (lambda batch: torch.zeros_like(batch.token_rewards)), batch), state


def of_rollout(estimator: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Batch], Tensor]:
    def estimate(batch: Batch) -> Tensor:
        assert batch.logp_old is not None and batch.logp_ref is not None
        return estimator(batch.logp_old, batch.logp_ref)

    return estimate


def _of_states(batch: Batch) -> Tensor:
    assert batch.kl_old is not None
    return batch.kl_old


def _k1_now(forward: Forward, batch: Batch) -> Tensor:
    assert forward.logp is not None and batch.logp_ref is not None
    return kl_k1(forward.logp, batch.logp_ref)


def _exact_now(forward: Forward, batch: Batch) -> Tensor:
    assert forward.kl is not None
    return forward.kl


REFUSED: dict[str, tuple[str, str, Forbidden, str]] = {
    "k1_in_loss_per_token": ("loss", "k1", Forbidden(in_loss=_k1_now), "its expected gradient is 0"),
    "k2_in_reward_to_go": ("reward", "k2", Forbidden(of_rollout(kl_k2)), "points against the KL's"),
    "k3_in_reward_to_go": ("reward", "k3", Forbidden(of_rollout(kl_k3)), "points against the KL's"),
    "exact_in_reward_to_go": ("reward", "exact", Forbidden(_of_states), "one alone is another gradient"),
    "exact_in_loss_per_state": ("loss", "exact", Forbidden(in_loss=_exact_now), "one alone is another gradient"),
}


@pytest.mark.parametrize("key", list(REFUSED))
def test_what_is_refused_would_have_the_wrong_gradient_that_the_message_states(key: str) -> None:
    placement, estimator, user, reason = REFUSED[key]
    for name in ("reinforce", "rloo", "grpo", "ppo"):
        with pytest.raises(InputError) as refusal:
            words = {"beta": BETA, "kl.placement": placement, "kl.estimator": estimator}
            build_algorithm(name, words, max_tokens=16)
        assert reason in " ".join(str(refusal.value).split())
    wrong, right = of_kl(T1, user, [0], REF["T1"]), grad_kl(T1, REF["T1"])
    assert_close(wrong, placement_gradient(key))
    if "is 0" in reason:
        assert float(wrong.abs().max()) < 1e-12
    elif "against" in reason:
        assert float((wrong * right).sum()) < 0
    else:
        assert float((wrong - right).abs().max()) > 0.01


def test_the_same_user_with_k1_is_right() -> None:
    """Guard on the test above: it is the estimator that is wrong, not the user's loop."""
    assert_close(of_kl(T1, Forbidden(of_rollout(kl_k1)), [0], REF["T1"]), placement_gradient("k1_in_reward_to_go"))


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_only_k3_goes_with_the_ratio_and_no_false_reason_is_given(estimator: str) -> None:
    """ratio_times_k1_in_loss_per_token is not 0: to say so would be wrong."""
    with pytest.raises(InputError, match=r"loss_times_ratio takes kl.estimator=k3") as refusal:
        built("reinforce", "loss_times_ratio", estimator)
    assert "is 0" not in str(refusal.value)


# ------------------------------------------------------------------ beta that moves

CONTROL = EXACT["adaptive_kl"]


def with_kl_of(nats: float, responses: int) -> Batch:
    """Two tokens in each response; together they lie `nats` above the reference."""
    batch = collate([Rollout((PROMPT,), (0, 1), 0, i, reward=0.0) for i in range(responses)], dtype=torch.float64)
    logp = torch.where(batch.response_mask, -1.0, 0.0).double()
    return batch.replace(logp_old=logp, logp_ref=logp * (1 + nats / 2), kl_old=-logp * nats / 2)


@pytest.mark.parametrize("term", [KLInReward, ExactKL, KLInLoss])
def test_beta_follows_the_measured_kl_as_in_the_vectors(term: Any) -> None:
    """adaptive_kl: KL per response 12, 6, 3, 6.6 with 512 responses each; target 6, horizon 10000."""
    control = Adaptive(CONTROL["target"], CONTROL["horizon"])
    algorithm = REINFORCE(kl=term(CONTROL["beta_start"], adaptive=control))
    state, used, after = algorithm.state(), [], []
    for nats in (12.0, 6.0, 3.0, 6.6):
        batch, state = algorithm.credit(with_kl_of(nats, CONTROL["num_responses"]), state)
        used.append(batch.metrics["beta"])
        after.append(state["beta"])
        assert_close(batch.metrics["kl/response"], nats)
        assert bool((batch.extras["beta"] == used[-1]).all())
    assert_close(after, CONTROL["beta_after_12_6_3_6.6"])
    assert used == [CONTROL["beta_start"], *after[:-1]]  # the beta of a step is that of the state at its start


@pytest.mark.parametrize("key", list(ALLOWED))
def test_over_several_updates_each_step_has_the_beta_of_the_state_at_its_start(key: str) -> None:
    """Five responses of T2, rate 2, so that the KL moves; target 0.1, horizon 20. The state is followed by hand: mean
    over responses of the measured KL (k1, or exact) at the policy as it is before the step."""
    options = {"kl.target": 0.1, "kl.horizon": 20.0}
    algorithm = built("reinforce", *ALLOWED[key], **options)
    rows = [T2.rollout(y, 0, i) for i, y in enumerate([*T2.responses, (1, 0)])]
    ref = torch.tensor(REF["T2"], dtype=torch.float64)
    policy = T2.policy()
    engine = Watched(local_engine(policy, reference=T2.policy(REF["T2"])))
    state, beta = algorithm.state(), BETA
    assert state == {"beta": BETA}
    batch = collate(rows, dtype=torch.float64)
    for step in range(1, 6):
        table = policy.table.detach().clone()
        exact = ALLOWED[key][1] == "exact"
        kls = [
            sum(float(k) for k in state_kls(T2, table, ref, r.response_ids))
            if exact
            else float(T2.logp(table, r.response_ids) - T2.logp(ref, r.response_ids))
            for r in rows
        ]
        expected_step = _plain_step(key, beta, table, batch)
        credited, state, record = update(batch, algorithm, state, engine, settings(), step, lambda _: 2.0)
        assert credited.metrics["beta"] == pytest.approx(beta, abs=1e-12)
        assert record.summary()["beta"] == credited.metrics["beta"]
        assert_close(policy.table.detach(), expected_step)
        error = min(max(sum(kls) / 5 / 0.1 - 1, -0.2), 0.2)
        beta *= 1 + error * 5 / 20
        assert_close(state["beta"], beta)
    assert abs(beta - BETA) > 0.01


def _plain_step(key: str, beta: float, table: Tensor, batch: Batch) -> Tensor:
    """The table after one step of an algorithm whose beta is fixed at this value."""
    placement, estimator = ALLOWED[key]
    fixed = built("reinforce", placement, estimator, beta=beta)
    policy = T2.policy(table.tolist())
    engine = local_engine(policy, reference=T2.policy(REF["T2"]))
    update(batch, fixed, fixed.state(), engine, settings(), 1, lambda _: 2.0)
    return policy.table.detach()


def test_a_fixed_beta_has_no_state_and_beta_zero_reads_no_reference() -> None:
    for key, names in ALLOWED.items():
        algorithm = built("reinforce", *names)
        batch, state = algorithm.credit(with_kl_of(12.0, 8), algorithm.state())
        assert state == {} and batch.metrics["beta"] == BETA, key
        assert built("reinforce", *names).reads
    free = build_algorithm("reinforce", {"beta": 0.0, "baseline": "none"}, 16)
    assert free.reads == frozenset() and free.objectives[0].needs == {"logp"}
