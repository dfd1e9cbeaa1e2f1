"""Sharing prompts and chunking the head change no log-probability, no value and no gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf

from hotcold.algorithms.base import Objective
from hotcold.algorithms.kl import ExactKL
from hotcold.algorithms.losses import ClippedLoss, WithTerms
from hotcold.batch import Batch, Rollout, collate
from hotcold.engines.local import LocalEngine, Trainee
from hotcold.equations import sum_per_response
from hotcold.models import chunks
from hotcold.models.packing import NotPackable, packed_hidden
from hotcold.models.reading import PLAIN, Laying, Reading, choose_reading, plain_hidden, shared_hidden
from hotcold.models.reference import copy_as_reference

BASE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
GPT2 = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
BLOOM = {"vocab_size": 32, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
DEEPSEEK = {**BASE, "num_key_value_heads": 4, **MLA, **MOE, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
NEXT = {
    **BASE,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    **LINEAR,
    "layer_types": ["linear_attention", "full_attention"],
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**BASE),
    "qwen2, window 6": lambda: tf.Qwen2Config(**BASE, use_sliding_window=True, sliding_window=6, max_window_layers=0),
    "mistral, window 6": lambda: tf.MistralConfig(**BASE, sliding_window=6),
    "gemma3, window 6": lambda: tf.Gemma3TextConfig(**BASE, head_dim=8, sliding_window=6),
    "gemma2, soft-cap": lambda: tf.Gemma2Config(**BASE, head_dim=8, sliding_window=6),
    "gpt2": lambda: tf.GPT2Config(**GPT2, **IDS),
    "bloom": lambda: tf.BloomConfig(**BLOOM, **IDS),
    "granite, scaled": lambda: tf.GraniteConfig(**BASE, logits_scaling=3.0),
    "cohere, scaled": lambda: tf.CohereConfig(**BASE, logit_scale=0.25),
    "mixtral": lambda: tf.MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: tf.DeepseekV3Config(**DEEPSEEK),
    "qwen3_next": lambda: tf.Qwen3NextConfig(**NEXT),
}
LAYING = {  # the others are packed
    "gemma2, soft-cap": Laying.PROMPTS,  # a soft cap inside attention
    "bloom": Laying.PROMPTS,  # ALiBi
    "qwen3_next": Laying.ROWS,  # half of its layers are recurrent: a state has no rows to repeat
}


def make(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return tf.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def rows() -> Batch:
    """Three prompts of 2, 7 and 11 tokens, four responses each of 1 to 14 tokens, one with a gap; interleaved."""
    random = torch.Generator().manual_seed(3)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 32, (n,), generator=random).tolist())

    prompts, out = [ids(2), ids(7), ids(11)], []
    for episode in range(12):
        length = 1 + (5 * episode) % 14
        mask = tuple(i != 1 or episode % 4 > 0 for i in range(length))
        out.append(Rollout(prompts[episode % 3], ids(length), episode % 3, episode, mask, reward=episode % 2 * 1.0))
    return collate(out)


WITH_TERMS = Objective(
    WithTerms(ClippedLoss(), ExactKL(0.5), entropy_bonus=0.1), sum_per_response, frozenset({"logp", "entropy", "kl"})
)
OF_LOGP = Objective(ClippedLoss(), sum_per_response)  # read by `linear_logp`


def passed(
    module: Any, reading: Reading, batch: Batch, objective: Objective = WITH_TERMS
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """log pi of each token and the gradients of one backward pass."""
    other = make_like(module)
    engine = LocalEngine(
        {"policy": Trainee(module, torch.optim.SGD(module.parameters(), lr=0.0))},
        0.7,
        copy_as_reference(other, "", ""),
        reading={"policy": reading, "reference": reading},
    )
    batch = batch.replace(
        advantages=torch.where(batch.response_mask, 1.0 - 2.0 * batch.rewards[:, None], 0.0),
        extras={"beta": torch.full((len(batch),), 0.5)},
    )
    done = engine.backward(batch, sum_per_response(batch.trained), objective)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]
    engine.discard("policy")
    assert done.logp is not None
    return done.logp, gradients


def make_like(module: Any) -> Any:
    torch.manual_seed(9)
    return type(module)(module.config).eval()


def relative(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    gap = sum(float(((x - y).double() ** 2).sum()) for x, y in zip(a, b, strict=True)) ** 0.5
    return gap / sum(float((y.double() ** 2).sum()) for y in b) ** 0.5


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_and_gradients_are_those_of_plain_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5 tokens, so that the head is recomputed in the backward pass."""
    module = make(name)
    reading = choose_reading(module)
    assert reading.head is not None
    assert reading.laying is LAYING.get(name, Laying.PACKED)
    expected = [passed(module, PLAIN, rows(), objective) for objective in (WITH_TERMS, OF_LOGP)]
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 5 * 32)
    layings = [Laying.PROMPTS, Laying.PACKED] if reading.laying is Laying.PACKED else [reading.laying]
    for laying in layings:
        for objective, (logp, gradients) in zip((WITH_TERMS, OF_LOGP), expected, strict=True):
            found, of_chunks = passed(module, replace(reading, laying=laying), rows(), objective)
            assert float((found - logp).abs().max()) < 2e-5
            assert relative(of_chunks, gradients) < 1e-5


def test_each_distinct_prompt_is_computed_once() -> None:
    """Forward tokens are counted: 3 prompts at the longest width and 12 rows at the longest response, less its last."""
    module, batch = make("llama"), rows()
    seen: list[int] = []
    layer = module.base_model.layers[0]
    layer.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[0] * inputs[0].shape[1]))
    row, at = batch.trained.nonzero(as_tuple=True)
    with torch.no_grad():
        plain = plain_hidden(module.base_model, batch, row, at)
        shared = shared_hidden(module.base_model, batch, row, at)
    assert seen == [12 * batch.tokens.shape[1], 3 * 11, 12 * 13]
    assert float((plain - shared).abs().max()) < 1e-5


def test_packed_rows_have_no_padding() -> None:
    """Forward tokens are counted: 3 prompts of 2, 7 and 11 tokens and twelve responses, each less its last token."""
    module, batch = make("llama"), rows()
    seen: list[tuple[int, ...]] = []
    module.base_model.layers[0].register_forward_hook(lambda _, inputs, __: seen.append(tuple(inputs[0].shape[:2])))
    row, at = batch.trained.nonzero(as_tuple=True)
    with torch.no_grad():
        packed = packed_hidden(module.base_model, batch, row, at)
        plain = plain_hidden(module.base_model, batch, row, at)
    assert seen[0] == (1, 2 + 7 + 11 + sum((5 * episode) % 14 for episode in range(12)))
    assert float((plain - packed).abs().max()) < 1e-5


def test_what_a_row_says_reaches_no_other_packed_row() -> None:
    module, batch = make("mistral, window 6"), rows()
    row, at = batch.trained.nonzero(as_tuple=True)
    tokens = batch.tokens.clone()
    tokens[5, 12:16] = (tokens[5, 12:16] + 1) % 32  # in a response of 12 behind a prompt of 11
    with torch.no_grad():
        before = packed_hidden(module.base_model, batch, row, at)
        after = packed_hidden(module.base_model, batch.replace(tokens=tokens), row, at)
    assert torch.equal(before[row != 5], after[row != 5]) and not torch.equal(before[row == 5], after[row == 5])


def test_a_forward_that_fails_leaves_the_model_as_it_was() -> None:
    module, batch = make("gemma2, soft-cap"), rows()
    row, at = batch.trained.nonzero(as_tuple=True)
    before = module.config._attn_implementation
    with pytest.raises(NotPackable, match="softcap"):
        packed_hidden(module.base_model, batch, row, at)
    assert module.config._attn_implementation == before
    plain_hidden(module.base_model, batch, row, at)


def test_no_more_logits_than_a_chunk_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = make("llama"), rows()
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 8 * 32)
    sizes: list[int] = []
    module.get_output_embeddings().register_forward_hook(lambda _, __, out: sizes.append(out.shape[0]))
    passed(module, choose_reading(module), batch)
    assert max(sizes[-20:]) <= 8


def test_a_model_that_leaks_between_rows_or_padding_is_read_plainly() -> None:
    """A trunk that adds the batch mean of its input to every row: log-probs are near, one branch moves another."""
    module = make("llama")
    layer = module.base_model.layers[0]
    inner = layer.forward

    def leaking(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return inner(hidden + 1e-7 * hidden.mean((0, 1)), *args, **kwargs)

    layer.forward = leaking
    assert choose_reading(module).laying is Laying.ROWS


def test_a_head_with_something_unknown_after_it_is_not_taken_apart() -> None:
    module = make("llama")
    module.register_forward_hook(lambda _, __, out: setattr(out, "logits", out.logits * 1.5) or out)
    assert choose_reading(module) == PLAIN
