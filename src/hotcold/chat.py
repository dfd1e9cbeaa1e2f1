"""From a prompt or a demonstration to token ids: chat templates, and exactly one BOS where the tokenizer uses one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from hotcold.errors import InputError
from hotcold.prompts import Demonstration
from hotcold.user_file import within

RENDERING = 10.0  # seconds that a template may take for one conversation
Content = str | list[dict[str, Any]]
TrainOn = Literal["assistant", "all"]
Pieces = list[tuple[str, bool]]  # texts that follow each other, and whether each is a response


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


def encode_demonstration(
    tokenizer: Any,
    demonstration: Demonstration,
    eos_ids: Sequence[int],
    chat: bool | None = None,
    train_on: TrainOn = "assistant",
    where: str = "the row",
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]:
    """(ids before the first trained token, all others, which of these are trained).

    Trained are the responses, each with the token that ends it; where the last one would end without an EOS, the
    tokenizer's is put after it, because a model that never saw one does not stop. What a template writes around a
    response (its header, a line break after it) and the other turns are not trained. With `train_on="all"` every
    token after the first is. What comes after the last response is left out.
    """
    content, response = demonstration.prompt.content, demonstration.response
    if isinstance(response, str) and isinstance(content, str) and not chat:
        pieces, encode = [(content, False), (response, True)], _text_ids
    else:
        messages, turns = _as_messages(demonstration)
        pieces, encode = _turn_pieces(tokenizer, messages, turns, chat, where), _template_ids
    ids, mask = _join(tokenizer, pieces, encode, where)
    if ids[-1] not in eos_ids and (end := _end_id(tokenizer, eos_ids)) is not None:
        ids, mask = [*ids, end], [*mask, True]
    first = 1 if train_on == "all" else mask.index(True)
    if mask[0]:
        raise InputError(f"{where}: no tokens before the response, so nothing says how likely its first token is.")
    return tuple(ids[:first]), tuple(ids[first:]), tuple(train_on == "all" or trained for trained in mask[first:])


def render_prompt(tokenizer: Any, content: Content, chat: bool | None = None) -> str:
    """The prompt as the model sees it, special tokens visible."""
    ids = list(encode_prompt(tokenizer, content, chat))
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _as_messages(demonstration: Demonstration) -> tuple[list[dict[str, Any]], list[int]]:
    """The messages up to the last response, and which of them are responses."""
    content, response = demonstration.prompt.content, demonstration.response
    if isinstance(response, str):
        return [{"role": "user", "content": content}, {"role": "assistant", "content": response}], [1]
    return response[: demonstration.turns[-1] + 1], demonstration.turns


def _turn_pieces(
    tokenizer: Any, messages: list[dict[str, Any]], turns: Sequence[int], chat: bool | None, where: str
) -> Pieces:
    """The rendered messages, cut where each response begins (as in sampling: after the template's header) and ends.

    A template may write an earlier turn differently once another follows it, as those do that drop its reasoning.
    Such a turn is not what the model would have to say, and is not trained.
    """
    whole = _templated(tokenizer, messages, chat, where, asks=False)
    pieces: Pieces = []
    done = 0
    for turn in turns:
        head = _templated(tokenizer, messages[:turn], chat, where)
        told = _templated(tokenizer, messages[: turn + 1], chat, where, asks=False)
        is_last = turn == turns[-1]
        if is_last and not (told.startswith(head) and told[len(head) :].strip()):
            raise InputError(
                f"{where}: the chat template ends a prompt with {head[-40:]!r}, but an answered one reads otherwise,\n"
                "so what the model should say after it is unknown.\n"
                "Give prompt and response as text, with the model's markers in them where you want them."
            )
        if told.startswith(head) and whole.startswith(told):
            said = told[len(head) :].rstrip()  # a line break after the end token is the template's
            pieces += [(whole[done : len(head)], False), (said, True)]
            done = len(head) + len(said)
    return pieces


def _join(
    tokenizer: Any, pieces: Pieces, encode: Callable[[Any, str], list[int]], where: str
) -> tuple[list[int], list[bool]]:
    """The ids of all pieces, and which belong to a response.

    Ids never reach over the start or end of a piece. When the model answers it sees the ids of the prompt alone; one
    token made of the prompt's last letters and the response's first would be a state that sampling never reaches. So
    the ids so far stay, and a piece gets those that the tokenizer gives it in its place if that leaves the ids before
    it as they are, else those of its text alone.
    """
    text, ids, mask = "", list[int](), list[bool]()
    for piece, is_response in pieces:
        text += piece
        joint = encode(tokenizer, text)
        more = joint[len(ids) :] if joint[: len(ids)] == ids else _ids(tokenizer, piece, special=False)
        if is_response and not more:
            raise InputError(f"{where}: the tokenizer makes no token of the response {piece[:40]!r}.")
        ids += more
        mask += [is_response] * len(more)
    return ids, mask


def _end_id(tokenizer: Any, eos_ids: Sequence[int]) -> int | None:
    """The tokenizer's EOS; where it has none, or one that does not end a response, the first that does."""
    own = tokenizer.eos_token_id
    return own if own in eos_ids or not eos_ids else eos_ids[0]


def _templated(tokenizer: Any, content: Content, chat: bool | None, where: str, asks: bool = True) -> str:
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
        with within(RENDERING, f"{where}: the model's chat template does not end"):
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
    except InputError:
        raise
    except Exception as error:  # a template is a program, and may fail in every way
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
    words = "prompt", "leave room for a response", "No room would be left for a response."
    return _fit([len(ids) for ids in encoded], limit, policy, rows, *words)


def fit_demonstrations(
    lengths: Sequence[int],
    limit: int,
    policy: Literal["error", "drop"] = "error",
    rows: Sequence[int] | None = None,
) -> list[int]:
    """The positions of the rows of at most `limit` tokens, prompt and response. Longer ones as in `fit_prompts`."""
    return _fit(lengths, limit, policy, rows, "row", "fit the model's context", "A row is never cut.")


def _fit(
    lengths: Sequence[int], limit: int, policy: str, rows: Sequence[int] | None, thing: str, why: str, so: str
) -> list[int]:
    fitting = [position for position, length in enumerate(lengths) if length <= limit]
    long = [position for position, length in enumerate(lengths) if length > limit]
    if not long or (policy == "drop" and fitting):
        return fitting
    low, high = min(lengths[p] for p in long), max(lengths[p] for p in long)
    span = f"{low} to {high} tokens" if low < high else f"{low} tokens"
    if not fitting:
        raise InputError(
            f"every {thing} is too long: {len(long)} {thing}s of {span}, and at most {limit} {why}.\n"
            f"Shorten the {thing}s, or use a model with a longer context."
        )
    named = ", ".join(f"row {rows[p] if rows else p} ({lengths[p]})" for p in long[:5])
    named += ", ..." if len(long) > 5 else ""
    raise InputError(
        f"{len(long)} of {len(lengths)} {thing}s have more than {limit} tokens: {named}.\n"
        f"{so} Shorten them, or leave them out with data.too_long=drop."
    )
