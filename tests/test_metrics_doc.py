"""docs/metrics.md documents every metric that a run writes, and no other."""

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hotcold.algorithms.base import Algorithm
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.kl import Adaptive, ExactKL, KLInReward
from hotcold.algorithms.ppo import PPO
from hotcold.algorithms.sft import SFT
from hotcold.batch import Rollout
from hotcold.engines.local import LocalEngine, Trainee
from hotcold.models.critic import Critic
from hotcold.models.reference import copy_as_reference
from hotcold.prompts import PromptOrder
from hotcold.rewards import judge, remote
from hotcold.rewards.failures import Ledger, Limits
from hotcold.training.collect import Collected
from hotcold.training.console import Console
from hotcold.training.dataset import DatasetRows
from hotcold.training.evaluate import Evaluation, WithLoss, interval
from hotcold.training.loop import Loop, LoopSettings, Progress
from hotcold.training.metrics import rollout_metrics
from hotcold.training.mismatch import Mismatch
from hotcold.training.record import UpdateRecord
from hotcold.training.truncation import Truncation
from hotcold.training.update import UpdateSettings
from tests.toy_policies import T1, RecordingEngine, ragged_rollouts, settings, tiny_llama

DOC = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
EXACT = json.loads((Path(__file__).parent / "vectors" / "exact.json").read_text(encoding="utf-8"))
PATTERNS = {
    r"rewards/(?!unscored$)[^/]+/mean": "rewards/<name>/mean",
    r"rewards/[^/]+/std": "rewards/<name>/std",
    r"eval/pass_at_\d+": "eval/pass_at_<k>",
}


def documented() -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", DOC, flags=re.MULTILINE)


def as_documented(name: str) -> str:
    return next((shown for pattern, shown in PATTERNS.items() if re.fullmatch(pattern, name)), name)


@dataclass
class Rows:
    """One step of four scored responses of T1, as a sampler would give them."""

    def collect(self, algorithm: Any, position: int, version: int, notify: Any) -> Collected:
        rollouts = [
            Rollout(
                (8,), y, group=0, episode=i, reward=T1.reward[y], logp_sampler=(-0.7, -0.7), parts={"f": T1.reward[y]}
            )
            for i, y in enumerate(T1.responses)
        ]
        counts = Ledger(Limits()).take_counts() | dict.fromkeys((*judge.COUNTS, *remote.COUNTS), 0)
        return Collected(rollouts, position + 1, {"sample": 0.1, "score": 0.1}, reward_counts=counts)


class Held:
    def run(self, notify: Callable[[str, int, int], None]) -> Evaluation:
        return Evaluation(interval([1.0, 0.0]), interval([0.5, 0.0]), {1: 0.25, 2: 0.5})


@dataclass
class Memory:
    attempt: int = 1
    lines: list[dict[str, Any]] = field(default_factory=list)

    def append_metrics(self, row: dict[str, Any]) -> None:
        self.lines.append(row)

    def write_rollouts(self, step: int, rollouts: Any, about: Any) -> None: ...

    def write_eval(self, name: str, content: Any) -> None: ...


@dataclass
class Given:
    """The same scored rows at each step."""

    rows: Sequence[Rollout]

    def collect(self, algorithm: Any, position: int, version: int, notify: Any) -> Collected:
        return Collected(list(self.rows), position + 1)


def lines_of(algorithm: Algorithm, engine: Any, source: Any, evaluator: Any, **changes: Any) -> list[dict[str, Any]]:
    """The lines that the real loop writes in two steps; the second evaluates."""
    memory = Memory()
    rates = {"policy": 0.1, "critic": 0.1}
    loop = Loop(
        algorithm=algorithm,
        engine=engine,
        source=source,
        evaluator=evaluator,
        record=memory,
        settings=replace(LoopSettings(2, rates, 0, settings(), save_every=0, eval_every=0), **changes),
        console=Console(None),
        refresh=lambda version: None,
        save=lambda progress: None,
        reward_names=["f"] if isinstance(evaluator, Held) else [],
    )
    loop.run(Progress(algorithm=algorithm.state()))
    return memory.lines


def run_of_grpo() -> list[dict[str, Any]]:
    return lines_of(GRPO(group_size=4, epochs_per_batch=2), RecordingEngine(T1.policy()), Rows(), Held())


def tiny_engine() -> LocalEngine:
    """A tiny Llama with a critic and a reference that are copies of it."""
    policy = tiny_llama()
    critic = Critic(copy.deepcopy(policy.model), width=16)
    modules = {"policy": policy, "critic": critic}
    trainees = {name: Trainee(m, torch.optim.SGD(m.parameters(), lr=0.0)) for name, m in modules.items()}
    return LocalEngine(trainees, 1.0, copy_as_reference(policy, "", ""))


def run_of_ppo() -> list[dict[str, Any]]:
    """With all that an algorithm with a critic can have beside it: a leash that adapts, mismatch weights, a penalty."""
    rows = [replace(r, logp_sampler=(-3.0,) * len(r.response_ids), parts={"f": r.reward}) for r in ragged_rollouts()]
    return lines_of(
        PPO(group_size=4, lam=0.9, kl=KLInReward(0.1, Adaptive(1.0)), epochs_per_batch=2, value_clip=0.5),
        tiny_engine(),
        Given(rows),
        Held(),
        update=UpdateSettings(10**6, {"policy": 1.0, "critic": 1.0}, mismatch=Mismatch("mask")),
        truncation=Truncation("penalty", max_tokens=8, buffer=4),
    )


def run_of_sft() -> list[dict[str, Any]]:
    rows = [replace(row, reward=None, demonstration=True) for row in ragged_rollouts()]
    source = DatasetRows(rows, PromptOrder(len(rows), 0), 4)
    algorithm = SFT(kl=ExactKL(0.1, in_reward=False))
    return lines_of(algorithm, tiny_engine(), source, WithLoss(None, lambda: 1.5))


RUNS = {"grpo": run_of_grpo, "ppo": run_of_ppo, "sft": run_of_sft}


@pytest.fixture(scope="module")
def written() -> dict[str, list[dict[str, Any]]]:
    return {name: run() for name, run in RUNS.items()}


def names(lines: Sequence[dict[str, Any]]) -> set[str]:
    return {as_documented(name) for line in lines for name in line}


def test_the_documented_metrics_are_those_that_runs_write(written: dict[str, Any]) -> None:
    assert set(documented()) == set().union(*map(names, written.values()))
    assert len(documented()) == len(set(documented()))


def test_a_run_writes_what_its_algorithm_has(written: dict[str, Any]) -> None:
    """A quantity that it cannot have is absent; one that it has and a step did not yield is null."""
    of_kl, of_critic = {"kl", "kl/response", "beta"}, {"value/loss", "value/explained_variance", "gae/score_weight"}
    grpo, ppo, sft = (names(written[name]) for name in ("grpo", "ppo", "sft"))
    assert not grpo & {*of_kl, *of_critic, "mismatch/weight_mean", "rewards/penalty", "eval/loss"}
    assert ppo >= {*of_kl, *of_critic, "kl/target", "mismatch/weight_mean", "rewards/penalty"}
    assert sft >= {*of_kl, "eval/loss"} and not sft & {*of_critic, "kl/target", "eval/greedy", "eval/unscored"}
    assert written["sft"][0]["reward"] is None and written["sft"][0]["mismatch/max_abs"] is None


def test_every_metric_is_there_even_where_it_does_not_exist() -> None:
    """A step in which nothing was computed has the same keys, with null."""
    summary = UpdateRecord().summary()
    assert {as_documented(name) for name in summary} <= set(documented())
    nulls = {"grad_norm/clipped", "entropy", "approx_kl", "ratio/max", "clip_fraction"}
    nulls |= {"mismatch/max_abs", "mismatch/mean_abs"}
    assert {name for name, value in summary.items() if value is None} == nulls
    assert rollout_metrics([], ["f"])["reward"] is None
    assert {as_documented(name) for name in rollout_metrics([], ["f"])} <= set(documented())


def test_metrics_of_an_evaluation_come_only_with_an_evaluation(written: dict[str, Any]) -> None:
    first, second = written["grpo"]
    assert not any(name.startswith("eval/") or name == "time/eval" for name in first)
    assert second["eval/greedy"] == 0.5 and second["eval/pass_at_2"] == 0.5 and second["eval/prompts"] == 2


def test_every_metric_has_a_formula_a_range_and_what_to_do() -> None:
    rows = [line for line in DOC.splitlines() if line.startswith("| `")]
    assert [row for row in rows if len(row.strip("|").split("|")) != 4 or "||" in row.replace(" ", "")] == []


def test_the_table_of_groups_without_signal_E03() -> None:
    table = DOC.split("### How many groups carry no signal")[1].split("\n\n")[2]
    shown = {cells[0].strip(): cells[1:] for line in table.splitlines()[2:] if (cells := line.strip("| ").split("|"))}
    assert len(shown) == len(EXACT["zero_variance_groups"])
    for case in EXACT["zero_variance_groups"]:
        expected = [f"{case['share'][group_size]:.3f}" for group_size in ("2", "4", "8", "16")]
        assert [cell.strip() for cell in shown[str(case["p"])]] == expected
