"""Checks of the numbers that filters and comparison methods are built from."""

from __future__ import annotations

import math
from typing import Any

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
