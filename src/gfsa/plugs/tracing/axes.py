"""Symbolic axes: which tokens, heads or features the positions of a tensor stand for.

An axis of a tensor is a product of factors, the slowest first. A factor is an atom (an axis of one
of the module's inputs, or the features of a projection) or a part of one: position i of the factor
is ``(index in the atom // stride) % size``. So ``view`` and ``reshape`` split and join factors,
``transpose`` reorders axes, and two axes hold the same tokens in the same order exactly if their
factors are equal. Nothing is computed: sizes alone are read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor


class Atom(NamedTuple):
    """What a factor is a part of."""

    kind: str
    """``"input"`` (an axis of an input), ``"features"`` (of a projection), ``"other"`` (what was
    concatenated with an input), or the operation that changed an axis: a slice, an index …"""
    key: Any
    """Hashable; equal for the same axis of an input, and for one operation with equal arguments."""
    of: tuple[Factor, ...] = ()
    """What the operation changed."""


class Factor(NamedTuple):
    """Part of an axis; constant (expanded) along it if ``atom`` is None."""

    atom: Atom | None
    whole: int
    stride: int
    size: int


Dim = tuple[Factor, ...]
"""One axis of a tensor: its factors, the slowest first, none of size 1."""


@dataclass(frozen=True)
class Origin:
    """How a tensor depends on one of the module's inputs."""

    source: str
    """The name of the input."""
    dims: tuple[Dim, ...]
    """One for each axis of the tensor."""
    picks: frozenset[tuple[Dim, int]] = frozenset()
    """Axes that are no longer there, with the index that was taken of each."""

    def with_dims(self, dims: Sequence[Dim]) -> Origin:
        return replace(self, dims=tuple(dims))


def whole(atom: Atom, size: int) -> Dim:
    """An axis that is one atom."""
    return () if size == 1 else (Factor(atom, size, 1, size),)


def constant(size: int) -> Dim:
    """An axis along which the tensor does not depend on the input."""
    return () if size == 1 else (Factor(None, size, 1, size),)


def size_of(dim: Dim) -> int:
    return math.prod(factor.size for factor in dim)


def is_constant(dim: Dim) -> bool:
    return all(factor.atom is None for factor in dim)


def atoms_in(dim: Dim) -> Iterator[Atom]:
    """The atoms of an axis, and those that they were made from."""
    for factor in dim:
        if factor.atom is not None:
            yield factor.atom
            yield from atoms_in(factor.atom.of)


def is_elsewhere(dim: Dim) -> bool:
    """Whether an axis is a part of a concatenation that has nothing of the input."""
    return bool(dim) and all(f.atom is not None and f.atom.kind == "other" for f in dim)


def is_features(dim: Dim) -> bool:
    """Whether an axis holds features of a projection, or a part of them, such as heads."""
    return any(atom.kind == "features" for atom in atoms_in(dim))


def changed(dim: Dim, kind: str, key: Hashable, size: int) -> Dim:
    """The axis after an operation that changed its order or its entries."""
    if is_constant(dim):
        return constant(size)
    return whole(Atom(kind, key, dim), size)


def joined(factors: Sequence[Factor]) -> Dim:
    """Factors as one axis: those that are neighbours in their atom are one factor again."""
    result: list[Factor] = []
    for factor in factors:
        if factor.size == 1:
            continue
        last = result[-1] if result else None
        if last is not None and last.atom is None and factor.atom is None:
            size = last.size * factor.size
            result[-1] = Factor(None, size, 1, size)
        elif (
            last is not None
            and last[:2] == factor[:2]
            and last.stride == factor.stride * factor.size
        ):
            result[-1] = factor._replace(size=last.size * factor.size)
        else:
            result.append(factor)
    return tuple(result)


def reshaped(dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
    """The axes after a reshape, which keeps the order of the entries in memory."""
    remaining = [factor for dim in dims for factor in dim][::-1]
    result = []
    for size in shape:
        taken = []
        while size > 1:
            if not remaining:
                return _inseparable(dims, shape)
            factor = remaining.pop()
            if size % factor.size == 0:
                taken.append(factor)
                size //= factor.size
            elif factor.size % size == 0:
                slow, fast = _split(factor, size)
                taken.append(slow)
                remaining.append(fast)
                size = 1
            else:
                return _inseparable(dims, shape)
        result.append(joined(taken))
    return tuple(result)


def _split(factor: Factor, size: int) -> tuple[Factor, Factor]:
    """A factor as two, of which the slower one has ``size`` entries."""
    rest = factor.size // size
    if factor.atom is None:
        return Factor(None, size, 1, size), Factor(None, rest, 1, rest)
    slow = factor._replace(stride=factor.stride * rest, size=size)
    return slow, factor._replace(size=rest)


def _inseparable(dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
    """Axes whose factors do not fit the new sizes: each depends on all of them."""
    everything = tuple(factor for dim in dims for factor in dim)
    return tuple(
        changed(everything, "reshape", (tuple(shape), place), size)
        for place, size in enumerate(shape)
    )


def sliced(dim: Dim, start: int, stop: int, step: int = 1) -> Dim:
    """The axis after ``[start:stop:step]``, with indices that are not negative."""
    size = size_of(dim)
    if (start, stop, step) == (0, size, 1):
        return dim
    atom = dim[0].atom if len(dim) == 1 and dim[0].size == dim[0].whole else None
    if atom is not None and atom.kind == "cat" and step == 1:
        pieces, sizes = atom.key
        ends = itertools.accumulate(sizes)
        for piece, length, end in zip(pieces, sizes, ends, strict=True):
            if end - length <= start and stop <= end:
                return sliced(piece, start - end + length, stop - end + length)
    return changed(dim, "slice", (start, stop, step), len(range(start, stop, step)))


def concatenated(pieces: Sequence[Dim], sizes: Sequence[int]) -> Dim:
    """Axes end to end; slices that add up to an axis are that axis again."""
    filled = [place for place, size in enumerate(sizes) if size]
    pieces, sizes = [pieces[place] for place in filled], [sizes[place] for place in filled]
    if len(pieces) == 1:
        return pieces[0]
    again = _axis_of_slices(pieces, sizes)
    if again is not None:
        return again
    if all(is_constant(dim) for dim in pieces):
        return constant(sum(sizes))
    everything = tuple(factor for dim in pieces for factor in dim)
    return whole(Atom("cat", (tuple(pieces), tuple(sizes)), everything), sum(sizes))


def _axis_of_slices(pieces: Sequence[Dim], sizes: Sequence[int]) -> Dim | None:
    """The axis that was cut into exactly these pieces, in this order; None if there is none."""
    atoms = [dim[0].atom if len(dim) == 1 else None for dim in pieces]
    slices = [atom for atom in atoms if atom is not None and atom.kind == "slice"]
    if len(slices) < len(pieces) or len({part.of for part in slices}) != 1:
        return None
    axis = slices[0].of
    ends = list(itertools.accumulate(sizes, initial=0))
    adjacent = [(start, stop, 1) for start, stop in itertools.pairwise(ends)]
    if [part.key for part in slices] != adjacent or ends[-1] != size_of(axis):
        return None
    return axis


def broadcast(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
    padded = [()] * (len(shape) - len(dims)) + list(dims)
    return [dim or constant(size) for dim, size in zip(padded, shape, strict=True)]


def taken(dim: Dim, index: Tensor | list[int], key: Hashable, size: int) -> Dim:
    """The axis after an index by a row of positions."""
    if isinstance(index, list) and len(index) == 1:
        return sliced(dim, index[0] % size, index[0] % size + 1)
    return changed(dim, "index", key, len(index))


def beside(origin: Origin, axis: int | None) -> Hashable:
    """What must be equal for tensors that are joined along ``axis``."""
    dims = [
        None if place == axis or is_features(dim) else dim for place, dim in enumerate(origin.dims)
    ]
    return origin.source, tuple(dims), origin.picks
