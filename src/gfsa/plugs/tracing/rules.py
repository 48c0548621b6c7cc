"""One rule for each kind of operation: the origins of its result from those of its arguments.

A rule returns no origins where it cannot tell them. Those that take ``(table, args, kwargs,
result)`` are called for operations by name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gfsa.plugs.tracing import operations as ops
from gfsa.plugs.tracing.axes import Atom, Dim, Origin, broadcast, changed, constant, whole
from gfsa.plugs.tracing.einsums import operands_of_einsum
from gfsa.plugs.tracing.origins import Origins, OriginTable


def elementwise(table: OriginTable, given: list[Tensor], result: Tensor) -> Origins:
    """Each entry depends on the entries at the same position, with broadcasting."""
    found: list[Origin] = []
    for x in given:
        if x.dim() > result.dim() or any(
            size not in (1, wanted)
            for size, wanted in zip(reversed(x.shape), reversed(result.shape), strict=False)
        ):
            return ()
        found += table.each(x, lambda dims: broadcast(dims, result.shape))
    return tuple(found)


def reorder(table: OriginTable, func: Any, args: Any, kwargs: Any) -> Origins:
    """Axes in another order, which is found by running the operation on a probe."""
    # each axis of the probe has a size of its own, by which it is recognised in the result
    probe = torch.empty(tuple(range(2, 2 + args[0].dim())), device="meta")
    order = [size - 2 for size in func(probe, *args[1:], **kwargs).shape]
    return table.each(args[0], lambda dims: [dims[axis] for axis in order])


def cast(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """Of a second tensor only the dtype and the device count: ``x.type_as(other)``."""
    return elementwise(table, [args[0]], result)


def expand(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """Axes of size 1 are repeated, and new ones come before them."""
    return table.each(args[0], lambda dims: broadcast(dims, result.shape))


def repeat(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """The whole of each axis is repeated: the copies are the slower factor."""

    def rule(dims: tuple[Dim, ...]) -> list[Dim]:
        padded = [()] * (result.dim() - len(dims)) + list(dims)
        sizes = [1] * (result.dim() - len(dims)) + list(args[0].shape)
        times = [new // max(old, 1) for new, old in zip(result.shape, sizes, strict=True)]
        return [(*constant(n), *dim) for n, dim in zip(times, padded, strict=True)]

    return table.each(args[0], rule)


def repeat_interleave(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """Each position of an axis is repeated: the copies are the faster factor."""
    times = args[1] if len(args) > 1 else kwargs.get("repeats")
    axis = args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(times, int) or axis is None:
        return ()

    def rule(dims: tuple[Dim, ...]) -> list[Dim]:
        result = list(dims)
        result[axis] = (*result[axis], *constant(times))
        return result

    return table.each(args[0], rule)


def linear(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """The last axis is summed over and becomes features."""
    return table.project(args[0], -1, result)


def conv(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """Channels become features; an axis whose size changes is no longer that of the input."""
    x, weight = args[0], args[1]
    # channels come before the axes of the kernel
    axis = 1 - weight.dim()
    key = table.key(args[1:], kwargs)
    projected = table.project(x, axis, result)

    def rule(dims: tuple[Dim, ...]) -> list[Dim]:
        # a convolution that keeps the size of an axis keeps its positions
        return [
            dim if place == axis or old == new else changed(dim, "convolution", (key, place), new)
            for place, dim, old, new in zip(
                range(-len(dims), 0), dims, x.shape, result.shape, strict=True
            )
        ]

    return tuple(origin.with_dims(rule(origin.dims)) for origin in projected)


def product(table: OriginTable, left: Any, right: Any, result: Tensor) -> Origins:
    """``left @ right``: the rows of one, the columns of the other."""
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return ()
    if left.dim() < 2 or right.dim() < 2:
        return ()
    if not table.of(right):
        # the right factor is a weight
        return _broadcast_lead(table.project(left, -1, result), result)
    if not table.of(left):
        return _broadcast_lead(table.project(right, -2, result), result)
    rows = table.each(left, lambda dims: [*dims[:-1], constant(result.shape[-1])])
    columns = table.each(right, lambda dims: [*dims[:-2], constant(result.shape[-2]), dims[-1]])
    return _broadcast_lead((*rows, *columns), result)


def _broadcast_lead(origins: Origins, result: Tensor) -> Origins:
    """Give origins of a product all of its leading axes."""
    return tuple(o.with_dims(broadcast(o.dims, result.shape)) for o in origins)


def einsum(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """Letters of the output are axes of the operands that have them."""
    equation, operands = args[0], operands_of_einsum(args)
    if "." in equation or "->" not in equation:
        return ()
    inputs, out = equation.replace(" ", "").split("->")
    letters = inputs.split(",")
    followed = [place for place, x in enumerate(operands) if table.of(x)]
    serial = table.serial()
    found = []
    for place in followed:
        own = letters[place]
        for origin in table.of(operands[place]):
            dims = []
            for letter, size in zip(out, result.shape, strict=True):
                if letter in own:
                    dims.append(origin.dims[own.index(letter)])
                elif any(letter in letters[other] for other in followed):
                    dims.append(constant(size))
                else:
                    # a letter of a weight
                    dims.append(whole(Atom("features", (serial, letter)), size))
            if len(followed) == 1:
                for letter, dim in zip(own, origin.dims, strict=True):
                    if letter not in out:
                        table.note_sum(origin, dim)
            found.append(origin.with_dims(dims))
    return tuple(found)


def along(table: OriginTable, name: str, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """Entries move along the axes that an argument names."""
    place = ops.ALONG[name]
    axes = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("dims"))
    if axes is None or result.dim() != args[0].dim():
        return scramble(table, [args[0]], name, table.key(args, kwargs), result.shape)
    axes = {axis % result.dim() for axis in ([axes] if isinstance(axes, int) else axes)}
    key = (name, table.key(args[1:], kwargs))
    return table.each(
        args[0],
        lambda dims: [
            changed(dim, "index", (key, axis), size) if axis in axes else dim
            for axis, dim, size in zip(range(len(dims)), dims, result.shape, strict=True)
        ],
    )


def pad(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """An axis that is padded is no longer that of the input, even if it is as long (a shift)."""
    x, key = args[0], table.key(args[1:], kwargs)
    amounts = args[1] if len(args) > 1 else kwargs["pad"]
    # two amounts an axis, the last axis first
    padded = {x.dim() - 1 - place // 2 for place, amount in enumerate(amounts) if amount}
    return table.each(
        x,
        lambda dims: [
            changed(dim, "padding", (key, axis), size) if axis in padded else dim
            for axis, dim, size in zip(range(len(dims)), dims, result.shape, strict=True)
        ],
    )


def scramble(
    table: OriginTable, given: Iterable[Tensor], name: str, key: Hashable, shape: Sequence[int]
) -> Origins:
    """Every entry of the result may come from any entry of these tensors."""
    return scramble_origins([o for x in given for o in table.of(x)], name, key, shape)


def scramble_origins(
    origins: Iterable[Origin], name: str, key: Hashable, shape: Sequence[int]
) -> Origins:
    """Origins of a tensor of which any entry may depend on any entry of theirs."""
    found = []
    for origin in origins:
        everything = tuple(factor for dim in origin.dims for factor in dim)
        dims = [
            changed(everything, "index", (name, key, axis), size) for axis, size in enumerate(shape)
        ]
        found.append(origin.with_dims(dims))
    return tuple(found)


def as_complex(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """The last axis holds the real and the imaginary part."""
    return table.each(args[0], lambda dims: dims[:-1])


def as_real(table: OriginTable, args: Any, kwargs: Any, result: Tensor) -> Origins:
    """The inverse of :func:`as_complex`."""
    return table.each(args[0], lambda dims: [*dims, constant(2)])
