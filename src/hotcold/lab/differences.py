"""Finite differences of a model's loss, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hotcold.algorithms.base import Objective
from hotcold.batch import Batch, Rollout
from hotcold.engines.base import Engine
from hotcold.lab.probe import MakeEngine, OneStep, Parts, Probe, norm, run
from hotcold.training.mismatch import Mismatch

CHANGE = 1e-4  # of the largest log-probability or value at one step: far above rounding, far below any clip
FIRST = 1e-8  # of the parameters' length: the step that finds out how long such a step is
NUM_DIRECTIONS = 3


class Wide(TorchFunctionMode):
    """float64 stays float64 where a model casts to float32 to be precise: a norm, a softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float or (func is Tensor.to and torch.float32 in (*args[1:], kwargs.get("dtype"))):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def along_random_directions(
    algorithm: OneStep,
    parts: Parts,
    rollouts: Sequence[Rollout],
    mismatch: Mismatch | None,
    make_engine: MakeEngine,
) -> dict[str, list[float]]:
    """By model, for each direction: |difference quotient - gradient times direction|, relative to the latter, or to the
    length of the rows' gradients where they cancel.

    A direction is a random one plus the gradient's, both of length 1: along a random one alone the derivative of a
    model of many parameters is too small to be told from rounding. Models whose gradient is 0 are left out.
    """
    modules = {name: copy.deepcopy(module).double() for name, module in parts.modules.items()}
    wide = replace(parts, modules=modules, compute=nullcontext, recompute=False)
    found: dict[str, list[float]] = {}
    with Wide():
        engine = make_engine(wide)
        probe = run(algorithm, rollouts, Probe(engine, wide), mismatch=mismatch, dtype=torch.float64)
        one_by_one = Probe(engine, wide, measures_parts=True)
        run(algorithm, rollouts, one_by_one, 1, mismatch, dtype=torch.float64)
        for batch, weights, objective in probe.passes:
            loss = _Loss(engine, _with_old(engine, batch, objective), weights, objective)
            gradient = loss.gradient(wide)
            if norm(gradient) > 0:
                least = math.sqrt(one_by_one.squares[objective.model])
                found[objective.model] = _gaps(loss, wide.parameters(objective.model), gradient, least)
    return found


def _with_old(engine: Engine, batch: Batch, objective: Objective) -> Batch:
    """log pi_old stays where it is while the policy moves; by construction it would move along."""
    if objective.model != "policy" or batch.logp_old is not None:
        return batch
    return batch.replace(logp_old=engine.read(batch, frozenset({"logp_old"}))["logp_old"])


class _Loss:
    """The loss of one micro-batch as a function of the parameters."""

    def __init__(self, engine: Engine, batch: Batch, weights: Tensor, objective: Objective):
        self.engine, self.batch, self.weights, self.objective = engine, batch, weights, objective

    def value(self) -> float:
        with torch.no_grad():
            return self.engine.backward(self.batch, self.weights, self.objective).loss

    def gradient(self, parts: Parts) -> list[Tensor]:
        model = self.objective.model
        self.engine.discard(model)
        self.engine.backward(self.batch, self.weights, self.objective)
        found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parts.parameters(model)]
        self.engine.discard(model)
        return found

    def output(self) -> Tensor:
        name = "values_old" if self.objective.model == "critic" else "logp_old"
        return self.engine.read(self.batch, frozenset({name}))[name]


def _gaps(loss: _Loss, parameters: Sequence[nn.Parameter], gradient: Sequence[Tensor], least: float) -> list[float]:
    gaps = []
    for seed in range(NUM_DIRECTIONS):
        direction = _direction(gradient, seed)
        slope = math.fsum(float((g * d).sum()) for g, d in zip(gradient, direction, strict=True))
        size = _step_size(loss, parameters, direction)
        ahead = _at(loss, parameters, direction, size)
        behind = _at(loss, parameters, direction, -size)
        gaps.append(abs((ahead - behind) / (2 * size) - slope) / max(abs(slope), least))
    return gaps


def _direction(gradient: Sequence[Tensor], seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(g.shape, generator=random, dtype=torch.float64).to(g.device) for g in gradient]
    length, size = norm(drawn), norm(gradient)
    return [d / length + g / size for d, g in zip(drawn, gradient, strict=True)]


def _step_size(loss: _Loss, parameters: Sequence[nn.Parameter], direction: Sequence[Tensor]) -> float:
    """So that no log-probability (or value) moves by more than about CHANGE."""
    first = FIRST * max(norm(parameters), 1.0)
    before = loss.output()
    _move(parameters, direction, first)
    change = float((loss.output() - before).abs().max())
    _move(parameters, direction, -first)
    return first * CHANGE / change if change > 0 else first


def _at(loss: _Loss, parameters: Sequence[nn.Parameter], direction: Sequence[Tensor], size: float) -> float:
    before = [p.detach().clone() for p in parameters]
    _move(parameters, direction, size)
    value = loss.value()
    with torch.no_grad():
        for parameter, old in zip(parameters, before, strict=True):
            parameter.copy_(old)
    return value


@torch.no_grad()
def _move(parameters: Sequence[nn.Parameter], direction: Sequence[Tensor], size: float) -> None:
    for parameter, d in zip(parameters, direction, strict=True):
        parameter.add_(d, alpha=size)
