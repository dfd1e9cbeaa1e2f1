"""reasoning_gym rows are scored by the rule of their own task."""

from dataclasses import replace

from hotcold.prompts import make_prompts, read_rows
from hotcold.rewards.base import Scorable
from hotcold.rewards.failures import Limits
from hotcold.rewards.functions import load_reward
from hotcold.rewards.reasoning_gym_task import score_reasoning_gym
from hotcold.rewards.scorer import FunctionScorer, load_scorer


def test_rows_of_a_task_are_scored_by_the_task() -> None:
    prompts = make_prompts(read_rows("reasoning_gym:chain_sum?size=3&seed=7"), None)
    reward = load_reward("reasoning_gym")
    reward.check(prompts[0].columns)
    scorer = FunctionScorer([reward], [1.0])
    for prompt in prompts:
        answer = prompt.columns["answer"]
        texts = [answer, f" {answer}\n", f"<answer>0</answer> no: <answer>{answer}</answer>", "none"]
        items = [Scorable(prompt.content, text, (1,), (2,), prompt.columns, row=prompt.index) for text in texts]
        assert [one.total for one in scorer.score(items)] == [1.0, 1.0, 1.0, 0.0]


def test_the_options_that_made_the_rows_reach_the_scorer() -> None:
    """puzzle24 refuses numbers below min_value, which is 1 unless it is given: 6 * 4 * 1 * 1 = 24."""
    (row,) = read_rows("reasoning_gym:puzzle24?size=1&min_value=2")
    assert row["options"] == {"min_value": 2}
    assert score_reasoning_gym("6 * 4 * 1 * 1", row["task"], row["entry"], row["options"]) == 0.01
    assert score_reasoning_gym("6 * 4 * 1 * 1", row["task"], row["entry"], {}) == 1.0


def test_it_runs_in_a_worker_by_its_name() -> None:
    prompts = make_prompts(read_rows("reasoning_gym:chain_sum?size=2&seed=7"), None)
    scorer = load_scorer(["reasoning_gym"], [1.0], Limits())
    items = [Scorable(p.content, p.columns["answer"], (1,), (2,), p.columns, row=p.index) for p in prompts]
    try:
        assert scorer.names == ("reasoning_gym",)
        assert [one.total for one in scorer.score([*items, replace(items[0], completion="none")])] == [1.0, 1.0, 0.0]
        assert scorer.take_counts() == dict.fromkeys(scorer.take_counts(), 0) != {}  # nothing failed, in a worker
    finally:
        scorer.close()
