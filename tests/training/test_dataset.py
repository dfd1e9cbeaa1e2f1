"""Rows of a data set: as ids, in the order of the passes, and their loss when held out."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from hotcold.algorithms.grpo import GRPO
from hotcold.batch import Batch, Rollout, collate
from hotcold.errors import InputError
from hotcold.prompts import PromptOrder, make_demonstrations
from hotcold.training.dataset import DatasetRows, encode_demonstrations, held_out_loss
from tests.tiny_model import EOS, character_tokenizer

CHATML = (
    "{% for m in messages %}{{ m['role'][0] + '=' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a=' }}{% endif %}"
)


def sums(*lengths: int) -> list[dict[str, str]]:
    """Row i: the prompt of `lengths[i]` characters and a response of one; 2 more than that in tokens."""
    return [{"prompt": "1" * length, "response": "2", "note": str(i)} for i, length in enumerate(lengths)]


def encoded(rows: list[dict[str, Any]], context_length: int | None = None, template: str | None = None, **options):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return encode_demonstrations(tokenizer, make_demonstrations(rows), (EOS,), context_length, **options)


def quiet(stage: str, done: int, of: int) -> None:
    pass


# ------------------------------------------------------------------ rows as ids


def test_a_demonstration_becomes_a_row_without_a_score_that_takes_part() -> None:
    out = encoded([{"prompt": "1+1=", "response": "2"}])
    assert out.rows == [
        Rollout(
            prompt_ids=(1, 10, 1, 11),  # the place of each character in CHARACTERS
            response_ids=(2, EOS),
            response_mask=(True, True),
            group=0,
            episode=0,
            demonstration=True,
            text="2",
            prompt_text="1+1=",
            prompt_index=0,
        )
    ]
    assert out.notes == ()
    batch = collate(out.rows)
    assert batch.trained.tolist() == [[False] * 4 + [True] * 2] and batch.rewards.isnan().all()


def test_b07_rows_longer_than_the_context_are_refused_by_number_or_dropped_with_a_note() -> None:
    """3 + 2 tokens fit in 5, 4 + 2 do not."""
    with pytest.raises(InputError, match=r"row 1 \(6\)"):
        encoded(sums(3, 4, 1), 5)
    out = encoded(sums(3, 4, 1), 5, too_long="drop")
    assert [d.prompt.index for d in out.demonstrations] == [r.prompt_index for r in out.rows] == [0, 2]
    assert [len(r.prompt_ids) for r in out.rows] == [3, 1]
    assert len(out.notes) == 1 and out.notes[0].startswith("1 row")
    assert encoded(sums(3, 4, 1), 6).notes == ()


def test_text_for_a_model_with_a_template_is_noted_unless_chat_is_decided() -> None:
    assert "chat=true" in encoded(sums(1), template=CHATML).notes[0]
    assert encoded(sums(1), template=CHATML, chat=False).notes == ()
    wrapped = encoded(sums(1), template=CHATML, chat=True)
    assert wrapped.notes == () and len(wrapped.rows[0].prompt_ids) == 6  # u=1</s>a= ("u" is unknown)


def test_a_template_that_rewrites_earlier_turns_is_noted_with_the_number_of_rows() -> None:
    """A question mark stands for reasoning, which this template writes in the last turn alone."""
    said = [("user", "1"), ("assistant", "?2"), ("user", "3"), ("assistant", "?4")]
    turns = [{"role": role, "content": content} for role, content in said]
    rows = [{"messages": turns}, {"messages": turns[:2]}]
    assert encoded(rows, template=CHATML).notes == ()
    rewrites = CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'].replace('?', ''))")
    out = encoded(rows, template=rewrites)
    assert len(out.notes) == 1 and out.notes[0].startswith("1 row")
    assert [sum(row.response_mask or ()) for row in out.rows] == [3, 3]  # "?4</s>" and "?2</s>"
    assert encoded(rows, template=rewrites, train_on="all").notes == ()


# ------------------------------------------------------------------ steps


def source(num_rows: int, per_step: int, seed: int = 0) -> DatasetRows:
    return DatasetRows(encoded(sums(*range(1, num_rows + 1))).rows, PromptOrder(num_rows, seed), per_step)


def steps(of: DatasetRows, count: int, position: int = 0) -> list[list[Rollout]]:
    out = []
    for _ in range(count):
        collected = of.collect(GRPO(), position, 0, quiet)
        position = collected.position
        out.append(collected.rollouts)
    return out


def test_each_row_of_a_step_is_its_own_group_and_episode_at_its_place_in_the_order() -> None:
    of = source(5, 3)
    out = of.collect(GRPO(), 3, 7, quiet)
    assert (out.position, out.num_refilled, len(out.rollouts)) == (6, 0, 3)
    for draw, row in zip((3, 4, 5), out.rollouts, strict=True):
        index = of.order.at(draw)
        assert (row.group, row.episode, row.draw, row.version) == (draw, draw, draw, 7)
        assert (row.prompt_index, len(row.prompt_ids)) == (index, index + 1)
        assert row.demonstration and row.reward is None and row.unit is None


def test_b11_the_end_of_a_pass_runs_on_into_the_next_and_no_row_is_lost() -> None:
    """5 rows, 2 a step: the third step has the last row of the first pass and the first of the second."""
    of = source(5, 2)
    out = steps(of, 5)
    assert [len(rows) for rows in out] == [2] * 5
    flat = [row.prompt_index for rows in out for row in rows]
    assert sorted(flat[:5]) == sorted(flat[5:]) == [0, 1, 2, 3, 4]
    assert [row.draw for rows in out for row in rows] == list(range(10))


def test_a_step_larger_than_the_data_has_rows_twice_as_groups_of_their_own() -> None:
    (rows,) = steps(source(2, 5), 1)
    assert sorted(Counter(row.prompt_index for row in rows).values()) == [2, 3]
    assert [row.group for row in rows] == [0, 1, 2, 3, 4]


def test_the_position_alone_says_where_a_run_goes_on_and_the_seed_which_order_it_has() -> None:
    whole = steps(source(7, 3), 6)
    assert steps(source(7, 3), 3, position=9) == whole[3:]
    assert steps(source(7, 3, seed=1), 6) != whole


# ------------------------------------------------------------------ the loss of held-out rows


def of_position(batch: Batch) -> Tensor:
    """log pi of token t is -t, so that every token has its own; what is not trained is 0, as from an engine."""
    places = torch.arange(batch.tokens.shape[1], dtype=torch.float32).expand(batch.tokens.shape)
    return torch.where(batch.trained, -places, 0.0)


def test_the_held_out_loss_is_the_mean_over_trained_tokens_and_no_cut_changes_it() -> None:
    """Rows of 1 and 3 prompt tokens, 2 trained ones each: places 1, 2 and 3, 4. The mean is 10 / 4 = 2.5."""
    rows = encoded(sums(1, 3)).rows
    for tokens_per_microbatch in (1, 5, 10, 1000):
        assert held_out_loss(of_position, rows, tokens_per_microbatch) == 2.5


def test_a_long_response_counts_by_its_tokens_and_gaps_do_not_count() -> None:
    """Trained are places 1, 2, 3 and 5 of the first row and 1 of the second: 12 / 5."""
    first = Rollout((0,), (1, 1, 1, 1, 1), 0, 0, (True, True, True, False, True), demonstration=True)
    second = Rollout((0,), (1,), 1, 1, demonstration=True)
    assert held_out_loss(of_position, [first, second], 100) == pytest.approx(12 / 5, rel=1e-12)


def test_rows_without_a_trained_token_have_no_loss_and_untrained_places_may_hold_anything() -> None:
    nothing = Rollout((0,), (1, 1), 0, 0, (False, False), demonstration=True)
    assert math.isnan(held_out_loss(of_position, [nothing], 100))
    row = Rollout((0,), (1, 1), 0, 0, (False, True), demonstration=True)
    assert held_out_loss(lambda b: torch.where(b.trained, of_position(b), math.nan), [row], 100) == 2.0


def test_micro_batches_stay_within_their_bound() -> None:
    seen: list[int] = []

    def counting(batch: Batch) -> Tensor:
        seen.append(batch.tokens.numel())
        return of_position(batch)

    held_out_loss(counting, encoded(sums(*range(1, 9))).rows, 20)  # rows of 3 to 10 tokens
    assert max(seen) <= 20 and len(seen) > 1
