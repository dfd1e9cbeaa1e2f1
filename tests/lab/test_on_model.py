"""The update of a real model: every check passes on right parts, and each planted fault is found by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotcold.algorithms.base import Algorithm, Forward, Objective, TokenLoss
from hotcold.algorithms.expert_iteration import ExpertIteration, Threshold
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.kl import ExactKL, KLInLoss, KLInReward
from hotcold.algorithms.ppo import PPO
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Batch, Rollout
from hotcold.config.schema import train_config
from hotcold.engines.base import Engine, Pass, StepResult
from hotcold.equations import mean_per_token
from hotcold.errors import InputError
from hotcold.lab.on_model import Check, Subject, check_model, shuffled
from hotcold.lab.probe import Parts, local_engine, norm, relative_gap
from hotcold.lab.telling import stirred, with_variance
from hotcold.models.critic import Critic
from hotcold.models.reading import Head, Laying, Reading, choose_reading
from hotcold.models.reference import FrozenReference, copy_as_reference
from hotcold.sampling.base import Request, SamplingOptions
from hotcold.sampling.transformers_engine import TransformersSampler
from hotcold.verify.models import verify_on_model
from tests.sampling.tiny import gpt2, letters, llama
from tests.tiny_model import write_tiny

GROUP = 3
OPTIONS = SamplingOptions(max_tokens=9, seed=2)
PROMPTS = [(3, 4, 5, 6, 7, 8), (9, 3)]


def sampler_of(module: Any) -> TransformersSampler:
    return TransformersSampler(module, letters(), eos_ids=(27, 5), context_length=64, pad_id=26)


def sampled(sampler: TransformersSampler) -> list[Rollout]:
    """2 prompts of different length, 3 responses each; scores by hand."""
    requests = [Request(PROMPTS[draw], draw, sample) for draw in range(len(PROMPTS)) for sample in range(GROUP)]
    return [
        Rollout(
            prompt_ids=request.prompt_ids,
            response_ids=response.ids,
            group=request.draw,
            episode=request.draw * GROUP + request.sample,
            reward=(0.0, 1.0, 0.25, 0.5, 1.0, 0.0)[i],
            logp_sampler=response.logp,
            draw=request.draw,
        )
        for i, (request, response) in enumerate(zip(requests, sampler.sample(requests, OPTIONS), strict=True))
    ]


def subject(algorithm: Algorithm, policy: Any = None, **more: Any) -> Subject:
    reading = {} if policy is not None else {"policy": choose_reading(gpt2()), "critic": Reading(laying=Laying.PROMPTS)}
    policy = policy or gpt2()
    sampler = sampler_of(policy)
    modules = {"policy": policy}
    if any(o.model == "critic" for o in algorithm.objectives):
        modules["critic"] = Critic(llama(seed=1).model, 32)
    return Subject(
        algorithm=algorithm,
        parts=Parts(
            modules, copy_as_reference(policy, "", ""), reading=reading and {**reading, "reference": reading["policy"]}
        ),
        rollouts=sampled(sampler),
        sampler=sampler,
        options=OPTIONS,
        **more,
    )


def bad(checks: Sequence[Check]) -> set[str]:
    return {check.name.split(",")[0] for check in checks if not check.passed}


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": GRPO(GROUP, kl=KLInLoss(0.1)),
    "rloo": RLOO(GROUP, kl=KLInReward(0.1)),
    "rloo_exact": RLOO(GROUP, kl=ExactKL(0.1), entropy_bonus=0.01),
    "ppo": PPO(GROUP, kl=KLInReward(0.05), epochs_per_batch=2, minibatches=3, critic_warmup=1),
}


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_right_model_and_engine_pass_every_check(name: str) -> None:
    algorithm = ALGORITHMS[name]
    checks = check_model(subject(algorithm))
    assert bad(checks) == set(), "\n".join(c.text for c in checks)
    assert not any(c.skipped for c in checks)
    # 2 log-probs, 2 samplings, ratio, KL; then 5 invariances and finite differences of each trained model
    assert len(checks) == 6 + 6 * len({o.model for o in algorithm.objectives})


def test_nothing_is_changed() -> None:
    one = subject(ALGORITHMS["ppo"])
    before = {k: [p.clone() for p in m.parameters()] for k, m in one.parts.modules.items()}
    check_model(one)
    for name, module in one.parts.modules.items():
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before[name], strict=True))
        assert all(p.grad is None for p in module.parameters()) and all(p.dtype == torch.float32 for p in before[name])


# ------------------------------------------------------------------ planted faults in the model


class Around(nn.Module):
    """A causal LM with something wrong; the rest is the model's own."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner
        self.config = inner.config

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()


class ReadsPadding(Around):
    """Adds to every logit the mean embedding of the whole row: padding, and later tokens, are in it."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        use_cache: bool,
        past_key_values: Any = None,
    ) -> Any:
        out = self.inner(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            past_key_values=past_key_values,
        )
        out.logits = out.logits + 0.1 * self.get_input_embeddings()(input_ids).mean((1, 2))[:, None, None] * out.logits
        return out


class NoPositions(Around):
    """Positions cannot be given: in a left-padded batch they count the padding."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool, past_key_values: Any = None) -> Any:
        return self.inner(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache, past_key_values=past_key_values
        )


class DropsOut(Around):
    """Dropout that does not ask for the mode."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        use_cache: bool,
        past_key_values: Any = None,
    ) -> Any:
        out = self.inner(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            past_key_values=past_key_values,
        )
        out.logits = nn.functional.dropout(out.logits, 0.1, training=True)
        return out


SAME, RATIO = {"micro-batches", "row order"}, "ratio - 1 before the first update"
SAMPLER, APART = "sampled against recomputed log-probabilities", "sampled together or one by one"
FAULTY_MODELS: list[tuple[Callable[[Any], Any], set[str]]] = [
    (ReadsPadding, {*SAME, "padding", SAMPLER}),
    (NoPositions, {SAMPLER, APART}),
    (DropsOut, {*SAME, "padding", RATIO, SAMPLER, APART}),
]


@pytest.mark.parametrize("fault, found", FAULTY_MODELS)
def test_a_model_with_a_fault_is_found(fault: Callable[[Any], Any], found: set[str]) -> None:
    torch.manual_seed(0)
    assert found <= bad(check_model(subject(GRPO(GROUP), fault(gpt2()))))


def test_a_way_of_reading_that_is_not_the_model_s_is_found() -> None:
    """A head that is scaled where the model's is not: every log-probability is a little off."""
    one = subject(GRPO(GROUP), gpt2())
    wrong = replace(one, parts=replace(one.parts, reading={"policy": Reading(Head(scale=1.05))}))
    assert bad(check_model(wrong)) == {"shared prompts", SAMPLER}


def test_a_reference_that_is_not_the_starting_model_is_found_or_named() -> None:
    one = subject(ALGORITHMS["grpo"])
    other = replace(one, parts=replace(one.parts, reference=FrozenReference(gpt2(seed=1), "")))
    assert bad(check_model(other)) == {"KL to the reference at the start"}
    named = check_model(replace(other, other_reference="the reference is not the starting model"))
    assert bad(named) == set()
    (skipped,) = [c for c in named if c.skipped]
    assert skipped.name == "KL to the reference at the start" and "not the starting model" in skipped.text


# ------------------------------------------------------------------ planted faults in the engine


@dataclass
class Faulty:
    """The local engine with `wrong` in place of its backward pass."""

    parts: Parts
    wrong: Callable[[Engine, Batch, Tensor, Objective], Pass]

    def __post_init__(self) -> None:
        self.engine = local_engine(self.parts)

    def read(self, batch: Batch, names: frozenset[str]) -> dict[str, Tensor]:
        return self.engine.read(batch, names)

    def backward(self, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
        return self.wrong(self.engine, batch, weights, objective)

    def step(self, model: str, rate: float, max_norm: float | None) -> StepResult:
        return self.engine.step(model, rate, max_norm)

    def discard(self, model: str) -> None:
        self.engine.discard(model)

    def restart(self, model: str) -> None:
        self.engine.restart(model)


def mean_per_microbatch(engine: Engine, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
    """Each micro-batch averages over its own tokens; their means are then added up."""
    return engine.backward(batch, mean_per_token(batch.trained).to(weights.dtype), objective)


def counts_padding(engine: Engine, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
    """The denominator is the size of the padded batch."""
    return engine.backward(batch, weights * batch.trained.sum() / batch.trained.numel(), objective)


def critic_by_rows(engine: Engine, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
    """Only the critic's loss is averaged per micro-batch."""
    if objective.model == "critic":
        return mean_per_microbatch(engine, batch, weights, objective)
    return engine.backward(batch, weights, objective)


def gradient_twice(engine: Engine, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
    """The loss that is reported is half of the one that is differentiated."""
    done = engine.backward(batch, weights, objective)
    return replace(done, loss=done.loss / 2)


FAULTY_ENGINES = [
    (mean_per_microbatch, "grpo", {"micro-batches", "row order"}),
    (counts_padding, "grpo", {"micro-batches", "padding", "row order"}),
    (critic_by_rows, "ppo", {"micro-batches", "row order"}),
    (gradient_twice, "grpo", {"finite differences of the policy's loss"}),
]


@pytest.mark.parametrize("wrong, algorithm, found", FAULTY_ENGINES)
def test_an_engine_with_a_fault_is_found(wrong: Any, algorithm: str, found: set[str]) -> None:
    checks = check_model(subject(ALGORITHMS[algorithm], make_engine=lambda parts: Faulty(parts, wrong)))
    # rows of one prompt are laid together where prompts are shared, so that a fault of the cut shows there as well
    assert found <= bad(checks), "\n".join(c.text for c in checks)
    if wrong is critic_by_rows:
        assert all("critic" in c.name for c in checks if not c.passed)


@dataclass(frozen=True)
class Undetached(GRPO):
    """The loss is multiplied by log pi once more: what is differentiated is not what a constant advantage says."""

    @property
    def objectives(self) -> tuple[Objective, ...]:
        (objective,) = GRPO(self.group_size).objectives

        def loss(forward: Forward, batch: Batch) -> TokenLoss:
            assert forward.logp is not None
            right = objective.loss(forward, batch)
            # the value is that of the right loss, the gradient is not
            return TokenLoss(right.loss + 0.1 * (forward.logp - forward.logp.detach()))

        return (replace(objective, loss=loss),)


def test_a_loss_whose_gradient_is_not_its_own_is_found() -> None:
    assert bad(check_model(subject(Undetached(GROUP)))) == {"finite differences of the policy's loss"}


# ------------------------------------------------------------------ the parts


def test_rows_whose_gradients_cancel_are_compared_at_the_length_of_their_parts() -> None:
    """Equal responses with centred advantages: the whole gradient is rounding. A fault of the cut is still found."""
    given = subject(ALGORITHMS["rloo"])
    first = given.rollouts[0]
    same = {
        "prompt_ids": first.prompt_ids,
        "response_ids": first.response_ids,
        "response_mask": first.response_mask,
        "logp_sampler": first.logp_sampler,
    }
    equal = [replace(r, **same) for r in given.rollouts]
    given = replace(given, rollouts=equal, sampler=None)
    base = given.base()
    assert 0 < norm(base.gradients["policy"]) < 1e-4 * base.lengths["policy"]
    assert bad(check_model(given)) == set()
    faulty = replace(given, make_engine=lambda parts: Faulty(parts, mean_per_microbatch))
    assert "micro-batches" in bad(check_model(faulty))


def test_scores_that_teach_nothing_are_replaced_by_made_up_ones() -> None:
    rows = sampled(sampler_of(gpt2()))
    equal = [replace(r, reward=1.0, greedy_reward=1.0) for r in rows]
    per_group = [replace(r, reward=float(r.group)) for r in rows]  # vary between the prompts only
    none = [replace(r, reward=None) for r in rows]
    assert with_variance(rows, GRPO(GROUP)) == (rows, False)
    for same in (equal, per_group, none):
        made, made_up = with_variance(same, GRPO(GROUP))
        assert made_up and all(len({r.reward for r in made if r.group == g}) > 1 for g in range(2))
    assert with_variance(per_group, RLOO(2)) != (per_group, False)
    # nothing reaches this threshold until the scores are a hundred times larger
    made, made_up = with_variance(rows, ExpertIteration(GROUP, Threshold(70.0)))
    assert made_up and max(r.reward or 0.0 for r in made) == 100.0


def test_shuffling_moves_rows_and_keeps_the_order_inside_an_episode() -> None:
    rows = [Rollout((1,), (i,), 0, i // 2, reward=float(i)) for i in range(8)]
    other = shuffled(rows)
    assert other != rows and sorted(r.response_ids for r in other) == [(i,) for i in range(8)]
    for episode in range(4):
        assert [r.response_ids for r in other if r.episode == episode] == [(2 * episode,), (2 * episode + 1,)]


def test_tensors_of_zeros_are_stirred_and_put_back() -> None:
    critic = Critic(llama(seed=1).model, 32)
    parts = Parts({"critic": critic})
    trunk = [p.clone() for p in critic.trunk.parameters()]
    with stirred(parts):
        assert bool(critic.head.weight.any()) and bool(critic.head.bias.any())
        assert all(torch.equal(a, b) for a, b in zip(trunk, critic.trunk.parameters(), strict=True))
    assert not bool(critic.head.weight.any()) and not bool(critic.head.bias.any())


def test_the_gap_is_over_the_whole_gradient() -> None:
    # |(0, 0, 1)| / |(0, 3, 4)| = 1 / 5
    assert relative_gap(
        [torch.tensor([0.0]), torch.tensor([3.0, 5.0])], [torch.tensor([0.0]), torch.tensor([3.0, 4])]
    ) == pytest.approx(0.2)
    assert relative_gap([torch.zeros(2)], [torch.zeros(2)]) == 0.0
    assert relative_gap([torch.ones(2)], [torch.zeros(2)]) == math.inf
    assert relative_gap([torch.ones(1)], [torch.zeros(1)], least=4.0) == 0.25


def test_a_check_fails_on_what_is_not_a_number_and_passes_only_with_a_reason_when_skipped() -> None:
    assert not Check("x", "y", math.nan, 1.0).passed and Check("x", "y", math.nan, 1.0).as_dict()["measured"] is None
    assert not Check("x", "y", None).passed and Check("x", "y", None, skipped="too large").passed
    assert Check("x", "y", 0.0).passed and not Check("x", "y", 1e-12).passed


# ------------------------------------------------------------------ from a config


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_tiny(folder / "model")
    rows = [{"prompt": f"{i}+{i + 1}=" + "0" * (i % 3), "response": "42"[: 1 + i % 2]} for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def reward(completion):\n    return float(len(completion) % 3)\n")
    (folder / "silent.py").write_text("def reward(completion):\n    return None\n")
    return folder


def checks_of(files: Path, algorithm: str, *words: str, reward: str = "reward.py") -> list[Check]:
    given = [f"model={files}/model", f"data={files}/prompts.jsonl"]
    given += [] if algorithm == "sft" else [f"reward={files}/{reward}"]
    return verify_on_model(train_config([algorithm, *given, *words]))


def test_the_models_of_a_config_are_checked_and_nothing_is_written(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(files.rglob("*"))
    for words in (
        ["ppo", "beta=0.05", "minibatches=2", "max_tokens=8"],
        ["dapo", "lora.rank=2", "beta=0.1", "group_size=4", "max_tokens=8"],
    ):
        checks = checks_of(files, *words)
        assert bad(checks) == set() and not any(c.skipped for c in checks), [c.text for c in checks]
    assert sorted(files.rglob("*")) == before and list(tmp_path.iterdir()) == []


def test_short_responses_without_any_score_get_made_up_ones(files: Path) -> None:
    checks = checks_of(files, "grpo", "group_size=2", "max_tokens=4", reward="silent.py")
    assert bad(checks) == set()
    assert [c.skipped for c in checks if c.skipped] == ["this algorithm has no reference"]


def test_an_algorithm_that_imitates_has_no_sampler_to_check(files: Path) -> None:
    checks = checks_of(files, "sft")
    assert bad(checks) == set()
    assert {c.skipped for c in checks if c.skipped} == {
        "the rows are given, not sampled",
        "this algorithm has no reference",
    }


def test_bf16_is_checked_at_its_own_tolerances(files: Path) -> None:
    checks = checks_of(files, "grpo", "group_size=4", "dtype=bf16", "max_tokens=6", "beta=0.1")
    assert bad(checks) == set(), [c.text for c in checks]
    tolerances = {c.name.split(",")[0]: c.tolerance for c in checks}
    assert tolerances["micro-batches"] == 5e-2 and tolerances[RATIO] == 0.0
    assert tolerances["finite differences of the policy's loss"] == 1e-6  # in float64


def test_a_wrong_config_is_an_input_error(files: Path) -> None:
    with pytest.raises(InputError, match="no such"):
        verify_on_model(
            train_config(["grpo", f"model={files}/no such", f"data={files}/prompts.jsonl", f"reward={files}/reward.py"])
        )
