"""Necessary work against numbers worked out by hand.

The tiny llama of tests/tiny_model.py: 23 tokens, width 32, one layer, 4 heads of 8, keys and values of 2 heads, a
feed-forward of 48, head tied to the embedding.

    q 32 x 32, k and v 16 x 32 each, o 32 x 32                      1024 + 512 + 512 + 1024 = 3072
    gate, up, down 48 x 32 each                                     4608
    body 7680; head 23 x 32 = 736; attention: 4 heads x (8 + 8) = 64 per key
"""

from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from hotcold.bench.work import Row, Size, attention, common_start, forward, num_keys, size_of, tokens_of, training
from hotcold.models.adapters import LoraSettings, add_lora
from hotcold.models.critic import critic_from_policy
from hotcold.models.loading import load_model
from tests.tiny_model import tiny_llama, write_tiny

PROMPT = (1, 2, 3, 4, 5)
# Two responses of 3 and 4 tokens: 2 and 3 of them are read, 7 are predicted.
ROWS = [Row(PROMPT, 2, 3), Row(PROMPT, 3, 4)]


def test_the_tiny_llama_is_counted_by_its_weights() -> None:
    size = size_of(tiny_llama())
    assert (size.body, size.head, size.windows, size.width, size.notes) == (7680, 736, (None,), 64, ())
    assert (size.trained_body, size.trained_head) == (7680, 736)


def test_a_forward_of_known_rows_costs_what_a_hand_count_says() -> None:
    size, tokens = size_of(tiny_llama()), tokens_of(ROWS)
    # 5 + 2 + 3 = 10 tokens through the body, 7 through the head.
    # Keys: the prompt's queries see 1 + 2 + 3 + 4 + 5 = 15, the responses' 6 + 7 = 13 and 6 + 7 + 8 = 21: 49.
    assert (tokens.num, tokens.num_scored) == (10, 7)
    assert attention(size, tokens) == 2 * 64 * 49 == 6272
    assert forward(size, tokens) == 2 * 7680 * 10 + 2 * 736 * 7 + 6272 == 170176


def test_training_costs_three_forwards() -> None:
    size, tokens = size_of(tiny_llama()), tokens_of(ROWS)
    assert training(size, tokens) == 3 * 170176


def test_frozen_weights_cost_two_and_adapters_three() -> None:
    model = tiny_llama()
    add_lora(model, LoraSettings(2, 4.0, ("q_proj",)), seed=0)
    size, tokens = size_of(model), tokens_of(ROWS)
    # Two matrices of 2 x 32 beside q. Their 128 elements alone get a gradient of their own.
    assert (size.body, size.trained_body, size.trained_head) == (7680 + 128, 128, 0)
    weights = 2 * (2 * (7680 + 128) + 128) * 10 + 2 * 2 * 736 * 7
    assert training(size, tokens) == weights + 3 * 6272


def test_a_prompt_counts_once_for_its_group_and_twice_for_two_prompts() -> None:
    other = (1, 2, 9)
    assert tokens_of([*ROWS, *ROWS]).num == 5 + 2 * (2 + 3)
    assert tokens_of([*ROWS, Row(other, 1, 2)]).num == 5 + 2 + 3 + 3 + 1


def test_what_all_prompts_begin_with_counts_once_where_it_is_read_once() -> None:
    rows = [Row((1, 2, 3, 4), 1, 2), Row((1, 2, 7), 0, 1)]
    tokens = tokens_of(rows, reads_start_once=True)
    # (1, 2) at positions 0 and 1; then (3, 4), (7,), and one token of the first response.
    assert tokens.spans == ((0, 2), (2, 2), (2, 1), (4, 1))
    assert tokens_of(rows[:1], reads_start_once=True).num == tokens_of(rows[:1]).num == 5
    assert common_start([(1, 2), (1, 2, 3)]) == 1  # the last token of the shorter one is left to be read


def test_queries_see_what_is_before_them_and_no_more_than_a_window() -> None:
    for start in range(6):
        for end in range(start, 12):
            assert num_keys(start, end, None) == sum(p + 1 for p in range(start, end))
            for window in (1, 3, 5, 20):
                assert num_keys(start, end, window) == sum(min(p + 1, window) for p in range(start, end))


def test_a_sliding_window_is_read_from_the_config() -> None:
    config = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 11}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    size = size_of(MistralForCausalLM(MistralConfig(**config, **heads, sliding_window=6)))
    assert size.windows == (6, 6) and size.width == 2 * (8 + 8)


def test_of_the_experts_only_the_active_ones_count() -> None:
    shape = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 11}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(**shape, **heads, num_local_experts=4, num_experts_per_tok=1)
    model = MixtralForCausalLM(config)
    # Attention 4 x 16 x 16, the router 4 x 16, and of four experts with three matrices of 8 x 16 one.
    assert size_of(model).body == 4 * 256 + 64 + 3 * 128
    model.config.num_experts_per_tok = 0
    size = size_of(model)
    assert size.body == 4 * 256 + 64 + 4 * 3 * 128
    assert size.notes == ("all experts are counted, since the config does not say how many a token goes through",)


def test_position_embeddings_are_looked_up_and_transposed_layers_multiply() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=32))
    # qkv 8 x 24, out 8 x 8, feed-forward 8 x 32 and back; neither table of embeddings.
    size = size_of(model)
    assert (size.body, size.head, size.width) == (192 + 64 + 512, 88, 2 * (4 + 4))


def test_a_critic_is_a_trunk_with_one_output(tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = size_of(critic_from_policy(load_model(str(write_tiny(tmp_path / "model"))), "cpu"))
    assert size == Size(7680, 32, 7680, 32, (None,), 64)
