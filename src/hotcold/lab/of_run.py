"""From the saved rollouts of a run: what another baseline would have done to its gradient, and how much they teach."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotcold.algorithms.base import Algorithm, Forward, Objective, TokenLoss
from hotcold.algorithms.critic_free import to_go
from hotcold.batch import Batch, Rollout, collate, episode_totals
from hotcold.engines.base import Engine
from hotcold.equations import sum_per_response
from hotcold.errors import InputError
from hotcold.lab.probe import Parts
from hotcold.lab.sketch import Array, CountSketch
from hotcold.lab.variance import LEAVE_ONE_OUT, NONE, OWN, BaselineVariance, Contributions, effective_size
from hotcold.training.batching import Cut, micro_batches
from hotcold.training.collect import kept
from hotcold.training.truncation import Truncation
from hotcold.training.update import UpdateSettings, fill_reads, objective_of


@dataclass(frozen=True)
class Bench:
    """What the gradients are computed with: the models as they stood at the step, or near it."""

    algorithm: Algorithm
    engine: Engine
    parts: Parts
    settings: UpdateSettings
    truncation: Truncation
    sketch: CountSketch
    most_prompts: int
    state: dict[str, float] = field(default_factory=dict)  # the algorithm's, as it stood

    @property
    def cut(self) -> Cut:
        return Cut(self.settings.tokens_per_microbatch, self.settings.laying)


@dataclass(frozen=True)
class StepFigures:
    """Of one step, over all of its rows; only `num_used` prompts had their gradients computed."""

    step: int
    policy: str  # in words: which parameters stood in for those that sampled
    num_prompts: int
    num_used: int
    num_responses: int
    num_informative: int  # prompts whose scores differ
    ess_responses: float | None  # effective share of the responses under the ratios policy / sampler
    ess_tokens: float | None
    ess_responses_now: float | None = None  # the same for the newest parameters of the run
    ess_tokens_now: float | None = None


@dataclass(frozen=True)
class RunReport:
    folder: str
    steps: tuple[StepFigures, ...]
    baselines: tuple[BaselineVariance, ...]
    weighting: str
    num_parameters: int
    dims: int  # of the projection
    newest: str = ""  # what `now` stands for
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def passed(self) -> bool:
        """There is nothing to fail; False where a figure that should exist is not a number."""
        variances = [b.variance for b in self.baselines if b.variance is not None]
        return bool(variances) and all(math.isfinite(v) for v in variances)

    @property
    def text(self) -> str:
        return "\n".join(_lines(self))

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("folder", "weighting", "num_parameters", "dims", "newest")},
            "steps": [asdict(step) for step in self.steps],
            "baselines": [b.as_dict() for b in self.baselines],
            "notes": list(self.notes),
            "passed": self.passed,
        }


def measure_step(
    step: int, rollouts: Sequence[Rollout], policy: str, bench: Bench, say: Callable[[str], None]
) -> tuple[StepFigures, Contributions]:
    batch = scored(rollouts, bench)
    groups = batch.group.unique().tolist() if len(batch) else []
    if len(groups) < 2:
        raise InputError(
            f"step {step} has scored responses to {len(groups)} prompt{'s' * (len(groups) != 1)}: at least 2 are "
            "needed, a variance is between prompts."
        )
    used = groups[: bench.most_prompts]
    weights = objective_of(bench.algorithm, "policy").weighting(batch.trained)
    values = _values(batch, bench, used)
    passes = _coefficients(batch, weights, values)
    gradients: dict[str, list[Array]] = {name: [] for name in passes}
    own = _own(rollouts, bench, step)
    owned: list[Array] = []
    for number, group in enumerate(used):
        say(f"step {step}: gradients of prompt {number + 1} of {len(used)}")
        rows = (batch.group == group).nonzero().flatten().tolist()
        for name, coefficients in passes.items():
            gradients[name].append(len(groups) * _gradient(batch, rows, coefficients, _LIKELIHOOD, bench))
        owned.append(len(groups) * own(group))
    found = {name: np.stack(rows) for name, rows in gradients.items()}
    return (
        _figures(step, batch, policy, len(groups), len(used), bench),
        _contributions(batch, used, len(groups), found, np.stack(owned), bench),
    )


def scored(rollouts: Sequence[Rollout], bench: Bench) -> Batch:
    """The rows that have a score, whatever the algorithm then keeps of them."""
    batch = bench.truncation.apply(collate(rollouts))
    return batch.select(batch.keep)


def _log_likelihood(forward: Forward, batch: Batch) -> TokenLoss:
    assert forward.logp is not None
    return TokenLoss(forward.logp)


_LIKELIHOOD = Objective(_log_likelihood, sum_per_response)  # its weights are given


def _coefficients(batch: Batch, weights: Tensor, values: Tensor | None) -> dict[str, Tensor]:
    """[B, T] by what log pi of each token is multiplied. With a score at the end and no more, to_go is the total."""
    totals = episode_totals(batch)[:, None].double()
    returns = to_go(batch, gamma=1.0).double()
    out = {"to_go": weights * returns, "score": weights.double()}
    if not torch.equal(torch.where(batch.trained, returns - totals, 0.0), torch.zeros_like(returns)):
        out["totals"] = torch.where(batch.trained, weights * totals, 0.0)
    if values is not None:
        out["values"] = weights * values.double()
    return out


def _values(batch: Batch, bench: Bench, used: Sequence[int]) -> Tensor | None:
    """[B, T] the critic's values of the rows of the prompts that are used."""
    if "critic" not in bench.parts.modules:
        return None
    out = torch.zeros(batch.tokens.shape)
    rows = torch.isin(batch.group, torch.tensor(used)).nonzero().flatten().tolist()
    for part in micro_batches(batch, rows, bench.cut):
        cut = batch.select(part)
        out[part, : cut.tokens.shape[1]] = bench.engine.read(cut, frozenset({"values_old"}))["values_old"].float()
    return out


def _gradient(batch: Batch, rows: Sequence[int], weights: Tensor, objective: Objective, bench: Bench) -> Array:
    """Of sum(loss * weights) over these rows, projected."""
    bench.engine.discard("policy")
    for part in micro_batches(batch, rows, bench.cut):
        cut = batch.select(part)
        share = weights[part, : cut.tokens.shape[1]]
        if bool(share.any()):
            bench.engine.backward(cut, share, objective)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in bench.parts.parameters("policy")]
    projected = bench.sketch.of(found)
    bench.engine.discard("policy")
    return projected


def _own(rollouts: Sequence[Rollout], bench: Bench, step: int) -> Callable[[int], Array]:
    """The gradient of the run's own loss on a prompt's rows: its credit, objective and weighting, before any step."""
    algorithm, settings = bench.algorithm, bench.settings
    batch = bench.truncation.apply(collate(rollouts))
    batch = batch.select(kept(batch, algorithm))
    objective = objective_of(algorithm, "policy")
    weights = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    if len(batch):
        batch = fill_reads(batch, algorithm, bench.engine, settings, step)
        correction = None if settings.mismatch is None else settings.mismatch.weights(batch)
        with torch.no_grad():
            batch, _ = algorithm.credit(batch, bench.state)
        weights = objective.weighting(batch.trained).double()
        weights = weights if correction is None else weights * correction.double()

    def of(group: int) -> Array:
        rows = (batch.group == group).nonzero().flatten().tolist() if len(batch) else []
        return -_gradient(batch, rows, weights, objective, bench)

    return of


def _contributions(
    batch: Batch, used: Sequence[int], num_prompts: int, found: dict[str, Array], own: Array, bench: Bench
) -> Contributions:
    totals = _episodes(batch)
    mean = np.array([np.mean(totals[group]) for group in used])
    size = np.array([float(len(totals[group])) for group in used])
    every = [total for group in totals.values() for total in group]
    greedy = None
    if batch.greedy_rewards is not None:
        by_group = {int(g): float(r) for g, r in zip(batch.group, batch.greedy_rewards, strict=True)}
        greedy = np.array([by_group[group] for group in used])
        greedy = None if bool(np.isnan(greedy).any()) else greedy
    num_numbers = sum(p.numel() for p in bench.parts.parameters("policy"))
    return Contributions(
        num_prompts=num_prompts,
        to_go=found["to_go"],
        totals=found.get("totals", found["to_go"]),
        score=found["score"],
        group_mean=mean,
        group_size=size,
        batch_mean=float(np.mean(every)),
        num_responses=len(every),
        greedy=greedy,
        values=found.get("values"),
        own=own,
        is_exact=bench.sketch.is_exact(num_numbers),
    )


def _episodes(batch: Batch) -> dict[int, list[float]]:
    """The totals of each group's responses, one for each episode."""
    found: dict[int, dict[int, float]] = {}
    for group, episode, total in zip(
        batch.group.tolist(), batch.episode.tolist(), episode_totals(batch).tolist(), strict=True
    ):
        found.setdefault(group, {})[episode] = total
    return {group: list(totals.values()) for group, totals in found.items()}


def _figures(step: int, batch: Batch, policy: str, num_prompts: int, num_used: int, bench: Bench) -> StepFigures:
    totals = _episodes(batch)
    responses, tokens = effective_sizes(batch, bench.engine, bench.cut)
    return StepFigures(
        step=step,
        policy=policy,
        num_prompts=num_prompts,
        num_used=num_used,
        num_responses=sum(map(len, totals.values())),
        num_informative=sum(len(set(group)) > 1 for group in totals.values()),
        ess_responses=responses,
        ess_tokens=tokens,
    )


def effective_sizes(batch: Batch, engine: Engine, cut: Cut) -> tuple[float | None, float | None]:
    """Effective shares of the responses and of the tokens under the ratios policy / sampler; None without a report."""
    if batch.logp_sampler is None or not bool(batch.trained.any()):
        return None, None
    of_rows: dict[int, float] = {}
    of_tokens: list[Array] = []
    for rows in micro_batches(batch, range(len(batch)), cut):
        part = batch.select(rows)
        assert part.logp_sampler is not None
        logp = engine.read(part, frozenset({"logp_old"}))["logp_old"].double()
        gap = torch.where(part.trained, logp - part.logp_sampler.double(), 0.0)
        of_tokens.append(gap[part.trained].numpy())
        for episode, total in zip(part.episode.tolist(), gap.sum(1).tolist(), strict=True):
            of_rows[episode] = of_rows.get(episode, 0.0) + total
    return effective_size(np.array(list(of_rows.values()))), effective_size(np.concatenate(of_tokens))


# ---- in words


def _lines(report: RunReport) -> Iterator[str]:
    used = sum(s.num_used for s in report.steps)
    yield (
        f"{report.folder}: step{'s' * (len(report.steps) > 1)} {', '.join(str(s.step) for s in report.steps)}; "
        f"gradients of {used} prompts over {report.num_parameters:,} parameters"
        + (f", projected to {report.dims} numbers" if report.dims < report.num_parameters else "")
    )
    for step in report.steps:
        yield f"  step {step.step}: {step.policy}; {step.num_used} of {step.num_prompts} prompts"
    yield f"  variance of a step's gradient, weighting {report.weighting}; intervals over prompts"
    yield f"  {'baseline':<16} {'variance':>11}  {'against none':<30} signal-to-noise"
    for row in report.baselines:
        yield f"  {row.baseline:<16} {_row(row)}"
    yield from (f"{sentence}" for sentence in _sentences(report))
    yield from (f"note: {note}" for note in report.notes)


def _row(row: BaselineVariance) -> str:
    if row.variance is None:
        return "needs at least 2 scored responses to each prompt"
    change = "" if row.change is None else percent(row.change)
    if row.low is not None and row.high is not None:
        change += f" ({percent(row.low)} to {percent(row.high)})"
    ratio = "-" if row.signal_to_noise is None else f"{row.signal_to_noise:.3f}"
    if row.signal_to_noise_error is not None:
        ratio += f" ± {row.signal_to_noise_error:.3f}"
    return f"{row.variance:>11.3e}  {change:<30} {ratio}"


def percent(share: float) -> str:
    return f"{100 * share:+.0f} %"


def _sentences(report: RunReport) -> Iterator[str]:
    rows = {row.baseline: row for row in report.baselines}
    for name, row in rows.items():
        if name in (NONE, OWN) or row.change is None:
            continue
        verb, size = ("cut", -row.change) if row.change <= 0 else ("raise", row.change)
        interval = ""
        if row.low is not None and row.high is not None:
            ends = sorted(-end if verb == "cut" else end for end in (row.low, row.high))
            interval = f" (95 % interval {100 * ends[0]:.0f} to {100 * ends[1]:.0f} %)"
        if name == LEAVE_ONE_OUT or row is min(_others(rows), key=lambda r: r.change or 0.0):
            yield f"{name} would {verb} variance by {100 * size:.0f} %{interval} against no baseline"
    informative = sum(s.num_informative for s in report.steps)
    groups = sum(s.num_prompts for s in report.steps)
    yield f"informative groups: {informative} of {groups} prompts have scores that differ"
    for step in report.steps:
        if step.ess_responses is None:
            yield f"step {step.step}: the sampler's log-probabilities were not saved: no effective sample size"
            continue
        now = f"; {report.newest}: {_share(step.ess_responses_now)} and {_share(step.ess_tokens_now)}"
        yield (
            f"step {step.step}: effective sample size {_share(step.ess_responses)} of the responses, "
            f"{_share(step.ess_tokens)} of the tokens{now if step.ess_responses_now is not None else ''}"
        )


def _others(rows: dict[str, BaselineVariance]) -> list[BaselineVariance]:
    return [row for name, row in rows.items() if name not in (NONE, OWN) and row.change is not None]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
