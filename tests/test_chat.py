"""Prompts as token ids, with a word tokenizer whose ids can be read off `VOCABULARY`."""

import re

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hotcold.chat import encode_prompt, fit_prompts, has_template, render_prompt
from hotcold.errors import InputError

VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|user|>": 3, "<|assistant|>": 4, "[gMASK]": 5, "two": 6, "plus": 7}
TURNS = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
WITH_BOS, WITHOUT_BOS = "{{ bos_token }}" + TURNS + ASKS, TURNS + ASKS
MESSAGES = [{"role": "user", "content": "two plus two"}]


def tokenizer(template: str | None = None, adds_bos: bool = False, bos: str | None = "<s>", ends: str = ""):
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"<s> $A{ends}", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token=bos,
        eos_token="</s>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "[gMASK]"],
    )
    made.chat_template = template
    return made


def test_b01_a_template_with_bos_gives_one_bos_whether_the_tokenizer_adds_its_own_or_not() -> None:
    for adds_bos in (True, False):
        assert encode_prompt(tokenizer(WITH_BOS, adds_bos), MESSAGES) == (1, 3, 6, 7, 6, 4)


def test_b01_a_template_without_bos_gets_one_where_the_tokenizer_adds_one_to_every_text() -> None:
    assert encode_prompt(tokenizer(WITHOUT_BOS, adds_bos=True), MESSAGES) == (1, 3, 6, 7, 6, 4)


def test_b01_a_bos_that_neither_template_nor_tokenizer_writes_is_put_once_before_a_template() -> None:
    assert encode_prompt(tokenizer(WITHOUT_BOS, adds_bos=False), MESSAGES) == (1, 3, 6, 7, 6, 4)
    assert encode_prompt(tokenizer(), "two plus") == (6, 7)  # text is raw: what the tokenizer makes of it


def test_b01_text_gets_the_bos_of_the_tokenizer_once_even_where_the_text_spells_it() -> None:
    assert encode_prompt(tokenizer(adds_bos=True), "two plus") == (1, 6, 7)
    assert encode_prompt(tokenizer(adds_bos=True), "<s> two plus") == (1, 6, 7)


def test_b01_a_tokenizer_without_bos_gives_none() -> None:
    assert encode_prompt(tokenizer(WITHOUT_BOS, bos=None), MESSAGES) == (3, 6, 7, 6, 4)
    assert encode_prompt(tokenizer(bos=None), "two") == (6,)


def test_b01_two_distinct_special_tokens_at_the_start_are_both_kept() -> None:
    assert encode_prompt(tokenizer("[gMASK]{{ bos_token }}" + TURNS, adds_bos=True), MESSAGES) == (5, 1, 3, 6, 7, 6)
    assert encode_prompt(tokenizer("{{ bos_token }}[gMASK]" + TURNS, adds_bos=True), MESSAGES) == (1, 5, 3, 6, 7, 6)


def test_an_eos_that_the_tokenizer_puts_after_a_text_does_not_end_the_prompt() -> None:
    assert encode_prompt(tokenizer(adds_bos=True, ends=" </s>"), "two plus") == (1, 6, 7)


def test_chat_true_wraps_text_as_one_user_message() -> None:
    assert encode_prompt(tokenizer(WITH_BOS), "two plus two", chat=True) == (1, 3, 6, 7, 6, 4)
    assert encode_prompt(tokenizer(WITH_BOS), "two plus two") == (6, 7, 6)  # else it stays raw


def test_messages_need_a_template_and_it_cannot_be_switched_off() -> None:
    assert has_template(tokenizer(WITH_BOS)) and not has_template(tokenizer())
    with pytest.raises(InputError, match="template"):
        encode_prompt(tokenizer(), MESSAGES)
    with pytest.raises(InputError, match="template"):
        encode_prompt(tokenizer(), "two", chat=True)
    with pytest.raises(InputError, match="chat=false"):
        encode_prompt(tokenizer(WITH_BOS), MESSAGES, chat=False)


def test_what_a_template_refuses_is_an_input_error_with_its_own_words() -> None:
    refusing = tokenizer("{{ raise_exception('no system turn here') }}")
    with pytest.raises(InputError, match="no system turn here"):
        encode_prompt(refusing, [{"role": "system", "content": "two"}])


def test_b08_an_empty_prompt_is_allowed_where_a_bos_stands_before_the_response() -> None:
    assert encode_prompt(tokenizer(adds_bos=True), "") == (1,)
    with pytest.raises(InputError, match="BOS"):
        encode_prompt(tokenizer(), "")


def test_the_rendered_prompt_shows_the_special_tokens() -> None:
    assert re.sub(r"\s", "", render_prompt(tokenizer(WITH_BOS), MESSAGES, None)) == "<s><|user|>twoplustwo<|assistant|>"


LENGTHS = [[6] * n for n in (3, 5, 6, 50)]


def test_b07_drop_keeps_the_prompts_that_fit_and_error_names_row_and_lengths() -> None:
    assert fit_prompts(LENGTHS, 5, "drop") == [0, 1]  # 3 and 5 tokens; 5 is still within 5
    assert fit_prompts(LENGTHS, 50, "error") == [0, 1, 2, 3]
    with pytest.raises(InputError) as refused:
        fit_prompts(LENGTHS, 5, "error")
    assert {"2", "3", "5", "6", "50"} <= set(re.findall(r"\d+", str(refused.value)))  # rows, limit, lengths


def test_b07_prompts_that_are_all_too_long_are_an_error_with_their_lengths_under_both_policies() -> None:
    for policy in ("drop", "error"):
        with pytest.raises(InputError) as refused:
            fit_prompts(LENGTHS[2:], 5, policy)
        assert {"6", "50", "5"} <= set(re.findall(r"\d+", str(refused.value)))
