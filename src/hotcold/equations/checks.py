"""What every equation asks of its arguments, in one place: tensors, shapes, masks, ranges.

A mask is a bool tensor. An integer tensor of 0 and 1 (a tokenizer's attention mask) is taken as one; floats are not,
because a float "mask" is usually a weight.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def as_float(name: str, x: Any) -> Tensor:
    """The tensor in float32 or wider: float64 stays, bf16, fp16, integers and bools become float32."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; needed a torch tensor.")
    if x.is_complex():
        raise ValueError(f"{name} is complex ({x.dtype}); needed real numbers.")
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def as_mask(name: str, mask: Any) -> Tensor:
    if not isinstance(mask, Tensor):
        raise ValueError(f"{name} is a {type(mask).__name__}; needed a bool tensor.")
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point() or mask.is_complex() or bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"{name} has dtype {mask.dtype}; needed bool, or integers that are all 0 or 1.")
    return mask != 0


def as_ids(name: str, ids: Any) -> Tensor:
    """An int64 tensor of ids."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        given = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{name} is {given}; needed a tensor of integer ids.")
    return ids.long()


def check_shapes(shape: str, num_dims: int | None, **tensors: Tensor) -> None:
    """All the same shape, with `num_dims` axes (None: any number). `shape` is what the message calls it: [B, T]."""
    first = next(iter(tensors.values())).shape
    if all(x.shape == first for x in tensors.values()) and num_dims in (None, len(first)):
        return
    given = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
    hint = " One number per response becomes one per token with x[:, None].expand(B, T)." if num_dims == 2 else ""
    raise ValueError(f"Shapes given: {given}. Needed: all {shape}, equal; nothing is broadcast.{hint}")


def per_token(**tensors: Any) -> list[Tensor]:
    """The arguments as floats, all [B, T]."""
    floats = {name: as_float(name, x) for name, x in tensors.items()}
    check_shapes("[B, T]", 2, **floats)
    return list(floats.values())


def per_token_mask(mask: Any) -> Tensor:
    mask = as_mask("mask", mask)
    check_shapes("[B, T]", 2, mask=mask)
    return mask


def masked(mask: Any, num_dims: int | None = 2, **tensors: Any) -> list[Tensor]:
    """The mask, then each argument as float with 0 outside the mask, so that nothing there can enter.

    The selection comes before any arithmetic: 0 times NaN is NaN, in the value and in the gradient.
    """
    mask = as_mask("mask", mask)
    floats = {name: as_float(name, x) for name, x in tensors.items()}
    check_shapes("[B, T]" if num_dims == 2 else "one shape", num_dims, **floats, mask=mask)
    return [mask, *(torch.where(mask, x, 0.0) for x in floats.values())]


def per_row(rewards: Any, mask: Tensor) -> Tensor:
    """Rewards [B] as floats, one for each row of the mask [B, T]."""
    rewards = as_float("rewards", rewards)
    if rewards.dim() != 1 or mask.dim() != 2 or len(rewards) != len(mask):
        raise ValueError(
            f"rewards has shape {list(rewards.shape)}, the mask {list(mask.shape)}. "
            "Needed: rewards [B], one for each row of the mask [B, T]."
        )
    return rewards


def check_number(
    name: str, value: Any, low: float, high: float = math.inf, above: bool = False, finite: bool = True
) -> float:
    """`value` as a float in [low, high], or in (low, high] with `above`; NaN never passes."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if low <= number <= high and not (above and number == low) and not (finite and math.isinf(number)):
        return number
    needed = f"{'above' if above else 'at least'} {low:g}" if low > -math.inf else "not NaN"
    needed += f" and at most {high:g}" if high < math.inf else ""
    raise ValueError(f"{name} is {value!r}; needed a{' finite' if finite else ''} number {needed}.")


def check_whole(name: str, value: Any, low: int, high: float = math.inf) -> int:
    number = check_number(name, value, low, high)
    if number != int(number):
        raise ValueError(f"{name} is {value!r}; needed a whole number.")
    return int(number)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; needed one of {', '.join(choices)}.")


def finite_gradient(x: Tensor, *with_: Tensor) -> Tensor:
    """x, through which a gradient flows only where x and all of `with_` are finite; the value is unchanged.

    A token that a later torch.where removes sends back a gradient of 0; times a NaN in the local derivative it would
    be NaN, and spoil every parameter.
    """
    finite = x.isfinite()
    for other in with_:
        finite = finite & other.isfinite()
    return torch.where(finite, x, x.detach())


def exp(x: Tensor) -> Tensor:
    """exp(x) that saturates at the largest float instead of inf, in the value and in the gradient.

    A plain exp sends 0 * inf = NaN back from an overflowing entry that is masked away later, this one 0; an entry that
    is not masked away sends back a huge gradient of the right sign. NaN and inf keep their value and send nothing.
    """
    return _saturating(x, torch.exp)


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1 without cancellation near 0; saturates as `exp` above."""
    return _saturating(x, torch.expm1)


def _saturating(x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    largest = torch.finfo(x.dtype).max
    fits = x < math.log(largest) - 0.01  # False for NaN
    over = x.isfinite() & ~fits
    one = 1 + (x - x.detach())  # carries the gradient of exp(log(largest))
    inside = torch.where(fits, f(torch.where(fits, x, 0.0)), f(x.detach()))
    return torch.where(over, largest * one, inside)
