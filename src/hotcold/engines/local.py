"""The engine of one process and one device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotcold.algorithms.base import Forward, Objective
from hotcold.batch import Batch
from hotcold.engines.base import Pass, StepResult
from hotcold.errors import InputError
from hotcold.memory import as_out_of_memory
from hotcold.models.compute import recomputing
from hotcold.models.critic import measure_values
from hotcold.models.packing import until_backward
from hotcold.models.policy import Measured, measure
from hotcold.models.reading import PLAIN, Laying, Reading
from hotcold.models.reference import FrozenReference, Reference


class Trainee:
    """One trained model with its optimiser. Parameters are float32 and all dropout is 0, so the mode is always eval."""

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer, remember_start: bool = False):
        self.module = module.eval()
        self.optimizer = optimizer
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self._start = [p.detach().clone() for p in self.parameters] if remember_start else None
        self._optimizer_start = copy.deepcopy(optimizer.state_dict()) if remember_start else None
        self.fault = ""  # the first tensor since the last step that was not finite

    def step(self, rate: float, max_norm: float | None) -> StepResult:
        limit = math.inf if max_norm is None else max_norm
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))
        # A NaN advantage sends no gradient: only the loss shows it.
        fault = self.fault or ("" if math.isfinite(norm) else self._first_gradient())
        applied = not fault
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._check_parameters(rate)
        self.clear()
        return StepResult(norm, applied, fault)

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.fault = ""

    def _first_gradient(self) -> str:
        named = ((name, p.grad) for name, p in self.module.named_parameters() if p.grad is not None)
        name = next((name for name, grad in named if not bool(grad.isfinite().all())), "")
        return f"the gradient of {name}" if name else "the norm of the gradient"

    def restart(self) -> None:
        assert self._start is not None and self._optimizer_start is not None
        with torch.no_grad():
            for parameter, start in zip(self.parameters, self._start, strict=True):
                parameter.copy_(start)
        self.optimizer.load_state_dict(copy.deepcopy(self._optimizer_start))

    def _check_parameters(self, rate: float) -> None:
        # least and largest, which are NaN where there is one: isfinite() would take as much again as the parameter
        if not all(bool(torch.stack(p.aminmax()).isfinite().all()) for p in self.parameters if p.numel()):
            raise InputError(
                f"a step at learning rate {rate:g} left parameters that are not finite: lower learning_rate.\n"
                "Checkpoints written before this step are good."
            )


class LocalEngine:
    """Holds the policy, and where an algorithm has them a critic and the frozen reference."""

    def __init__(
        self,
        models: Mapping[str, Trainee],
        temperature: float,
        reference: Reference | None = None,
        compute: Callable[[], AbstractContextManager[Any]] = nullcontext,
        recompute: bool = False,
        reading: Mapping[str, Reading] | None = None,
    ):
        self.models = dict(models)
        self.temperature = temperature
        self.reference = reference
        self.compute = compute  # the dtype of the arithmetic
        self.recompute = recompute  # activations in the backward pass, instead of keeping them
        self.reading = dict(reading or {})  # by model, `reference` among them: what may be shared and left out

    @property
    def policy(self) -> Trainee:
        return self.models["policy"]

    def read(self, batch: Batch, names: frozenset[str]) -> dict[str, Tensor]:
        home, batch = batch.tokens.device, self._on_device(batch)
        with as_out_of_memory("a forward"), torch.no_grad(), self.compute():
            found = {**self._read_policy(batch, names), **self._read_reference(batch, names)}
            if "values_old" in names:
                found["values_old"] = self._values(batch)
        return {name: value.to(home) for name, value in found.items()}

    def _read_policy(self, batch: Batch, names: frozenset[str]) -> dict[str, Tensor]:
        """log pi_old and the exact KL come from one pass."""
        if not names & {"logp_old", "kl_old"}:
            return {}
        needs = frozenset({"logp", "kl"} if "kl_old" in names else {"logp"})
        forward = self._measure_policy(batch, needs).forward
        found = {"logp_old": forward.logp, "kl_old": forward.kl}
        return {name: value for name, value in found.items() if name in names and value is not None}

    def _read_reference(self, batch: Batch, names: frozenset[str]) -> dict[str, Tensor]:
        if "logp_ref" not in names:
            return {}
        assert self.reference is not None
        # not where it is the policy without its adapter: what a module keeps for itself must stay trainable
        with torch.inference_mode(isinstance(self.reference, FrozenReference)), self.reference.module() as module:
            reading = self.reading.get("reference", PLAIN)
            logp = measure(module, batch, frozenset({"logp"}), self.temperature, reading=reading).forward.logp
        assert logp is not None
        return {"logp_ref": logp.clone()}  # an inference tensor could not stand in a loss

    def backward(self, batch: Batch, weights: Tensor, objective: Objective) -> Pass:
        home, batch = batch.tokens.device, self._on_device(batch)
        trainee = self.models[objective.model]
        with as_out_of_memory("a forward and backward"), recomputing(trainee.module, self.recompute), until_backward():
            with self.compute():
                measured = self._measure(batch, objective)
            logp = measured.forward.logp
            if batch.logp_old is None and logp is not None:
                # The batch gets exactly one step: pi_old is the policy itself and the ratio is 1 by construction.
                batch = batch.replace(logp_old=logp.detach())
            result = objective.loss(measured.forward, batch)
            weights = weights.to(device=result.loss.device, dtype=result.loss.dtype)
            # where, not a product alone: a NaN under weight 0 must not reach the sum or its gradient
            loss = torch.where(weights != 0, result.loss, 0.0)
            total = (loss * weights).sum()
            trainee.fault = trainee.fault or _fault("the loss", loss, batch)
            if total.requires_grad:
                read = measured.forward.values if logp is None else logp
                if read is not None and read.requires_grad:
                    read.retain_grad()
                total.backward()
                if read is not None and read.grad is not None:
                    trainee.fault = trainee.fault or _fault("the loss's gradient", read.grad, batch)

        def kept(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.detach().to(home)

        return Pass(
            loss=float(total.detach()),
            metrics={name: value.detach().to(home) for name, value in result.metrics.items()},
            logp=kept(logp),
            logp_old=None if logp is None else kept(batch.logp_old),
            entropy=kept(measured.entropy),
            kl=kept(measured.forward.kl),
        )

    def _measure(self, batch: Batch, objective: Objective) -> Measured:
        if objective.model == "critic":
            return Measured(Forward(values=self._values(batch)), None)
        return self._measure_policy(batch, objective.needs)

    def _measure_policy(self, batch: Batch, needs: frozenset[str]) -> Measured:
        readings = self._reading("policy"), self.reading.get("reference", PLAIN)
        return measure(self.policy.module, batch, needs, self.temperature, self.reference, *readings)

    def _values(self, batch: Batch) -> Tensor:
        return measure_values(self.models["critic"].module, batch, self._reading("critic").laying)

    def _reading(self, model: str) -> Reading:
        """A cache would keep what recomputing drops: then rows are plain."""
        reading = self.reading.get(model, PLAIN)
        is_cached = self.recompute and reading.laying is Laying.PROMPTS
        return replace(reading, laying=Laying.ROWS) if is_cached else reading

    def step(self, model: str, rate: float, max_norm: float | None) -> StepResult:
        with as_out_of_memory("a step of the optimiser, with its state,"):
            return self.models[model].step(rate, max_norm)

    def discard(self, model: str) -> None:
        self.models[model].clear()

    def restart(self, model: str) -> None:
        self.models[model].restart()

    def _on_device(self, batch: Batch) -> Batch:
        return batch.to(self.policy.parameters[0].device)


def _fault(what: str, values: Tensor, batch: Batch) -> str:
    """Where the first of values [b, T] stands that is not finite; "" if all are."""
    bad = (~values.isfinite()).nonzero()
    if not len(bad):
        return ""
    row, at = bad[0].tolist()
    token = at - int(batch.prompt_lengths[row])
    return (
        f"{what} at token {token} of the response with episode {int(batch.episode[row])}, group {int(batch.group[row])}"
    )
