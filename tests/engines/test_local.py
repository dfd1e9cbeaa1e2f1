"""The local engine: log-probabilities at the right places, gradients of the weighted loss, steps that can be undone."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotcold.algorithms.base import Forward, Objective, TokenLoss
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.batch import Batch, Rollout, collate
from hotcold.engines.local import LocalEngine, Trainee
from hotcold.equations import sum_per_response
from tests.toy_policies import TINY, assert_close, ragged_rollouts, tiny_gpt2, tiny_llama


class Bigram(nn.Module):
    """The logits of the next token are the row of the current one."""

    def __init__(self, probabilities: list[list[float]]):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(probabilities, dtype=torch.float64).log())

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.table[input_ids])


BIGRAM = [[0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.6, 0.3, 0.1]]
OBJECTIVE = Objective(policy_gradient_loss, sum_per_response)


def engine_of(module: nn.Module, temperature: float = 1.0, rate: float = 0.1, remember: bool = False) -> LocalEngine:
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=0.0)
    return LocalEngine({"policy": Trainee(module, optimizer, remember)}, temperature)


def logp_of(engine: LocalEngine, batch: Batch) -> Tensor:
    return engine.read(batch, frozenset({"logp_old"}))["logp_old"]


def row(prompt: tuple[int, ...], response: tuple[int, ...], **fields: Any) -> Rollout:
    return Rollout(prompt, response, 0, 0, reward=1.0, **fields)


def batch_of(*rows: Rollout, advantage: float = 1.0, pad_id: int = 0) -> Batch:
    batch = collate(rows, pad_id, dtype=torch.float64)
    return batch.replace(advantages=torch.where(batch.response_mask, advantage, 0.0).double())


def backward(engine: LocalEngine, batch: Batch, objective: Objective = OBJECTIVE) -> Any:
    return engine.backward(batch, objective.weighting(batch.trained), objective)


# ------------------------------------------------------------------ log-probabilities


def test_each_response_token_has_its_own_log_prob() -> None:
    """A01: [0, 1, 2 | 0, 1]: ln P(0 after 2) = ln 0.6, ln P(1 after 0) = ln 0.5; the ratio to itself is 1."""
    engine, batch = engine_of(Bigram(BIGRAM)), batch_of(row((0, 1, 2), (0, 1)))
    expected = [[0, 0, 0, math.log(0.6), math.log(0.5)]]
    assert_close(engine.read(batch, frozenset({"logp_old"}))["logp_old"], expected)
    done = backward(engine, batch)
    assert_close(done.logp, expected)
    assert torch.equal(done.logp, done.logp_old)
    assert done.loss == pytest.approx(-math.log(0.6) - math.log(0.5), abs=1e-15)


def test_log_probs_are_those_at_the_sampling_temperature() -> None:
    """A23: logits [2, 0] at T = 0.5."""
    model = Bigram([[math.exp(2), 1.0], [1.0, 1.0]])
    engine = engine_of(model, temperature=0.5)
    assert_close(
        logp_of(engine, batch_of(row((0,), (0,)), row((0,), (1,))))[:, 1], [-0.018149927917809, -4.018149927917809]
    )


def test_untrained_tokens_have_zero_log_prob_and_entropy() -> None:
    gap = row((0,), (1, 2, 0), response_mask=(True, False, True))
    engine = engine_of(Bigram(BIGRAM))
    done = backward(engine, batch_of(gap, row((0, 1), (2,))))
    assert (done.logp != 0).int().tolist() == [[0, 1, 0, 1], [0, 0, 1, 0]]
    assert (done.entropy != 0).int().tolist() == [[0, 1, 0, 1], [0, 0, 1, 0]]
    # token 3 was chosen after token 2
    assert_close(done.entropy[0, 3], -sum(p * math.log(p) for p in BIGRAM[2]))


def test_rows_that_do_not_take_part_are_not_trained() -> None:
    engine, batch = engine_of(Bigram(BIGRAM)), batch_of(row((0,), (1,)), Rollout((0,), (2,), 0, 1, reward=None))
    assert engine.read(batch, frozenset({"logp_old"}))["logp_old"].tolist()[1] == [0, 0]


@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize("extra", [0, 1, 7])
def test_a_row_has_the_same_log_probs_alone_and_padded(name: str, extra: int) -> None:
    """A07: prompts of 2 and 9 tokens, responses of 3 and 7, and as much padding as a third row brings."""
    model = TINY[name]()
    engine = engine_of(model)
    rows = [row((5, 6), (7, 8, 9)), row((1, 2, 3, 4, 5, 6, 7, 8, 9), (11, 12, 13, 14, 15, 16, 17))]
    together = logp_of(engine, batch_of(*rows, row((3,), (4,) * (15 + extra))))
    for i, r in enumerate(rows):
        ids = torch.tensor([[*r.prompt_ids, *r.response_ids]])
        start = len(r.prompt_ids)
        with torch.no_grad():  # plain transformers, one row, no padding
            logits = model(input_ids=ids).logits.log_softmax(-1)
        alone = logits[0, start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        assert float((together[i, start : ids.shape[1]] - alone).abs().max()) < 1e-5
        assert bool((together[i, ids.shape[1] :] == 0).all()) and bool((together[i, :start] == 0).all())


@pytest.mark.parametrize("name", list(TINY))
def test_what_stands_in_the_padding_changes_nothing(name: str) -> None:
    """A08: pad = EOS or any other id."""
    engine = engine_of(TINY[name]())
    rows = [row((5, 6), (7, 2)), row((1,), (4,) * 9)]
    assert torch.equal(logp_of(engine, batch_of(*rows, pad_id=2)), logp_of(engine, batch_of(*rows, pad_id=23)))


def test_dropout_in_the_config_is_off() -> None:
    """A25: GPT-2 comes with 0.1."""
    model = tiny_gpt2()
    model.train()
    engine, batch = engine_of(model), batch_of(row((5, 6), (7, 8, 9)))
    assert not any(m.training for m in model.modules())
    assert torch.equal(engine.read(batch, frozenset({"logp_old"}))["logp_old"], backward(engine, batch).logp)


# ------------------------------------------------------------------ gradients


def test_the_gradient_is_that_of_the_weighted_loss() -> None:
    """-A w d log p: for a softmax row, w A (p - onehot). Row 0: A 2, weight 1/2 each for both rows."""
    model = Bigram(BIGRAM)
    engine = engine_of(model)
    backward(engine, batch_of(row((0,), (1,)), row((2,), (2,)), advantage=2.0))
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[0] = torch.tensor([0.2, 0.5 - 1, 0.3], dtype=torch.float64)
    expected[2] = torch.tensor([0.6, 0.3, 0.1 - 1], dtype=torch.float64)
    assert model.table.grad is not None
    assert_close(model.table.grad, expected)


def test_gradients_of_micro_batches_add() -> None:
    model = Bigram(BIGRAM)
    engine = engine_of(model)
    for _ in range(2):
        backward(engine, batch_of(row((0,), (1,))))
    assert model.table.grad is not None
    assert_close(model.table.grad[0], [0.4, 1.0 - 2, 0.6])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_nothing_outside_the_mask_reaches_the_gradient(poison: float) -> None:
    """A15: NaN and inf in advantages, old and sampler log-probs of tokens that are not trained, and in their logits."""

    def clipped(forward: Forward, batch: Batch) -> TokenLoss:
        assert forward.logp is not None and batch.advantages is not None and batch.logp_old is not None
        return TokenLoss(-(forward.logp - batch.logp_old).exp() * batch.advantages)

    gap = row((0,), (1, 2, 0), response_mask=(True, False, True))
    clean = batch_of(gap, row((0, 1), (2,)), pad_id=0)
    clean = clean.replace(logp_old=clean.advantages, logp_sampler=clean.advantages)
    dirty = torch.where(clean.trained, 1.0, poison).double()
    gradients = []
    for batch in (clean, clean.replace(advantages=dirty, logp_old=dirty, logp_sampler=dirty)):
        model = Bigram(BIGRAM)
        backward(engine_of(model), batch, Objective(clipped, sum_per_response))
        gradients.append(model.table.grad)
    assert torch.equal(gradients[0], gradients[1]) and bool(gradients[0].isfinite().all())


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_impossible_logits_where_nothing_is_trained_do_no_harm(poison: float) -> None:
    """A15 (c): after the first of two tool tokens, and in the padding."""
    model = Bigram([*([*p, 1e-9] for p in BIGRAM), [1.0] * 4])
    with torch.no_grad():
        model.table[3] = poison
    gap = row((0,), (1, 3, 2, 0), response_mask=(True, False, False, True))
    done = backward(engine_of(model), batch_of(gap, row((0,), (1,)), pad_id=3))
    assert math.isfinite(done.loss) and bool(done.entropy.isfinite().all())
    assert model.table.grad is not None and bool(model.table.grad.isfinite().all())
    assert bool((model.table.grad[3] == 0).all())


def test_rows_without_a_trained_token_leave_no_gradient() -> None:
    """B09: an empty response."""
    model = Bigram(BIGRAM)
    done = backward(engine_of(model), batch_of(row((0,), ())))
    assert done.loss == 0.0 and model.table.grad is None
    assert done.logp.tolist() == [[0]] and done.entropy.tolist() == [[0]]


def test_an_entropy_term_sends_its_gradient() -> None:
    """d H / d z_i = -p_i (log p_i + H) for one softmax row."""

    def minus_entropy(forward: Forward, batch: Batch) -> TokenLoss:
        assert forward.entropy is not None
        return TokenLoss(-forward.entropy)

    model = Bigram(BIGRAM)
    objective = Objective(minus_entropy, sum_per_response, needs=frozenset({"logp", "entropy"}))
    done = backward(engine_of(model), batch_of(row((0,), (1,))), objective)
    entropy = -sum(p * math.log(p) for p in BIGRAM[0])
    assert done.loss == pytest.approx(-entropy, abs=1e-15)
    assert model.table.grad is not None
    assert_close(model.table.grad[0], [p * (math.log(p) + entropy) for p in BIGRAM[0]])


def test_the_ratio_is_one_by_construction_where_old_log_probs_are_not_recomputed() -> None:
    seen = []

    def surrogate(forward: Forward, batch: Batch) -> TokenLoss:
        assert forward.logp is not None and batch.logp_old is not None
        assert forward.logp.requires_grad and not batch.logp_old.requires_grad
        seen.append((forward.logp - batch.logp_old).abs().max().item())
        return TokenLoss(-(forward.logp - batch.logp_old).exp())

    batch = batch_of(row((5, 6), (7, 8, 9))).replace(logp_sampler=torch.full((1, 5), -9.0))
    backward(engine_of(tiny_llama()), batch, Objective(surrogate, sum_per_response))
    assert seen == [0.0]


# ------------------------------------------------------------------ steps


def state_of(engine: LocalEngine) -> list[Tensor]:
    moments = [v for s in engine.policy.optimizer.state_dict()["state"].values() for v in s.values()]
    return [t.detach().clone() for t in [*engine.policy.parameters, *moments]]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_changes_neither_parameters_nor_moments(
    poison: float, max_norm: float | None
) -> None:
    """D18: six steps, one element poisoned at step 3; the run ends as one that never had step 3."""
    ends = []
    for poisoned in (True, False):
        engine = engine_of(tiny_llama())
        batch = batch_of(*ragged_rollouts())
        for number in range(1, 7):
            if number == 3 and not poisoned:
                continue
            backward(engine, batch)
            if number == 3:
                before = state_of(engine)
                gradient = engine.policy.parameters[1].grad
                assert gradient is not None
                gradient.view(-1)[5] = poison
            result = engine.step("policy", 0.01, max_norm)
            assert result.applied == (number != 3)
            if number == 3:
                assert not math.isfinite(result.grad_norm)
                assert same(state_of(engine), before)
                assert all(p.grad is None for p in engine.policy.parameters)
        ends.append(state_of(engine))
    assert same(*ends)


def sgd_engine(values: list[float]) -> tuple[LocalEngine, nn.Module]:
    module = nn.Module()
    module.w = nn.Parameter(torch.tensor(values, dtype=torch.float64))
    return LocalEngine({"policy": Trainee(module, torch.optim.SGD(module.parameters(), lr=9.9))}, 1.0), module


@pytest.mark.parametrize(("max_norm", "expected"), [(None, [0.7, 0.6]), (10.0, [0.7, 0.6]), (1.0, [0.94, 0.92])])
def test_a_step_moves_by_rate_times_the_clipped_gradient(max_norm: float | None, expected: list[float]) -> None:
    """Gradient (3, 4), norm 5; rate 0.1; clipped to norm 1 it is (0.6, 0.8) (torch divides by 5 + 1e-6)."""
    engine, module = sgd_engine([1.0, 1.0])
    module.w.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    result = engine.step("policy", 0.1, max_norm)
    assert result.grad_norm == 5.0 and result.applied  # the norm before clipping
    assert_close(module.w, expected, 1e-7)
    assert module.w.grad is None


def test_rate_zero_changes_no_parameter() -> None:
    engine = engine_of(tiny_llama())
    before = [p.detach().clone() for p in engine.policy.parameters]
    backward(engine, batch_of(*ragged_rollouts()))
    assert engine.step("policy", 0.0, None).grad_norm > 0
    assert same([p.detach() for p in engine.policy.parameters], before)


def test_restart_brings_back_parameters_and_optimizer() -> None:
    engine = engine_of(tiny_llama(), remember=True)
    batch = batch_of(*ragged_rollouts())
    start = state_of(engine)
    runs = []
    for _ in range(2):
        backward(engine, batch)
        engine.step("policy", 0.01, None)
        first = state_of(engine)
        backward(engine, batch)
        engine.step("policy", 0.02, None)
        runs.append((first, state_of(engine)))
        assert not same(first, start)
        engine.restart("policy")
        assert same(state_of(engine), start) and engine.policy.optimizer.state_dict()["state"] == {}
    assert same(runs[0][0], runs[1][0]) and same(runs[0][1], runs[1][1])


def test_frozen_parameters_stay() -> None:
    model = tiny_llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    frozen = copy.deepcopy(model.model.embed_tokens.weight)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    engine = LocalEngine({"policy": Trainee(model, optimizer)}, 1.0)
    backward(engine, batch_of(*ragged_rollouts()))
    engine.step("policy", 0.1, None)
    assert torch.equal(model.model.embed_tokens.weight, frozen)


def test_a_policy_without_a_token_before_the_first_is_refused() -> None:
    with pytest.raises(AssertionError, match="at least one token before"):
        logp_of(engine_of(Bigram(BIGRAM)), batch_of(row((), (1, 2))))


# ------------------------------------------------------------------ what was not finite


def with_loss(of: Any) -> Objective:
    return Objective(lambda forward, batch: TokenLoss(of(forward.logp)), sum_per_response)


def ragged() -> Batch:
    """Responses of 2 and 3 tokens behind a prompt of 2; groups 4 and 5, episodes 40 and 50."""
    rows = [Rollout((0, 1), (2, 0), 4, 40, reward=1.0), Rollout((1, 1), (2, 0, 1), 5, 50, reward=1.0)]
    return batch_of(*rows)


def test_the_first_bad_loss_is_named_with_its_token_and_response() -> None:
    engine, batch = engine_of(Bigram(BIGRAM)), ragged()
    bad = torch.zeros(batch.trained.shape).index_put((torch.tensor([1]), torch.tensor([3])), torch.tensor(math.nan))
    backward(engine, batch, with_loss(lambda logp: logp + bad))
    result = engine.step("policy", 0.1, None)
    assert not result.applied
    assert result.fault == "the loss at token 1 of the response with episode 50, group 5"


def test_a_finite_loss_with_a_bad_gradient_is_named_too() -> None:
    """The root of 0 is 0, and its slope is infinite: at the token where logp is what is taken off it."""
    engine, batch = engine_of(Bigram(BIGRAM)), ragged()
    offset = logp_of(engine, batch)[0, 2].item()  # token 0 of the first response; no other has this log-probability
    backward(engine, batch, with_loss(lambda logp: (logp - offset).abs().sqrt()))
    result = engine.step("policy", 0.1, None)
    assert not result.applied
    assert result.fault == "the loss's gradient at token 0 of the response with episode 40, group 4"


def test_a_gradient_that_overflows_inside_the_model_names_its_parameter() -> None:
    module = Bigram(BIGRAM)
    engine, batch = engine_of(module), ragged()
    backward(engine, batch)
    assert module.table.grad is not None
    module.table.grad[0, 0] = math.inf
    result = engine.step("policy", 0.1, None)
    assert not result.applied and result.fault == "the gradient of table"


def test_a_finite_step_has_no_fault_and_the_next_one_starts_anew() -> None:
    engine, batch = engine_of(Bigram(BIGRAM)), ragged()
    backward(engine, batch, with_loss(lambda logp: logp * math.nan))
    assert engine.step("policy", 0.1, None).fault
    backward(engine, batch)
    assert engine.step("policy", 0.1, None).fault == ""
