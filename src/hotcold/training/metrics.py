"""Score and shape of a step's responses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hotcold.batch import Rollout


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
        "rewards/unscored": float(sum(r.score is None and not r.demonstration for r in rollouts)),
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
