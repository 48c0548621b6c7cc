"""Follow the axes of a module's inputs through the operations of its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gfsa.plugs.tracing import operations as ops
from gfsa.plugs.tracing import part_rules, rules
from gfsa.plugs.tracing.axes import is_elsewhere, reshaped
from gfsa.plugs.tracing.origins import Origins, OriginTable

_RULES: dict[str, Callable[..., Origins]] = {
    "to": rules.cast,
    "type_as": rules.cast,
    "expand": rules.expand,
    "expand_as": rules.expand,
    "broadcast_to": rules.expand,
    "repeat": rules.repeat,
    "tile": rules.repeat,
    "repeat_interleave": rules.repeat_interleave,
    "linear": rules.linear,
    "conv1d": rules.conv,
    "conv2d": rules.conv,
    "conv3d": rules.conv,
    "einsum": rules.einsum,
    "pad": rules.pad,
    "view_as_complex": rules.as_complex,
    "view_as_real": rules.as_real,
    "select": part_rules.select,
    "narrow": part_rules.narrow,
    "__getitem__": part_rules.getitem,
    "cat": part_rules.cat,
    "concat": part_rules.cat,
    "concatenate": part_rules.cat,
    "stack": part_rules.stack,
}


class AxisFollower(OriginTable):
    """Finds the origins of each operation's result while a forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: str | None = None
        """The last operation that could not be followed."""

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
            found = part_rules.pieces(self, name, args, kwargs, result)
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
            self.known[result] = self.project(args[0], -1, result)

    def _origins(
        self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], result: Tensor
    ) -> Origins:
        """The origins of an operation's one result, by the rule for its kind."""
        if name in ops.REORDERS:
            return rules.reorder(self, func, args, kwargs)
        if name in ops.RESHAPES:
            return self.each(given[0], lambda dims: reshaped(dims, result.shape))
        if name in ops.PRODUCTS:
            left, right = ops.operands_of(args, kwargs)[:2]
            return rules.product(self, left, right, result)
        if name in ("addmm", "baddbmm"):
            added, left, right = ops.operands_of(args, kwargs)[:3]
            terms = rules.elementwise(self, [added], result) if self.of(added) else ()
            return (*terms, *rules.product(self, left, right, result))
        if name in ops.ALONG:
            return rules.along(self, name, args, kwargs, result)
        if name in ops.NOT_FOLLOWED:
            return ()
        if name in ops.SCRAMBLES:
            return rules.scramble(self, given, name, self.key(args, kwargs), result.shape)
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self, args, kwargs, result)
        return rules.elementwise(self, given, result)

    def _write(self, name: str, args: Any, given: list[Tensor]) -> None:
        """Something is written into a tensor: its entries may now be anything."""
        target, value = args[0], args[-1]
        if name == "copy_":
            self.known[target] = rules.elementwise(self, [args[1]], target)
            return
        kept: Origins = ()
        part: Origins = ()
        if name == "__setitem__":
            if not self.of(value):
                # a mask, say, in the place of some entries: the others are where they were
                return
            # what is written depends on the input as what was there did
            part = part_rules.getitem(self, args[:2], {}, target[args[1]])
            pairs = zip(self.of(target), part, strict=True)
            kept = tuple(origin for origin, inside in pairs if inside in self.of(value))
        others = [o for x in given for o in self.of(x) if o not in kept and o not in part]
        key = (name, self.serial())
        scrambled = rules.scramble_origins(others, name, key, target.shape)
        self.known[target] = (*kept, *scrambled)
