"""What a filter is, as plain data: its kind, the arguments that build it, and their limits.

θ alone does not tell which polynomial it belongs to. Files therefore keep a description of each
filter; the checkpoint of a whole model has it beside each θ as the bytes of a JSON text. A file may
have any content, so every number that builds a filter is checked here.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gfsa.operators.call import check_dropout_place

if TYPE_CHECKING:
    from gfsa.filters.base import GraphFilter

EXTRA = "_extra_state"
"""The key of a filter's state under which its description is."""
KINDS: dict[str, type[GraphFilter]] = {}
"""The filters that can be built from their description: the classes of ``gfsa.filters``."""
MOST_DEGREE = 16
"""Degree of a rebuilt filter, unless the caller allows more: every power is an attention pass."""

# limits far above any use: a file must not be able to allocate all memory
_MOST_DESCRIPTION = 2**22
_MOST_HEADS = 65536
_MOST_POWERS = 1000
_MOST_COEFFICIENTS = 2**22
_SMALLEST, _LARGEST = 1e-30, 1e30
# how far decay·x + (1 - decay)·x drifts from a byte x in float32, with decay up to 0.9999 (0.016)
_ROUNDING = 0.05


def kind_of(cls: type) -> str:
    """The name of a filter class in files; a user's class never has the name of one of ours."""
    if is_ours(cls) or cls.__name__ not in KINDS:
        # without its module: a script and what imports it read the same checkpoints
        return cls.__name__
    return f"{cls.__module__}.{cls.__qualname__}"


def is_ours(cls: type) -> bool:
    """Whether a filter class can be built from its description."""
    return cls.__module__.startswith("gfsa.filters.")


def kind_named(name: Any) -> type[GraphFilter]:
    """The filter class that a configuration or a description names."""
    if name not in KINDS:
        raise ValueError(f"filter must be one of {', '.join(sorted(KINDS))}; got {name!r:.80}")
    return KINDS[name]


_COMPARED = ("kind", "arguments", "exclusive", "depth")


def is_same_filter(saved: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether two descriptions are of one filter; the place of its dropout is not compared."""
    return all(saved.get(key) == own.get(key) for key in _COMPARED)


def shown(description: Mapping[str, Any]) -> str:
    """What :func:`is_same_filter` compares, for an error."""
    kind, arguments, *terms = ((key, description.get(key)) for key in _COMPARED)
    named = "".join(f", {term} {value!r:.80}" for term, value in terms if value)
    return f"{kind[1]!s:.80} {arguments[1]!r:.200}{named}"


def write_description(description: Mapping[str, Any]) -> Tensor:
    """A description as the bytes that a checkpoint keeps."""
    return torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)


def read_description(state: Tensor) -> dict[str, Any]:
    """A filter's description from the bytes that a checkpoint keeps."""
    if state.numel() > _MOST_DESCRIPTION:
        raise ValueError(
            f"the description of a filter has {state.numel()} bytes; more than {_MOST_DESCRIPTION} "
            "are refused, because a filter needs far fewer. Take another copy of the checkpoint"
        )
    # a checkpoint that was averaged with others, or cast, has the same bytes as floats
    if state.is_floating_point() and bool(((state - state.round()).abs() < _ROUNDING).all()):
        state = state.round().to(torch.int64)
    try:
        description = json.loads(bytes(state.tolist()))
        if not isinstance(description, dict):
            raise TypeError(f"expected a JSON object, got {description!r:.80}")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the description of a filter is damaged: {error}. It is the bytes of a text: where "
            "checkpoints are averaged, take keys that end in _extra_state from one of them"
        ) from error
    return description


def numbers_of(filter: GraphFilter) -> dict[str, Tensor]:
    """A filter's state without its description."""
    return {key: value for key, value in filter.state_dict().items() if key != EXTRA}


def build(
    entry: Mapping[str, Any], heads: int, name: str, source: str, max_degree: int = MOST_DEGREE
) -> GraphFilter:
    """The filter of a description, which may have any content, without its numbers.

    ``name`` is that of the layer, which has ``heads``; ``source`` is where the description is from.
    """
    arguments: Any = entry.get("arguments")
    described = arguments.get("num_heads", heads) if isinstance(arguments, dict) else heads
    if type(described) is not int or described != heads:
        raise ValueError(
            f"{source} has a filter for {described!r:.40} heads, {name} has {heads}; load it into "
            "the backbone that it was saved from"
        )
    try:
        # on the host and trainable, wherever load is called
        with torch.device("cpu"), torch.inference_mode(False):
            built = kind_named(entry.get("kind"))(**arguments)
            if entry.get("exclusive") is not None:
                built.exclude(**entry["exclusive"])
            if entry.get("depth"):
                built.add_depth()
        # files of older versions may not contain it
        built.dropout_after = check_dropout_place(entry.get("dropout_after", "attention"))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"{source}: the filter of {name} cannot be built: {error!s:.300}. If a newer gfsa "
            "wrote it, install that version"
        ) from error
    if built.degree > max_degree:
        raise ValueError(
            f"{source}: the filter of {name} has degree {built.degree}, an attention pass each; "
            f"more than {max_degree} is refused. If you trust it, pass max_degree={built.degree}"
        )
    return built


def check_heads(num_heads: Any) -> None:
    """Accept an integer from 1 to a limit that no model reaches."""
    check_order("num_heads", num_heads, least=1, most=_MOST_HEADS)


def check_order(
    name: str, value: Any, least: int, otherwise: str = "", most: int = _MOST_POWERS
) -> None:
    """Accept an integer that can be a power of A; ``otherwise`` tells what else is allowed."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not least <= value <= most:
        bound = f"at most {most}" if is_integer and value > most else f"at least {least}"
        raise ValueError(f"{name} must be an integer of {bound}{otherwise}, got {value!r:.40}")


def check_size(num_heads: int, learned: int, powers: int) -> None:
    """Refuse a filter whose tables ``(heads, learned, powers)`` no model needs."""
    size = num_heads * learned * powers
    if size > _MOST_COEFFICIENTS:
        raise ValueError(
            f"a filter of degree {powers - 1} for {num_heads} heads would have tables of {size} "
            f"coefficients; at most {_MOST_COEFFICIENTS} are allowed"
        )


def check_multiplier(value: Any) -> None:
    """Accept a positive number whose steps float32 does not round to zero."""
    if not isinstance(value, (int, float)) or not _SMALLEST <= value <= _LARGEST:
        raise ValueError(
            f"lr_multiplier must be a positive number, at least {_SMALLEST} because float32 rounds "
            f"smaller steps to zero; got {value!r:.40}"
        )


def check_number(
    name: str, value: Any, least: float = -math.inf, above: float = -math.inf
) -> float:
    """``value`` as a finite float of at least ``least`` and above ``above``, or a ValueError."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    largest = sys.float_info.max
    if not is_number or not -largest <= value <= largest or value < least or value <= above:
        bound = f" of at least {least:g}" if least > -math.inf else ""
        bound += f" above {above:g}" if above > -math.inf else ""
        raise ValueError(f"{name} must be a finite number{bound}, got {value!r:.40}")
    return float(value)


def check_shapes(num_heads: int, base: Any, basis: Any, theta: Any) -> None:
    """Refuse tensors of a subclass that do not fit together, or are larger than any model needs."""
    check_heads(num_heads)
    given = {"base": base, "basis": basis, "theta": theta}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) and (name == "base" or tensor is not None):
            raise TypeError(
                f"the {name} of a filter must be a tensor, got {type(tensor).__name__}; "
                "torch.tensor(...) makes one of a list"
            )
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items() if tensor is not None}
    *rows, powers = shapes["base"] or (0,)
    learned, *_ = shapes.get("basis") or (0,)
    if (
        rows not in ([], [1], [num_heads])
        or not powers
        or shapes.get("basis", (learned, powers)) != (learned, powers)
        or shapes.get("theta", (learned,)) not in ((learned,), (1, learned), (num_heads, learned))
    ):
        raise ValueError(
            f"a filter for {num_heads} heads takes a base (degree+1,) or ({num_heads}, degree+1), "
            "lowest power first, a basis (L, degree+1), a polynomial for each of its L learned "
            f"numbers, and a theta (L,) or ({num_heads}, L); got the shapes {shapes}"
        )
    check_size(num_heads, 1, powers)


def check_finite(base: Tensor, basis: Tensor, theta: Tensor) -> None:
    """Refuse float64 numbers that are not finite in float32, in which a filter computes."""
    # of absolute values, because no part of the sum may overflow, and with a θ that has moved
    total = base.abs() + theta.abs().clamp(min=1.0) @ basis.abs()
    for name, numbers in {"θ": theta, "coefficients (base + θ·basis)": total}.items():
        if not bool(numbers.float().isfinite().all()):
            raise ValueError(
                f"the initial {name} of a filter must be finite in float32, got "
                f"{numbers.abs().max().item():g}; choose smaller initial values, or a smaller K"
            )


def per_head(name: str, value: float | Sequence[float] | Tensor, num_heads: int) -> Tensor:
    """One number per head, ``(heads,)`` in float64, from a number or one for each head."""
    wanted = f"{name} must be a number or one number for each of {num_heads} heads"
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{wanted}, got {value!r:.80}: {error}") from error
    if numbers.dim() > 1 or numbers.numel() not in (1, num_heads):
        raise ValueError(f"{wanted}, got shape {tuple(numbers.shape)}")
    if not bool(numbers.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {value!r:.80}")
    return numbers.expand(num_heads).clone()


def as_number(values: Tensor) -> float | list[float]:
    """The inverse of :func:`per_head`."""
    numbers: list[float] = values.tolist()
    return numbers[0] if len(set(numbers)) == 1 else numbers
