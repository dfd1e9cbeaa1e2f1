"""Scoring by reasoning_gym, with the task's own rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from hotcold.errors import InputError


def reasoning_gym_reward() -> Callable[..., float]:
    """The reward over the columns `task` (its name) and `entry` (question, answer, metadata)."""
    try:
        from reasoning_gym.factory import get_score_answer_fn
        from reasoning_gym.utils import extract_answer
    except ImportError as error:
        raise InputError(
            f"reward=reasoning_gym needs the package reasoning_gym ({error}).\n"
            "Install it: pip install 'hotcold[reasoning-gym]'"
        ) from error
    scorer_of = cache(get_score_answer_fn)  # builds the task's dataset object once

    def reasoning_gym(completion: str, task: str, entry: dict[str, Any]) -> float:
        """What stands in <answer> tags counts where there are any, else the whole completion."""
        tagged = extract_answer(completion)
        return float(scorer_of(task)(answer=completion.strip() if tagged is None else tagged, entry=entry))

    return reasoning_gym
