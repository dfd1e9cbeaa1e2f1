"""From a prompt to token ids: chat templates, and exactly one BOS where the tokenizer uses one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from jinja2 import TemplateError

from hotcold.errors import InputError

Content = str | list[dict[str, Any]]


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def encode_prompt(
    tokenizer: Any, content: Content, chat: bool | None = None, where: str = "the prompt"
) -> tuple[int, ...]:
    """Token ids. Messages go through the chat template; text is raw, or one user message with `chat=True`.

    BOS: text gets what the tokenizer itself puts before a text (and nothing that it puts after one). A template's
    output is tokenised as it stands; if it does not begin with the tokenizer's BOS, one is put before it (not where
    BOS and EOS are one token and the tokenizer adds none). So there is never a second BOS. `where` names the prompt
    in errors.
    """
    if isinstance(content, str) and not chat:
        ids = _text_ids(tokenizer, content)
    else:
        ids = _template_ids(tokenizer, _templated(tokenizer, content, chat, where))
    if not ids:
        raise InputError(
            f"{where} has no tokens: it is empty and this tokenizer puts no BOS before it.\n"
            "Nothing would say how likely the first token of a response is. Give at least one character."
        )
    return tuple(ids)


def render_prompt(tokenizer: Any, content: Content, chat: bool | None = None) -> str:
    """The prompt as the model sees it, special tokens visible."""
    ids = list(encode_prompt(tokenizer, content, chat))
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _templated(tokenizer: Any, content: Content, chat: bool | None, where: str) -> str:
    if chat is False:
        raise InputError(f"{where} is messages, which only a chat template can render: leave chat=false out.")
    if not has_template(tokenizer):
        what = "chat=true needs" if isinstance(content, str) else f"{where} is messages, and they need"
        raise InputError(
            f"{what} a chat template, which this model's tokenizer has not.\n"
            "Give the prompts as text, or a model with a template (often called ...-Instruct or ...-chat)."
        )
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise InputError(
            f"{where}: the model's chat template refuses it ({type(error).__name__}: {error}).\n"
            f"Its roles are: {roles}. Many templates want user and assistant in turns and no system turn."
        ) from error


def _template_ids(tokenizer: Any, text: str) -> list[int]:
    ids = _ids(tokenizer, text, special=False)
    bos = tokenizer.bos_token_id
    if bos is None or bos in _leading_special(tokenizer, ids):
        return ids
    adds_bos = _text_ids(tokenizer, "a")[:1] == [bos]
    # A BOS that is also the EOS (GPT-2's way) marks the end of a document; a tokenizer that does not add it means none.
    return [bos, *ids] if adds_bos or bos != tokenizer.eos_token_id else ids


def _leading_special(tokenizer: Any, ids: list[int]) -> list[int]:
    """The special tokens that a template starts with; there may be several, and BOS need not be the first."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
    count = next((n for n, i in enumerate(ids) if i not in special), len(ids))
    return ids[:count]


def _text_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text after what the tokenizer puts before it; an EOS that it puts after it would end the text."""
    bare, full = _ids(tokenizer, text, special=False), _ids(tokenizer, text, special=True)
    if bare and bare[0] == tokenizer.bos_token_id:  # the text itself begins with BOS
        return bare
    for before in range(len(full) - len(bare) + 1):
        if full[before : before + len(bare)] == bare:
            return full[: before + len(bare)] if bare else _without_eos(tokenizer, full)
    return full


def _without_eos(tokenizer: Any, ids: list[int]) -> list[int]:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return [i for i in ids if i == bos or i != eos]


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def fit_prompts(
    encoded: Sequence[Sequence[int]],
    limit: int,
    policy: Literal["error", "drop"] = "error",
    rows: Sequence[int] | None = None,
) -> list[int]:
    """The positions of the prompts of at most `limit` tokens.

    A longer one is an error, or with `drop` left out; no prompt is ever cut. `rows` are their row numbers in the data.
    """
    fitting = [position for position, ids in enumerate(encoded) if len(ids) <= limit]
    long = [position for position, ids in enumerate(encoded) if len(ids) > limit]
    if not long or (policy == "drop" and fitting):
        return fitting
    lengths = [len(encoded[position]) for position in long]
    span = f"{min(lengths)} to {max(lengths)} tokens" if min(lengths) < max(lengths) else f"{lengths[0]} tokens"
    if not fitting:
        raise InputError(
            f"every prompt is too long: {len(long)} prompts of {span}, and at most {limit} leave room for a response.\n"
            "Shorten the prompts, or use a model with a longer context."
        )
    named = ", ".join(f"row {rows[p] if rows else p} ({len(encoded[p])})" for p in long[:5])
    named += ", ..." if len(long) > 5 else ""
    raise InputError(
        f"{len(long)} of {len(encoded)} prompts have more than {limit} tokens: {named}.\n"
        "No room would be left for a response. Shorten them, or leave them out with data.too_long=drop."
    )
