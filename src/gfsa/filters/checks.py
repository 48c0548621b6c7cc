"""Checks of the numbers and tensors that filters and comparison methods are built from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# limits far above any use: a filter from a file must not be able to allocate all memory
_MOST_HEADS = 65536
_MOST_POWERS = 1000
_MOST_COEFFICIENTS = 2**22
_SMALLEST, _LARGEST = 1e-30, 1e30


def check_positive_int(name: str, value: Any) -> None:
    """Refuse all but an integer from 1 to a limit that no model reaches."""
    _check_integer(name, value, least=1, most=_MOST_HEADS)


def check_order(name: str, value: Any, least: int, otherwise: str = "") -> None:
    """Refuse all but an integer that can be a power of A.

    Args:
        otherwise: added to the error: what else is allowed.
    """
    _check_integer(name, value, least, _MOST_POWERS, otherwise)


def _check_integer(name: str, value: Any, least: int, most: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{name} must be an integer of at least {least}{otherwise}, got {value!r:.40}"
        )
    if value > most:
        raise ValueError(
            f"{name} must be an integer of at most {most}{otherwise}, got {value!r:.40}"
        )


def check_size(num_heads: int, learned: int, powers: int) -> None:
    """Refuse a filter whose tables would take more memory than any model needs.

    Args:
        num_heads: heads with a row each.
        learned: rows of a table that each head has; 1 for a single polynomial.
        powers: coefficients in a row.
    """
    if num_heads * learned * powers > _MOST_COEFFICIENTS:
        raise ValueError(
            f"a filter of degree {powers - 1} for {num_heads} heads would have tables of "
            f"{num_heads * learned * powers} coefficients; at most {_MOST_COEFFICIENTS} are allowed"
        )


def check_multiplier(value: Any) -> None:
    if not isinstance(value, (int, float)) or not 0 < value <= _LARGEST:
        raise ValueError(f"lr_multiplier must be a positive number, got {value!r:.40}")
    if value < _SMALLEST:
        raise ValueError(
            f"lr_multiplier must be at least {_SMALLEST}, because float32 rounds smaller steps to "
            f"zero; got {value!r:.40}"
        )


def check_number(
    name: str, value: Any, least: float = -math.inf, above: float = -math.inf
) -> float:
    """``value`` as a finite float of at least ``least`` and above ``above``, or a ValueError."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least or value <= above:
        wanted = "a finite number"
        if least > -math.inf:
            wanted += f" of at least {least:g}"
        if above > -math.inf:
            wanted += f" above {above:g}"
        raise ValueError(f"{name} must be {wanted}, got {value!r:.40}")
    return float(value)


def check_shapes(num_heads: int, base: Any, basis: Any, theta: Any) -> None:
    """Refuse tensors of a subclass that do not fit together."""
    for name, given in {"base": base, "basis": basis, "theta": theta}.items():
        if not isinstance(given, Tensor) and (name == "base" or given is not None):
            raise TypeError(
                f"the {name} of a filter must be a tensor, got {type(given).__name__}; "
                "torch.tensor(...) makes one of a list"
            )
    powers = base.shape[-1] if base.dim() else 0
    rows = len(base) if base.dim() == 2 else 1
    if base.dim() not in (1, 2) or not powers or rows not in (1, num_heads):
        raise ValueError(
            "the base of a filter must be (degree+1,) or (heads, degree+1), lowest power first, "
            f"with {num_heads} heads here; got {tuple(base.shape)}"
        )
    if basis is not None and (basis.dim() != 2 or basis.shape[-1] != powers):
        raise ValueError(
            "the basis of a filter must be (L, degree+1), a polynomial for each of its L learned "
            f"numbers, with {powers} coefficients as its base has; got {tuple(basis.shape)}"
        )
    learned = 0 if basis is None else len(basis)
    fitting = ((learned,), (1, learned), (num_heads, learned))
    if theta is not None and theta.shape not in fitting:
        raise ValueError(
            f"the theta of a filter must be (L,) or (heads, L), here {(learned,)} or "
            f"{(num_heads, learned)}; got {tuple(theta.shape)}"
        )


def check_finite(base: Tensor, basis: Tensor, theta: Tensor) -> None:
    """Refuse numbers that are finite, but not in the precision that a filter computes in."""
    # each of them first: a sum of infinite numbers would not tell which of them was wrong
    for name, tensor in {"coefficients": base, "learned polynomials": basis, "θ": theta}.items():
        if not bool(tensor.float().isfinite().all()):
            largest = tensor.abs().max().item()
            raise ValueError(
                f"the initial {name} of a filter must be finite in float32, got {largest:g}"
            )
    # in float64, where nothing overflows and autocast does not act; of absolute values, because no
    # part of the sum may overflow in float32 either
    largest = (base.abs() + theta.abs() @ basis.abs()).max().item()
    if largest > torch.finfo(torch.float32).max:
        raise ValueError(
            "the initial coefficients of a filter, base + θ·basis, must be finite in float32, got "
            f"{largest:g}; choose smaller initial values, or a smaller K"
        )


def per_head(name: str, value: float | Sequence[float] | Tensor, num_heads: int) -> Tensor:
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be a number or one number for each of {num_heads} heads, got "
            f"{value!r:.80}: {error}"
        ) from error
    if numbers.dim() > 1 or numbers.numel() not in (1, num_heads):
        raise ValueError(
            f"{name} must be a number or one number for each of {num_heads} heads, "
            f"got shape {tuple(numbers.shape)}"
        )
    if not bool(numbers.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {value!r:.80}")
    return numbers.expand(num_heads).clone()


def as_number(values: Tensor) -> float | list[float]:
    numbers: list[float] = values.tolist()
    return numbers[0] if len(set(numbers)) == 1 else numbers
