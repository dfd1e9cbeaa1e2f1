"""Prompts as token ids: the chat template, exactly one BOS, and what fits the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotcold.errors import InputError

Content = str | list[dict[str, Any]]


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def encode_prompt(tokenizer: Any, content: Content, chat: bool | None = None) -> tuple[int, ...]:
    """Token ids of a prompt: messages through the chat template, text as it is (`chat=True`: as one user message).

    A BOS stands at position 0, once, where the template writes it or the tokenizer adds it to plain text; a tokenizer
    that names a BOS and uses it in neither place (SmolLM2's is `<|im_start|>`) gets none.
    """
    if isinstance(content, str) and not chat:
        ids = list(tokenizer(content)["input_ids"])
    else:
        ids = _encode_messages(tokenizer, _as_messages(content, chat))
    bos = getattr(tokenizer, "bos_token_id", None)
    while bos is not None and ids[:2] == [bos, bos]:  # BOS was in the text and was added too
        del ids[0]
    if not ids:
        raise InputError(
            f"the prompt {content!r} gives no token, and this tokenizer adds no BOS: "
            "nothing would stand before the first token of the response. Give it some text."
        )
    return tuple(ids)


def render_prompt(tokenizer: Any, content: Content, chat: bool | None = None) -> str:
    """What the model reads, with its special tokens visible."""
    ids = encode_prompt(tokenizer, content, chat)
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def fit_prompts(ids: Sequence[Sequence[int]], limit: int, policy: str) -> list[int]:
    """Indices of the prompts of at most `limit` tokens. A longer one is an error, or left out (`drop`); never cut."""
    if policy not in ("error", "drop"):
        raise InputError(f"data.too_long={policy}: it is error or drop.")
    fitting = [i for i, row in enumerate(ids) if len(row) <= limit]
    too_long = [i for i, row in enumerate(ids) if len(row) > limit]
    if too_long and not fitting:
        shortest, longest = min(map(len, ids)), max(map(len, ids))
        raise InputError(
            f"all {len(ids)} prompts are too long: they have {shortest} to {longest} tokens, and at most {limit} fit "
            "(one must remain for the response). Use shorter prompts or a model with a longer context."
        )
    if too_long and policy == "error":
        named = ", ".join(f"row {i} has {len(ids[i])} tokens" for i in too_long[:3])
        more = f" and {len(too_long) - 3} more" if len(too_long) > 3 else ""
        raise InputError(
            f"prompts too long: {named}{more} (rows counted from 0), and at most {limit} fit. "
            "Shorten them, or leave them out with data.too_long=drop."
        )
    return fitting


def _as_messages(content: Content, chat: bool | None) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if chat is False:
        raise InputError(
            "chat=false, but the prompts are messages: without the chat template there is no one way to write them as "
            "text. Leave chat out, or give the prompts as text."
        )
    return content


def _encode_messages(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    if not has_template(tokenizer):
        raise InputError(
            "the prompts are messages, but the model's tokenizer has no chat template. "
            "Use a chat (instruct) model, or give the prompts as text."
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise InputError(f"the model's chat template refuses messages with the roles {roles}: {error}") from error
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and ids[:1] != [bos] and _adds_bos(tokenizer, bos):
        ids = [bos, *ids]
    return ids


def _adds_bos(tokenizer: Any, bos: int) -> bool:
    return list(tokenizer("a")["input_ids"])[:1] == [bos]
