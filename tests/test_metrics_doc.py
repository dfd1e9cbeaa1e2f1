"""docs/metrics.md documents every metric that a run writes, and no other."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotcold.algorithms.grpo import GRPO
from hotcold.batch import Rollout
from hotcold.training.collect import Collected
from hotcold.training.console import Console
from hotcold.training.evaluate import Evaluation, interval
from hotcold.training.loop import Loop, LoopSettings, Progress
from hotcold.training.metrics import rollout_metrics
from hotcold.training.record import UpdateRecord
from tests.toy_policies import T1, RecordingEngine, settings

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
        return Collected(rollouts, position + 1, {"sample": 0.1, "score": 0.1})


class Held:
    def run(self, notify: Callable[[str, int, int], None]) -> Evaluation:
        return Evaluation(interval([1.0, 0.0]), interval([0.5, 0.0]), {1: 0.25, 2: 0.5})


@dataclass
class Memory:
    attempt: int = 1
    lines: list[dict[str, Any]] = field(default_factory=list)

    def append_metrics(self, row: dict[str, Any]) -> None:
        self.lines.append(row)

    def write_rollouts(self, step: int, rollouts: Any) -> None: ...

    def write_eval(self, name: str, content: Any) -> None: ...


def run_of_two_steps() -> list[dict[str, Any]]:
    """The lines that the real loop writes: the second step evaluates."""
    memory = Memory()
    loop = Loop(
        algorithm=GRPO(group_size=4, epochs_per_batch=2),
        engine=RecordingEngine(T1.policy()),
        source=Rows(),
        evaluator=Held(),  # type: ignore[arg-type]
        record=memory,
        settings=LoopSettings(2, {"policy": 0.1}, 0, settings(), save_every=0, eval_every=0),
        console=Console(None),
        refresh=lambda version: None,
        save=lambda progress: None,
        reward_names=["f"],
    )
    loop.run(Progress())
    return memory.lines


def test_the_documented_metrics_are_those_that_a_run_writes() -> None:
    written = {as_documented(name) for line in run_of_two_steps() for name in line}
    assert set(documented()) == written
    assert len(documented()) == len(set(documented()))


def test_every_metric_is_there_even_where_it_does_not_exist() -> None:
    """A step in which nothing was computed has the same keys, with null."""
    summary = UpdateRecord().summary()
    assert {as_documented(name) for name in summary} <= set(documented())
    nulls = {"entropy", "approx_kl", "ratio/max", "clip_fraction", "mismatch/max_abs", "mismatch/mean_abs"}
    assert {name for name, value in summary.items() if value is None} == nulls
    assert rollout_metrics([], ["f"])["reward"] is None
    assert {as_documented(name) for name in rollout_metrics([], ["f"])} <= set(documented())


def test_metrics_of_an_evaluation_come_only_with_an_evaluation() -> None:
    first, second = run_of_two_steps()
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
