"""Prompts as token ids, with a word tokenizer whose ids can be read off `VOCABULARY`."""

import re

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hotcold.chat import (
    encode_demonstration,
    encode_prompt,
    fit_demonstrations,
    fit_prompts,
    has_template,
    render_prompt,
)
from hotcold.errors import InputError
from hotcold.prompts import make_demonstrations

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


def test_b07_rows_of_a_data_set_are_refused_or_dropped_by_their_whole_length_and_never_cut() -> None:
    assert fit_demonstrations([3, 5, 6], 5, "drop") == [0, 1]
    with pytest.raises(InputError, match=r"1 of 3 rows have more than 5 tokens: row 12 \(6\)") as refused:
        fit_demonstrations([3, 5, 6], 5, rows=[10, 11, 12])
    assert "data.too_long=drop" in str(refused.value)
    with pytest.raises(InputError, match="every row is too long: 2 rows of 6 to 9 tokens, and at most 5"):
        fit_demonstrations([6, 9], 5, "drop")


# ------------------------------------------------------------------ demonstrations

# Letters, and the merges "ab" and two line breaks in one token, which may reach over the start of a response.
LETTERS = "abcsux \n▁"
MERGES = [("a", "b"), ("\n", "\n")]
SPECIAL = ["<s>", "</s>", "<|start|>", "<|end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m['role'][0] + '\n' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>a\n' }}{% endif %}"
)
REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"


def letters(template: str | None = None, bos: str | None = None, eos: str | None = "<|end|>", metaspace: bool = False):
    vocabulary = {token: i for i, token in enumerate([*LETTERS, *("".join(m) for m in MERGES)])}
    core = Tokenizer(models.BPE(vocabulary, MERGES))
    if metaspace:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, additional_special_tokens=SPECIAL
    )
    made.chat_template = template
    return made


def marked(tokenizer, row: dict, eos: tuple[str, ...] = ("<|end|>",), **options) -> str:
    """The tokens of a row with | between prompt and the rest, and each run of trained tokens in brackets."""
    (made,) = make_demonstrations([row])
    ids = tokenizer.convert_tokens_to_ids(list(eos))
    prompt, rest, mask = encode_demonstration(tokenizer, made, ids, **options)
    out, before = "".join(tokenizer.convert_ids_to_tokens(prompt)) + "|", False
    for token, is_trained in zip(tokenizer.convert_ids_to_tokens(rest), mask, strict=True):
        out += "[" * (is_trained and not before) + "]" * (before and not is_trained) + token
        before = is_trained
    return out + "]" * before


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(contents)
    given = [] if system is None else [{"role": "system", "content": system}]
    return given + [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def test_b01_a_text_is_answered_after_exactly_the_ids_that_sampling_would_use_and_an_eos_ends_it() -> None:
    (row,) = make_demonstrations([{"prompt": "two plus", "response": "two"}])
    for tokens in (tokenizer(adds_bos=True), tokenizer(adds_bos=True, ends=" </s>")):
        assert encode_demonstration(tokens, row, (2,)) == ((1, 6, 7), (6, 2), (True, True))
    assert encode_demonstration(tokenizer(), row, (2,)) == ((6, 7), (6, 2), (True, True))


def test_b02_no_token_reaches_over_the_start_of_a_response() -> None:
    """The text "xab" alone would be x, ab; but sampling goes on from x, a."""
    tokens = letters()
    (row,) = make_demonstrations([{"prompt": "xa", "response": "bab"}])
    prompt, response, _ = encode_demonstration(tokens, row, (tokens.eos_token_id,))
    assert prompt == encode_prompt(tokens, "xa")
    assert tokens.convert_ids_to_tokens(response) == ["b", "ab", "<|end|>"]


def test_b02_nor_over_the_end_of_a_templates_header() -> None:
    tokens = letters(CHATML)
    (row,) = make_demonstrations([{"messages": turns("x", "\nb")}])
    prompt, response, _ = encode_demonstration(tokens, row, (tokens.eos_token_id,))
    assert prompt == encode_prompt(tokens, turns("x"))
    assert tokens.convert_ids_to_tokens(response) == ["\n", "b", "<|end|>"]


def test_a_tokenizer_that_puts_a_space_before_every_text_puts_none_before_a_response() -> None:
    tokens = letters(metaspace=True)
    assert tokens.tokenize("b") == ["▁", "b"]
    assert marked(tokens, {"prompt": "x", "response": "b"}) == "▁x|[b<|end|>]"
    assert marked(tokens, {"prompt": "x", "response": " b"}) == "▁x|[▁b<|end|>]"


def test_b06_a_response_that_ends_with_any_eos_gets_no_second_one() -> None:
    tokens = letters(eos="</s>")
    both = ("</s>", "<|end|>")
    assert marked(tokens, {"prompt": "x", "response": "b"}, both) == "x|[b</s>]"
    assert marked(tokens, {"prompt": "x", "response": "b<|end|>"}, both) == "x|[b<|end|>]"
    assert marked(letters(eos=None), {"prompt": "x", "response": "b"}) == "x|[b<|end|>]"  # the model's
    assert marked(letters(eos=None), {"prompt": "x", "response": "b"}, ()) == "x|[b]"  # nobody names one


def test_every_assistant_turn_is_trained_with_its_end_token_and_nothing_else_is() -> None:
    row = {"messages": turns("x", "ab", "u", "c", system="s")}
    header = "<|start|>s\ns<|end|>\n<|start|>u\nx<|end|>\n<|start|>a\n"
    gap = "\n<|start|>u\nu<|end|>\n<|start|>a\n"
    assert marked(letters(CHATML), row) == f"{header}|[ab<|end|>]{gap}[c<|end|>]"


def test_the_ids_before_each_response_are_those_of_its_prompt() -> None:
    tokens, messages = letters(CHATML), turns("x", "ab", "u", "c")
    (row,) = make_demonstrations([{"messages": messages}])
    prompt, rest, mask = encode_demonstration(tokens, row, (tokens.eos_token_id,))
    assert prompt == encode_prompt(tokens, messages[:1])
    assert mask[-2:] == (True, True) and prompt + rest[:-2] == encode_prompt(tokens, messages[:3])


def test_what_comes_after_the_last_response_is_left_out() -> None:
    tokens = letters(CHATML)
    assert marked(tokens, {"messages": turns("x", "b", "u")}) == marked(tokens, {"messages": turns("x", "b")})


def test_chat_true_makes_messages_of_two_texts() -> None:
    tokens = letters(CHATML)
    as_messages = marked(tokens, {"messages": turns("x", "b")})
    assert marked(tokens, {"prompt": "x", "response": "b"}, chat=True) == as_messages
    assert marked(tokens, {"prompt": "x", "response": "b"}) == "x|[b<|end|>]"


def test_of_a_prompt_with_examples_only_the_response_in_its_own_column_is_trained() -> None:
    header = "<|start|>u\nx<|end|>\n<|start|>a\nb<|end|>\n<|start|>u\nu<|end|>\n<|start|>a\n"
    assert marked(letters(CHATML), {"prompt": turns("x", "b", "u"), "response": "c"}) == f"{header}|[c<|end|>]"


def test_an_assistant_turn_with_no_prompt_before_it_is_not_trained() -> None:
    said = [{"role": "assistant", "content": "c"}, *turns("x", "b")]
    header = "<|start|>a\nc<|end|>\n<|start|>u\nx<|end|>\n<|start|>a\n"
    assert marked(letters(CHATML), {"messages": said}) == f"{header}|[b<|end|>]"


def test_b01_a_conversation_has_one_bos_whether_the_template_writes_it_or_not() -> None:
    row, expected = {"messages": turns("x", "b")}, "<s><|start|>u\nx<|end|>\n<|start|>a\n|[b<|end|>]"
    assert marked(letters(CHATML, bos="<s>"), row) == expected
    assert marked(letters("{{ bos_token }}" + CHATML, bos="<s>"), row) == expected


def test_a_template_that_refuses_a_system_turn_is_quoted_with_the_row() -> None:
    tokens = letters(REFUSES_SYSTEM + CHATML)
    assert marked(tokens, {"messages": turns("x", "b")}).endswith("|[b<|end|>]")
    with pytest.raises(InputError, match=r"(?s)row 7.*no system turn.*system, user, assistant"):
        marked(tokens, {"messages": turns("x", "b", system="s")}, where="row 7")


def test_an_eos_ends_the_last_turn_of_a_template_that_writes_no_end() -> None:
    plain = "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + '\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
    tokens = letters(plain, eos="</s>")
    row = {"messages": turns("x", "b", "u", "c")}
    assert marked(tokens, row, ("</s>",)) == "u x\na |[b]\nu u\na [c</s>]"
    # an end token that does not stop sampling is trained, and so is the one that does
    ends = marked(letters(CHATML, eos="</s>"), row, ("</s>",))
    assert ends.endswith("|[b<|end|>]\n<|start|>u\nu<|end|>\n<|start|>a\n[c<|end|></s>]")


def test_of_a_template_that_drops_earlier_reasoning_only_the_turn_that_stays_as_it_was_said_is_trained() -> None:
    """ "s" stands for reasoning: it is written in the last turn alone."""
    drops = CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'].replace('s', ''))")
    header = "<|start|>u\nx<|end|>\n<|start|>a\nb<|end|>\n<|start|>u\nu<|end|>\n<|start|>a\n"
    assert marked(letters(drops), {"messages": turns("x", "sb", "u", "sc")}) == f"{header}|[sc<|end|>]"
    # "last" means the last response, also where the user had the last word
    assert marked(letters(drops), {"messages": turns("x", "sb", "u")}).endswith("|[sb<|end|>]")


def test_a_template_whose_answers_do_not_follow_its_own_header_is_refused() -> None:
    asks_otherwise = CHATML.replace("<|start|>a", "<|start|>a ")
    with pytest.raises(InputError, match=r"(?s)row 7.*reads otherwise.*as text"):
        marked(letters(asks_otherwise), {"messages": turns("x", "b")}, where="row 7")


def test_messages_without_a_template_are_refused_in_a_demonstration_too() -> None:
    with pytest.raises(InputError, match="template"):
        marked(letters(), {"messages": turns("x", "b")})
    with pytest.raises(InputError, match="chat=false"):
        marked(letters(CHATML), {"messages": turns("x", "b")}, chat=False)


def test_train_on_all_trains_every_token_after_the_first() -> None:
    tokens = letters(CHATML)
    text = "<|start|>|[u\nx<|end|>\n<|start|>a\nb<|end|>\n<|start|>u\nu<|end|>\n<|start|>a\nc<|end|>]"
    assert marked(tokens, {"messages": turns("x", "b", "u", "c")}, train_on="all") == text
    assert marked(tokens, {"prompt": "xx", "response": "b"}, train_on="all") == "x|[xb<|end|>]"
