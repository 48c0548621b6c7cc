"""The origins of the tensors of one forward: how each depends on the module's inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gfsa.plugs.tracing.axes import Atom, Dim, Origin, whole

Origins = tuple[Origin, ...]
"""How a tensor depends on each of the module's inputs; empty if it is not followed."""


class OriginTable:
    """The origins of every tensor of one forward that depends on the module's inputs."""

    def __init__(self) -> None:
        self.known: Any = WeakIdKeyDictionary()
        self.channels: set[tuple[str, Atom]] = set()
        """Axes of inputs over which a projection sums."""
        self.cut_to_one = False
        """Whether one position of a longer axis was taken: which one, an axis does not show."""
        self._serials = itertools.count()
        self._alive: list[Any] = []

    def start(self, name: str, x: Tensor) -> None:
        """Follow ``x``, the input ``name``; an empty one has nothing to follow."""
        if x.numel() == 0:
            return
        dims = [whole(Atom("input", axis), size) for axis, size in enumerate(x.shape)]
        self.known[x] = (*self.of(x), Origin(name, tuple(dims)))

    def of(self, x: Any) -> Origins:
        """The origins of a tensor, or none."""
        origins: Origins = self.known.get(x, ()) if isinstance(x, Tensor) else ()
        return origins

    def each(self, x: Any, rule: Callable[[tuple[Dim, ...]], Sequence[Dim]]) -> Origins:
        """The origins of ``x`` with their axes changed by ``rule``."""
        return tuple(origin.with_dims(rule(origin.dims)) for origin in self.of(x))

    def serial(self) -> int:
        """Another number at each call, for what is equal to itself alone."""
        return next(self._serials)

    def key(self, *arguments: Any) -> Hashable:
        """Equal for equal arguments; a tensor is equal to itself alone."""
        if len(arguments) != 1:
            return tuple(self.key(argument) for argument in arguments)
        (argument,) = arguments
        if isinstance(argument, (list, tuple)):
            return tuple(self.key(inner) for inner in argument)
        if isinstance(argument, dict):
            return tuple((name, self.key(inner)) for name, inner in argument.items())
        if isinstance(argument, slice):
            return ("slice", argument.start, argument.stop, argument.step)
        if isinstance(argument, Tensor):
            if self.of(argument):
                return None
            # kept, so that no other tensor gets the same id
            self._alive.append(argument)
            return id(argument)
        return argument if isinstance(argument, Hashable) else repr(argument)

    def project(self, x: Any, axis: int, result: Tensor) -> Origins:
        """A sum over ``axis`` of x, which has new features in its place."""
        features = whole(Atom("features", self.serial()), result.shape[axis])
        found = []
        for origin in self.of(x):
            self.note_sum(origin, origin.dims[axis])
            dims = list(origin.dims)
            dims[axis] = features
            found.append(origin.with_dims(dims))
        return tuple(found)

    def note_sum(self, origin: Origin, dim: Dim) -> None:
        """Note that a projection sums over an axis."""
        for factor in dim:
            if factor.atom is not None and factor.atom.kind == "input":
                self.channels.add((origin.source, factor.atom))
