"""What a step reports. Sums are collected over micro-batches and divided once, so no number is a mean of means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hotcold.batch import Batch, Rollout
from hotcold.engines.base import Pass, StepResult
from hotcold.equations import approx_kl

OF_THE_RATIO = ("clip_fraction",)  # metrics that mean nothing where the ratio is 1 by construction


@dataclass
class UpdateRecord:
    """The update of one step, over all of its optimiser steps."""

    losses: list[float] = field(default_factory=list)  # one for each optimiser step
    grad_norms: list[float] = field(default_factory=list)  # of the steps that were applied
    num_rows: int = 0
    num_skipped_rows: int = 0
    num_empty_steps: int = 0  # nothing was left to compute
    num_nonfinite_steps: int = 0
    num_tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    recomputed: bool = False
    ratio_max: float = 0.0
    mismatch_max: float | None = None
    _loss: float = 0.0

    def add_pass(self, batch: Batch, done: Pass, recomputed: bool, restarted: bool = False) -> None:
        trained = batch.trained
        self._loss += done.loss
        self.num_tokens += int(trained.sum())
        self._add("entropy", done.entropy[trained].sum().item())
        for name, value in done.metrics.items():
            self._add(name, value[trained].sum().item())
        if recomputed:
            log_ratio = (done.logp - done.logp_old)[trained]
            self.recomputed = True
            self._add("approx_kl", approx_kl(log_ratio[None]).sum().item())
            self.ratio_max = max(self.ratio_max, log_ratio.exp().max().item() if len(log_ratio) else 0.0)
        # Before the first update both are the same policy, unless training starts from another one.
        if batch.logp_sampler is not None and not self.losses and not restarted:
            self._add_mismatch((done.logp - batch.logp_sampler)[trained].abs())

    def add_step(self, result: StepResult) -> None:
        self.losses.append(self._loss)
        self._loss = 0.0
        if result.applied:
            self.grad_norms.append(result.grad_norm)
        else:
            self.num_nonfinite_steps += 1

    def summary(self) -> dict[str, float | int | None]:
        """Means over tokens or optimiser steps; null where a quantity does not exist."""
        per_token = {name: total / self.num_tokens for name, total in self.sums.items() if self.num_tokens}
        compared = per_token.pop("_num_compared", 0.0) * self.num_tokens
        mismatch = per_token.pop("mismatch/mean_abs", 0.0) * self.num_tokens
        steps = len(self.losses)
        known = {
            "loss": sum(self.losses) / steps if steps else 0.0,
            "grad_norm": _mean(self.grad_norms) if steps else 0.0,
            "entropy": per_token.pop("entropy", None),
            "approx_kl": per_token.pop("approx_kl", None),
            "ratio/max": self.ratio_max if self.recomputed else None,
            "clip_fraction": None,
            "mismatch/max_abs": self.mismatch_max,
            "mismatch/mean_abs": mismatch / compared if compared else None,
            "rows/trained": self.num_rows - self.num_skipped_rows,
            "rows/skipped": self.num_skipped_rows,
            "optimizer_steps": steps - self.num_nonfinite_steps,
            "optimizer_steps/empty": self.num_empty_steps,
            "optimizer_steps/nonfinite": self.num_nonfinite_steps,
        }
        of_loss = {k: v for k, v in per_token.items() if self.recomputed or k not in OF_THE_RATIO}
        return {**known, **of_loss}

    def _add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def _add_mismatch(self, differences: torch.Tensor) -> None:
        if len(differences):
            self.mismatch_max = max(self.mismatch_max or 0.0, differences.max().item())
            self._add("mismatch/mean_abs", differences.sum().item())
            self._add("_num_compared", len(differences))


def rollout_metrics(rollouts: Sequence[Rollout], names: Sequence[str]) -> dict[str, float | None]:
    """Score and shape of all sampled responses, the ones that are not trained on included."""
    scores = [score for r in rollouts if (score := r.score) is not None]
    lengths = [len(r.response_ids) for r in rollouts]
    stds = [_std(group) for group in _groups(rollouts) if len(group) > 1]
    out: dict[str, float | None] = {
        "reward": _mean(scores),
        "reward_std": _mean(stds),
        "frac_reward_zero_std": _mean([float(max(g) == min(g)) for g in _groups(rollouts) if len(g) > 1]),
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(min(lengths)) if lengths else None,
        "completions/max_length": float(max(lengths)) if lengths else None,
        "completions/truncated": _mean([float(r.truncated) for r in rollouts]),
        "completions/distinct": _mean(_distinct(rollouts)),
        "completions/repeated": _mean([_repeated(r.response_ids) for r in rollouts]),
        "rewards/unscored": float(len(rollouts) - len(scores)),
    }
    for name in names:
        parts = [value for r in rollouts if (value := r.parts.get(name)) is not None]
        out[f"rewards/{name}/mean"] = _mean(parts)
        out[f"rewards/{name}/std"] = _std(parts) if len(parts) > 1 else None
    return out


def _groups(rollouts: Sequence[Rollout]) -> list[list[float]]:
    """The scores of each prompt's responses, those without a score left out."""
    groups: dict[int, list[float]] = {}
    for r in rollouts:
        if (score := r.score) is not None:
            groups.setdefault(r.group, []).append(score)
    return list(groups.values())


def _distinct(rollouts: Sequence[Rollout]) -> list[float]:
    """For each prompt with several responses: 0 if all are the same, 1 if no two are."""
    groups: dict[int, list[tuple[int, ...]]] = {}
    for r in rollouts:
        groups.setdefault(r.group, []).append(r.response_ids)
    return [(len(set(ids)) - 1) / (len(ids) - 1) for ids in groups.values() if len(ids) > 1]


def _repeated(ids: tuple[int, ...], n: int = 4) -> float:
    """Share of a response's runs of n tokens that stand in it already (Welleck et al. 2020)."""
    runs = [ids[i : i + n] for i in range(len(ids) - n + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _std(values: Sequence[float]) -> float:
    """Sample standard deviation, exactly 0 where all are equal."""
    if max(values) == min(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
