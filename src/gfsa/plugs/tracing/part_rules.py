"""Rules, as those of ``rules.py``, for operations that take parts of tensors or join tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gfsa.plugs.tracing import operations as ops
from gfsa.plugs.tracing.axes import (
    Atom,
    Dim,
    Origin,
    beside,
    concatenated,
    is_features,
    sliced,
    taken,
    whole,
)
from gfsa.plugs.tracing.origins import Origins, OriginTable
from gfsa.plugs.tracing.rules import scramble


def _select(table: OriginTable, x: Any, axis: int, index: int) -> Origins:
    """One index of an axis, which is no longer there."""

    def pick(origin: Origin) -> Origin:
        dims = list(origin.dims)
        dim = dims.pop(axis)
        picks = origin.picks
        if dim and not is_features(dim):
            picks |= {(dim, index % x.shape[axis])}
        return Origin(origin.source, tuple(dims), picks)

    return tuple(pick(origin) for origin in table.of(x))


def _slice(table: OriginTable, x: Any, axis: int, start: int, stop: int) -> Origins:
    """Some positions of an axis."""

    def rule(dims: tuple[Dim, ...]) -> list[Dim]:
        result = list(dims)
        result[axis] = _part(table, result[axis], start, stop, 1)
        return result

    return table.each(x, rule)


def _part(table: OriginTable, dim: Dim, start: int, stop: int, step: int) -> Dim:
    part = sliced(dim, start, stop, step)
    if dim and not part and not is_features(dim):
        table.cut_to_one = True
    return part


def select(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """``x.select(dim, index)``."""
    axis = args[1] if len(args) > 1 else kwargs["dim"]
    index = args[2] if len(args) > 2 else kwargs["index"]
    return _select(table, args[0], axis, int(index))


def narrow(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """``x.narrow(dim, start, length)``."""
    axis = args[1] if len(args) > 1 else kwargs["dim"]
    start = int(args[2] if len(args) > 2 else kwargs["start"]) % max(args[0].shape[axis], 1)
    return _slice(table, args[0], axis, start, start + result.shape[axis])


def getitem(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """``x[index]``; an index of several tensors may take entries from anywhere."""
    x, index = args
    index = index if isinstance(index, tuple) else (index,)
    plain = (int, slice, type(None), type(...))
    others = [i for i in index if isinstance(i, bool) or not isinstance(i, plain)]
    if others and not (len(others) == 1 and _is_positions(others[0], index)):
        return scramble(table, [x], "index", table.key(index), result.shape)
    index = _for_every_axis(index, x.dim())
    return tuple(_indexed(table, origin, x.shape, index) for origin in table.of(x))


def _for_every_axis(index: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """An index with ``:`` for the axes that it does not name."""
    named = sum(i is not None and i is not ... for i in index)
    place = next((place for place, i in enumerate(index) if i is ...), len(index))
    return (*index[:place], *[slice(None)] * (rank - named), *index[place + 1 :])


def _indexed(
    table: OriginTable, origin: Origin, shape: Sequence[int], index: tuple[Any, ...]
) -> Origin:
    """An origin of a tensor of this shape, after an index that names every axis."""
    dims: list[Dim] = []
    picks, axes = origin.picks, zip(origin.dims, shape, strict=True)
    for i in index:
        if i is None:
            dims.append(())
            continue
        dim, size = next(axes)
        if isinstance(i, slice):
            dims.append(_part(table, dim, *i.indices(size)))
        elif isinstance(i, (Tensor, list)):
            dims.append(taken(dim, i, table.key(i), size))
        elif dim and not is_features(dim):
            picks |= {(dim, i % size)}
    return Origin(origin.source, tuple(dims), picks)


def pieces(table: OriginTable, name: str, args: Any, kwargs: Any, result: Any) -> list[Origins]:
    """The tensors that split, chunk or unbind returns."""
    x = args[0]
    place = 1 if name == "unbind" else 2
    axis = args[place] if len(args) > place else kwargs.get("dim", 0)
    if name == "unbind":
        return [_select(table, x, axis, index) for index in range(len(result))]
    found, start = [], 0
    for piece in result:
        stop = start + piece.shape[axis]
        found.append(_slice(table, x, axis, start, stop))
        start = stop
    return found


def cat(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """Tensors one after another along an axis that they have."""
    tensors, axis = ops.joined_arguments(args, kwargs)
    axis %= result.dim()
    tensors = [x for x in tensors if x.dim() == result.dim()]

    def rule(pieces: list[Origin | None]) -> list[Dim]:
        first = next(piece for piece in pieces if piece is not None)
        sizes = [x.shape[axis] for x in tensors]
        parts = [
            whole(Atom("other", (place, size)), size) if piece is None else piece.dims[axis]
            for place, (piece, size) in enumerate(zip(pieces, sizes, strict=True))
        ]
        dims = list(first.dims)
        dims[axis] = concatenated(parts, sizes)
        return dims

    return _join(table, tensors, axis, rule)


def stack(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """Tensors one after another along a new axis."""
    tensors, axis = ops.joined_arguments(args, kwargs)
    axis %= result.dim()

    def rule(pieces: list[Origin | None]) -> list[Dim]:
        first = next(piece for piece in pieces if piece is not None)
        # tensors of the same tokens differ in features, others in which input they come from
        same = all(piece is not None for piece in pieces)
        kind = "features" if same else "stack"
        dims = list(first.dims)
        dims.insert(axis, whole(Atom(kind, table.serial()), len(tensors)))
        return dims

    return _join(table, tensors, None, rule)


def _join(
    table: OriginTable,
    tensors: list[Tensor],
    axis: int | None,
    rule: Callable[[list[Origin | None]], list[Dim]],
) -> Origins:
    """Tensors as one: what they have in common beside ``axis`` is one origin again."""
    alike = [{beside(origin, axis): origin for origin in table.of(x)} for x in tensors]
    keys = dict.fromkeys(key for origins in alike for key in origins)
    found = []
    for key in keys:
        pieces = [origins.get(key) for origins in alike]
        first = next(piece for piece in pieces if piece is not None)
        found.append(first.with_dims(rule(pieces)))
    return tuple(found)


def _is_positions(index: Any, indices: tuple[Any, ...]) -> bool:
    """Whether an index is a row of positions along one axis, and no integer is beside it."""
    if any(isinstance(i, int) for i in indices):
        return False
    if isinstance(index, list):
        return all(type(i) is int for i in index)
    return isinstance(index, Tensor) and index.dim() == 1 and index.dtype != torch.bool
