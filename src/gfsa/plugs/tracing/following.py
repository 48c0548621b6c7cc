"""Follow the axes of a module's inputs through the operations of its forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gfsa.plugs.tracing import operations as ops
from gfsa.plugs.tracing.axes import (
    Atom,
    Dim,
    Origin,
    beside,
    broadcast,
    changed,
    concatenated,
    constant,
    is_elsewhere,
    is_features,
    reshaped,
    sliced,
    taken,
    whole,
)

Origins = tuple[Origin, ...]
"""How a tensor depends on each of the module's inputs; empty if it is not followed."""


class AxisFollower:
    """The origins of every tensor of one forward that depends on the module's inputs."""

    def __init__(self) -> None:
        self.known: Any = WeakIdKeyDictionary()
        self.lost: str | None = None
        """The last operation that could not be followed."""
        self.channels: set[tuple[str, Atom]] = set()
        """Axes of inputs over which a projection sums."""
        self._serials = itertools.count()
        self._alive: list[Any] = []

    def start(self, name: str, x: Tensor) -> None:
        """Follow ``x``, the input ``name``; an empty one has nothing to follow."""
        if x.numel() == 0:
            return
        dims = [whole(Atom("input", axis), size) for axis, size in enumerate(x.shape)]
        self.known[x] = (*self.of(x), Origin(name, tuple(dims)))

    def of(self, x: Any) -> Origins:
        origins: Origins = self.known.get(x, ()) if isinstance(x, Tensor) else ()
        return origins

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Find the origins of ``result = func(*args, **kwargs)``."""
        given = [x for x in ops.tensors_in((*args, *kwargs.values())) if self.of(x)]
        if not given:
            return
        name = ops.name_of(func)
        args, kwargs = ops.named_first(args, kwargs)
        if name in ops.WRITES:
            self._write(name, args, given)
            return
        results = [x for x in ops.tensors_in((result,)) if x.is_floating_point() or x.is_complex()]
        if not results or name in ops.WITHOUT_VALUES:
            return
        if name in ops.PIECES:
            found = self._pieces(name, args, kwargs, result)
        else:
            found = [self._origins(func, name, args, kwargs, given, results[0])]
            if len(results) > 1:
                found += [()] * (len(results) - 1)
        for x, origins in zip(results, found, strict=True):
            origins = tuple(o for o in origins if not any(map(is_elsewhere, o.dims)))
            if origins and all(len(origin.dims) == x.dim() for origin in origins):
                self.known[x] = tuple(dict.fromkeys(origins))
            else:
                self.lost = name
                self.known.pop(x, None)

    def note_linear(self, module: Any, args: tuple[Any, ...], result: Any) -> None:
        """A forward hook of linear layers, some of which compute outside torch (quantised ones)."""
        if not args or not self.of(args[0]) or not isinstance(result, Tensor) or self.of(result):
            return
        if result.shape[:-1] == args[0].shape[:-1]:
            self.known[result] = self._project(args[0], -1, result)

    def _origins(
        self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], result: Tensor
    ) -> Origins:
        if name in ops.REORDERS:
            return self._reorder(func, args, kwargs)
        if name in ops.RESHAPES:
            return self._each(given[0], lambda dims: reshaped(dims, result.shape))
        if name in ops.PRODUCTS:
            left, right = ops.operands_of(args, kwargs)[:2]
            return self._product(left, right, result)
        if name in ("addmm", "baddbmm"):
            added, left, right = ops.operands_of(args, kwargs)[:3]
            terms = self._elementwise([added], result) if self.of(added) else ()
            return (*terms, *self._product(left, right, result))
        if name in ops.ALONG:
            return self._along(name, args, kwargs, result)
        if name in ops.NOT_FOLLOWED:
            return ()
        if name in ops.SCRAMBLES:
            return self._scramble(given, name, self._key(args, kwargs), result.shape)
        rule: Callable[..., Origins] | None = _RULES.get(name)
        if rule is not None:
            return rule(self, args, kwargs, result)
        return self._elementwise(given, result)

    def _each(self, x: Any, rule: Callable[[tuple[Dim, ...]], Sequence[Dim]]) -> Origins:
        return tuple(origin.with_dims(rule(origin.dims)) for origin in self.of(x))

    def _key(self, *arguments: Any) -> Hashable:
        """Equal for equal arguments; a tensor is equal to itself alone."""
        if len(arguments) != 1:
            return tuple(self._key(argument) for argument in arguments)
        (argument,) = arguments
        if isinstance(argument, (list, tuple)):
            return tuple(self._key(inner) for inner in argument)
        if isinstance(argument, dict):
            return tuple((name, self._key(inner)) for name, inner in argument.items())
        if isinstance(argument, slice):
            return ("slice", argument.start, argument.stop, argument.step)
        if isinstance(argument, Tensor):
            if self.of(argument):
                return None
            # kept, so that no other tensor gets the same id
            self._alive.append(argument)
            return id(argument)
        return argument if isinstance(argument, Hashable) else repr(argument)

    # one rule for each kind of operation

    def _elementwise(self, given: list[Tensor], result: Tensor) -> Origins:
        """Each entry depends on the entries at the same position, with broadcasting."""
        found: list[Origin] = []
        for x in given:
            if x.dim() > result.dim() or any(
                size not in (1, wanted)
                for size, wanted in zip(reversed(x.shape), reversed(result.shape), strict=False)
            ):
                return ()
            found += self._each(x, lambda dims: broadcast(dims, result.shape))
        return tuple(found)

    def _reorder(self, func: Any, args: Any, kwargs: Any) -> Origins:
        # each axis of the probe has a size of its own, by which it is recognised in the result
        probe = torch.empty(tuple(range(2, 2 + args[0].dim())), device="meta")
        order = [size - 2 for size in func(probe, *args[1:], **kwargs).shape]
        return self._each(args[0], lambda dims: [dims[axis] for axis in order])

    def _expand(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
        return self._each(args[0], lambda dims: broadcast(dims, result.shape))

    def _repeat(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
        def rule(dims: tuple[Dim, ...]) -> list[Dim]:
            padded = [()] * (result.dim() - len(dims)) + list(dims)
            sizes = [1] * (result.dim() - len(dims)) + list(args[0].shape)
            times = [new // max(old, 1) for new, old in zip(result.shape, sizes, strict=True)]
            return [(*constant(n), *dim) for n, dim in zip(times, padded, strict=True)]

        return self._each(args[0], rule)

    def _repeat_interleave(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
        times = args[1] if len(args) > 1 else kwargs.get("repeats")
        axis = args[2] if len(args) > 2 else kwargs.get("dim")
        if not isinstance(times, int) or axis is None:
            return ()

        def rule(dims: tuple[Dim, ...]) -> list[Dim]:
            result = list(dims)
            result[axis] = (*result[axis], *constant(times))
            return result

        return self._each(args[0], rule)

    def _linear(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
        return self._project(args[0], -1, result)

    def _conv(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
        x, weight = args[0], args[1]
        # channels come before the axes of the kernel
        axis = 1 - weight.dim()
        key = self._key(args[1:], kwargs)
        projected = self._project(x, axis, result)

        def rule(dims: tuple[Dim, ...]) -> list[Dim]:
            # a convolution that keeps the size of an axis keeps its positions
            return [
                dim
                if place == axis or old == new
                else changed(dim, "convolution", (key, place), new)
                for place, dim, old, new in zip(
                    range(-len(dims), 0), dims, x.shape, result.shape, strict=True
                )
            ]

        return tuple(origin.with_dims(rule(origin.dims)) for origin in projected)

    def _project(self, x: Any, axis: int, result: Tensor) -> Origins:
        """A sum over ``axis`` of x, which has new features in its place."""
        features = whole(Atom("features", next(self._serials)), result.shape[axis])
        found = []
        for origin in self.of(x):
            self._summed(origin, origin.dims[axis])
            dims = list(origin.dims)
            dims[axis] = features
            found.append(origin.with_dims(dims))
        return tuple(found)

    def _summed(self, origin: Origin, dim: Dim) -> None:
        for factor in dim:
            if factor.atom is not None and factor.atom.kind == "input":
                self.channels.add((origin.source, factor.atom))

    def _product(self, left: Any, right: Any, result: Tensor) -> Origins:
        """``left @ right``: the rows of one, the columns of the other."""
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
            return ()
        if left.dim() < 2 or right.dim() < 2:
            return ()
        if not self.of(right):
            # the right factor is a weight
            return self._broadcast_lead(self._project(left, -1, result), result)
        if not self.of(left):
            return self._broadcast_lead(self._project(right, -2, result), result)
        rows = self._each(left, lambda dims: [*dims[:-1], constant(result.shape[-1])])
        columns = self._each(right, lambda dims: [*dims[:-2], constant(result.shape[-2]), dims[-1]])
        return self._broadcast_lead((*rows, *columns), result)

    def _broadcast_lead(self, origins: Origins, result: Tensor) -> Origins:
        return tuple(o.with_dims(broadcast(o.dims, result.shape)) for o in origins)

    def _einsum(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
        equation, *operands = args
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = list(operands[0])
        if not isinstance(equation, str) or "." in equation or "->" not in equation:
            return ()
        inputs, out = equation.replace(" ", "").split("->")
        letters = inputs.split(",")
        followed = [place for place, x in enumerate(operands) if self.of(x)]
        serial = next(self._serials)
        found = []
        for place in followed:
            own = letters[place]
            for origin in self.of(operands[place]):
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
                            self._summed(origin, dim)
                found.append(origin.with_dims(dims))
        return tuple(found)

    def _along(self, name: str, args: Any, kwargs: Any, result: Tensor) -> Origins:
        """Entries move along the axes that an argument names."""
        place = ops.ALONG[name]
        axes = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("dims"))
        if axes is None or result.dim() != args[0].dim():
            return self._scramble([args[0]], name, self._key(args, kwargs), result.shape)
        axes = {axis % result.dim() for axis in ([axes] if isinstance(axes, int) else axes)}
        key = (name, self._key(args[1:], kwargs))
        return self._each(
            args[0],
            lambda dims: [
                changed(dim, "index", (key, axis), size) if axis in axes else dim
                for axis, dim, size in zip(range(len(dims)), dims, result.shape, strict=True)
            ],
        )

    def _pad(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
        x, key = args[0], self._key(args[1:], kwargs)
        return self._each(
            x,
            lambda dims: [
                dim if old == new else changed(dim, "padding", (key, axis), new)
                for axis, dim, old, new in zip(
                    range(len(dims)), dims, x.shape, result.shape, strict=True
                )
            ],
        )

    def _scramble(
        self, given: Iterable[Tensor], name: str, key: Hashable, shape: Sequence[int]
    ) -> Origins:
        """Every entry of the result may come from any entry of these tensors."""
        return self._scrambled([o for x in given for o in self.of(x)], name, key, shape)

    def _scrambled(
        self, origins: Iterable[Origin], name: str, key: Hashable, shape: Sequence[int]
    ) -> Origins:
        found = []
        for origin in origins:
            everything = tuple(factor for dim in origin.dims for factor in dim)
            dims = [
                changed(everything, "index", (name, key, axis), size)
                for axis, size in enumerate(shape)
            ]
            found.append(origin.with_dims(dims))
        return tuple(found)

    def _write(self, name: str, args: Any, given: list[Tensor]) -> None:
        """Something is written into a tensor: its entries may now be anything."""
        target, value = args[0], args[-1]
        if name == "copy_":
            self.known[target] = self._elementwise([args[1]], target)
            return
        kept: Origins = ()
        part: Origins = ()
        if name == "__setitem__":
            if not self.of(value):
                # a mask, say, in the place of some entries: the others are where they were
                return
            # what is written depends on the input as what was there did
            part = self._getitem(args[:2], {}, target[args[1]])
            pairs = zip(self.of(target), part, strict=True)
            kept = tuple(origin for origin, inside in pairs if inside in self.of(value))
        others = [o for x in given for o in self.of(x) if o not in kept and o not in part]
        key = (name, next(self._serials))
        self.known[target] = (*kept, *self._scrambled(others, name, key, target.shape))

    def _select(self, x: Any, axis: int, index: int) -> Origins:
        def pick(origin: Origin) -> Origin:
            dims = list(origin.dims)
            dim = dims.pop(axis)
            picks = origin.picks
            if dim and not is_features(dim):
                picks |= {(dim, index % x.shape[axis])}
            return Origin(origin.source, tuple(dims), picks)

        return tuple(pick(origin) for origin in self.of(x))

    def _select_call(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
        axis = args[1] if len(args) > 1 else kwargs["dim"]
        index = args[2] if len(args) > 2 else kwargs["index"]
        return self._select(args[0], axis, int(index))

    def _narrow(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
        axis = args[1] if len(args) > 1 else kwargs["dim"]
        start = int(args[2] if len(args) > 2 else kwargs["start"]) % max(args[0].shape[axis], 1)
        return self._slice(args[0], axis, start, start + result.shape[axis])

    def _slice(self, x: Any, axis: int, start: int, stop: int, step: int = 1) -> Origins:
        def rule(dims: tuple[Dim, ...]) -> list[Dim]:
            result = list(dims)
            result[axis] = sliced(result[axis], start, stop, step)
            return result

        return self._each(x, rule)

    def _getitem(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
        x, index = args
        index = index if isinstance(index, tuple) else (index,)
        plain = (int, slice, type(None), type(...))
        others = [i for i in index if isinstance(i, bool) or not isinstance(i, plain)]
        if others and not (len(others) == 1 and _is_positions(others[0], index)):
            return self._scramble([x], "index", self._key(index), result.shape)
        named = sum(i is not None and i is not ... for i in index)
        place = next((place for place, i in enumerate(index) if i is ...), len(index))
        index = (*index[:place], *[slice(None)] * (x.dim() - named), *index[place + 1 :])
        found = []
        for origin in self.of(x):
            dims: list[Dim] = []
            picks, axis = origin.picks, 0
            for i in index:
                if i is None:
                    dims.append(())
                    continue
                dim, size = origin.dims[axis], x.shape[axis]
                axis += 1
                if isinstance(i, slice):
                    dims.append(sliced(dim, *i.indices(size)))
                elif isinstance(i, (Tensor, list)):
                    dims.append(taken(dim, i, self._key(i), size))
                elif dim and not is_features(dim):
                    picks |= {(dim, i % size)}
            found.append(Origin(origin.source, tuple(dims), picks))
        return tuple(found)

    def _pieces(self, name: str, args: Any, kwargs: Any, result: Any) -> list[Origins]:
        x = args[0]
        place = 1 if name == "unbind" else 2
        axis = args[place] if len(args) > place else kwargs.get("dim", 0)
        if name == "unbind":
            return [self._select(x, axis, index) for index in range(len(result))]
        found, start = [], 0
        for piece in result:
            stop = start + piece.shape[axis]
            found.append(self._slice(x, axis, start, stop))
            start = stop
        return found

    def _cat(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
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

        return self._join(tensors, axis, rule)

    def _stack(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
        tensors, axis = ops.joined_arguments(args, kwargs)
        axis %= result.dim()

        def rule(pieces: list[Origin | None]) -> list[Dim]:
            first = next(piece for piece in pieces if piece is not None)
            # tensors of the same tokens differ in features; others are told by the index
            same = all(piece is not None for piece in pieces)
            kind = "features" if same else "stack"
            dims = list(first.dims)
            dims.insert(axis, whole(Atom(kind, next(self._serials)), len(tensors)))
            return dims

        return self._join(tensors, None, rule)

    def _join(
        self,
        tensors: list[Tensor],
        axis: int | None,
        rule: Callable[[list[Origin | None]], list[Dim]],
    ) -> Origins:
        """Tensors as one: what they have in common beside ``axis`` is one origin again."""
        alike = [{beside(origin, axis): origin for origin in self.of(x)} for x in tensors]
        keys = dict.fromkeys(key for origins in alike for key in origins)
        found = []
        for key in keys:
            pieces = [origins.get(key) for origins in alike]
            first = next(piece for piece in pieces if piece is not None)
            found.append(first.with_dims(rule(pieces)))
        return tuple(found)

    def _as_complex(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
        return self._each(args[0], lambda dims: dims[:-1])

    def _as_real(self, args: Any, kwargs: Any, result: Tensor) -> Origins:
        return self._each(args[0], lambda dims: [*dims, constant(2)])


_RULES: dict[str, Callable[..., Origins]] = {
    "expand": AxisFollower._expand,
    "expand_as": AxisFollower._expand,
    "broadcast_to": AxisFollower._expand,
    "repeat": AxisFollower._repeat,
    "tile": AxisFollower._repeat,
    "repeat_interleave": AxisFollower._repeat_interleave,
    "linear": AxisFollower._linear,
    "conv1d": AxisFollower._conv,
    "conv2d": AxisFollower._conv,
    "conv3d": AxisFollower._conv,
    "einsum": AxisFollower._einsum,
    "pad": AxisFollower._pad,
    "select": AxisFollower._select_call,
    "narrow": AxisFollower._narrow,
    "__getitem__": AxisFollower._getitem,
    "cat": AxisFollower._cat,
    "concat": AxisFollower._cat,
    "concatenate": AxisFollower._cat,
    "stack": AxisFollower._stack,
    "view_as_complex": AxisFollower._as_complex,
    "view_as_real": AxisFollower._as_real,
}


def _is_positions(index: Any, beside: tuple[Any, ...]) -> bool:
    """Whether an index is a row of positions along one axis, and no integer is beside it."""
    if any(isinstance(i, int) for i in beside):
        return False
    if isinstance(index, list):
        return all(type(i) is int for i in index)
    return isinstance(index, Tensor) and index.dim() == 1 and index.dtype != torch.bool
