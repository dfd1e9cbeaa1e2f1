"""Where rows come from: prompts sampled and scored, groups refilled within a bound, recorded rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.base import Objective, Plan
from hotcold.algorithms.baselines import greedy_baseline, no_baseline
from hotcold.algorithms.grpo import GRPO
from hotcold.algorithms.losses import policy_gradient_loss
from hotcold.algorithms.reinforce import REINFORCE
from hotcold.batch import Batch, Rollout, collate
from hotcold.equations import group_std, sum_per_response
from hotcold.errors import RewardError
from hotcold.prompts import Prompt, PromptOrder
from hotcold.rewards.base import Scorable, Score
from hotcold.sampling.base import Request, Response, SamplingOptions
from hotcold.training.collect import Collected, PromptedRollouts, ReplayedRollouts, as_text, kept, scorable
from tests.toy_policies import T1, RecordingEngine, run_update


@dataclass
class EchoSampler:
    """Answers with ids that name prompt, sample and greediness; long prompts hit the limit."""

    calls: list[tuple[list[Request], SamplingOptions]] = field(default_factory=list)

    def sample(self, requests: Sequence[Request], options: SamplingOptions, progress: Any = None) -> list[Response]:
        self.calls.append((list(requests), options))
        kinds = "greedy" if options.greedy else "sampled"
        return [
            Response(
                ids=(*r.prompt_ids, r.sample),
                logp=(-0.5,) * (len(r.prompt_ids) + 1),
                finish_reason="length" if len(r.prompt_ids) > 1 else "stop",
                text=f"{kinds} {r.prompt_ids[0]} {r.sample}",
            )
            for r in requests
        ]

    def refresh(self, version: int) -> None:
        pass


@dataclass
class ScoreBy:
    of: Callable[[Scorable], float | None]
    names: tuple[str, ...] = ("score",)
    calls: list[list[Scorable]] = field(default_factory=list)

    def score(self, items: Sequence[Scorable]) -> list[Score]:
        self.calls.append(list(items))
        return [Score(self.of(item), {"score": self.of(item)}, ((0, 0.5),)) for item in items]

    def take_counts(self) -> dict[str, int]:
        return {}


@dataclass(frozen=True)
class DropEqualGroups:
    """DAPO's filter: groups whose scores are all equal are rejected and refilled."""

    plan: Plan
    reads: frozenset[str] = frozenset()
    objectives: tuple[Objective, ...] = (Objective(policy_gradient_loss, sum_per_response),)

    def state(self) -> dict[str, float]:
        return {}

    def keep(self, batch: Batch) -> Tensor:
        return group_std(batch.rewards, batch.group) > 0

    def credit(self, batch: Batch, state: dict[str, float]) -> tuple[Batch, dict[str, float]]:
        return batch.replace(advantages=torch.where(batch.response_mask, 1.0, 0.0).to(batch.token_rewards)), state


def source(num_prompts: int, per_step: int, of: Callable[[Scorable], float | None]) -> PromptedRollouts:
    """Prompt i has the one id i, the last one two; its text is p<i>."""
    prompts = [Prompt(content=f"p{i}", columns={"answer": i}, index=10 + i) for i in range(num_prompts)]
    ids = [(i,) for i in range(num_prompts - 1)] + [(num_prompts - 1, 99)]
    order = PromptOrder(num_prompts, 0)
    return PromptedRollouts(prompts, ids, order, EchoSampler(), ScoreBy(of), SamplingOptions(), per_step)


def quiet(stage: str, done: int, of: int) -> None:
    pass


def collect(of: PromptedRollouts, algorithm: Any, position: int = 0, version: int = 0) -> Collected:
    return of.collect(algorithm, position, version, quiet)


def by_sample(item: Scorable) -> float:
    return float(item.completion_ids[-1])


# ------------------------------------------------------------------ one step


def test_every_prompt_of_the_step_has_its_group_of_scored_responses() -> None:
    of = source(3, 3, by_sample)
    out = collect(of, GRPO(group_size=2), position=3, version=7)
    assert out.position == 6 and out.num_refilled == 0 and set(out.seconds) == {"sample", "score"}
    assert [r.group for r in out.rollouts] == [3, 3, 4, 4, 5, 5]
    assert [r.episode for r in out.rollouts] == [6, 7, 8, 9, 10, 11]
    assert [r.reward for r in out.rollouts] == [0.0, 1.0] * 3
    for r in out.rollouts:
        index = r.prompt_ids[0]
        assert (r.prompt_index, r.prompt_text, r.draw) == (10 + index, f"p{index}", r.group)
        assert r.response_ids == (*r.prompt_ids, r.episode % 2) and r.text == f"sampled {index} {r.episode % 2}"
        assert r.logp_sampler == (-0.5,) * len(r.response_ids)
        assert r.truncated == (index == 2) and r.finish_reason == ("length" if index == 2 else "stop")
        assert r.version == 7 and r.steps == ((0, 0.5),) and r.parts == {"score": r.reward}


def test_the_score_knows_the_columns_of_its_own_row() -> None:
    """C09: whatever the order of the prompts."""
    of = source(4, 4, by_sample)
    collect(of, GRPO(group_size=2))
    (items,) = of.scorer.calls  # type: ignore[attr-defined]
    assert all(item.columns == {"answer": item.prompt_ids[0]} for item in items)
    assert all(item.prompt == f"p{item.prompt_ids[0]}" and item.row == 10 + item.prompt_ids[0] for item in items)
    assert [item.truncated for item in items] == [item.prompt_ids[0] == 3 for item in items]


def test_greedy_responses_are_scored_and_belong_to_their_prompt() -> None:
    """The greedy response to prompt i scores 100 + i, and 0.5 on the way."""

    def score(item: Scorable) -> float:
        return item.prompt_ids[0] + 100.0 * item.completion.startswith("greedy")

    of = source(3, 3, score)
    out = collect(of, REINFORCE(group_size=2, baseline=greedy_baseline))
    assert all(r.greedy_reward == 100.5 + r.prompt_ids[0] and r.reward == r.prompt_ids[0] for r in out.rollouts)
    assert [options.greedy for _, options in of.sampler.calls] == [False, True]  # type: ignore[attr-defined]
    assert len(of.sampler.calls[1][0]) == 3  # type: ignore[attr-defined]
    plain = source(3, 3, score)
    assert all(r.greedy_reward is None for r in collect(plain, GRPO(group_size=2)).rollouts)
    assert len(plain.sampler.calls) == 1  # type: ignore[attr-defined]


def test_the_same_position_gives_the_same_rows() -> None:
    a, b = (collect(source(5, 2, by_sample), GRPO(group_size=2), position=4).rollouts for _ in range(2))
    assert a == b


def test_no_prompt_is_lost_where_the_step_does_not_divide_the_data() -> None:
    """D15: 5 prompts, 2 a step, G = 4: five steps see every prompt twice, in groups of 4 that are never split."""
    of, position = source(5, 2, by_sample), 0
    seen: Counter[int] = Counter()
    for _ in range(5):
        out = collect(of, GRPO(group_size=4), position)
        position = out.position
        assert sorted(Counter(r.group for r in out.rollouts).values()) == [4, 4]
        seen.update(r.prompt_index for r in out.rollouts)
    assert position == 10 and seen == dict.fromkeys(range(10, 15), 8)


def test_two_draws_of_one_prompt_are_two_groups() -> None:
    """D20: a data set smaller than a step."""
    out = collect(source(1, 3, by_sample), GRPO(group_size=2))
    assert [r.group for r in out.rollouts] == [0, 0, 1, 1, 2, 2]
    assert {r.prompt_index for r in out.rollouts} == {10}


# ------------------------------------------------------------------ refill (D20)


def test_refilling_ends_at_its_bound_where_no_group_has_a_signal() -> None:
    """Rewards constant 0 or 1, 10 refills: 11 rounds of 2 prompts, then the step is skipped and the run goes on."""
    for reward in (0.0, 1.0):
        of, algorithm = source(20, 2, lambda item, reward=reward: reward), DropEqualGroups(Plan(2, refill=10))
        out = collect(of, algorithm)
        assert len(of.sampler.calls) == 11  # type: ignore[attr-defined]
        assert (out.position, out.num_refilled, len(out.rollouts)) == (22, 20, 44)
        _, record = run_update(out.rollouts, algorithm, RecordingEngine(T1.policy()))
        assert record.summary()["optimizer_steps"] == 0 and record.summary()["optimizer_steps/empty"] == 1


def test_refilling_stops_as_soon_as_the_step_is_full() -> None:
    """Draws 1 and 4 of the order are mixed. Rounds: draws 0 and 1 (one accepted), 2, 3, 4: full."""
    order = PromptOrder(20, 0)
    mixed = {order.at(1), order.at(4)}
    of = source(20, 2, lambda item: by_sample(item) if item.prompt_ids[0] in mixed else 0.0)
    algorithm = DropEqualGroups(Plan(2, refill=10))
    out = collect(of, algorithm)
    assert (out.position, out.num_refilled) == (5, 3)
    batch = collate(out.rollouts)
    assert batch.group[kept(batch, algorithm)].unique().tolist() == [1, 4]


def test_one_mixed_prompt_of_twenty_trains_alone_when_the_refills_are_used_up() -> None:
    of = source(20, 2, lambda item: by_sample(item) if item.prompt_ids[0] == PromptOrder(20, 0).at(0) else 1.0)
    algorithm = DropEqualGroups(Plan(2, refill=3))
    out = collect(of, algorithm)
    assert out.num_refilled == 3  # one place is left, refilled one by one
    batch = collate(out.rollouts)
    assert batch.group[kept(batch, algorithm)].tolist() == [0, 0]


def test_without_refills_rejected_groups_stay_rejected() -> None:
    of = source(20, 2, lambda item: 0.0)
    assert len(collect(of, DropEqualGroups(Plan(2))).rollouts) == 4
    assert len(of.sampler.calls) == 1  # type: ignore[attr-defined]


# ------------------------------------------------------------------ what takes part


def test_unscored_rows_are_never_kept() -> None:
    rows = [Rollout((1,), (2,), 0, i, reward=r) for i, r in enumerate((1.0, None, 0.0))]
    assert kept(collate(rows), REINFORCE(group_size=1, baseline=no_baseline)).tolist() == [True, False, True]
    none = source(2, 2, lambda item: None)
    assert [r.reward for r in collect(none, GRPO(group_size=2), position=2).rollouts] == [None] * 4
    with pytest.raises(RewardError, match="any of the first 4 responses"):  # at the very first step: a fault
        collect(none, GRPO(group_size=2))


def test_recorded_rows_are_those_of_the_step_after_the_position() -> None:
    steps = {1: [Rollout((1,), (2,), 0, 0, reward=1.0)], 2: []}
    replay = ReplayedRollouts(lambda number: steps[number])
    first = replay.collect(GRPO(), 0, 0, quiet)
    assert (first.rollouts, first.position) == (steps[1], 1)
    assert replay.collect(GRPO(), first.position, 0, quiet) == replace(first, rollouts=[], position=2)


# ------------------------------------------------------------------ records


def test_what_is_scored_is_the_text_and_the_ids_of_the_response() -> None:
    prompt = Prompt(content=[{"role": "user", "content": "hi"}], columns={"a": 1}, index=3)
    item = scorable(prompt, Request((7, 8), 0), Response((5, 6), (-1.0, -2.0), "length", "five"))
    assert (item.completion, item.completion_ids, item.prompt_ids) == ("five", (5, 6), (7, 8))
    assert item.truncated and item.row == 3 and item.columns == {"a": 1} and item.prompt == prompt.content


def test_a_prompt_is_recorded_as_readable_text() -> None:
    assert as_text("plain") == "plain"
    assert as_text([{"role": "user", "content": "hä?"}]) == "hä?"
    two = [{"role": "system", "content": "be ä"}, {"role": "user", "content": "hi"}]
    assert as_text(two) == '[{"role": "system", "content": "be ä"}, {"role": "user", "content": "hi"}]'
