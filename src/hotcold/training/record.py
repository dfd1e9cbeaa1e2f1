"""What an update reports. Sums are collected over micro-batches and divided once, so no number is a mean of means."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from hotcold.batch import Batch
from hotcold.engines.base import Pass, StepResult
from hotcold.equations import approx_kl, explained_variance, kl_k1, kl_k3, masked_mean, masked_var
from hotcold.training.batching import Cut, Room

OF_THE_RATIO = ("clip_fraction",)  # metrics that mean nothing where the ratio is 1 by construction
LEAST_VARIANCE = 1e-8  # of returns: below it they differ by the KL's noise alone, and nothing can be explained
OF_TRAINING = ("loss", "grad_norm", "rows/trained", "rows/skipped", "optimizer_steps")  # null before it starts


@dataclass
class ModelRecord:
    """What one model's objective did in a step, over all of its optimiser steps."""

    losses: list[float] = field(default_factory=list)  # one for each optimiser step
    grad_norms: list[float] = field(default_factory=list)  # of the steps that were applied
    max_grad_norm: float | None = None
    num_rows: int = 0
    num_skipped_rows: int = 0
    num_empty_steps: int = 0  # nothing was left to compute
    num_nonfinite_steps: int = 0
    fault: str = ""  # what was not finite in the first of them
    num_stopped_steps: int = 0  # not taken: the minibatch lay too far from pi_old
    num_tokens: int = 0
    num_rows_passed: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    recomputed: bool = False
    ratio_max: float = 0.0
    mismatch_max: float | None = None
    _loss: float = 0.0

    def begin(self, num_rows: int, num_skipped_rows: int, max_grad_norm: float | None) -> None:
        self.num_rows, self.num_skipped_rows, self.max_grad_norm = num_rows, num_skipped_rows, max_grad_norm

    def add_pass(self, batch: Batch, done: Pass, recomputed: bool, restarted: bool = False) -> None:
        trained = batch.trained
        self._loss += done.loss
        self.num_tokens += int(trained.sum())
        self.num_rows_passed += len(batch)
        for name, value in {**done.metrics, "entropy": done.entropy}.items():
            if value is not None:
                self._add(name, value[trained].sum().item())
        if done.logp is None or done.logp_old is None:
            return
        self._add_kl(batch, done, trained)
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
            self.fault = self.fault or result.fault

    def stop(self) -> None:
        self.num_stopped_steps += 1
        self._loss = 0.0

    @property
    def num_applied_steps(self) -> int:
        return len(self.grad_norms)

    def per_token(self) -> dict[str, float]:
        return {name: total / self.num_tokens for name, total in self.sums.items() if self.num_tokens}

    @property
    def mean_loss(self) -> float:
        return sum(self.losses) / len(self.losses) if self.losses else 0.0

    @property
    def mean_norm(self) -> float | None:
        return _mean_norm(self.grad_norms) if self.losses else 0.0

    @property
    def share_clipped(self) -> float | None:
        """Of the optimiser steps: how many were cut to the largest gradient norm."""
        if self.max_grad_norm is None or not self.grad_norms:
            return None
        return sum(norm > self.max_grad_norm for norm in self.grad_norms) / len(self.grad_norms)

    def _add_kl(self, batch: Batch, done: Pass, trained: Tensor) -> None:
        """`kl` is per token (k3, or exact where the objective has it); `kl_row` is k1 or the exact one."""
        assert done.logp is not None
        if done.kl is not None:
            per_token = per_row = done.kl[trained]
        elif batch.logp_ref is not None:
            logp, logp_ref = done.logp[trained][None], batch.logp_ref[trained][None].to(done.logp.dtype)
            per_token, per_row = kl_k3(logp, logp_ref), kl_k1(logp, logp_ref)
        else:
            return
        self._add("kl", per_token.sum().item())
        self._add("_kl_of_rows", per_row.sum().item())

    def _add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def _add_mismatch(self, differences: Tensor) -> None:
        if len(differences):
            self.mismatch_max = max(self.mismatch_max or 0.0, differences.max().item())
            self._add("mismatch/mean_abs", differences.sum().item())
            self._add("_num_compared", len(differences))


@dataclass
class UpdateRecord:
    """The update of one step: what credit reports, and what each model's objective did."""

    credit: dict[str, float | None] = field(default_factory=dict)
    models: dict[str, ModelRecord] = field(default_factory=dict)
    num_empty_steps: int = 0  # of objectives that found no row
    waiting: set[str] = field(default_factory=set)  # models whose training has not started
    room: Room = field(default_factory=lambda: Room(Cut(1)))  # how large micro-batches were at the end
    seconds_reading: float = 0.0  # of the passes before the first step: log pi_old, reference, values

    def of(self, model: str) -> ModelRecord:
        return self.models.setdefault(model, ModelRecord())

    @property
    def policy(self) -> ModelRecord:
        return self.of("policy")

    @property
    def faults(self) -> list[str]:
        return [f"{model}: {record.fault}" for model, record in self.models.items() if record.fault]

    def add_credit(self, batch: Batch, correction: Tensor | None) -> None:
        """`batch` as it comes from credit. `correction`: the weights against the sampler's mismatch."""
        self.credit |= batch.metrics
        trained = batch.trained
        if batch.values_old is not None and batch.returns is not None:
            explained = float(explained_variance(batch.values_old, batch.returns, trained))
            varies = float(masked_var(batch.returns, trained)) > LEAST_VARIANCE
            self.credit["value/explained_variance"] = explained if varies else None
            self.credit["value/mean"] = float(masked_mean(batch.values_old, trained))
            self.credit["returns/mean"] = float(masked_mean(batch.returns, trained))
        if correction is not None:
            self.credit["mismatch/weight_mean"] = float(masked_mean(correction, trained))
            self.credit["mismatch/weight_zero"] = float(masked_mean((correction == 0).to(correction.dtype), trained))

    def summary(self) -> dict[str, float | int | None]:
        """Means over tokens or optimiser steps; null where a quantity does not exist."""
        policy = self.policy
        per_token = policy.per_token()
        compared = per_token.pop("_num_compared", 0.0) * policy.num_tokens
        mismatch = per_token.pop("mismatch/mean_abs", 0.0) * policy.num_tokens
        kl_of_rows = per_token.pop("_kl_of_rows", None)
        known: dict[str, float | int | None] = {
            "loss": policy.mean_loss,
            "grad_norm": policy.mean_norm,
            "grad_norm/clipped": policy.share_clipped,
            "entropy": per_token.pop("entropy", None),
            "approx_kl": per_token.pop("approx_kl", None),
            "ratio/max": policy.ratio_max if policy.recomputed else None,
            "clip_fraction": None,
            "mismatch/max_abs": policy.mismatch_max,
            "mismatch/mean_abs": mismatch / compared if compared else None,
            "rows/trained": policy.num_rows - policy.num_skipped_rows,
            "rows/skipped": policy.num_skipped_rows,
            "optimizer_steps": policy.num_applied_steps,
            "optimizer_steps/empty": self.num_empty_steps + sum(m.num_empty_steps for m in self.models.values()),
            "optimizer_steps/stopped": policy.num_stopped_steps,
            "optimizer_steps/nonfinite": sum(m.num_nonfinite_steps for m in self.models.values()),
        }
        if kl_of_rows is not None:
            known["kl/response"] = kl_of_rows * policy.num_tokens / policy.num_rows_passed
        of_loss = {k: v for k, v in per_token.items() if policy.recomputed or k not in OF_THE_RATIO}
        if "policy" in self.waiting:
            known |= dict.fromkeys(OF_TRAINING)
        return {**self.credit, **known, **of_loss, **self._critic()}

    def _critic(self) -> dict[str, float | int | None]:
        if "critic" not in self.models:
            return {}
        critic = self.models["critic"]
        return {
            "value/loss": critic.mean_loss,
            "value/grad_norm": critic.mean_norm,
            "value/grad_norm_clipped": critic.share_clipped,
            "value/optimizer_steps": critic.num_applied_steps,
        }


def _mean_norm(norms: list[float]) -> float | None:
    return math.fsum(norms) / len(norms) if norms else None
