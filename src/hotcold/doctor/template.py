"""What the model is given and where its responses end: prompts, special tokens, the way there and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import TemplateError

from hotcold.assemble import Assembled
from hotcold.chat import render_prompt
from hotcold.doctor.report import Finding, note, ok, problem
from hotcold.intake import EncodedPrompts
from hotcold.models.loading import LoadedModel
from hotcold.training.dataset import EncodedDemonstrations

SHOWN = 3
MOST = 200  # prompts that are decoded
LONGEST = 400  # characters of a prompt that are shown
ANSWER = "hotcold"  # what an assistant says, to see what a template writes after it


def prompts_as_seen(ready: Assembled) -> Iterator[Finding]:
    tokenizer = ready.model.tokenizer
    if isinstance(ready.train, EncodedPrompts):
        for at in _telling([len(ids) for ids in ready.train.ids]):
            content, num = ready.train.prompts[at].content, len(ready.train.ids[at])
            text = render_prompt(tokenizer, content, ready.config.data.chat)
            yield ok(f"prompt, row {ready.train.prompts[at].index}", f"{num} tokens: {in_one_line(text)}")
    elif isinstance(ready.train, EncodedDemonstrations):
        rows = ready.train.rows
        for at in _telling([len(row.prompt_ids) + len(row.response_ids) for row in rows]):
            prompt, response = (decoded(tokenizer, ids) for ids in (rows[at].prompt_ids, rows[at].response_ids))
            text = f"{in_one_line(prompt)}, then {in_one_line(response)}"
            yield ok(f"row {at}", f"{len(rows[at].prompt_ids)} and {len(rows[at].response_ids)} tokens: {text}")


def _telling(lengths: Sequence[int]) -> list[int]:
    """The first, the longest and one in the middle; where these are one, the next."""
    longest = max(range(len(lengths)), key=lambda at: lengths[at])
    return list(dict.fromkeys([0, longest, len(lengths) // 2, *range(len(lengths))]))[:SHOWN]


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def in_one_line(text: str) -> str:
    """Quoted, line breaks as \\n; the middle of a long text is left out."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return json.dumps(text, ensure_ascii=False)


# ---- where a response ends


def ends(ready: Assembled) -> Iterator[Finding]:
    model, config = ready.model, ready.config
    if not model.eos_ids:
        found = note if config.stop else problem
        yield found(
            "EOS",
            f"the model names no EOS id, so only {'a stop string' if config.stop else 'max_tokens'} ends a response. "
            "Set eos_token_id in its generation_config.json, or stop=TEXT.",
        )
        return
    names = ", ".join(_named(model, i) for i in model.eos_ids)
    is_eos = " (an EOS too: masks come from lengths, so it does no harm)" if model.pad_id in model.eos_ids else ""
    yield ok("EOS", f"a response ends at {names}; the pad id {_named(model, model.pad_id)} only fills{is_eos}")


def _named(model: LoadedModel, token: int) -> str:
    return f"{model.tokenizer.convert_ids_to_tokens(token)} ({token})"


def end_of_turn(ready: Assembled) -> Iterator[Finding]:
    """The token with which the chat template ends an answer must end a response."""
    model, messages = ready.model, _messages(ready)
    if messages is None or not model.eos_ids:
        return
    try:
        text = model.tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": ANSWER}], tokenize=False
        )
    except (TemplateError, TypeError, ValueError, KeyError):
        return  # a template that takes no answer; the prompt itself was rendered
    after = text.rpartition(ANSWER)[2].strip()
    ids = model.tokenizer(after, add_special_tokens=False)["input_ids"]
    if not ids:
        yield note("template", "it writes nothing after an answer: only an EOS that the model has learnt ends it")
    elif ids[0] in model.eos_ids:
        yield ok("template", f"it ends an answer with {_named(model, ids[0])}, which ends a response")
    elif model.tokenizer.convert_ids_to_tokens(ids[0]) in ready.config.stop:
        yield ok("template", f"it ends an answer with {_named(model, ids[0])}, which is a stop string")
    else:
        yield problem(
            "template",
            f"it ends an answer with {_named(model, ids[0])}, and that is not among the EOS ids {list(model.eos_ids)}: "
            f"responses would run on behind it. Set stop={in_one_line(decoded(model.tokenizer, ids[:1]))}, or "
            "eos_token_id in generation_config.json.",
        )


def _messages(ready: Assembled) -> list[dict[str, Any]] | None:
    """The first prompt as messages, if it goes through the chat template."""
    if not isinstance(ready.train, EncodedPrompts):
        return None
    content = ready.train.prompts[0].content
    if isinstance(content, str):
        return [{"role": "user", "content": content}] if ready.config.data.chat else None
    return content


# ---- there and back


def round_trip(ready: Assembled) -> Iterator[Finding]:
    """Every prompt's ids, decoded, are its text; and no prompt begins with two BOS."""
    if not isinstance(ready.train, EncodedPrompts):
        return
    tokenizer, chat = ready.model.tokenizer, ready.config.data.chat
    texts = [_text(tokenizer, prompt.content, chat) for prompt in ready.train.prompts[:MOST]]
    rows = list(zip(ready.train.prompts, ready.train.ids, texts, strict=False))
    wrong = [(p.index, ids, text) for p, ids, text in rows if not _same(tokenizer, decoded(tokenizer, ids), text)]
    if wrong:
        yield _not_the_same(tokenizer, wrong, len(rows))
    else:
        yield ok("round trip", f"the ids of {len(rows)} prompts decode to their text")
    yield _bos(ready, [(p.index, ids) for p, ids, _ in rows])


def _text(tokenizer: Any, content: Any, chat: bool | None) -> str:
    if isinstance(content, str) and not chat:
        return content
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _same(tokenizer: Any, back: str, text: str) -> bool:
    """But for a BOS before it, and the blank that some tokenizers put before a text."""
    bos = tokenizer.bos_token or ""
    return back == text or back.removeprefix(bos).removeprefix(" ") == text.removeprefix(bos).removeprefix(" ")


def _not_the_same(tokenizer: Any, wrong: Sequence[tuple[int, Sequence[int], str]], num: int) -> Finding:
    row, ids, text = wrong[0]
    back = decoded(tokenizer, ids)
    at = next((i for i, (a, b) in enumerate(zip(back, text, strict=False)) if a != b), min(len(back), len(text)))
    shown = f"row {row}: {in_one_line(text[at : at + 20])} comes back as {in_one_line(back[at : at + 20])}"
    if tokenizer.unk_token_id is not None and any(tokenizer.unk_token_id in ids for _, ids, _ in wrong):
        return problem(
            "round trip",
            f"{len(wrong)} of {num} prompts hold what the tokenizer does not know ({shown}): the model never sees it. "
            "Clean the prompts, or take another model.",
        )
    return note("round trip", f"{len(wrong)} of {num} prompts do not decode to their text ({shown}): harmless if known")


def _bos(ready: Assembled, rows: Sequence[tuple[int, Sequence[int]]]) -> Finding:
    bos = ready.model.tokenizer.bos_token_id
    if bos is None:
        return ok("BOS", "the tokenizer has none, and no prompt begins with one")
    twice = [row for row, ids in rows if list(ids[:2]) == [bos, bos]]
    if twice:
        return problem(
            "BOS",
            f"{len(twice)} prompts (row {twice[0]} ...) begin with it twice: the text or the template writes one and "
            "the tokenizer adds another. Take it out of the text.",
        )
    num = sum(ids[0] == bos for _, ids in rows)
    return ok("BOS", f"{num} of {len(rows)} prompts begin with {_named(ready.model, bos)}, none with two")
