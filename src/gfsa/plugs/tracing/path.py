"""The path of a forward: which operations it ran on which tensors, up to its attention product.

Two forwards on the same path combine their inputs in the same way, so what was shown of one holds
for the other. An entry of the path has the operation, the number of each tensor that it takes, and
the arguments that decide which entry goes where (axes, starts of slices, equations). Sizes are no
part of it: the next batch has others.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.plugs.tracing.operations import ALONG, PIECES, REORDERS

Path = tuple[Hashable, ...]
"""The inputs and flags of a forward, then its operations up to the attention product."""

# operations whose arguments say where entries go, and are no sizes
_PLACES = {
    *REORDERS, *ALONG, "__getitem__", "__setitem__", "select", "unbind", "einsum", "pad", "cat",
    "concat", "concatenate", "stack", "squeeze", "unsqueeze", "flatten", "softmax", "sum", "mean",
    "rot90", "tensordot", "diagonal", "cumsum", "index_copy_", "index_add_", "index_fill_",
    "scatter", "scatter_", "sort", "topk",
}  # fmt: skip
# the same for arguments beside sizes: their names and positions
_PLACES_BESIDE_SIZES = {
    "narrow": (("dim", "start"), slice(1, 3)),
    "unflatten": (("dim",), slice(1, 2)),
    "repeat_interleave": (("dim",), slice(2, 3)),
    **{name: (("dim",), slice(2, 3)) for name in PIECES - {"unbind"}},
}

# properties whose value is a tensor; a forward reads shape and dtype all the time
_TENSOR_PROPERTIES = {"T", "mT", "H", "mH", "data", "grad", "real", "imag"}
_GETTER = type(Tensor.T.__get__)  # type: ignore[attr-defined]


def inputs_of(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a forward's arguments that may hold tokens, by name."""
    return {name: x for key, value in given.items() for name, x in _named_tokens(key, value)}


def beginning(inputs: Mapping[str, Tensor], given: Mapping[str, Any]) -> Hashable:
    """The first entry of a path: the inputs, and the flags that the caller set."""
    entry = []
    for name, x in inputs.items():
        # a tensor may be two inputs
        first = next(first for first, other in inputs.items() if other is x)
        entry.append(f"{name}:{x.dim()}={first}")
    for name, value in given.items():
        # a flag that is off is as one that is not given
        if isinstance(value, (bool, str)) and value:
            entry.append(f"{name}={value}")
    return tuple(entry)


class PathRecorder:
    """Records the path of one forward, and numbers its tensors as they come.

    While a graph is compiled, the inputs and flags alone are recorded.
    """

    def __init__(self) -> None:
        self.beginning: Hashable = ()
        """The first entry alone, which a compiler can read without depending on the others."""
        self.entries: list[Hashable] = []
        # by id, with a weak reference: the id of a tensor that is gone may be given to another
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._count = 0

    def path(self) -> Path:
        return tuple(self.entries)

    def start(self, inputs: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
        """Record the inputs of the module, by name, and the flags that the caller set."""
        self.beginning = beginning(inputs, given)
        self.entries.append(self.beginning)
        if not torch.compiler.is_compiling():
            self.number_results(list(inputs.values()))

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record an operation before it runs."""
        name = getattr(func, "__name__", None) or str(func)
        if func.__class__ is _GETTER:
            name = func.__self__.__name__
            if name not in _TENSOR_PROPERTIES:
                return
        entry: list[Hashable] = [name]
        everything = name in _PLACES
        for value in args:
            self._describe(value, entry, everything)
        for key, value in kwargs.items():
            entry.append(key)
            self._describe(value, entry, everything)
        if name in _PLACES_BESIDE_SIZES:
            names, places = _PLACES_BESIDE_SIZES[name]
            self._describe(args[places], entry, True)
            self._describe([kwargs.get(key) for key in names], entry, True)
        self.entries.append(tuple(entry))

    def number_results(self, result: Any) -> None:
        """Number what an operation returned."""
        if isinstance(result, Tensor):
            self._number(result)
        elif isinstance(result, (list, tuple)):
            for x in result:
                self.number_results(x)

    def _describe(self, value: Any, entry: list[Hashable], everything: bool) -> None:
        """Append the tensors of an argument by number, and all else if ``everything`` counts."""
        if isinstance(value, Tensor):
            known = self._known(value)
            if known is None:
                # neither an input nor a result: the module has it, or computes it out of sight
                kind = "parameter" if isinstance(value, nn.Parameter) else "outside"
                entry.append((kind, self._number(value)))
            else:
                entry.append((known,))
        elif isinstance(value, (list, tuple)):
            entry.append("(")
            for x in value:
                self._describe(x, entry, everything)
            entry.append(")")
        elif not everything:
            return
        elif isinstance(value, slice):
            # where it stops is a matter of sizes
            entry.append("slice")
            self._describe(0 if value.start is None else value.start, entry, True)
            self._describe(1 if value.step is None else value.step, entry, True)
        elif value is None or isinstance(value, (int, str)):
            entry.append(value)
        else:
            entry.append(repr(value))

    def _known(self, x: Tensor) -> int | None:
        known = self._numbers.get(id(x))
        return known[1] if known is not None and known[0]() is x else None

    def _number(self, x: Tensor) -> int:
        known = self._known(x)
        if known is not None:
            return known
        self._count += 1
        self._numbers[id(x)] = weakref.ref(x), self._count
        return self._count


def _named_tokens(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors of an argument that may hold tokens, each with a name."""
    if isinstance(value, Tensor):
        return [(name, value)] if value.is_floating_point() and value.dim() >= 2 else []
    if isinstance(value, (list, tuple)):
        return [found for i, x in enumerate(value) for found in _named_tokens(f"{name}[{i}]", x)]
    return []
