"""Necessary work: floating-point operations that a step cannot do without.

A product of a weight matrix with one token costs 2 per element (a multiplication and an addition), so a forward of one
token costs 2 x the parameters that multiply it. A token's query that sees k keys costs 2 k heads (d_key + d_value) in
each attention layer: its products with k keys, then the sum over k values. The backward pass costs a forward for the
gradient of the inputs, and another one for the gradient of the weights that are trained.

Each distinct prompt counts once in a pass; in sampling what all prompts begin with counts once for all. Each response
token but the last, after which nothing is read, counts once; the head at sampled or trained positions only. Norms,
activations, softmax and the optimiser's step count nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hotcold.models.critic import Critic

ATTENTION = frozenset({"full_attention", "attention"})
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
EXPERT = re.compile(r"(^|\.)experts\.")
NUMBER_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


@dataclass(frozen=True)
class Size:
    """Parameters of one model that multiply a token."""

    body: float
    head: float
    trained_body: float = 0.0  # of them those that get a gradient
    trained_head: float = 0.0
    windows: tuple[int | None, ...] = ()  # of each attention layer: most keys that a query sees; None: all before it
    width: int = 0  # of an attention layer: heads x (elements of a key + elements of a value)
    notes: tuple[str, ...] = ()  # what could not be counted as it is


@dataclass(frozen=True)
class Row:
    """One response after its prompt."""

    prompt: tuple[int, ...]
    num_tokens: int  # that stand before the last one whose distribution is needed
    num_scored: int  # whose distribution is needed


@dataclass(frozen=True)
class Tokens:
    """What one pass through a model needs."""

    spans: tuple[tuple[int, int], ...]  # (position of the first token, how many): prompts, and responses behind them
    num_scored: int

    @property
    def num(self) -> int:
        return sum(length for _, length in self.spans)


def tokens_of(rows: Iterable[Row], reads_start_once: bool = False) -> Tokens:
    """Each distinct prompt once. `reads_start_once`: what all of them begin with once for all, too."""
    rows = list(rows)
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    start = common_start(prompts) if reads_start_once and len(prompts) > 1 else 0
    spans = [(0, start), *((start, len(prompt) - start) for prompt in prompts)]
    spans += [(len(row.prompt), row.num_tokens) for row in rows]
    return Tokens(tuple(span for span in spans if span[1]), sum(row.num_scored for row in rows))


def common_start(prompts: Sequence[tuple[int, ...]]) -> int:
    """Tokens with which all prompts begin; the last of a prompt is left to be read."""
    first, last, most = min(prompts), max(prompts), min(map(len, prompts)) - 1
    return next((n for n in range(most) if first[n] != last[n]), most)


def forward(size: Size, tokens: Tokens) -> float:
    return 2 * size.body * tokens.num + 2 * size.head * tokens.num_scored + attention(size, tokens)


def training(size: Size, tokens: Tokens) -> float:
    """Forward and backward: three forwards of what is trained, two of frozen weights that a gradient goes through."""
    weights = 2 * size.trained_body * tokens.num + 2 * size.trained_head * tokens.num_scored
    return 2 * forward(size, tokens) + weights + attention(size, tokens)


def attention(size: Size, tokens: Tokens) -> float:
    """The products with keys and values, in all layers."""
    keys = sum(num_keys(start, start + n, window) for window in size.windows for start, n in tokens.spans)
    return 2.0 * size.width * keys


def num_keys(start: int, end: int, window: int | None) -> int:
    """Keys that the queries at positions start, ..., end - 1 see: position p sees p + 1, at most `window`."""
    full = end if window is None else min(max(window, start), end)  # below it a query sees everything before it
    growing = (full - start) * (start + full + 1) // 2
    return growing + (end - full) * (window or 0)


def size_of(module: Any) -> Size:
    """Counted from the module's own parameters: all that have two dimensions or more, but embeddings that are looked
    up."""
    head_module = module.head if isinstance(module, Critic) else _output(module)
    head = {} if head_module is None else {id(p): p for p in head_module.parameters() if p.ndim > 1}
    looked_up = {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    config = _config(module)
    share, notes = _active_share(config)
    body = trained = 0.0
    has_experts = False
    for name, p in module.named_parameters():
        if p.ndim < 2 or name.endswith("bias") or id(p) in head or id(p) in looked_up:
            continue
        is_expert = EXPERT.search(name) is not None
        has_experts = has_experts or is_expert
        elements = p.numel() * (share if is_expert else 1.0)
        body += elements
        trained += elements if p.requires_grad else 0.0
    windows, width, missing = _attention_of(config)
    return Size(
        body=body,
        head=sum(p.numel() for p in head.values()),
        trained_body=trained,
        trained_head=sum(p.numel() for p in head.values() if p.requires_grad),
        windows=windows,
        width=width,
        notes=(*(notes if has_experts else ()), *missing),
    )


def _output(module: Any) -> Any:
    return module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None


def _config(module: Any) -> Any:
    config: Any = getattr(module.trunk if isinstance(module, Critic) else module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _active_share(config: Any) -> tuple[float, tuple[str, ...]]:
    """Of a layer's experts, how many a token goes through."""
    of = next((n for key in NUMBER_OF_EXPERTS if isinstance(n := getattr(config, key, None), int)), None)
    active = next((n for key in ACTIVE_EXPERTS if isinstance(n := getattr(config, key, None), int)), None)
    if not of or not active:
        return 1.0, ("all experts are counted, since the config does not say how many a token goes through",)
    return active / of, ()


def _attention_of(config: Any) -> tuple[tuple[int | None, ...], int, tuple[str, ...]]:
    """Windows by layer, width, and what is not counted."""
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    if not isinstance(layers, int) or not isinstance(heads, int):
        return (), 0, ("attention's own products are not counted: the config does not name layers and heads",)
    kinds = getattr(config, "layer_types", None)
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if not kinds:
        return (sliding,) * layers, _width(config, heads), ()
    windows = tuple(
        None if kind in ATTENTION else getattr(config, WINDOWS[kind], None)
        for kind in kinds
        if kind in ATTENTION or kind in WINDOWS
    )
    others = len(kinds) - len(windows)
    note = f"{others} layers without softmax attention are counted with their weights alone"
    return windows, _width(config, heads), (note,) if others else ()


def _width(config: Any, heads: int) -> int:
    usual = getattr(config, "head_dim", None) or config.hidden_size // heads
    plain, turned = (getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    key = plain + turned if plain and turned else usual  # latent attention (DeepSeek)
    return heads * (key + (getattr(config, "v_head_dim", None) or usual))
