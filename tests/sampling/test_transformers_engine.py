import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM

from hotcold.errors import InputError
from hotcold.models.kv_cache import SlotLayer
from hotcold.sampling.base import Request, Response, SamplingOptions
from hotcold.sampling.transformers_engine import TransformersSampler

from .tiny import VOCAB, bigram, byte_tokenizer, chain, gpt2, letters, llama

EOS, END = 27, 28
PROMPTS = [(1, 2), (3, 4, 5, 6, 7, 8, 9, 10, 11), (5,), (26, 26, 7, 27, 8)]  # pad and EOS ids are real tokens too
REQUESTS = [Request(p, draw, sample) for draw, p in enumerate(PROMPTS) for sample in range(3)]


def sampler(module: Any, eos_ids: Sequence[int] = (), tokenizer: Any = None, **options: Any) -> TransformersSampler:
    return TransformersSampler(module, tokenizer or letters(), eos_ids, 64, **options)


def plain_logits(module: Any, ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        return module(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def plain_logp(module: Any, request: Request, response: Response, temperature: float = 1.0) -> Tensor:
    """The row alone, without padding or cache."""
    ids = [*request.prompt_ids, *response.ids]
    logp = torch.log_softmax(plain_logits(module, ids) / temperature, -1)
    start = len(request.prompt_ids)
    return torch.stack([logp[t - 1, ids[t]] for t in range(start, len(ids))])


def sliding() -> Any:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, initializer_range=0.3,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def mamba() -> Any:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2, initializer_range=0.3, expand=1
    )
    return MambaForCausalLM(config).eval()


@pytest.mark.parametrize("make", [llama, gpt2, sliding, mamba])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_reported_log_probs_are_those_of_the_row_alone(make: Any, temperature: float) -> None:  # A07, A23
    module = make()
    options = SamplingOptions(max_tokens=12, temperature=temperature)
    for request, response in zip(REQUESTS, sampler(module, [EOS]).sample(REQUESTS, options), strict=True):
        wanted = plain_logp(module, request, response, temperature)
        assert (torch.tensor(response.logp) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("amount", [0, 1, 7])
def test_a_row_does_not_depend_on_the_padding_left_of_it(make: Any, amount: int) -> None:  # A07
    engine, options = sampler(make()), SamplingOptions(max_tokens=7)
    row = Request((1, 2), 0)
    alone = engine.sample([row], options)[0]
    padded = engine.sample([row, Request((3,) * (2 + amount), 1)], options)[0]
    assert padded.ids == alone.ids
    assert padded.logp == pytest.approx(alone.logp, abs=1e-5)


@pytest.mark.parametrize("make", [llama, gpt2, mamba])
def test_responses_do_not_depend_on_the_batch_or_the_chunks(make: Any) -> None:
    module, options = make(), SamplingOptions(max_tokens=12, seed=3)
    together = sampler(module, [EOS, 3, 4]).sample(REQUESTS, options)
    for split in (
        [sampler(module, [EOS, 3, 4]).sample([r], options)[0] for r in REQUESTS],
        sampler(module, [EOS, 3, 4], max_rows=5).sample(REQUESTS, options),
        sampler(module, [EOS, 3, 4], max_cache_tokens=40).sample(REQUESTS, options),
        sampler(module, [EOS, 3, 4]).sample(REQUESTS[::-1], options)[::-1],
    ):
        assert [r.ids for r in split] == [r.ids for r in together]
        for one, other in zip(split, together, strict=True):
            assert one.logp == pytest.approx(other.logp, abs=1e-5)
    assert len({len(r.ids) for r in together}) > 1  # rows left the batch at different times


def test_another_seed_stream_draw_or_sample_gives_another_response() -> None:
    engine, options = sampler(llama()), SamplingOptions(max_tokens=12)
    request = Request((1, 2), 0)
    responses = [
        engine.sample([request], options),
        engine.sample([request], replace(options, seed=1)),
        engine.sample([request], replace(options, stream=1)),
        engine.sample([replace(request, draw=1)], options),
        engine.sample([replace(request, sample=1)], options),
    ]
    assert len({r[0].ids for r in responses}) == 5


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("how", [{"greedy": True, "temperature": 0.7}, {"temperature": 0.0}])
def test_greedy_is_the_argmax_loop_without_a_cache(make: Any, how: dict[str, Any]) -> None:
    module, options = make(), SamplingOptions(max_tokens=9, **how)
    for request, response in zip(REQUESTS[::3], sampler(module).sample(REQUESTS[::3], options), strict=True):
        ids = list(request.prompt_ids)
        for _ in range(9):
            ids.append(int(plain_logits(module, ids)[-1].argmax()))
        assert list(response.ids) == ids[len(request.prompt_ids) :]
        # log-probs of temperature 1, finite: A23 (c)
        assert response.logp == pytest.approx(plain_logp(module, request, response).tolist(), abs=1e-4)


def test_the_shares_of_a_known_bigram_model_are_met_exactly_by_the_choice() -> None:  # A01
    table = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.6, 0.3, 0.1]])
    logits = torch.full((4, 4), -1000.0)
    logits[:3, :3] = table.log()
    engine = sampler(bigram(logits))
    responses = engine.sample([Request((0, 1, 2), draw) for draw in range(200)], SamplingOptions(max_tokens=2))
    for response in responses:
        first, second = response.ids
        assert response.logp == pytest.approx([math.log(table[2, first]), math.log(table[first, second])], abs=1e-5)
    first, second = next(r.logp for r in responses if r.ids == (0, 1))
    assert (first, second) == pytest.approx((-0.510826, -0.693147), abs=1e-5)


def test_masks_come_from_lengths_though_the_pad_id_is_in_the_prompt() -> None:  # A08 (c)
    module = llama()
    masks: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, __, kw: masks.append(kw["attention_mask"]), with_kwargs=True)
    requests = [Request((7, 2, 8), 0), Request((2, 9, 2, 9, 2), 1)]
    sampler(module, pad_id=2).sample(requests, SamplingOptions(max_tokens=2))
    assert masks[0].tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]  # the longer prompt comes first
    assert masks[1].tolist() == [[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]


def test_with_pad_equal_to_eos_the_sampled_eos_is_kept_and_nothing_after_it() -> None:  # A08 (a), (b), (d)
    engine = sampler(chain((5, 9, EOS)), [EOS], pad_id=EOS)  # the model goes on emitting EOS
    short, long = engine.sample([Request((5,), 0), Request((7, 3), 1)], SamplingOptions(max_tokens=5, greedy=True))
    assert (short.ids, short.finish_reason) == ((9, EOS), "stop")
    assert len(short.logp) == 2
    assert (len(long.ids), long.finish_reason) == (5, "length")


def test_any_of_several_eos_ids_ends_a_response() -> None:  # B06
    module = chain((5, 6, 20, 2), (7, 21, 3), (8, 9, 10, 11, 12, 13))
    requests = [Request((5,), 0), Request((7,), 1), Request((8,), 2)]
    options = SamplingOptions(max_tokens=5)
    rows = sampler(module, [20, 22, 21]).sample(requests, options)
    assert [r.ids for r in rows] == [(6, 20), (21,), (9, 10, 11, 12, 13)]
    assert [r.finish_reason for r in rows] == ["stop", "stop", "length"]
    (row,) = sampler(module, [20]).sample(requests[1:2], options)
    assert (row.ids, row.finish_reason) == ((21, 3, 3, 3, 3), "length")


def test_eos_as_the_first_token_is_a_response_of_one_token_with_empty_text() -> None:  # B09
    (row,) = sampler(chain((3, EOS)), [EOS]).sample([Request((3,), 0)], SamplingOptions(max_tokens=4))
    assert (row.ids, row.text, row.finish_reason) == ((EOS,), "", "stop")
    assert row.logp == pytest.approx([0.0])


def test_eos_in_the_last_place_is_a_stop_and_not_a_truncation() -> None:
    (row,) = sampler(chain((3, 4, EOS)), [EOS]).sample([Request((3,), 0)], SamplingOptions(max_tokens=2))
    assert (row.ids, row.finish_reason) == ((4, EOS), "stop")


def test_a_stop_string_ends_the_row_keeps_its_ids_and_is_cut_from_the_text() -> None:
    engine = sampler(chain(tuple(range(26))))  # a b c d e ...
    requests = [Request((0,), 0), Request((9,), 1), Request((4, 5), 2)]
    rows = engine.sample(requests, SamplingOptions(max_tokens=6, stop=("de", "kl", "zz")))
    assert [r.text for r in rows] == ["bc", "", "ghijkl"[:4]]
    assert [r.ids for r in rows] == [(1, 2, 3, 4), (10, 11), (6, 7, 8, 9, 10, 11)]
    assert [r.finish_reason for r in rows] == ["stop"] * 3


def test_a_stop_string_does_not_match_across_the_prompt() -> None:
    (row,) = sampler(chain(tuple(range(26)))).sample([Request((3,), 0)], SamplingOptions(max_tokens=3, stop=("de",)))
    assert (row.text, row.finish_reason) == ("efg", "length")


def test_a_special_token_given_as_a_stop_string_stops() -> None:
    (row,) = sampler(chain((3, 4, END))).sample([Request((3,), 0)], SamplingOptions(max_tokens=5, stop=("<end>",)))
    assert (row.ids, row.text, row.finish_reason) == ((4, END), "e", "stop")


def test_a_special_token_that_was_only_added_stops_too() -> None:
    tokenizer = letters()
    tokenizer.add_tokens([AddedToken("<|eot|>", special=True)])  # as Llama 3 has it: not among all_special_tokens
    eot = tokenizer.convert_tokens_to_ids("<|eot|>")
    assert eot == VOCAB and "<|eot|>" not in tokenizer.all_special_tokens
    module = chain((3, 4, eot), size=VOCAB + 2)
    (row,) = sampler(module, tokenizer=tokenizer).sample(
        [Request((3,), 0)], SamplingOptions(max_tokens=5, stop=("<|eot|>",))
    )
    assert (row.ids, row.text, row.finish_reason) == ((4, eot), "e", "stop")


def emoji_model() -> tuple[Any, Any, tuple[int, ...]]:
    tokenizer = byte_tokenizer()
    face = tuple(tokenizer.encode("\U0001f604", add_special_tokens=False))  # bytes F0 9F 98 84
    assert len(face) == 4
    start = tokenizer.encode(":", add_special_tokens=False)[0]
    return chain((start, *face, 256), size=260), tokenizer, (start, *face)


def test_a_character_over_four_tokens_is_decoded_whole() -> None:  # B04 (a)
    module, tokenizer, (start, *face) = emoji_model()
    (row,) = sampler(module, [256], tokenizer).sample([Request((start,), 0)], SamplingOptions(max_tokens=9))
    assert (row.text, row.ids) == ("\U0001f604", (*face, 256))


def test_a_character_that_the_limit_cuts_gives_a_replacement_and_keeps_its_ids() -> None:  # B04 (b)
    module, tokenizer, (start, *face) = emoji_model()
    (row,) = sampler(module, [256], tokenizer).sample([Request((start,), 0)], SamplingOptions(max_tokens=2))
    assert row.ids == tuple(face[:2])
    assert "�" in row.text and row.text.encode("utf-8")


def test_a_stop_string_of_a_character_over_several_tokens_is_found() -> None:
    module, tokenizer, (start, *face) = emoji_model()
    options = SamplingOptions(max_tokens=9, stop=("\U0001f604",))
    (row,) = sampler(module, (), tokenizer).sample([Request((start,), 0)], options)
    assert (row.ids, row.text, row.finish_reason) == (tuple(face), "", "stop")


def test_the_context_limit_ends_a_row_by_length() -> None:
    engine = TransformersSampler(gpt2(), letters(), (), 64)
    rows = engine.sample([Request((1,) * 60, 0), Request((1,) * 10, 1)], SamplingOptions(max_tokens=40))
    assert [len(r.ids) for r in rows] == [4, 40]
    assert [r.finish_reason for r in rows] == ["length", "length"]


@pytest.mark.parametrize(("prompt", "said"), [((), "no token"), ((1,) * 64, "64 tokens"), ((1,) * 99, "99 tokens")])
def test_a_prompt_that_leaves_nothing_to_sample_is_refused(prompt: tuple[int, ...], said: str) -> None:  # B07, B08
    with pytest.raises(InputError, match=said):
        sampler(llama()).sample([Request((1,), 0), Request(prompt, 1)], SamplingOptions(max_tokens=4))


def test_no_request_gives_no_response() -> None:
    assert sampler(llama()).sample([], SamplingOptions()) == []


def test_gradient_checkpointing_and_train_mode_change_nothing_and_come_back() -> None:  # D12
    module, options = llama(), SamplingOptions(max_tokens=32, greedy=True)
    requests = [Request(p, i) for i, p in enumerate([(1, 2), (3,), (4, 5, 6), (7, 8)])]
    wanted = [r.ids for r in sampler(module).sample(requests, options)]
    module.gradient_checkpointing_enable({"use_reentrant": False})
    module.config.use_cache = False
    module.train()
    module.model.layers[1].eval()  # a part that its owner has frozen
    widths: list[int] = []
    module.register_forward_pre_hook(lambda _, __, kw: widths.append(kw["input_ids"].shape[1]), with_kwargs=True)
    assert [r.ids for r in sampler(module).sample(requests, options)] == wanted
    assert widths == [3] + [1] * 31  # one prefill, then single tokens: the cache is in use
    assert module.training and not module.model.layers[1].training
    assert module.is_gradient_checkpointing and module.config.use_cache is False
    module(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.parameters())


def test_new_parameters_count_at_once() -> None:  # D14
    module = bigram(torch.zeros(VOCAB, VOCAB))
    engine, request = sampler(module), [Request((1,), draw) for draw in range(8)]
    for version, token in enumerate((5, 9, 13)):
        logits = torch.zeros(VOCAB, VOCAB)
        logits[:, token] = 50.0
        with torch.no_grad():
            module.lm_head.weight.copy_(logits.T / VOCAB**0.5)
        engine.refresh(version)
        assert {r.ids for r in engine.sample(request, SamplingOptions(max_tokens=2))} == {(token, token)}


def test_each_distinct_prompt_is_prefilled_once_and_finished_rows_leave() -> None:
    module = chain((1, 2, EOS), (9,))
    shapes: list[tuple[int, ...]] = []
    module.register_forward_pre_hook(lambda _, __, kw: shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    requests = [Request((1,), 0, sample) for sample in range(6)] + [Request((9,), 1, sample) for sample in range(4)]
    rows = sampler(module, [EOS]).sample(requests, SamplingOptions(max_tokens=4))
    # two prompts at once; ten rows; the six that ended after two tokens have gone
    assert shapes == [(2, 1), (10, 1), (4, 1), (4, 1)]
    assert [len(r.ids) for r in rows] == [2] * 6 + [4] * 4


SYSTEM = tuple(1 + (5 * i) % 23 for i in range(20))  # what all of these prompts begin with
LONG = [(*SYSTEM, *rest) for rest in ((), (2, 3), (4,), (2, 3, 9, 9, 1, 7))]


@pytest.mark.parametrize("make", [llama, gpt2, sliding])
@pytest.mark.parametrize("prompts", [PROMPTS, LONG])
@pytest.mark.parametrize("budget", [(1, 10**6), (3, 10**6), (5, 90), (9, 10**6), (99, 200)])
def test_rows_that_come_and_go_are_what_they_are_alone(make: Any, prompts: Any, budget: tuple[int, int]) -> None:
    """Few slots and short responses: rows leave, others enter, move to other slots and to other columns."""
    module, ends = make(), [EOS, 3, 4, 5]
    requests = [Request(p, draw, sample) for draw, p in enumerate(prompts) for sample in range(6)]
    options = SamplingOptions(max_tokens=12)
    rows, tokens = budget
    together = sampler(module, ends, max_rows=rows, max_cache_tokens=tokens).sample(requests, options)
    for request, response in zip(requests, together, strict=True):
        (alone,) = sampler(module, ends).sample([request], options)
        assert (response.ids, response.finish_reason) == (alone.ids, alone.finish_reason)
        plain = plain_logp(module, request, response)
        torch.testing.assert_close(torch.tensor(response.logp), plain, atol=2e-5, rtol=0)
    assert len({len(r.ids) for r in together}) > 4  # rows of many lengths


def test_a_waiting_row_enters_as_soon_as_there_is_a_place() -> None:
    module = chain((1, 2, EOS), (9,))  # 9 stays 9
    shapes: list[tuple[int, ...]] = []
    module.register_forward_pre_hook(lambda _, __, kw: shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    requests = [Request((9,), 0), *(Request((1,), 1, sample) for sample in range(3))]
    rows = sampler(module, [EOS], max_rows=2).sample(requests, SamplingOptions(max_tokens=6))
    assert [len(r.ids) for r in rows] == [6, 2, 2, 2]
    # two of the group of three, which is more than fits, for two tokens; its third and 9; then 9 alone
    assert shapes == [(1, 1), (2, 1), (2, 1), (2, 1), (1, 1), (1, 1), (1, 1), (1, 1)]
    shapes.clear()
    requests = [Request((9,), 0), *(Request((draw, 1), draw) for draw in range(1, 4))]
    rows = sampler(module, [EOS], max_rows=2).sample(requests, SamplingOptions(max_tokens=6))
    assert [len(r.ids) for r in rows] == [6, 2, 2, 2]
    # 1 1 and 2 1, together for two tokens; 3 1 and 9; then 9 alone
    assert shapes == [(2, 2), (2, 1), (2, 2), (2, 1), (1, 1), (1, 1), (1, 1), (1, 1)]


def test_what_all_prompts_begin_with_is_read_once() -> None:
    module = llama()
    shapes: list[tuple[int, ...]] = []
    module.register_forward_pre_hook(lambda _, __, kw: shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    requests = [Request(p, draw, sample) for draw, p in enumerate(LONG[1:]) for sample in range(2)]
    sampler(module).sample(requests, SamplingOptions(max_tokens=3))
    assert shapes == [(1, 20), (3, 6), (6, 1), (6, 1)]


def test_a_window_that_counts_columns_reads_each_prompt_whole() -> None:
    module = sliding()
    shapes: list[tuple[int, ...]] = []
    module.register_forward_pre_hook(lambda _, __, kw: shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    sampler(module).sample([Request(p, n) for n, p in enumerate(LONG)], SamplingOptions(max_tokens=2))
    assert shapes == [(4, 26), (4, 1)]


def test_the_cache_of_slots_is_the_one_in_use() -> None:
    layers: list[type] = []
    module = llama()
    module.register_forward_pre_hook(
        lambda _, __, kw: layers.extend(type(layer) for layer in kw["cache"].layers) if "cache" in kw else None,
        with_kwargs=True,
    )
    sampler(module).sample([Request((1,), 0)], SamplingOptions(max_tokens=3))
    assert layers == [SlotLayer] * 4  # two layers, two steps after the prefill


def test_progress_goes_up_to_all_responses() -> None:
    heard: list[tuple[int, int]] = []
    sampler(llama(), [EOS, 3, 4, 5, 6], max_rows=5).sample(
        REQUESTS, SamplingOptions(max_tokens=12), lambda done, of: heard.append((done, of))
    )
    done = [d for d, _ in heard]
    assert done == sorted(done) and heard[-1] == (12, 12) and len(set(done)) > 3
