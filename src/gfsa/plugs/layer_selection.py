"""Select layers of a model: all, even, odd, a half, by number, name or predicate."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from gfsa.plugs.report import counted

Layers = str | Iterable[int | str] | Callable[[str, nn.Module], bool]

NOT_SELECTED = "not among the selected layers"
"""The reason in reports for a layer that ``layers`` leaves out."""

_EXPECTED = (
    "layers must be 'all', 'even', 'odd', 'lower', 'upper', numbers counted from 1, names or "
    "patterns such as 'encoder.*', or a predicate (name, module)"
)


def select_layers(candidates: Mapping[str, nn.Module], layers: Layers) -> set[str]:
    """The names among ``candidates`` that ``layers`` selects.

    Args:
        candidates: the model's self-attention modules by name, in the model's order. They are
            counted from 1, over the whole model, as the paper counts.
        layers: ``"all"``, ``"even"``, ``"odd"``, ``"upper"`` (the half next to the output; the
            middle layer of an odd number belongs to it), ``"lower"`` (the other half), a name or a
            pattern such as ``"encoder.*"``, an iterable of numbers, names and patterns, or a
            predicate ``(name, module) -> bool``.

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
        selected = set(halves[layers] if layers in halves else _matching(layers, names))
    else:
        try:
            chosen = list(layers)
        except TypeError:
            raise ValueError(f"{_EXPECTED}; got {layers!r}") from None
        selected = set()
        for one in chosen:
            if isinstance(one, str):
                selected.update(_matching(one, names))
                continue
            if isinstance(one, bool) or not hasattr(one, "__index__"):
                raise ValueError(f"{_EXPECTED}; got {one!r} among them")
            number = operator.index(one)
            if not 1 <= number <= len(names):
                raise ValueError(
                    f"there is no layer {number}: the model has "
                    f"{counted(len(names), 'self-attention layer')} that can be plugged, counted "
                    "from 1"
                )
            selected.add(names[number - 1])
    if names and not selected:
        raise ValueError(
            f"layers={layers!r} selects none of the model's "
            f"{counted(len(names), 'self-attention layer')} (depths that share one module, as in "
            "ALBERT, are one layer); select at least one"
        )
    return selected


def _matching(pattern: str, names: list[str]) -> list[str]:
    """The layers that a name or a pattern means; a name also means what is inside that module."""
    found = fnmatch.filter(names, pattern) + fnmatch.filter(names, f"{pattern}.*")
    if not found:
        shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        raise ValueError(f"{_EXPECTED}; got {pattern!r}, which matches none of {shown}")
    return found
