"""Is the update of a real model the same however its rows are cut, padded, ordered, sampled and recomputed?

Everything here goes through the update, the engine and the sampler that a run uses, on a few rows of a few tokens. No
parameter is changed in the end and nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hotcold.algorithms.base import Algorithm
from hotcold.batch import Batch, Rollout, collate
from hotcold.engines.base import Engine
from hotcold.errors import InputError
from hotcold.lab.differences import along_random_directions
from hotcold.lab.probe import (
    AT_ONCE,
    Gradients,
    MakeEngine,
    OneStep,
    Parts,
    Probe,
    local_engine,
    relative_gap,
    run,
)
from hotcold.lab.telling import stirred
from hotcold.models.compute import check_recomputing
from hotcold.sampling.base import Request, Response, Sampler, SamplingOptions
from hotcold.training.collect import kept
from hotcold.training.mismatch import Mismatch

READS_OF_REFERENCE = frozenset({"logp_ref", "kl_old"})
MOST_PARAMETERS = 5_000_000  # for finite differences, which need a copy in float64
MOST_ALONE = 8  # responses that are sampled again one by one
EXTRA_COLUMNS = 7


@dataclass(frozen=True)
class Tolerance:
    """By what the arithmetic is: bf16 keeps 8 bits, and a product rounds differently with the rows beside it."""

    gradient: float  # relative, L2 of the whole gradient
    logp_max: float  # nats
    logp_mean: float


TOLERANCES = {"fp32": Tolerance(1e-5, 1e-4, 5e-6), "bf16": Tolerance(5e-2, 0.5, 2e-2)}
DIFFERENCES = 1e-6  # of a directional derivative in float64, relative
RELATIVE, NATS, RESPONSES = "relative", "nats", "responses"


@dataclass(frozen=True)
class Check:
    name: str
    what: str  # what was compared with what
    measured: float | None  # the largest difference; None: not measured
    tolerance: float = 0.0
    unit: str = RELATIVE
    skipped: str = ""  # the reason

    @property
    def passed(self) -> bool:
        if self.measured is None:
            return bool(self.skipped)
        return self.measured <= self.tolerance  # False for NaN

    @property
    def text(self) -> str:
        if self.measured is None:
            return f"{'-':<4} {self.name}: {self.skipped}"
        limit = f"at most {self.tolerance:.0e}" if self.tolerance else "exactly 0 is needed"
        return (
            f"{'ok' if self.passed else 'BAD':<4} {self.name}: {self.measured:.1e} {self.unit} ({limit}); {self.what}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "what": self.what,
            "measured": self.measured if self.measured is None or math.isfinite(self.measured) else None,
            "tolerance": self.tolerance,
            "unit": self.unit,
            "skipped": self.skipped,
            "passed": self.passed,
        }


@dataclass(frozen=True)
class Subject:
    """A model with its algorithm, and rows to train on."""

    algorithm: Algorithm
    parts: Parts
    rollouts: Sequence[Rollout]
    dtype: str = "fp32"  # of the arithmetic
    mismatch: Mismatch | None = None
    other_reference: str = ""  # why the reference is not the starting model; empty: it is
    sampler: Sampler | None = None  # that sampled the rows, all together
    options: SamplingOptions = field(default_factory=SamplingOptions)
    not_sampled: str = ""  # why the rows are not the sampler's
    make_engine: MakeEngine = local_engine

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.dtype]

    @property
    def num_tokens(self) -> int:
        return sum(len(r.prompt_ids) + len(r.response_ids) for r in self.rollouts)

    def engine(self) -> Engine:
        return self.make_engine(self.parts)

    def gradients(
        self,
        rollouts: Sequence[Rollout] | None = None,
        tokens_per_microbatch: int = AT_ONCE,
        columns: int = 0,
        pad_id: int = 0,
        **changes: Any,
    ) -> Gradients:
        """`changes`: of the engine's parts. Rows are laid as before, so that nothing else differs."""
        parts = replace(self.parts, **changes)
        probe = Probe(self.make_engine(parts), parts, columns, pad_id)
        return self._run(probe, self.rollouts if rollouts is None else rollouts, tokens_per_microbatch).gradients

    def base(self) -> Base:
        one_by_one = Probe(self.make_engine(self.parts), self.parts, measures_parts=True)
        self._run(one_by_one, self.rollouts, tokens_per_microbatch=1)
        lengths = {model: math.sqrt(square) for model, square in one_by_one.squares.items()}
        return Base(self.gradients(), one_by_one.gradients, lengths)

    def _run(self, probe: Probe, rows: Sequence[Rollout], tokens_per_microbatch: int) -> Probe:
        algorithm, laid = OneStep(self.algorithm), self.parts.laying
        return run(algorithm, rows, probe, tokens_per_microbatch, self.mismatch, probe.pad_id, laying=laid)


@dataclass(frozen=True)
class Base:
    """What the other gradients are compared with.

    `lengths`: by model the length of the rows' gradients, sqrt(sum |g_row|^2). Where they cancel, as those of equal
    responses with centred advantages do, the whole gradient is smaller than the rounding of its parts: differences are
    relative to the larger of the two.
    """

    gradients: Gradients
    one_by_one: Gradients
    lengths: dict[str, float]


def check_model(subject: Subject, progress: Callable[[str], None] | None = None) -> list[Check]:
    """Every check, in order. The first ones are of the model as it stands."""
    say = progress or (lambda text: None)
    checks: list[Check] = []
    for name, part in (
        ("sampled against recomputed", recomputed),
        ("together or one by one", sampled_apart),
        ("the ratio before the first update", ratio_at_first),
        ("the KL at the start", kl_at_start),
    ):
        say(name)
        checks += part(subject)
    with stirred(subject.parts):
        say("the gradient of all rows at once and of each alone")
        base = subject.base()
        for name, measure in INVARIANCES.items():
            say(name)
            checks += measure(subject, base)
        say("finite differences")
        checks += finite_differences(subject)
    return checks


# ---- the same gradient


def in_microbatches(subject: Subject, base: Base) -> list[Check]:
    what = "one row at a time against as many as go together"
    return _same(subject, "micro-batches", what, base.one_by_one, base)


def with_padding(subject: Subject, base: Base) -> list[Check]:
    pad_id = last_id(subject.parts.modules["policy"])
    what = f"{EXTRA_COLUMNS} more columns of padding, pad id {pad_id} in place of 0"
    return _same(subject, "padding", what, subject.gradients(columns=EXTRA_COLUMNS, pad_id=pad_id), base)


def in_another_order(subject: Subject, base: Base) -> list[Check]:
    rows = shuffled(subject.rollouts)
    cut = subject.gradients(rows, tokens_per_microbatch=max(1, subject.num_tokens // 3))
    return _same(subject, "row order", "rows shuffled, in about three micro-batches", cut, base)


def with_checkpointing(subject: Subject, base: Base) -> list[Check]:
    name, on = "gradient checkpointing", subject.parts.recompute
    try:
        for module in subject.parts.modules.values():
            check_recomputing(module)
    except InputError as error:
        return [Check(name, "", None, skipped=str(error).splitlines()[0])]
    return _same(subject, name, "on against off", subject.gradients(recompute=not on), base)


def with_whole_rows(subject: Subject, base: Base) -> list[Check]:
    """Each prompt once for all of its responses, and the head apart from the trunk: both are proven at load on logits.
    Here the whole gradient is compared."""
    if not subject.parts.reading:
        return [Check("shared prompts", "", None, skipped="this model is read in whole rows")]
    found = subject.gradients(reading={})
    return _same(subject, "shared prompts", "each prompt once against whole rows", found, base)


INVARIANCES: Mapping[str, Callable[[Subject, Base], list[Check]]] = {
    "micro-batches": in_microbatches,
    "padding": with_padding,
    "row order": in_another_order,
    "shared prompts": with_whole_rows,
    "gradient checkpointing": with_checkpointing,
}


def _same(subject: Subject, name: str, what: str, found: Gradients, base: Base) -> list[Check]:
    """One check for each model that is trained."""
    checks = []
    for model in subject.parts.modules:
        whole = f"{name}, the {model}'s gradient"
        if not base.lengths.get(model):
            checks.append(Check(whole, what, None, skipped="its gradient is 0 on these rows: nothing to compare"))
            continue
        gap = math.inf
        if model in found:
            gap = relative_gap(found[model], base.gradients[model], least=base.lengths[model])
        checks.append(Check(whole, what, gap, subject.tolerance.gradient))
    return checks


def shuffled(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """In another order; the rows of an episode keep theirs."""
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(3)).tolist()
    in_time: dict[int, Iterator[Rollout]] = {}
    for r in rollouts:
        in_time.setdefault(r.episode, iter([row for row in rollouts if row.episode == r.episode]))
    return [next(in_time[rollouts[i].episode]) for i in order]


def last_id(module: Any) -> int:
    return int(module.get_input_embeddings().weight.shape[0]) - 1


# ---- the sampler and the trainer


def recomputed(subject: Subject) -> list[Check]:
    """log pi as the sampler reported it against log pi as the trainer computes it, on the sampled tokens."""
    name = "sampled against recomputed log-probabilities"
    if subject.not_sampled or any(r.logp_sampler is None for r in subject.rollouts):
        return [Check(name, "", None, skipped=subject.not_sampled or "the rows have no log-probabilities")]
    batch = _all_kept(subject.rollouts)
    assert batch.logp_sampler is not None
    gap = (subject.engine().read(batch, frozenset({"logp_old"}))["logp_old"] - batch.logp_sampler).abs()[batch.trained]
    what, limit = f"{len(gap)} sampled tokens", subject.tolerance
    largest, mean = (float(gap.max()), float(gap.double().mean())) if len(gap) else (0.0, 0.0)
    return [
        Check(f"{name}, the largest", what, largest, limit.logp_max, NATS),
        Check(f"{name}, the mean", what, mean, limit.logp_mean, NATS),
    ]


def sampled_apart(subject: Subject) -> list[Check]:
    """The same draws alone in their batch: the same tokens, and log-probabilities that differ by rounding."""
    name = "sampled together or one by one"
    if subject.sampler is None or subject.not_sampled:
        return [Check(name, "", None, skipped=subject.not_sampled or "there is no sampler")]
    plan = subject.algorithm.plan
    size = plan.group_size if plan else 1
    rows = list(subject.rollouts)[:: max(1, len(subject.rollouts) // MOST_ALONE)][:MOST_ALONE]
    differing, largest = 0, 0.0
    for row in rows:
        request = Request(row.prompt_ids, row.draw, row.episode - row.draw * size)
        (alone,) = subject.sampler.sample([request], subject.options)
        differing += alone.ids != row.response_ids
        largest = max(largest, _gap_of_common(alone, row))
    what = f"{len(rows)} of {len(subject.rollouts)} responses"
    exact = [] if subject.dtype == "bf16" else [Check(f"{name}, other tokens", what, differing, 0.0, RESPONSES)]
    if subject.dtype == "bf16":
        what += ", up to the first token that differs: in bf16 a token near the edge of its interval may"
    return [*exact, Check(f"{name}, log-probabilities", what, largest, subject.tolerance.logp_max, NATS)]


def _gap_of_common(alone: Response, row: Rollout) -> float:
    """The largest difference over the tokens up to the first that differs."""
    gap = 0.0
    for a, b, x, y in zip(alone.ids, row.response_ids, alone.logp, row.logp_sampler or (), strict=False):
        if a != b:
            break
        gap = max(gap, abs(x - y))
    return gap


def ratio_at_first(subject: Subject) -> list[Check]:
    """Several steps on the batch are asked for, so that log pi_old is computed before the first one."""
    algorithm = OneStep(subject.algorithm, epochs=2, keep_minibatches=_has_rows_for_minibatches(subject))
    probe = Probe(subject.engine(), subject.parts)
    run(algorithm, subject.rollouts, probe, max(1, subject.num_tokens // 3), subject.mismatch)
    name, what = "ratio - 1 before the first update", "log pi_old in the micro-batches of training"
    if probe.drift is None:
        return [Check(name, what, None, skipped="the policy takes no step on these rows")]
    return [Check(name, what, probe.drift)]


def _has_rows_for_minibatches(subject: Subject) -> bool:
    batch = collate(subject.rollouts)
    num_kept = int(kept(batch, subject.algorithm).sum())
    return all(o.minibatches <= num_kept for o in subject.algorithm.objectives)


def kl_at_start(subject: Subject) -> list[Check]:
    name = "KL to the reference at the start"
    of_loss = any("kl" in objective.needs for objective in subject.algorithm.objectives)
    if subject.parts.reference is None or not (of_loss or subject.algorithm.reads & READS_OF_REFERENCE):
        return [Check(name, "", None, skipped="this algorithm has no reference")]
    if subject.other_reference:
        return [Check(name, "", None, skipped=subject.other_reference)]
    batch, engine = _all_kept(subject.rollouts), subject.engine()
    found = engine.read(batch, frozenset({"logp_old", "logp_ref", "kl_old"}))
    logp = float((found["logp_old"] - found["logp_ref"]).abs()[batch.trained].max())
    exact = float(found["kl_old"].abs()[batch.trained].max())
    what = "log pi - log pi_ref of every token, and the exact KL of every state"
    return [Check(name, what, max(logp, exact), unit=NATS)]


def _all_kept(rollouts: Sequence[Rollout]) -> Batch:
    batch = collate(rollouts)
    return batch.replace(keep=torch.ones_like(batch.keep))


# ---- finite differences


def finite_differences(subject: Subject) -> list[Check]:
    """The gradient times a direction against the loss at both sides, in float64."""
    checks = []
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in subject.parts.modules.items()}
    if (size := sum(sizes.values())) > MOST_PARAMETERS:
        reason = f"{size / 1e6:.0f} M parameters; above {MOST_PARAMETERS / 1e6:.0f} M a float64 copy is too much"
        return [Check("finite differences", "", None, skipped=reason)]
    gaps = along_random_directions(
        OneStep(subject.algorithm), subject.parts, subject.rollouts, subject.mismatch, subject.make_engine
    )
    for model in subject.parts.modules:
        name, what = f"finite differences of the {model}'s loss", "3 random directions, in float64"
        if model not in gaps:
            checks.append(Check(name, what, None, skipped="its gradient is 0 on these rows: nothing to compare"))
        else:
            checks.append(Check(name, what, max(gaps[model]), DIFFERENCES))
    return checks
