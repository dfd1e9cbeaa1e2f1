"""Rows as lists, then as tensors: masks from lengths, rewards on tokens, cutting a batch by rows."""

from __future__ import annotations

import torch

from hotcold.batch import Batch, Rollout, along_episodes, collate, episode_totals
from hotcold.equations import reward_to_go

EOS = PAD = 2


def rollout(prompt: tuple[int, ...], response: tuple[int, ...], **fields: object) -> Rollout:
    return Rollout(prompt, response, **{"group": 0, "episode": 0, "reward": 1.0, **fields})  # type: ignore[arg-type]


def test_a_sampled_eos_is_trained_where_pad_is_the_same_id() -> None:
    """A08 (a), (b): [5, 9, EOS] ends itself; [5, 9, 7, 8, 4] hits the limit. The mask comes from lengths."""
    stopped = rollout((7,), (5, 9, EOS))
    cut = rollout((7,), (5, 9, 7, 8, 4), truncated=True)
    batch = collate([stopped, cut], pad_id=PAD)
    assert batch.tokens.tolist() == [[7, 5, 9, 2, 2, 2], [7, 5, 9, 7, 8, 4]]
    assert batch.response_mask.int().tolist() == [[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]
    assert batch.truncated.tolist() == [False, True]
    assert batch.response_mask.sum(1).float().mean() == 4  # lengths 3 and 5


def test_a_prompt_token_equal_to_the_pad_id_stays_a_prompt_token() -> None:
    """A08 (c): the true prompt is [7, 2, 8]."""
    batch = collate([rollout((7, 2, 8), (5,)), rollout((1,), (2, 2))], pad_id=PAD)
    assert batch.lengths.tolist() == [4, 3] and batch.prompt_lengths.tolist() == [3, 1]
    assert batch.tokens.tolist() == [[7, 2, 8, 5], [1, 2, 2, 2]]
    assert batch.response_mask.int().tolist() == [[0, 0, 0, 1], [0, 1, 1, 0]]


def test_the_pad_id_fills_and_decides_nothing() -> None:
    rows = [rollout((7,), (5, 9, 2)), rollout((7, 8), (5,))]
    a, b = collate(rows, pad_id=0), collate(rows, pad_id=9)
    assert torch.equal(a.response_mask, b.response_mask) and torch.equal(a.token_rewards, b.token_rewards)
    assert a.tokens[1].tolist() == [7, 8, 5, 0] and b.tokens[1].tolist() == [7, 8, 5, 9]


def test_the_score_arrives_at_the_last_trained_token() -> None:
    """A02: a row that stops, a row of full width, a row of one token; a row that ends with a tool's output."""
    rows = [
        rollout((1,), (5, 6, EOS), reward=3.0),
        rollout((1,), (5, 6, 7, 8, 9), reward=-1.0),
        rollout((1,), (EOS,), reward=2.0),
        rollout((1,), (5, 6, 7), reward=4.0, response_mask=(True, True, False)),
    ]
    assert collate(rows).token_rewards.tolist() == [
        [0, 0, 0, 3, 0, 0],
        [0, 0, 0, 0, 0, -1],
        [0, 2, 0, 0, 0, 0],
        [0, 0, 4, 0, 0, 0],
    ]


def test_rewards_on_the_way_stand_where_they_arrive_and_move_off_tool_tokens() -> None:
    """Positions count response tokens from 0; token 2 is a tool's, so its value moves back to token 1."""
    row = rollout(
        (1, 1),
        (5, 6, 7, 8),
        reward=10.0,
        response_mask=(True, True, False, True),
        steps=((0, 0.5), (2, 0.25), (3, 0.125), (3, 1.0)),
    )
    assert collate([row]).token_rewards.tolist() == [[0, 0, 0.5, 0.25, 0, 11.125]]


def test_the_score_of_a_response_is_all_that_it_earned() -> None:
    assert rollout((1,), (5, 6), reward=1.0, steps=((0, 0.5), (1, -0.25))).score == 1.25
    assert rollout((1,), (5, 6), reward=None, steps=((0, 0.5),)).score is None


def test_a_reward_before_the_first_trained_token_is_not_lost() -> None:
    row = rollout((1,), (5, 6), response_mask=(False, True), steps=((0, 0.5),))
    assert collate([row]).token_rewards.tolist() == [[0, 0, 1.5]]
    longer = rollout((1,), (5, 6, 7, 8), response_mask=(False, True, True, True), steps=((0, 0.5),))
    assert collate([longer]).token_rewards.tolist() == [[0, 0, 0.5, 0, 1]]


def test_a_row_without_a_score_is_not_kept_and_has_no_rewards() -> None:
    batch = collate([rollout((1,), (5, 6), reward=None, steps=((0, 0.5),)), rollout((1,), (5,), reward=0.0)])
    assert batch.keep.tolist() == [False, True]
    assert batch.rewards.isnan().tolist() == [True, False]
    assert batch.token_rewards.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert batch.trained.int().tolist() == [[0, 0, 0], [0, 1, 0]]
    assert batch.response_mask.int().tolist() == [[0, 1, 1], [0, 1, 0]]


def test_empty_completions_have_no_trained_token() -> None:
    """B09: [], [EOS], [7, EOS], [7, 8, 9]: lengths 0, 1, 2, 3."""
    batch = collate([rollout((1,), y) for y in ((), (EOS,), (7, EOS), (7, 8, 9))], pad_id=PAD)
    assert batch.response_mask.sum(1).tolist() == [0, 1, 2, 3]
    assert batch.token_rewards.sum(1).tolist() == [0, 1, 1, 1]


def test_log_probs_of_the_sampler_are_laid_on_their_tokens() -> None:
    rows = [
        rollout((1, 1), (5, 6), logp_sampler=(-0.5, -0.25), response_mask=(True, False)),
        rollout((1,), (5,), logp_sampler=(-1.0,)),
        rollout((1,), (5, 6), logp_sampler=(-1.0, -2.0)),
    ]
    logp = collate(rows).logp_sampler
    assert logp is not None and logp.tolist() == [[0, 0, -0.5, 0], [0, -1, 0, 0], [0, -1, -2, 0]]
    assert collate([rows[0], rollout((1,), (5,))]).logp_sampler is None  # not known for every row


def test_greedy_scores_are_nan_where_there_is_none() -> None:
    batch = collate([rollout((1,), (5,), greedy_reward=0.5), rollout((1,), (5,))])
    assert batch.greedy_rewards is not None
    assert batch.greedy_rewards[0] == 0.5 and batch.greedy_rewards[1].isnan()
    assert collate([rollout((1,), (5,))]).greedy_rewards is None


def test_float64_is_kept() -> None:
    batch = collate([rollout((1,), (5,), reward=0.1, logp_sampler=(-0.1,))], dtype=torch.float64)
    assert batch.logp_sampler is not None
    assert batch.token_rewards[0, 1].item() == 0.1 and batch.logp_sampler[0, 1].item() == -0.1


def test_selected_rows_are_trimmed_to_the_longest_of_them() -> None:
    rows = [
        rollout((1,), (3,), group=4),
        rollout((1, 2), (3, 4, 5), group=5, greedy_reward=0.0),
        rollout((1,), (6, 7), group=6),
    ]
    batch = collate(rows).replace(extras={"a": torch.tensor([1, 2, 3]), "b": torch.arange(15).view(3, 5)})
    for picked in (batch.select([2, 0]), batch.select(torch.tensor([2, 0]))):
        assert picked.tokens.tolist() == [[1, 6, 7], [1, 3, 0]]
        assert picked.response_mask.int().tolist() == [[0, 1, 1], [0, 1, 0]]
        assert picked.group.tolist() == [6, 4]
        assert picked.greedy_rewards is not None and picked.greedy_rewards.isnan().all()
        assert picked.extras["a"].tolist() == [3, 1]
        assert picked.extras["b"].tolist() == [[10, 11, 12], [0, 1, 2]]
    assert batch.select(torch.tensor([True, False, True])).group.tolist() == [4, 6]
    assert len(batch.select([])) == 0 and batch.select([]).tokens.shape == (0, 0)


def test_an_empty_batch_is_a_batch() -> None:
    batch = collate([])
    assert len(batch) == 0 and len(batch.select([])) == 0
    assert episode_totals(batch).tolist() == []
    assert batch.logp_sampler is None  # nobody has reported any


def test_an_episode_sums_the_rewards_of_its_rows_wherever_they_stand() -> None:
    """Episode 7 has rows 0 and 2 with 1 + 0.5 and 2; episode 3 has row 1 with -1."""
    rows = [
        rollout((1,), (5, 6), episode=7, reward=1.0, steps=((0, 0.5),)),
        rollout((1,), (5,), episode=3, reward=-1.0),
        rollout((1,), (5,), episode=7, reward=2.0),
    ]
    batch = collate(rows)
    assert episode_totals(batch).tolist() == [3.5, -1.0, 3.5]
    outside = torch.where(batch.response_mask, batch.token_rewards, torch.nan)
    assert episode_totals(batch.replace(token_rewards=outside)).tolist() == [3.5, -1.0, 3.5]


def test_the_rows_of_an_episode_follow_each_other() -> None:
    """Episode 7: rows 0, 2 and 3 with 1, 2 and 1 tokens, rewards 1, (0, 10) and 100; row 1 is another's, with 5.

    To go from its tokens: 111, (110, 110), 100. They are laid out from column 0 on, episodes in the order of their ids.
    """
    rows = [
        rollout((1,), (5,), episode=7, reward=1.0),
        rollout((1,), (5, 6), episode=3, reward=5.0),
        rollout((1,), (5, 6), episode=7, reward=10.0),
        rollout((1,), (5,), episode=7, reward=100.0),
    ]
    batch = collate(rows)
    assert along_episodes(batch, reward_to_go, batch.token_rewards).tolist() == [
        [0, 111, 0],
        [0, 5, 5],
        [0, 110, 110],
        [0, 100, 0],
    ]

    def seen(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert values.tolist() == [[0, 5, 0, 0], [1, 0, 10, 100]]
        assert mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
        return values

    assert along_episodes(batch, seen, batch.token_rewards).tolist() == batch.token_rewards.tolist()


def test_an_empty_completion_counts_with_its_score() -> None:
    """B09: it has no token that the score could stand on, and still belongs to its group."""
    rows = [rollout((1,), (), episode=0, reward=-1.0), rollout((1,), (5,), episode=1, reward=1.0)]
    assert episode_totals(collate(rows)).tolist() == [-1.0, 1.0]
    unscored = [rollout((1,), (), episode=0, reward=None), rollout((1,), (5,), episode=1, reward=1.0)]
    assert episode_totals(collate(unscored)).tolist() == [0.0, 1.0]


def test_to_moves_every_column_and_changes_none() -> None:
    batch: Batch = collate([rollout((1,), (5, 6))]).replace(extras={"a": torch.ones(1)})
    there = batch.to("meta")
    assert there.tokens.is_meta and there.keep.is_meta and there.extras["a"].is_meta
    assert batch.to("cpu").tokens.tolist() == batch.tokens.tolist()


def test_units_are_rows_unless_given() -> None:
    assert collate([rollout((1,), (5,)), rollout((1,), (5,))]).unit.tolist() == [0, 1]
    assert collate([rollout((1,), (5,), unit=4), rollout((1,), (5,), unit=4)]).unit.tolist() == [4, 4]
