"""`hotcold doctor`: a run's folder is examined, a recipe or a reward is tried."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hotcold.algorithms.presets import NOT_BUILT, PRESETS
from hotcold.config.schema import Config, EvalConfig, reward_config, train_config
from hotcold.config.sources import Keys, read_arguments
from hotcold.doctor import preflight, reward, run
from hotcold.doctor.budget import SECONDS, Budget
from hotcold.doctor.record import is_run
from hotcold.doctor.report import Report
from hotcold.errors import InputError, did_you_mean
from hotcold.rewards.functions import BUILT_IN

Say = Callable[[str], None]


def doctor(tokens: Sequence[str], as_json: bool, echo: Say, say: Say = lambda _: None) -> int:
    """0: healthy, or notes alone; 1: something needs action. `say` takes what is being done."""
    report = examined(tokens, say)
    echo(json.dumps(report.as_json(), indent=2, ensure_ascii=False) if as_json else report.as_text())
    return report.exit_code


def examined(tokens: Sequence[str], say: Say, seconds: float = SECONDS) -> Report:
    budget = Budget(seconds, time.perf_counter())
    words, keys = read_arguments(tokens)
    if words and _is_reward(words[0], keys):
        return reward.examine(_reward_config(words, keys), say, budget)
    folder = _run_folder(words, keys)
    return preflight.examine(_config(tokens, words, keys, say), say, budget) if folder is None else run.examine(folder)


def _run_folder(words: Sequence[str], keys: Keys) -> Path | None:
    """The folder of a run, if that is what the words name."""
    if not words or words[0] in PRESETS or not Path(words[0]).is_dir():
        return None
    path = Path(words[0])
    if not is_run(path):
        raise InputError(
            f"{path} is a folder and no run: it has neither config.yaml nor metrics.jsonl.\n"
            "Give the folder of a run, as in runs/NAME; for a model, the whole recipe: hotcold doctor grpo "
            f"model={path} data=... reward=..."
        )
    if extra := [*words[1:], *keys]:
        raise InputError(f"{extra[0]} has no effect on a run's folder: leave it out.")
    return path


def _config(tokens: Sequence[str], words: Sequence[str], keys: Keys, say: Say) -> Config:
    word = words[0] if words else None
    if word is None and not keys:
        raise InputError(
            "doctor of what? Give a run's folder, a recipe, or a reward:\n"
            "hotcold doctor runs/NAME\nhotcold doctor recipe.yaml\nhotcold doctor reward.py data=prompts.jsonl\n"
            "hotcold doctor grpo model=smollm2 data=prompts.jsonl reward=reward.py"
        )
    if word is not None and not _is_recipe(word):
        raise _unknown(word)
    config = train_config(tokens)
    for warning in config.warnings:
        say(f"warning: {warning}")
    return config


def _is_reward(word: str, keys: Keys) -> bool:
    """A file stands for its reward unless a model is given: then it may be an algorithm."""
    if word in PRESETS or "model" in keys or "reward" in keys or Path(word).is_dir():
        return False
    named = word.partition("?")[0] in BUILT_IN
    return named or word.startswith(("http://", "https://")) or word.endswith(".py") or ".py:" in word


def _reward_config(words: Sequence[str], keys: Keys) -> EvalConfig:
    if len(words) > 1:
        raise InputError(
            f"{words[1]!r} is not understood. After the reward, write KEY=VALUE, as in data=prompts.jsonl."
        )
    return reward_config(words[0], keys)


def _is_recipe(word: str) -> bool:
    return word in PRESETS or word in NOT_BUILT or word.endswith((".yaml", ".yml")) or ".py" in word


def _unknown(word: str) -> InputError:
    there = is_run(Path("runs") / word)
    hint = f" Did you mean runs/{word}?" if there else did_you_mean(word, list(PRESETS))
    return InputError(
        f"{word!r} is no run's folder, no recipe.yaml and no algorithm.{hint}\n"
        f"Algorithms are: {', '.join(PRESETS)}; FILE.py:CLASS for your own."
    )
