"""The mean gradient of sampled responses beside the exact one, through the sampler that runs use.

The policy is a real Llama whose next-token logits are a tiny world's table; the product's sampler draws from it with
the product's random numbers. There are few distinct responses and few distinct groups of them: each is put through the
update once and counts as often as it was drawn, so 10^5 responses take seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hotcold.algorithms.base import Algorithm
from hotcold.algorithms.baselines import greedy_baseline, no_baseline
from hotcold.algorithms.expert_iteration import ExpertIteration
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.kl import ExactKL, KLInLoss, KLInReward
from hotcold.algorithms.ppo import PPO
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.algorithms.rloo import RLOO
from hotcold.batch import Rollout
from hotcold.equations import kl_k3
from hotcold.lab.expectation import Recorder, Setting, expected_update, interleaved, prepared
from hotcold.lab.tiny import FIXED, Response, Table, Tiny
from hotcold.lab.truth import state_values, truth
from hotcold.sampling.base import Request, Sampler, SamplingOptions
from hotcold.sampling.transformers_engine import TransformersSampler
from hotcold.training.mismatch import Mismatch
from hotcold.training.update import UpdateSettings, update

NUM_RESPONSES = 100_000
LIMIT = 4.0  # standard errors; each of few entries lies further out in 6 of 100 000 cases
NEVER = -1e4  # a logit whose probability is exactly 0
PER_DRAW = 8  # responses that share a draw; every group size that is asked for divides it


@dataclass(frozen=True)
class Drawn:
    """Responses in the order of their draws, as the sampler returned them."""

    responses: tuple[Response, ...]
    logp: dict[Response, list[float]]  # as it reported them
    greedy: Response


@dataclass(frozen=True)
class SampledCheck:
    name: str
    num_responses: int
    num_steps: int  # of `num_responses` / `num_steps` responses each
    num_distinct: int  # steps that differ; only these were computed
    largest: float  # of the entries of the gradient: |mean - exact| in standard errors
    relative: float  # |mean - exact| / |exact|, L2
    limit: float = LIMIT

    @property
    def passed(self) -> bool:
        return self.largest <= self.limit  # False for NaN

    @property
    def text(self) -> str:
        verdict = "within" if self.passed else "NOT within"
        return (
            f"{self.name}: mean gradient of {self.num_responses} responses {verdict} {self.limit:g} standard errors of "
            f"the exact one (largest {self.largest:.2f}; relative distance {self.relative:.1e})"
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True)
class Estimator:
    """What is put through the update, and the gradient that it should have on average, uphill."""

    name: str
    algorithm: Algorithm
    exact: Tensor  # [prefixes, V]
    setting: Setting = field(default_factory=Setting)


def sampled_checks(
    num_responses: int = NUM_RESPONSES, seed: int = 0, progress: Callable[[str], None] | None = None
) -> list[SampledCheck]:
    """Every estimator of `estimators()` on responses from the policy that its setting names."""
    drawn: dict[bool, Drawn] = {}
    checks = []
    for estimator in estimators():
        if progress is not None:
            progress(estimator.name)
        of_other = estimator.setting.sampler is not None
        if of_other not in drawn:
            table = FIXED.logits if estimator.setting.sampler is None else estimator.setting.sampler
            drawn[of_other] = draw(FIXED, table_sampler(FIXED, table), num_responses, seed)
        checks.append(sampled_check(estimator, drawn[of_other]))
    return checks


def sampled_check(estimator: Estimator, drawn: Drawn, tiny: Tiny = FIXED) -> SampledCheck:
    """The responses in groups of the algorithm's size, in their order; what is left over is not used."""
    algorithm, setting = estimator.algorithm, estimator.setting
    size = (algorithm.plan.group_size if algorithm.plan else 1) * setting.num_groups
    num_steps = len(drawn.responses) // size
    steps = Counter(tuple(sorted(drawn.responses[start : start + size])) for start in range(0, num_steps * size, size))
    assert setting.num_groups == 1, "the order inside a step is forgotten, and with it which group a response is in"
    gradients = torch.stack([_gradient(estimator, members, drawn, tiny) for members in steps])
    share = torch.tensor(list(steps.values()), dtype=torch.float64)[:, None, None] / num_steps
    mean = (share * gradients).sum(0)
    variance = (share * (gradients - mean) ** 2).sum(0) * num_steps / max(num_steps - 1, 1)
    error = (variance / num_steps).sqrt()
    gap = (mean - estimator.exact).abs()
    # An entry that never varies has no error to be measured in: it is right to rounding, or wrong.
    in_errors = torch.where(error > 0, gap / error, torch.where(gap < 1e-9, 0.0, math.inf))
    relative = float(gap.norm() / estimator.exact.norm())
    return SampledCheck(estimator.name, num_steps * size, num_steps, len(steps), float(in_errors.max()), relative)


def _gradient(estimator: Estimator, members: Sequence[Response], drawn: Drawn, tiny: Tiny) -> Tensor:
    """[prefixes, V] the real update on one step's responses, uphill."""
    algorithm, setting = estimator.algorithm, estimator.setting
    has_critic = any(objective.model == "critic" for objective in algorithm.objectives)
    recorder = Recorder(tiny, setting, has_critic)
    rows = [_with_greedy(row, drawn, tiny) for row in interleaved(tiny, [members], drawn.logp, False)]
    settings = UpdateSettings(setting.tokens_per_microbatch, {}, setting.seed, setting.mismatch)
    batch = prepared(rows, algorithm, setting.truncation)
    update(batch, algorithm, algorithm.state(), recorder, settings, 1, lambda _: 0.0)
    (gradient,) = recorder.update["policy"]
    return gradient


def _with_greedy(row: Rollout, drawn: Drawn, tiny: Tiny) -> Rollout:
    return replace(row, greedy_reward=tiny.total(drawn.greedy))


# ---- sampling


def draw(tiny: Tiny, sampler: Sampler, num_responses: int, seed: int) -> Drawn:
    """As a run asks for them: PER_DRAW responses to each draw."""
    prompt = (tiny.vocabulary,)
    options = SamplingOptions(max_tokens=tiny.max_tokens, seed=seed)
    requests = [Request(prompt, i // PER_DRAW, i % PER_DRAW) for i in range(num_responses)]
    found = sampler.sample(requests, options)
    (greedy,) = sampler.sample(requests[:1], replace(options, greedy=True))
    return Drawn(tuple(r.ids for r in found), {r.ids: list(r.logp) for r in found}, greedy.ids)


def table_sampler(tiny: Tiny, table: Table, max_rows: int = 8192) -> TransformersSampler:
    return TransformersSampler(table_llama(tiny, table), _NoWords(), eos_ids=(), max_rows=max_rows)


def table_llama(tiny: Tiny, table: Table) -> LlamaForCausalLM:
    """A Llama whose next-token logits after a prefix are the table's row. The last token must name the prefix.

    One-hot embeddings, a layer that adds nothing; the norm multiplies a one-hot vector of width W by sqrt(W), which
    the head divides by. The prompt is one more token, which is never chosen.
    """
    assert all(len(prefix) <= 1 for prefix in tiny.prefixes), "the last token alone does not say where a response is"
    size = tiny.vocabulary + 1
    width = size + size % 2  # rotary positions need an even one
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=16,
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
    )
    logits = torch.full((size, size), NEVER)
    for prefix, row in zip(tiny.prefixes, table, strict=True):
        logits[prefix[-1] if prefix else tiny.vocabulary, : tiny.vocabulary] = torch.tensor(row)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[:, :size] = logits.T / math.sqrt(width)
    return model.eval()


class _NoWords:
    """What the sampler asks of a tokenizer, for ids that stand for themselves."""

    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
    all_special_tokens: list[str] = []  # noqa: RUF012

    def batch_decode(self, rows: Sequence[Sequence[int]], **options: Any) -> list[str]:
        return ["".join(map(str, row)) for row in rows]


# ---- the estimators


def estimators(tiny: Tiny = FIXED, beta: float = 0.3) -> list[Estimator]:
    """On a world of fixed length T. The scale is known where the estimator is unbiased up to one; elsewhere the exact
    gradient is the sum over every group."""
    exact = truth(tiny)
    leashed = exact.grad_J - beta * exact.grad_reverse_kl
    length = tiny.max_tokens
    assert tiny.has_fixed_length
    other = Setting(sampler=tiny.sampler, mismatch=Mismatch("truncate", "sequence", cap=1e9))
    valued = Setting(values=state_values(tiny))
    known = [
        Estimator("reinforce, no baseline", REINFORCE(1, baseline=no_baseline), exact.grad_J),
        Estimator("reinforce, batch mean of 4: 3/4", REINFORCE(4), 3 / 4 * exact.grad_J),
        Estimator("reinforce, greedy response", REINFORCE(1, baseline=greedy_baseline), exact.grad_J),
        Estimator("rloo, 2 responses", RLOO(2), exact.grad_J),
        Estimator("rloo, 4 responses", RLOO(4), exact.grad_J),
        Estimator(
            f"grpo without std, 4 responses of {length} tokens: 3/{4 * length}",
            GRPO(4, scale_by_std=False),
            3 / (4 * length) * exact.grad_J,
        ),
        Estimator(f"ppo, true values, lam 1: 1/{length}", PPO(1, whiten=False), exact.grad_J / length, valued),
        Estimator(f"rloo, KL in the reward, beta {beta}", RLOO(2, kl=KLInReward(beta)), leashed),
        Estimator(f"rloo, exact KL, beta {beta}", RLOO(2, kl=ExactKL(beta)), leashed),
        Estimator("rloo, sampled by another policy, weights of whole responses", RLOO(2), exact.grad_J, other),
    ]
    summed: dict[str, Algorithm] = {
        "grpo, 4 responses": GRPO(4),
        f"grpo, k3 in the loss, beta {beta}": GRPO(2, kl=KLInLoss(beta, kl_k3)),
        "expert iteration, 2 responses": ExpertIteration(2),
    }
    return known + [Estimator(name, a, expected_update(a, tiny).gradient) for name, a in summed.items()]
