"""Batched decoding with the trainer's own module: what it samples from is what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotcold.errors import InputError
from hotcold.models.hf import cache_of, forward_kwargs, has_row_cache, position_kwargs, supports_logits_to_keep
from hotcold.models.kv_cache import select_rows
from hotcold.sampling.base import Request, Response, SamplingOptions
from hotcold.sampling.choice import choose
from hotcold.sampling.counter import uniforms

COMPACT_BELOW = 0.8  # rows leave the batch once this share of it is still running: selecting copies the whole cache


@dataclass
class _Running:
    """The rows that are in the forward batch, in the order of `rows`."""

    rows: Tensor  # [n] index into the chunk
    cache: Any
    mask: Tensor  # [n, prompt width + tokens to come] attention: 0 on the padding left of the prompt
    logits: Tensor  # [n, V] of the next token
    width: int  # columns of the mask that have been read


@dataclass(frozen=True)
class _Decoded:
    ids: Tensor  # [B, tokens]
    logp: Tensor  # [B, tokens]
    lengths: Tensor  # [B]
    stopped: Tensor  # [B] bool


class TransformersSampler:
    """A `Sampler` that holds the trainer's module. It keeps nothing between calls, so new parameters count at once."""

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any,
        eos_ids: Sequence[int],
        context_length: int | None = None,
        pad_id: int = 0,
        max_rows: int = 512,
        max_cache_tokens: int = 32768,
        compute: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.context_length = context_length
        self.pad_id = pad_id  # only fills
        self.max_rows = max_rows
        self.max_cache_tokens = max_cache_tokens
        self.compute = compute  # the dtype of the arithmetic
        self.row_cache = has_row_cache(module)

    def refresh(self, version: int) -> None:
        """Nothing to drop: every call computes its cache anew."""

    def sample(
        self,
        requests: Sequence[Request],
        options: SamplingOptions,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Response]:
        self._check(requests, options)
        responses: dict[int, Response] = {}
        with evaluating(self.module), torch.no_grad(), self.compute():
            for chunk in self._chunks(requests, options.max_tokens):
                done = len(responses)

                def notify(finished: int, done: int = done) -> None:
                    if progress is not None:
                        progress(done + finished, len(requests))

                decoded = self._decode([requests[i] for i in chunk], options, notify)
                responses.update(zip(chunk, self._responses(decoded, options), strict=True))
        return [responses[i] for i in range(len(requests))]

    def _check(self, requests: Sequence[Request], options: SamplingOptions) -> None:
        if options.temperature < 0 or options.max_tokens < 1:
            raise InputError(
                f"temperature {options.temperature}, max_tokens {options.max_tokens}: the temperature must not be "
                "negative and there must be at least one token to sample."
            )
        for request in requests:
            num = len(request.prompt_ids)
            if num == 0:
                raise InputError(
                    "A prompt has no token, so nothing stands before the first sampled one. "
                    "Give a prompt that is not empty, or a tokenizer that adds a BOS token."
                )
            if self.context_length is not None and num >= self.context_length:
                raise InputError(
                    f"A prompt has {num} tokens (draw {request.draw}); the model's context is {self.context_length}, "
                    "which leaves no room for a response. Shorten or drop such prompts."
                )

    def _chunks(self, requests: Sequence[Request], max_tokens: int) -> Iterator[list[int]]:
        """Indices of the requests to decode together: prompts of similar length, equal prompts next to each other."""
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids))
        chunk: list[int] = []
        for i in order:
            width = len(requests[i].prompt_ids)
            full = len(chunk) >= self.max_rows or (len(chunk) + 1) * (width + max_tokens) > self.max_cache_tokens
            ragged = not self.row_cache and chunk and len(requests[chunk[0]].prompt_ids) != width
            if chunk and (full or ragged):
                yield chunk
                chunk = []
            chunk.append(i)
        if chunk:
            yield chunk

    def _decode(self, requests: list[Request], options: SamplingOptions, notify: Callable[[int], None]) -> _Decoded:
        greedy = options.greedy or options.temperature == 0
        device = next(self.module.parameters()).device
        prompt_lengths = torch.tensor([len(r.prompt_ids) for r in requests], device=device)
        limits = torch.full_like(prompt_lengths, options.max_tokens)
        if self.context_length is not None:
            limits = limits.minimum(self.context_length - prompt_lengths)
        num_steps = int(limits.max())
        random = self._random(requests, options, num_steps).to(device)
        num = len(requests)
        ids = torch.full((num, num_steps), self.pad_id, dtype=torch.long, device=device)
        logp = torch.zeros((num, num_steps), device=device)
        lengths, stopped = torch.zeros_like(prompt_lengths), torch.zeros(num, dtype=torch.bool, device=device)
        finished = stopped.clone()
        eos = torch.tensor(self._end_ids(options), dtype=torch.long, device=device)
        state = self._prefill(requests, num_steps)
        for t in range(num_steps):
            token, token_logp = choose(
                state.logits,
                None if greedy else random[state.rows, t],
                1.0 if greedy else options.temperature,
                options.top_k,
                options.top_p,
                options.min_p,
            )
            live = ~finished[state.rows]
            rows = state.rows[live]
            ids[rows, t], logp[rows, t] = token[live], token_logp[live]
            lengths[rows] = t + 1
            stopped[rows] = torch.isin(token[live], eos) | self._at_stop_string(ids[rows, : t + 1], options.stop)
            finished[rows] = stopped[rows] | (lengths[rows] >= limits[rows])
            running = ~finished[state.rows]
            num_running = int(running.sum())
            notify(num - num_running if len(state.rows) == num else int(finished.sum()))
            if num_running == 0:
                break
            if self.row_cache and num_running <= COMPACT_BELOW * len(state.rows):
                state, token = _select(state, running.nonzero().flatten()), token[running]
            last = prompt_lengths + limits - 1  # a finished row that is still in the batch stays inside the context
            state = self._advance(state, token, (prompt_lengths + t).minimum(last)[state.rows])
        return _Decoded(ids, logp, lengths, stopped)

    def _random(self, requests: list[Request], options: SamplingOptions, num_tokens: int) -> Tensor:
        draws, samples = [r.draw for r in requests], [r.sample for r in requests]
        return torch.from_numpy(uniforms(options.seed, options.stream, draws, samples, num_tokens))

    def _prefill(self, requests: list[Request], num_steps: int) -> _Running:
        """Each distinct prompt once; its keys and values are then repeated for its requests."""
        device = next(self.module.parameters()).device
        index: dict[tuple[int, ...], int] = {}
        for request in requests:
            index.setdefault(request.prompt_ids, len(index))
        prompts = list(index) if self.row_cache else [r.prompt_ids for r in requests]
        tokens, attention = left_padded(prompts, self.pad_id)
        tokens, attention = tokens.to(device), attention.to(device)
        extra: dict[str, Any] = {"logits_to_keep": 1} if supports_logits_to_keep(self.module) else {}
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        out = self.module(
            input_ids=tokens,
            **self._attention(attention),
            **position_kwargs(self.module, positions),
            **forward_kwargs(self.module, None),
            **extra,
        )
        room = attention.new_ones((len(prompts), num_steps))
        mask = torch.cat([attention, room], 1)
        state = _Running(
            torch.arange(len(prompts), device=device), cache_of(out), mask, out.logits[:, -1], tokens.shape[1]
        )
        if not self.row_cache:
            return state
        source = torch.tensor([index[r.prompt_ids] for r in requests], device=device)
        state = _select(state, source, room=num_steps)
        state.rows = torch.arange(len(requests), device=device)
        return state

    def _advance(self, state: _Running, token: Tensor, positions: Tensor) -> _Running:
        state.width += 1
        out = self.module(
            input_ids=token[:, None],
            **self._attention(state.mask[:, : state.width]),
            **position_kwargs(self.module, positions[:, None]),
            **forward_kwargs(self.module, state.cache),
        )
        state.logits = out.logits[:, -1]
        return state

    def _attention(self, mask: Tensor) -> dict[str, Tensor]:
        """Recurrent models get rows without padding, and no mask: with one they read their cache differently."""
        return {"attention_mask": mask} if self.row_cache else {}

    def _end_ids(self, options: SamplingOptions) -> list[int]:
        """EOS ids, and stop strings that are one special token: their text never shows in a decoded response."""
        added = self.tokenizer.added_tokens_decoder.items()  # all_special_tokens has only those with a role
        special = {*self.tokenizer.all_special_tokens, *(token.content for _, token in added if token.special)}
        return [*self.eos_ids, *(self.tokenizer.convert_tokens_to_ids(s) for s in options.stop if s in special)]

    def _at_stop_string(self, ids: Tensor, stop: tuple[str, ...]) -> Tensor:
        """[n] bool: the text of the last tokens contains a stop string. A token is at least one byte of text."""
        if not stop or not len(ids):
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        window = max(len(s.encode()) for s in stop) + 4
        texts = self._texts(ids[:, -window:].tolist())
        return torch.tensor([any(s in text for s in stop) for text in texts], device=ids.device)

    def _texts(self, ids: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _responses(self, decoded: _Decoded, options: SamplingOptions) -> list[Response]:
        lengths = decoded.lengths.tolist()
        ids = [row[:n] for row, n in zip(decoded.ids.tolist(), lengths, strict=True)]
        logp = [row[:n] for row, n in zip(decoded.logp.tolist(), lengths, strict=True)]
        reasons = ["stop" if stopped else "length" for stopped in decoded.stopped.tolist()]
        texts = [cut_before(text, options.stop) for text in self._texts(ids)]
        return [Response(tuple(i), tuple(p), r, x) for i, p, r, x in zip(ids, logp, reasons, texts, strict=True)]


def _select(state: _Running, index: Tensor, room: int = 0) -> _Running:
    select_rows(state.cache, index, room)
    return _Running(state.rows[index], state.cache, state.mask[index], state.logits[index], state.width)


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask [P, width]; the mask comes from the lengths, because a pad id may be a real token."""
    width = max(len(p) for p in prompts)
    tokens = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts])
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return tokens, attention


def cut_before(text: str, stop: Sequence[str]) -> str:
    """The text up to the first stop string in it."""
    found = [at for s in stop if (at := text.find(s)) >= 0]
    return text[: min(found)] if found else text


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode, in which gradient checkpointing does not disable the cache; each submodule's flag comes back after."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True
