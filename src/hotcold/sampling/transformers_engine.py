"""Sampling with the trainer's own module: what it samples from is what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hotcold.errors import InputError
from hotcold.models.products import for_few_rows
from hotcold.sampling.base import Request, Response, SamplingOptions
from hotcold.sampling.choice import choose
from hotcold.sampling.counter import uniforms
from hotcold.sampling.decoding import Budget, Decoded, Decoder

MANY = 2**31  # tokens: no limit


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

    def refresh(self, version: int) -> None:
        """Nothing to drop: every call computes its cache anew."""

    def sample(
        self,
        requests: Sequence[Request],
        options: SamplingOptions,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Response]:
        self._check(requests, options)
        with evaluating(self.module), torch.no_grad(), self.compute(), for_few_rows(self.module):
            return self._responses(self._decode(requests, options, progress), options) if requests else []

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

    def _decode(
        self, requests: Sequence[Request], options: SamplingOptions, progress: Callable[[int, int], None] | None
    ) -> Decoded:
        greedy = options.greedy or options.temperature == 0
        device = next(self.module.parameters()).device
        limits = [min(options.max_tokens, self._room(request)) for request in requests]
        random = None if greedy else self._random(requests, options, max(limits)).to(device)
        eos = torch.tensor(self._end_ids(options), dtype=torch.long, device=device)

        def choose_tokens(logits: Tensor, rows: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
            points = None if random is None else random[rows, done]
            temperature = 1.0 if greedy else options.temperature
            return choose(logits, points, temperature, options.top_k, options.top_p, options.min_p)

        def ends(ids: Tensor, rows: Tensor, done: Tensor) -> Tensor:
            return torch.isin(ids[rows, done - 1], eos) | self._at_stop_string(ids, rows, done, options.stop)

        return Decoder(
            self.module,
            [request.prompt_ids for request in requests],
            limits,
            Budget(self.max_rows, self.max_cache_tokens),
            choose_tokens,
            ends,
            self.pad_id,
            lambda finished: progress(finished, len(requests)) if progress is not None else None,
        ).run()

    def _room(self, request: Request) -> int:
        return MANY if self.context_length is None else self.context_length - len(request.prompt_ids)

    def _random(self, requests: Sequence[Request], options: SamplingOptions, num_tokens: int) -> Tensor:
        draws, samples = [r.draw for r in requests], [r.sample for r in requests]
        return torch.from_numpy(uniforms(options.seed, options.stream, draws, samples, num_tokens))

    def _end_ids(self, options: SamplingOptions) -> list[int]:
        """EOS ids, and stop strings that are one special token: their text never shows in a decoded response."""
        added = self.tokenizer.added_tokens_decoder.items()  # all_special_tokens has only those with a role
        special = {*self.tokenizer.all_special_tokens, *(token.content for _, token in added if token.special)}
        return [*self.eos_ids, *(self.tokenizer.convert_tokens_to_ids(s) for s in options.stop if s in special)]

    def _at_stop_string(self, ids: Tensor, rows: Tensor, done: Tensor, stop: tuple[str, ...]) -> Tensor:
        """[n] bool: the text of the last tokens contains a stop string. A token is at least one byte of text."""
        if not stop:
            return torch.zeros(len(rows), dtype=torch.bool, device=ids.device)
        window = max(len(s.encode()) for s in stop) + 4
        pairs = zip(ids[rows].tolist(), done.tolist(), strict=True)
        texts = self._texts([row[max(0, n - window) : n] for row, n in pairs])
        return torch.tensor([any(s in text for s in stop) for text in texts], device=ids.device)

    def _texts(self, ids: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _responses(self, decoded: Decoded, options: SamplingOptions) -> list[Response]:
        lengths = decoded.lengths.tolist()
        ids = [row[:n] for row, n in zip(decoded.ids.tolist(), lengths, strict=True)]
        logp = [row[:n] for row, n in zip(decoded.logp.tolist(), lengths, strict=True)]
        reasons = ["stop" if stopped else "length" for stopped in decoded.stopped.tolist()]
        texts = [cut_before(text, options.stop) for text in self._texts(ids)]
        return [Response(tuple(i), tuple(p), r, x) for i, p, r, x in zip(ids, logp, reasons, texts, strict=True)]


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
