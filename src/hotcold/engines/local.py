"""The engine of one process and one device."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from hotcold.algorithms.base import Objective
from hotcold.batch import Batch
from hotcold.engines.base import Pass, StepResult
from hotcold.errors import InputError
from hotcold.models.policy import measure


class LocalEngine:
    """Holds the policy and its optimiser. Parameters are float32 and all dropout is 0, so the mode is always eval."""

    def __init__(self, policy: nn.Module, optimizer: torch.optim.Optimizer, temperature: float, remember_start: bool):
        self.policy = policy
        self.optimizer = optimizer
        self.temperature = temperature
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        self._start = [p.detach().clone() for p in self.parameters] if remember_start else None
        self._optimizer_start = copy.deepcopy(optimizer.state_dict()) if remember_start else None
        self._finite = True  # every loss since the last step
        policy.eval()

    def logp(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            logp = measure(self.policy, self._on_device(batch), frozenset({"logp"}), self.temperature).forward.logp
        assert logp is not None
        return logp.to(batch.tokens.device)

    def backward(self, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
        home, batch = batch.tokens.device, self._on_device(batch)
        measured = measure(self.policy, batch, objective.needs, self.temperature)
        logp = measured.forward.logp
        assert logp is not None and measured.entropy is not None
        if batch.logp_old is None:
            # The batch gets exactly one step: pi_old is the policy itself and the ratio is 1 by construction.
            batch = batch.replace(logp_old=logp.detach())
        assert batch.logp_old is not None
        result = objective.loss(measured.forward, batch)
        weights = weights.to(device=result.loss.device, dtype=result.loss.dtype)
        # where, not a product alone: a NaN under weight 0 must not reach the sum or its gradient
        total = (torch.where(weights != 0, result.loss, 0.0) * weights).sum()
        self._finite = self._finite and math.isfinite(total.item())
        if total.requires_grad:
            total.backward()
        return Pass(
            logp.detach().to(home),
            measured.entropy.to(home),
            batch.logp_old.to(home),
            float(total.detach()),
            {name: value.detach().to(home) for name, value in result.metrics.items()},
        )

    def step(self, model: str, rate: float, max_norm: float | None) -> StepResult:
        assert model == "policy"
        limit = math.inf if max_norm is None else max_norm
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))
        # A NaN advantage sends no gradient: only the loss shows it.
        applied, self._finite = self._finite and math.isfinite(norm), True
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._check_parameters(rate)
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(norm, applied)

    def _check_parameters(self, rate: float) -> None:
        if not all(bool(parameter.isfinite().all()) for parameter in self.parameters):
            raise InputError(
                f"a step at learning rate {rate:g} left parameters that are not finite: lower learning_rate.\n"
                "Checkpoints written before this step are good."
            )

    def restart(self, model: str) -> None:
        assert model == "policy" and self._start is not None and self._optimizer_start is not None
        with torch.no_grad():
            for parameter, start in zip(self.parameters, self._start, strict=True):
                parameter.copy_(start)
        self.optimizer.load_state_dict(copy.deepcopy(self._optimizer_start))

    def _on_device(self, batch: Batch) -> Batch:
        return batch.to(self.parameters[0].device)
