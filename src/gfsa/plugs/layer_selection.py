"""Select layers of a model: all, even, odd, a half, by number or by predicate."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping

from torch import nn

Layers = str | Iterable[int] | Callable[[str, nn.Module], bool]

NOT_SELECTED = "not among the selected layers"
"""The reason in reports for a layer that ``layers`` leaves out."""

_EXPECTED = (
    "layers must be 'all', 'even', 'odd', 'lower', 'upper', 1-based layer numbers, or a "
    "predicate (name, module)"
)


def select_layers(candidates: Mapping[str, nn.Module], layers: Layers) -> set[str]:
    """The names among ``candidates`` that ``layers`` selects.

    Args:
        candidates: the model's self-attention modules by name, in the model's order. They are
            counted from 1, over the whole model, as the paper counts.
        layers: ``"all"``, ``"even"``, ``"odd"``, ``"upper"`` (the half next to the output; the
            middle layer of an odd number belongs to it), ``"lower"`` (the other half), an iterable
            of layer numbers, or a predicate ``(name, module) -> bool``.

    Raises:
        ValueError: if there are candidates and none is selected, or ``layers`` is none of these.
    """
    names = list(candidates)
    if callable(layers):
        selected = {name for name, module in candidates.items() if layers(name, module)}
    elif isinstance(layers, str):
        halves = {
            "all": names,
            "odd": names[::2],
            "even": names[1::2],
            "lower": names[: len(names) // 2],
            "upper": names[len(names) // 2 :],
        }
        if layers not in halves:
            raise ValueError(f"{_EXPECTED}; got {layers!r}")
        selected = set(halves[layers])
    else:
        try:
            numbers = list(layers)
        except TypeError:
            raise ValueError(f"{_EXPECTED}; got {layers!r}") from None
        for position, number in enumerate(numbers):
            if isinstance(number, bool) or not hasattr(number, "__index__"):
                raise ValueError(f"{_EXPECTED}; got {number!r} among them")
            numbers[position] = number = operator.index(number)
            if not 1 <= number <= len(names):
                raise ValueError(
                    f"there is no layer {number}: the model has {len(names)} self-attention "
                    f"layers that can be plugged, counted from 1"
                )
        selected = {names[number - 1] for number in numbers}
    if names and not selected:
        raise ValueError(
            f"layers={layers!r} selects none of the model's {len(names)} self-attention "
            f"layer{'s' if len(names) > 1 else ''} (depths that share one module, as in ALBERT, "
            "are one layer); select at least one"
        )
    return selected
