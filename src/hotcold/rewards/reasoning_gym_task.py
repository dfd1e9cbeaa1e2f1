"""Scoring by reasoning_gym, with the task's own rule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from hotcold.prompts.rows import reasoning_gym_dataset


def score_reasoning_gym(
    completion: str, task: str, entry: dict[str, Any], options: Mapping[str, Any] | None = None
) -> float:
    """The task's own score of the completion; of one with <answer> tags what stands in the last of them.

    The columns are those of rows read as `reasoning_gym:TASK?OPTIONS`: the task's name, the entry as the task made it,
    and the options, because the rules of some tasks depend on them (puzzle24 on its smallest number).
    """
    _, opened, tail = completion.rpartition("<answer>")
    text = tail.partition("</answer>")[0] if opened else completion
    dataset = _dataset(task, json.dumps(dict(options or {}), sort_keys=True))
    return float(dataset.score_answer(answer=text.strip(), entry=entry))


@cache
def _dataset(task: str, options: str) -> Any:
    return reasoning_gym_dataset(task, json.loads(options) | {"size": 1, "seed": 0})
