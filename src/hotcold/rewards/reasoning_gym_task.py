"""Scoring by reasoning_gym, with the task's own rule."""

from __future__ import annotations

from functools import cache
from typing import Any

from hotcold.prompts.rows import reasoning_gym_dataset


def score_reasoning_gym(completion: str, task: str, entry: dict[str, Any]) -> float:
    """The task's own score of the completion; of one with <answer> tags what stands in the last of them.

    The columns are those of rows read as `reasoning_gym:TASK`: the task's name and the entry as the task made it.
    """
    _, opened, tail = completion.rpartition("<answer>")
    text = tail.partition("</answer>")[0] if opened else completion
    return float(_dataset(task).score_answer(answer=text.strip(), entry=entry))


@cache
def _dataset(task: str) -> Any:
    """The scorer of a task reads the entry alone: which options made the rows does not matter."""
    return reasoning_gym_dataset(task, {"size": 1, "seed": 0})
