"""The attention maps of one forward: what became of a softmax, up to its product and beyond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_TRANSPOSES = [vars(torch._C.TensorBase)[name].__get__ for name in ("T", "mT", "H", "mH")]

# operations that give every entry another place and change none
_MOVES = {
    "view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze",
    "ravel", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "adjoint",
}  # fmt: skip
# operations on single entries that a map goes through on its way to the product; the product's map
# has been through them
_ON_THE_WAY = {
    "dropout", "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous",
    "clone", "masked_fill", "masked_fill_", "nan_to_num", "where", "mul", "mul_", "__mul__",
    "__rmul__", "__imul__", "div", "div_", "__truediv__", "__itruediv__",
}  # fmt: skip


class Step:
    """One tensor that was computed from a map, and how.

    Args:
        tensor: the tensor.
        parent: what it was computed from; None for the result of a softmax.
        func, args, kwargs: the operation that computed it.
    """

    def __init__(
        self,
        tensor: Tensor,
        parent: Step | None = None,
        func: Any = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tensor = tensor
        self.parent = parent
        self.func = func
        self.args = args
        self.kwargs = kwargs or {}
        # a sum or a mean of the map has another size: it is no map any more
        self.is_map = parent is None or tensor.numel() == parent.tensor.numel()

    @property
    def name(self) -> str:
        if getattr(self.func, "__name__", "") == "__get__" and self.func in _TRANSPOSES:
            return "transpose"
        return str(getattr(self.func, "__name__", self.func))

    def redo(self, other: Tensor) -> Tensor:
        """The operation again, with another tensor in place of the parent's."""
        assert self.parent is not None
        source = self.parent.tensor
        result: Tensor = self.func(
            *(other if x is source else x for x in self.args),
            **{name: other if x is source else x for name, x in self.kwargs.items()},
        )
        return result

    def ancestors(self) -> list[Step]:
        """This step and those before it, the softmax last."""
        steps: list[Step] = [self]
        while steps[-1].parent is not None:
            steps.append(steps[-1].parent)
        return steps


class MapHistory:
    """Every tensor of a forward that was computed from a softmax, by the way it was computed."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def start(self, softmax: Tensor) -> None:
        self.steps.append(Step(softmax))

    def find(self, x: Any) -> Step | None:
        return next((step for step in reversed(self.steps) if step.tensor is x), None)

    def find_map(self, *candidates: Any) -> Step | None:
        for x in candidates:
            step = self.find(x) if isinstance(x, Tensor) else None
            if step is not None and step.is_map:
                return step
        return None

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record the result of an operation on a map, if it is one tensor of numbers."""
        if not self.steps or not isinstance(result, Tensor) or not result.is_floating_point():
            return
        if self.find(result) is not None:
            return
        found = [self.find(x) for x in (*args, *kwargs.values())]
        parent = next((step for step in found if step is not None), None)
        if parent is None:
            return
        self.steps.append(Step(result, parent, func, args, kwargs))

    def transfer(self, new: Tensor, at: Step, to: Step) -> Tensor | None:
        """What ``to`` would have been if ``at`` had been ``new``, or None if that is unknown.

        From ``at`` back to what both were computed from, operations that move entries are undone.
        Those that change single entries (a cast, a dropout, a mask) are passed over: they are part
        of the map that multiplies the values, and what is returned stands for that map.
        """
        back, forth = at.ancestors(), to.ancestors()
        common = next((step for step in back if step in forth), None)
        if common is None:
            return None
        for step in back[: back.index(common)]:
            undone = _undo(step, new)
            if undone is None:
                return None
            new = undone
        for step in reversed(forth[: forth.index(common)]):
            if common is not at and step.is_map and step.name not in _MOVES:
                if step.name not in _ON_THE_WAY:
                    return None
                continue
            new = step.redo(new)
        return new


def _undo(step: Step, new: Tensor) -> Tensor | None:
    """The parent of ``step`` if the step's result had been ``new``."""
    assert step.parent is not None
    before = step.parent.tensor
    if step.name in _ON_THE_WAY and before.shape == new.shape:
        return new
    if step.name not in _MOVES:
        return None
    places = torch.arange(before.numel(), device=before.device).view(before.shape)
    moved = step.redo(places).reshape(-1)
    return new.reshape(-1)[moved.argsort()].view(before.shape)


def with_tensors(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a module returned, with each of its tensors replaced; dicts are changed in place."""
    if isinstance(result, Tensor):
        return change(result)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(with_tensors(x, change) for x in result))
    if isinstance(result, (list, tuple)):
        return type(result)(with_tensors(x, change) for x in result)
    if isinstance(result, dict):
        for key in list(result):
            result[key] = with_tensors(result[key], change)
    return result
