"""Where transformers' interface differs between versions and model families: the only place that looks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor, nn


@lru_cache(maxsize=256)
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def accepts(module: nn.Module, name: str) -> bool:
    """Whether the module's forward names this argument (a `**kwargs` that swallows it does not count)."""
    return name in _parameters(type(module).forward)


def supports_logits_to_keep(module: nn.Module) -> bool:
    return accepts(module, "logits_to_keep")


def forward_kwargs(module: nn.Module, cache: Any) -> dict[str, Any]:
    """The arguments that make a forward read and extend `cache` (None: start one).

    transformers 5.24 renamed `past_key_values` (and the recurrent models' `cache_params`) to `cache`.
    """
    named = [name for name in ("cache", "past_key_values", "cache_params") if accepts(module, name)]
    return {"use_cache": True} if cache is None or not named else {"use_cache": True, named[0]: cache}


def cache_of(output: Any) -> Any:
    for name in ("cache", "past_key_values", "cache_params"):
        if name in output:
            return output[name]
    return None


def position_kwargs(module: nn.Module, position_ids: Tensor) -> dict[str, Tensor]:
    """Explicit positions, for the families that have them (others have none, or count the attention mask)."""
    return {"position_ids": position_ids} if accepts(module, "position_ids") else {}


ROW_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})


def has_row_cache(module: nn.Module) -> bool:
    """Whether the cache holds only keys and values, so that padding can be masked and rows repeated and selected.

    A recurrent state has read its padding, and its cache cannot select rows; kinds of layers that are not known to be
    plain attention count as recurrent.
    """
    layer_types = getattr(getattr(module, "config", None), "layer_types", None) or ()
    return set(layer_types) <= ROW_LAYERS and not getattr(module, "_is_stateful", False)


def context_length(config: Any) -> int | None:
    """The number of positions the model was built for, by the names that configs use for it."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
