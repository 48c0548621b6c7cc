"""Watch the forward of one attention module, from its softmax to the product of the map with v.

The map is the result of a softmax over the last axis, followed through every operation that keeps
its size (dropout, casts, masks, mixing of heads) to a product with the values. Or the forward calls
torch's own attention or flex_attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gfsa.operators.base import repeat_heads
from gfsa.plugs.adapter import plain_class

# functions that make, change or use an attention map
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
# what flex_attention calls, compiled or not
FLEX = getattr(torch.ops.higher_order, "flex_attention", None)
_STARTS = (F.scaled_dot_product_attention, FLEX, *SOFTMAX)
_DROPOUT = (F.dropout, torch.dropout)
_MATMUL = (
    *(torch.matmul, torch.linalg.matmul, torch.bmm, torch.mm),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.mm),
)
_ADDED_MATMUL = (torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm)
_OPERANDS = ("input", "self", "mat1", "tensor1", "other", "mat2", "tensor2")


class TraceError(RuntimeError):
    """A traced module's forward is not the self-attention that a filter needs."""


@dataclass(eq=False)
class Step:
    """One tensor that was computed from a map, and how; the first is the result of a softmax."""

    tensor: Tensor
    parent: Step | None = None
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # a sum or a mean of the map has another size: it is no map any more
        self.is_map = self.parent is None or self.tensor.numel() == self.parent.tensor.numel()

    def redo(self, other: Tensor) -> Tensor:
        """The operation again, with another tensor in place of the parent's."""
        assert self.parent is not None
        source = self.parent.tensor
        args = (other if x is source else x for x in self.args)
        kwargs = {name: other if x is source else x for name, x in self.kwargs.items()}
        result: Tensor = self.func(*args, **kwargs)
        return result

    def ancestors(self) -> list[Step]:
        """This step and those before it, the softmax last."""
        steps: list[Step] = [self]
        while steps[-1].parent is not None:
            steps.append(steps[-1].parent)
        return steps


class Watch(TorchFunctionMode):
    """One forward of one module; a subclass says what takes the place of its attention product."""

    # in place of torch's attention, of flex_attention's operator, and of the product of a map and
    # values; their leading axes are those of the map
    of_attention: Any
    of_flex: Any
    of_map: Any

    def __init__(self, module: nn.Module, name: str = "") -> None:
        super().__init__()
        # the class of a traced module is created at run time; users know the original one
        self.kind = plain_class(module).__name__
        self.name = name or self.kind
        # the last one that was raised: the module may catch it
        self.error: BaseException | None = None
        # every tensor of the forward that was computed from a softmax
        self.steps: list[Step] = []

    def refuse(self, why: str) -> NoReturn:
        """Raise a :class:`TraceError` with a reason."""
        self.error = TraceError(
            f"cannot filter {self.name} ({self.kind}) by tracing: {why}. "
            "gfsa.unplug(model), then plug(..., inputs=batch), which leaves out the layers that it "
            "cannot filter, or plug(..., layers=...) without this one; or teach gfsa its class "
            "with gfsa.register_adapter"
        )
        raise self.error

    def takes_dropout(self, p: float) -> bool:
        """Whether a dropout of the map is left out here."""
        return True

    def find(self, x: Any) -> Step | None:
        return next((step for step in reversed(self.steps) if step.tensor is x), None)

    def find_map(self, *candidates: Any) -> Step | None:
        """The map among some arguments."""
        found = (self.find(x) for x in candidates if isinstance(x, Tensor))
        return next((step for step in found if step is not None and step.is_map), None)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and record its result if that is one tensor computed from a map."""
        result = self.run(func, args, kwargs)
        if self.steps and isinstance(result, Tensor) and result.is_floating_point():
            found = (self.find(x) for x in (*args, *kwargs.values()))
            parent = next((step for step in found if step is not None), None)
            if parent is not None and self.find(result) is None:
                self.steps.append(Step(result, parent, func, args, kwargs))
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.steps and func not in _STARTS:
            # most operations of a forward: they come before its map, or after torch's attention
            return self.run(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is FLEX:
            # the graph of a compiled call has the filter in it already
            in_graph = isinstance(args[3], torch.fx.GraphModule)
            return self.run(func, args, kwargs) if in_graph else self._flex(func, *args)
        if func in SOFTMAX:
            x = args[0] if args else kwargs["input"]
            axis = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
            if axis not in (-1, x.dim() - 1):
                return self.run(func, args, kwargs)
            self.steps.append(Step(self.softmax(func, args, kwargs)))
            return self.steps[-1].tensor
        if func is torch.einsum and isinstance(args[0], str) and isinstance(args[1], (list, tuple)):
            args = args[0], *args[1]
        step = self.find_map(*args, *kwargs.values())
        multiplies = func in _MATMUL or func in _ADDED_MATMUL
        if step is None:
            if (multiplies or func is torch.einsum) and any(self.find(x) for x in args):
                # as for values that depend on the distance, or for a column that is a sink
                self.refuse(
                    "a product takes a part or a sum of its map, and the filter needs all of it"
                )
            return self.follow(func, args, kwargs)
        if func in _DROPOUT:
            return self._dropout(*args, **kwargs)
        if func in _ADDED_MATMUL or (multiplies and "out" in kwargs):
            self.refuse(
                f"its map is in {func.__name__} with a tensor that the product is added to or "
                "written into; multiply by matmul alone"
            )
        if multiplies:
            named = [kwargs[name] for name in _OPERANDS if name in kwargs]
            return self._matmul(*(*args, *named)[:2])
        if func is torch.einsum:
            return self._einsum(step, args)
        return self.follow(func, args, kwargs)

    def softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The map of a softmax over the last axis."""
        result: Tensor = self.run(func, args, kwargs)
        return result

    def _dropout(self, *args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
        x: Tensor = given["input"]
        p = given.get("p", 0.5)
        # F.dropout calls the argument training, torch.dropout train
        drops = given.get("training", given.get("train", True)) and p
        if not drops or self.takes_dropout(p):
            return x
        dropped: Tensor = self.follow(F.dropout, (x, p, True, given.get("inplace", False)), {})
        return dropped

    def _attention(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any
    ) -> Any:
        if not options.get("enable_gqa"):
            lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
            query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
        return self.of_attention(query, key, value, attn_mask, *args, **options)

    def _flex(self, flex: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Any:
        lead = query.shape[:-2]
        key, value = (repeat_heads(x, query).expand(*lead, *x.shape[-2:]) for x in (key, value))
        return self.of_flex(flex, query, key, value, *args)

    def _product(self, matrix: Tensor, values: Tensor) -> Tensor:
        # multi-query attention has one head of values
        lead = torch.broadcast_shapes(matrix.shape[:-2], values.shape[:-2])
        expanded = (x.expand(*lead, *x.shape[-2:]) for x in (matrix, values))
        y: Tensor = self.of_map(self.find(matrix), *expanded)
        return y

    def _matmul(self, left: Any, right: Any) -> Tensor:
        if self.find_map(left) is not None:
            return self._product(left, right)
        # y = v·Aᵀ with tokens as columns
        turned = (self.follow(torch.transpose, (x, -2, -1), {}) for x in (right, left))
        return self._product(*turned).transpose(-2, -1)

    def _einsum(self, step: Step, args: tuple[Any, ...]) -> Tensor:
        equation, *operands = args
        if not isinstance(equation, str):
            # torch writes an equation for axes by number before it dispatches, its compiler after
            self.refuse("its map is in an einsum without an equation")
        place = next(i for i, x in enumerate(operands) if x is step.tensor)
        left, arrow, out = equation.replace(" ", "").partition("->")
        inputs = left.split(",")
        of_map = inputs[place]
        lead, row, column = of_map[:-2], of_map[-2], of_map[-1]
        if arrow and {row, column} <= set(out):
            # the einsum mixes heads: its result is still a map
            mixed: Tensor = self.follow(torch.einsum, (equation, *operands), {})
            return mixed
        of_values = inputs[1 - place] if len(inputs) == 2 else ""
        features = "".join(letter for letter in of_values if letter not in of_map)
        understood = arrow and "." not in equation and len(features) == 1
        if not understood or column not in of_values or row in of_values:
            self.refuse(f"its map is in an einsum that is not understood: {equation!r}")
        own = "".join(letter for letter in lead if letter in of_values)
        values = torch.einsum(f"{of_values}->{own}{column}{features}", operands[1 - place])
        # heads may share values
        values = values[tuple(slice(None) if letter in own else None for letter in lead)]
        y = self._product(step.tensor, values)
        return torch.einsum(f"{lead}{row}{features}->{out}", y)
