"""What the documentation states of an algorithm, as sums: every group, every token, formula by formula.

A second way to the expected gradient that shares no code with the product: plain numbers, one row at a time, no batch,
mask, padding, autograd or micro-batch. docs/algorithms.md has the same formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hotcold.lab.case import Case, truncation_of
from hotcold.lab.expectation import multisets, without_order
from hotcold.lab.numbers import Array, Policy, plain_rewards, policy_of, to_go
from hotcold.lab.tiny import Response, Table, Tiny


@dataclass(frozen=True)
class Row:
    response: Response
    group: int
    rewards: list[float]  # [T] what each token earns, penalty and KL taken off


@dataclass(frozen=True)
class World:
    """A case's policies and the values of its keys."""

    case: Case

    @cached_property
    def values(self) -> dict[str, Any]:
        return self.case.values

    @cached_property
    def tiny(self) -> Tiny:
        return self.case.tiny

    @cached_property
    def policy(self) -> Policy:
        return policy_of(self.tiny, self.tiny.logits)

    @cached_property
    def reference(self) -> Policy:
        return policy_of(self.tiny, self.tiny.reference)

    @cached_property
    def old(self) -> Policy:
        """pi_old, which log pi_old, the KL of the reward and the sampling belong to."""
        return policy_of(self.tiny, self._table("older policy"))

    @cached_property
    def sampler(self) -> Policy:
        return policy_of(self.tiny, self._table("older policy", "another engine", "a data set"))

    def _table(self, *who: str) -> Table:
        return self.tiny.sampler if self.case.sampled_by in who else self.tiny.logits

    @cached_property
    def critic(self) -> list[float]:
        return critic_values(self.case)

    @property
    def beta(self) -> float:
        return float(self.values.get("beta", 0.0))

    @property
    def gamma(self) -> float:
        return float(self.values.get("gamma", 1.0))

    @property
    def bonus(self) -> float:
        return float(self.values.get("entropy_bonus", 0.0))

    @property
    def kl(self) -> tuple[str | None, str] | None:
        return (self.values["kl.placement"], self.values["kl.estimator"]) if self.beta else None

    @property
    def imitates(self) -> bool:
        return self.case.algorithm in ("expert_iteration", "sft")

    @property
    def group_size(self) -> int:
        return int(self.values.get("group_size", 1))

    @property
    def fixed_length(self) -> float:
        _, _, given = str(self.values["weighting"]).partition(":")
        return float(given or self.tiny.max_tokens)

    def penalty(self, response: Response) -> float:
        """truncated=penalty: 0 up to longest - buffer, then in a line to 1 at the longest."""
        rule = truncation_of(self.case)
        if rule.rule != "penalty":
            return 0.0
        length = len(response) + (self.tiny.gap if len(response) > 1 else 0)
        return rule.penalty * min(1.0, max(0.0, (length - (rule.max_tokens - rule.buffer)) / rule.buffer))

    def rewards(self, response: Response) -> list[float]:
        """[T] the rewards of the tokens: on the way, at the end, minus the penalty, minus beta times the KL's cost."""
        rewards = plain_rewards(self.tiny, response)
        rewards[-1] -= self.penalty(response)
        if self.kl == ("reward", "k1"):
            logp, logq = self.old.logp(response), self.reference.logp(response)
            rewards = [r - self.beta * (p - q) for r, p, q in zip(rewards, logp, logq, strict=True)]
        if self.kl == (None, "exact") and not self.imitates:
            rows = self.old.rows(response)
            next_kl = [self.old.kl(self.reference, row) for row in rows[1:]] + [0.0]
            rewards = [r - self.beta * self.gamma * k for r, k in zip(rewards, next_kl, strict=True)]
        return rewards


def state_values(world: World) -> list[float]:
    """[prefixes] what the policy still earns, discounted: an exact critic."""
    values = []
    for prefix in world.tiny.prefixes:
        ahead = [y for y in world.tiny.responses if y[: len(prefix)] == prefix]
        weight = [math.exp(math.fsum(world.policy.logp(y)[len(prefix) :])) for y in ahead]
        earned = [to_go(world.rewards(y), world.gamma)[len(prefix)] for y in ahead]
        values.append(math.fsum(w * e for w, e in zip(weight, earned, strict=True)))
    return values


def critic_values(case: Case) -> list[float]:
    """[prefixes] of the case's critic. The wrong one is off by 0.3, -0.4, 0.3, ..."""
    if case.situation.critic == "zero":
        return [0.0] * len(case.tiny.prefixes)
    exact = state_values(World(case))
    wrong = case.situation.critic == "wrong"
    return [v + (0.3 if i % 2 == 0 else -0.4) * wrong for i, v in enumerate(exact)]


def stated_update(case: Case) -> tuple[Array, float] | None:
    """The update's mean [prefixes, V], uphill, and its variance. None where rows are dealt to minibatches at random."""
    world = World(case)
    if int(world.values.get("minibatches", 1)) > 1 and case.situation.rate:
        return None
    mean, square = np.zeros_like(world.policy.probability), 0.0
    for groups, probability in _batches(world):
        rows = [Row(y, g, world.rewards(y)) for g, members in enumerate(groups) for y in members]
        rows = [row for row, keeps in zip(rows, kept(world, rows), strict=True) if keeps]
        if rows:
            step = _update(world, rows)
            mean += probability * step
            square += probability * float((step**2).sum())
    return mean, square - float((mean**2).sum())


def _batches(world: World) -> list[tuple[tuple[Sequence[Response], ...], float]]:
    """Every step's groups with their probability. One prompt with refill: a rejected group is drawn anew."""
    probability = {y: world.sampler.of_response(y) for y in world.tiny.responses}
    groups = list(multisets(world.tiny.responses, probability, world.group_size))
    refill, count = int(world.values.get("refill", 0)), world.case.situation.groups
    if refill and count == 1:
        again = drawn_again(world)
        groups = [(members, p * again) for members, p in groups]  # those that stay rejected have no rows
    return list(without_order(groups, count))


def rejected_share(world: World) -> float:
    """The chance that no row of a group takes part."""
    probability = {y: world.sampler.of_response(y) for y in world.tiny.responses}
    groups = multisets(world.tiny.responses, probability, world.group_size)
    return math.fsum(p for members, p in groups if not any(kept(world, [Row(y, 0, []) for y in members])))


def drawn_again(world: World) -> float:
    """1 + q + ... + q^refill: how often an accepted group comes, relative to one draw."""
    return math.fsum(rejected_share(world) ** n for n in range(int(world.values["refill"]) + 1))


# ---- which rows take part


def kept(world: World, rows: Sequence[Row]) -> list[bool]:
    """By score before any penalty or KL. Rows that are not kept are in no statistic and no denominator."""
    masked = [world.case.situation.truncated == "mask" and row.response in world.tiny.cut for row in rows]
    rule = world.values.get("keep_rule")
    earned = [math.fsum(plain_rewards(world.tiny, row.response)) for row in rows]
    if rule:
        earned = [e - world.penalty(row.response) for e, row in zip(earned, rows, strict=True)]
    out = []
    for i, row in enumerate(rows):
        mates = [earned[k] for k, other in enumerate(rows) if other.group == row.group and not masked[k]]
        scored = sorted((e for e, gone in zip(earned, masked, strict=True) if not gone), reverse=True)
        out.append(not masked[i] and _keeps(world, earned[i], mates, scored))
    return out


def _keeps(world: World, earned: float, mates: list[float], scored: list[float]) -> bool:
    values = world.values
    rule = values.get("keep_rule")
    if rule == "threshold":
        return earned >= values["threshold"]
    if rule == "best_of_group":
        return earned == max(mates) > min(mates)
    if rule == "top_fraction":
        return earned >= scored[math.ceil(values["fraction"] * len(scored)) - 1]
    if values.get("drop_zero_variance"):
        return max(mates) > min(mates)
    if world.case.algorithm == "rloo" or values.get("baseline") == "leave_one_out":
        return len(mates) >= 2
    return True


# ---- credit


def advantages(world: World, rows: Sequence[Row]) -> list[list[float]]:
    """[B][T]"""
    if world.imitates:
        return [[1.0] * len(row.response) for row in rows]
    if world.case.has_critic:
        out = [_gae(world, row) for row in rows]
    elif "scale_by_std" in world.values:
        out = _within_group(world, rows)
    else:
        out = [
            [g - b for g in to_go(row.rewards, world.gamma)]
            for row, b in zip(rows, _baselines(world, rows), strict=True)
        ]
    return _whitened(out) if world.values.get("whiten") else out


def _baselines(world: World, rows: Sequence[Row]) -> list[float]:
    name = world.values.get("baseline", "leave_one_out")
    totals = [math.fsum(row.rewards) for row in rows]
    if name == "none":
        return [0.0] * len(rows)
    if name == "greedy":
        return [world.tiny.total(world.tiny.greedy())] * len(rows)
    if name == "batch_mean":
        return [math.fsum(totals) / len(totals)] * len(rows)
    others = [[t for k, t in enumerate(totals) if k != i and rows[k].group == row.group] for i, row in enumerate(rows)]
    return [math.fsum(o) / len(o) for o in others]


def _within_group(world: World, rows: Sequence[Row]) -> list[list[float]]:
    """(reward-to-go - group mean) / group std; the sequence objective has the total at every token."""
    totals = [math.fsum(row.rewards) for row in rows]
    whole = world.values["objective"] == "sequence_clipped_surrogate"
    out = []
    for row, total in zip(rows, totals, strict=True):
        mates = [t for t, other in zip(totals, rows, strict=True) if other.group == row.group]
        mean = math.fsum(mates) / len(mates)
        a = [total - mean] * len(row.rewards) if whole else [g - mean for g in to_go(row.rewards)]
        if world.values["scale_by_std"]:
            std = math.sqrt(math.fsum((t - mean) ** 2 for t in mates) / max(len(mates) - 1, 1))
            a = [0.0 if max(mates) == min(mates) else x / std for x in a]
        out.append(a)
    return out


def _gae(world: World, row: Row) -> list[float]:
    """sum over later k of (gamma lam)^(k-t) (r_k + gamma V_(k+1) - V_k); V after the last token is 0."""
    v = [world.critic[s] for s in world.policy.rows(row.response)] + [0.0]
    delta = [r + world.gamma * v[k + 1] - v[k] for k, r in enumerate(row.rewards)]
    return to_go(delta, world.gamma * float(world.values["lam"]))


def _whitened(advantage: list[list[float]]) -> list[list[float]]:
    flat = [a for row in advantage for a in row]
    mean = math.fsum(flat) / len(flat)
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in flat) / len(flat) + 1e-8)
    return [[(a - mean) / std for a in row] for row in advantage]


# ---- weights


def weights(world: World, rows: Sequence[Row]) -> list[list[float]]:
    """[B][T] each token's share, times the correction for who sampled it."""
    lengths = [len(row.response) for row in rows]
    name, B = str(world.values["weighting"]).partition(":")[0], len(rows)
    share = {
        "sum_per_response": lambda T: 1 / B,
        "mean_per_response": lambda T: 1 / (B * T),
        "mean_per_token": lambda T: 1 / sum(lengths),
        "fixed_length": lambda T: 1 / (B * world.fixed_length),
    }[name]
    return [[share(len(row.response)) * c for c in _corrections(world, row.response)] for row in rows]


def _corrections(world: World, response: Response) -> list[float]:
    rule = world.case.situation.mismatch
    if rule is None:
        return [1.0] * len(response)
    log = [p - q for p, q in zip(world.old.logp(response), world.sampler.logp(response), strict=True)]
    if rule.level != "token":
        whole = math.fsum(log) / (len(log) if rule.level == "geometric" else 1)
        log = [whole] * len(log)
    w = [math.exp(x) for x in log]
    if rule.mode == "truncate":
        return [min(x, rule.cap) for x in w]
    return [x if rule.low <= x <= rule.high else 0.0 for x in w]


# ---- the optimiser steps


def _update(world: World, rows: Sequence[Row]) -> Array:
    """The steps' gradients, summed; each is taken at the policy that the one before left."""
    advantage, weight = advantages(world, rows), weights(world, rows)
    policy, total = world.policy, np.zeros_like(world.policy.probability)
    for _ in range(world.case.num_steps):
        step = np.zeros_like(total)
        for row, a, w in zip(rows, advantage, weight, strict=True):
            step += _row_gradient(world, policy, row.response, a, w)
        total += step
        if world.case.num_steps > 1 and world.case.situation.rate:
            policy = policy.moved(world.case.situation.rate * step)
    return total


def _row_gradient(world: World, policy: Policy, response: Response, a: list[float], w: list[float]) -> Array:
    """sum_t w_t (coefficient_t grad log pi_t - beta grad KL_t + bonus grad H_t)"""
    out = np.zeros_like(policy.probability)
    log_ratio = _log_ratio(world, policy, response)
    logp, logq = policy.logp(response), world.reference.logp(response)
    for t, (row, token) in enumerate(zip(policy.rows(response), response, strict=True)):
        score = policy.score(row, token)
        if world.values.get("objective") == "sequence_clipped_surrogate":
            s = math.exp(math.fsum(log_ratio) / len(log_ratio))
            out += w[t] * _clipped(world, s, a[t]) / len(response) * policy.scores(response)
        else:
            out[row] += w[t] * _coefficient(world, math.exp(log_ratio[t]), a[t]) * score
        out[row] -= w[t] * world.beta * _kl_gradient(world, policy, row, score, logp[t] - logq[t], log_ratio[t])
        out[row] += w[t] * world.bonus * policy.grad_entropy(row)
    return out


def _log_ratio(world: World, policy: Policy, response: Response) -> list[float]:
    """[T] log pi - log pi_old. One step on a batch: pi_old is the policy itself, unless something reads log pi_old."""
    reads_old = (
        world.case.num_steps > 1
        or world.case.situation.mismatch is not None
        or (world.kl is not None and world.kl[0] == "reward")
    )
    old = world.old if reads_old else policy
    return [p - q for p, q in zip(policy.logp(response), old.logp(response), strict=True)]


def _coefficient(world: World, ratio: float, a: float) -> float:
    """What multiplies grad log pi."""
    objective = world.values.get("objective", "policy_gradient" if world.imitates else "clipped_surrogate")
    if objective == "policy_gradient":
        return a
    if objective == "importance_weighted":
        return ratio * a
    if objective == "truncated_is_policy_gradient":
        return min(max(ratio, 1 - world.values["clip_low"]), 1 + world.values["clip_high"]) * a
    return _clipped(world, ratio, a)


def _clipped(world: World, ratio: float, a: float) -> float:
    """min(r A, clip(r) A) has the gradient r A grad log pi, and none where the clipped branch is smaller."""
    dual = world.values.get("dual_clip", "off")
    if a >= 0:
        return 0.0 if ratio > 1 + world.values["clip_high"] else ratio * a
    if ratio < 1 - world.values["clip_low"] or (dual not in ("off", "none", None) and ratio > dual):
        return 0.0
    return ratio * a


def _kl_gradient(world: World, policy: Policy, row: int, score: Array, d: float, log_ratio: float) -> Array:
    """Of the KL term in the loss of one token; d = log pi - log ref."""
    kl = world.kl
    if kl == (None, "exact"):
        return policy.grad_kl(world.reference, row)
    if kl == ("loss", "k2"):
        return d * score
    if kl == ("loss", "k3"):
        return (1 - math.exp(-d)) * score
    if kl == ("loss_times_ratio", "k3"):
        k3 = math.exp(-d) - 1 + d
        return math.exp(log_ratio) * (k3 + 1 - math.exp(-d)) * score
    return np.zeros_like(score)
