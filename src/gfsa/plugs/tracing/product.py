"""A forward of a traced module with the filter in its one attention product."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator, DenseOperator
from gfsa.operators.base import FunctionOperator
from gfsa.plugs.checks.called import checks_of
from gfsa.plugs.checks.proof import has_no_values
from gfsa.plugs.tracing.capture import Step, Watch
from gfsa.plugs.tracing.rehearsal import NOT_SQUARE, HeadLayout, Memory, Verified, no_heads

NO_PRODUCT = (
    "its forward has no product of a softmax with values that torch dispatches (a softmax written "
    "out, a softmax over another axis, or an extension of its own)"
)
_BROKEN = (
    "torch.compile breaks the graph inside of its forward, and the parts that it compiles on their "
    "own cannot be followed"
)


class Trace(Watch):
    """A forward with the filter ``module.gfsa`` in its product.

    Args:
        module, name: the attention module, and its name in errors.
        verified: what is proven of this call, the reason why it is not, or None for a class that
            tests have verified.
        wants_maps: whether attention weights that the module returns are looked at.
    """

    def __init__(
        self, module: Any, name: str, verified: Verified | str | None, wants_maps: bool
    ) -> None:
        super().__init__(module, name)
        self.filter: GraphFilter = module.gfsa
        self.memory: Memory = module.__dict__["_gfsa_memory"]
        self.verified = verified
        self.wants_maps = wants_maps
        self.compiling = torch.compiler.is_compiling()
        # how many products the forward has had so far
        self.count = 0
        self.dropout_p = 0.0
        self.is_dropped = False
        self.layout = HeadLayout(0, -3)
        self.late_refusal: str | None = None
        # the map that multiplied the values, with its heads apart, its shape there, the values
        self.filtered: tuple[Step, Tensor, torch.Size, Tensor] | None = None

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            # on its way to the caller; kept here, it would keep the tensors of the forward
            self.error = None
        super().__exit__(*error)

    def end(self, result: Any) -> Any:
        """Check the forward after it ran; returns its result, with H where it has A."""
        if self.error is not None:
            # the module caught it
            raise self.error
        if not self.count:
            self.refuse(NO_PRODUCT)
        if self.late_refusal is not None:
            self.refuse(self.late_refusal)
        for check in checks_of(self.filter):
            # hooks inside of a compiled flex_attention do nothing
            check.called = True
        return result if self.filtered is None else self._with_filtered_maps(result)

    def take_dropout(self, p: float) -> bool:
        # entries of H are dropped instead, if the filter's dropout comes after it
        if self.filter.dropout_after != "filter":
            self.is_dropped = True
            return False
        self.dropout_p = p
        return True

    def of_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *options: Any
    ) -> Tensor:
        layout = self._verify((*query.shape[:-1], key.shape[-2]))
        heads, shape = self.filter.num_heads, query.shape
        query, key, value = (layout.split(x, heads) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = layout.split(attn_mask[(None,) * (len(shape) - attn_mask.dim())], heads)
        named: Any = {"dropout_after": self.filter.dropout_after}
        operator = AttentionOperator(query, key, attn_mask, *options, **named)
        return layout.join(self.filter(operator, value), heads, shape)

    def of_flex(self, flex: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Any:
        # torch compiles this call even where nothing else is, with the filter in its graph; it
        # would raise an error of its own in place of ours
        compiling = self.compiling or torch.compiler.is_compiling()
        self.late_refusal = self._refusal((*query.shape[:-1], key.shape[-2]), compiling)
        if self.late_refusal is not None:
            return flex(query, key, value, *args)
        layout, heads, shape = self.layout, self.filter.num_heads, value.shape
        calls: list[Any] = []

        def apply(x: Tensor) -> Tensor:
            # flex_attention is linear in v, so each power is a call of it
            calls.append(flex(query, key, layout.join(x, heads, shape), *args))
            return layout.split(calls[-1][0], heads)

        y = self.filter(FunctionOperator(apply), layout.split(value, heads))
        # the sums of the rows' exponentials, and their largest scores
        return layout.join(y, heads, shape), *calls[0][1:]

    def of_map(self, step: Step, matrix: Tensor, values: Tensor) -> Tensor:
        layout = self._verify(matrix.shape)
        heads, shape = self.filter.num_heads, values.shape
        self._check_rows(matrix)
        split = layout.split(matrix, heads)
        operator = DenseOperator(split, self.dropout_p, self.filter.dropout_after)
        values = self.filter.mixed(operator, layout.split(values, heads))
        if self.wants_maps:
            self.filtered = step, split, matrix.shape, values
        return layout.join(self.filter(operator, values), heads, shape)

    def _check_rows(self, matrix: Tensor) -> None:
        """Warn once if the map takes no averages: its powers may then grow or vanish."""
        # entries that were dropped are missing in their row
        if self.memory.rows_checked or self.is_dropped or self.compiling:
            return
        if matrix.is_meta or has_no_values(matrix):
            return
        self.memory.rows_checked = True
        sums = matrix.detach().sum(-1, dtype=torch.float32)
        # a fully masked row may be zeros
        off = torch.where(sums == 0, 0.0, (sums - 1).abs())
        if bool((off > 1e-2).any()):
            warnings.warn(
                f"the rows of the attention map of {self.name} do not sum to one (by up to "
                f"{off.max().item():.3g}); the filter uses the map as it is",
                stacklevel=2,
            )

    def _verify(self, scores: Sequence[int]) -> HeadLayout:
        refusal = self._refusal(scores, self.compiling)
        if refusal is not None:
            self.refuse(refusal)
        return self.layout

    def _refusal(self, scores: Sequence[int], compiling: bool) -> str | None:
        """Why a product with a map of this shape cannot be filtered; if it can, sets the layout."""
        if torch.compiler.is_compiling() is not compiling:
            return _BROKEN
        self.count += 1
        if self.count > 1:
            return "its forward has more than one attention product"
        if scores[-2] != scores[-1]:
            return NOT_SQUARE.format(*scores[-2:])
        verified = self.verified
        if isinstance(verified, str):
            return verified
        self.layout = HeadLayout(len(scores), -3) if verified is None else verified.layout
        heads = self.filter.num_heads
        return None if self.layout.fits(scores, heads) else no_heads(scores, heads)

    def _with_filtered_maps(self, result: Any) -> Any:
        """What a module returned, with H in place of A; dicts are changed in place."""
        if isinstance(result, Tensor):
            return self._filtered_map(result)
        if isinstance(result, tuple) and hasattr(result, "_fields"):
            return type(result)(*map(self._with_filtered_maps, result))
        if isinstance(result, (list, tuple)):
            return type(result)(map(self._with_filtered_maps, result))
        if isinstance(result, dict):
            for key in list(result):
                result[key] = self._with_filtered_maps(result[key])
        return result

    def _filtered_map(self, x: Tensor) -> Tensor:
        """H in place of ``x``, if that is an attention map that the module returns."""
        own = self.find(x)
        if own is None or self.filtered is None:
            return x
        # built here, because H costs a product of maps and few modules return them
        step, split, shape, values = self.filtered
        new = self.filter.map(DenseOperator(split), values).to(split.dtype)
        new = self.layout.join(new, self.filter.num_heads, shape)
        returned = _transferred(new, step, own) if new.shape == step.tensor.shape else None
        if returned is None:
            self.refuse(
                "it returns attention weights that are not the map that multiplies its values, so "
                "there is no filtered map in their place. Do not ask it for attention weights"
            )
        return returned.to(x.dtype)


# operations that give every entry another place and change none
_MOVES = {
    "view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze",
    "ravel", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "adjoint",
}  # fmt: skip
_TRANSPOSES = [vars(torch._C.TensorBase)[name].__get__ for name in ("T", "mT", "H", "mH")]
# operations on single entries that a map goes through on its way to the product; the product's map
# has been through them
_ON_THE_WAY = {
    "dropout", "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous",
    "clone", "masked_fill", "masked_fill_", "nan_to_num", "where", "mul", "mul_", "__mul__",
    "__rmul__", "__imul__", "div", "div_", "__truediv__", "__itruediv__",
}  # fmt: skip


def _transferred(new: Tensor, at: Step, to: Step) -> Tensor | None:
    """What ``to`` would have been if ``at`` had been ``new``, or None if that is unknown.

    From ``at`` back to what both were computed from, operations that move entries are undone.
    Those that change single entries (a cast, a dropout, a mask) are passed over: they are part of
    the map that multiplies the values, and what is returned stands for that map.
    """
    back, forth = at.ancestors(), to.ancestors()
    common = next((step for step in back if step in forth), None)
    if common is None or not all(step.is_map for step in back):
        return None
    source = common.tensor
    places = torch.arange(source.numel(), device=source.device).view(source.shape)
    moved = _replayed(back[: back.index(common)], places)
    if moved is None or moved.shape != new.shape:
        return None
    if moved is not places:
        new = new.reshape(-1)[moved.reshape(-1).argsort()].view(source.shape)
    return _replayed(forth[: forth.index(common)], new, whole=common is at)


def _replayed(steps: list[Step], x: Tensor, whole: bool = False) -> Tensor | None:
    """What steps, the last one first, make of ``x``; None if one of them is not understood."""
    for step in reversed(steps):
        name = str(getattr(step.func, "__name__", step.func))
        moves = name in _MOVES or (name == "__get__" and step.func in _TRANSPOSES)
        if whole or not step.is_map or moves:
            x = step.redo(x)
        elif name not in _ON_THE_WAY:
            return None
    return x
