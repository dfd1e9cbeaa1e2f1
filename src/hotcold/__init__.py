"""Train a language model by policy gradient on any score.

`run = hotcold.train(model="smollm2", data="prompts.jsonl", reward=my_function, algorithm="grpo")`

Names load when they are first used, so that `import hotcold` is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotcold.algorithms.expert_iteration import ExpertIteration
    from hotcold.algorithms.grpo import GRPO
    from hotcold.algorithms.kl import Adaptive, ExactKL, KLInLoss, KLInReward
    from hotcold.algorithms.ppo import PPO
    from hotcold.algorithms.reinforce import REINFORCE
    from hotcold.algorithms.rloo import RLOO
    from hotcold.algorithms.sft import SFT
    from hotcold.api import train
    from hotcold.config.schema import Config
    from hotcold.errors import InputError

    __version__: str

__all__ = [
    "GRPO",
    "PPO",
    "REINFORCE",
    "RLOO",
    "SFT",
    "Adaptive",
    "Config",
    "ExactKL",
    "ExpertIteration",
    "InputError",
    "KLInLoss",
    "KLInReward",
    "__version__",
    "train",
]

_HOME = {
    "train": "hotcold.api",
    "Config": "hotcold.config.schema",
    "InputError": "hotcold.errors",
    "REINFORCE": "hotcold.algorithms.reinforce",
    "RLOO": "hotcold.algorithms.rloo",
    "GRPO": "hotcold.algorithms.grpo",
    "ExpertIteration": "hotcold.algorithms.expert_iteration",
    "PPO": "hotcold.algorithms.ppo",
    "SFT": "hotcold.algorithms.sft",
    "KLInReward": "hotcold.algorithms.kl",
    "KLInLoss": "hotcold.algorithms.kl",
    "ExactKL": "hotcold.algorithms.kl",
    "Adaptive": "hotcold.algorithms.kl",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("hotcold")
    if name not in _HOME:
        raise AttributeError(f"module 'hotcold' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
