"""The attention product of one traced forward: where its heads are, and the filter in its place.

A forward has exactly one, ``A·v`` with a map that it computed or a call of torch's own attention.
The filter's ``H·v`` takes its place.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator, DenseOperator, Operator
from gfsa.operators.base import FunctionOperator, repeat_heads
from gfsa.plugs.adapter import plain_class
from gfsa.plugs.tracing.maps import MapHistory, Step


class TraceError(RuntimeError):
    """A traced module's forward is not the self-attention that a filter needs."""


class Refusals:
    """Raises the errors of one forward, and keeps the last: the module may catch it.

    Args:
        module: the attention module.
        name: its name in errors.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        # the class of a traced module is created at run time; users know the original one
        self.kind = plain_class(module).__name__
        self.name = name
        self.error: BaseException | None = None

    def refuse(self, why: str) -> NoReturn:
        """Raise a :class:`TraceError` with a reason."""
        self.error = TraceError(
            f"cannot filter {self.name} ({self.kind}) by tracing: {why}. "
            "gfsa.unplug(model), then plug(..., inputs=batch), which leaves out the layers that it "
            "cannot filter, or plug(..., layers=...) without this one; or teach gfsa its class "
            "with gfsa.register_adapter"
        )
        raise self.error


class HeadLayout(NamedTuple):
    """The place of the heads among the axes of a map ``(..., N, N)``.

    Args:
        rank: how many axes the map has.
        axis: the axis of the heads, counted from the end.
        before, after: how many entries are merged into this axis before and after the heads; None
            if it depends on the batch.
    """

    rank: int
    axis: int
    before: int | None = 1
    after: int | None = 1

    def split(self, x: Tensor, heads: int) -> Tensor:
        """``x`` with its heads as the third axis from the end."""
        if heads == 1:
            return x.unsqueeze(-3)
        axis = self.axis + x.dim()
        if (self.before, self.after) == (1, 1):
            return x.movedim(axis, -3)
        before, after = (-1 if size is None else size for size in (self.before, self.after))
        # a mask may be the same for all heads
        x = x.unflatten(axis, (1, 1, 1) if x.shape[axis] == 1 else (before, heads, after))
        return x.movedim(axis + 1, -3)

    def join(self, y: Tensor, heads: int, shape: Sequence[int]) -> Tensor:
        """The inverse of :meth:`split`: ``y`` in the leading sizes of ``shape``."""
        if heads > 1:
            merged = (self.before, self.after) != (1, 1)
            y = y.movedim(-3, self.axis + self.rank + 1 if merged else self.axis)
        return y.reshape(*shape[:-1], y.shape[-1])

    def fits(self, scores: Sequence[int], heads: int) -> bool:
        """Whether a map of this shape can have this layout."""
        if heads == 1:
            return True
        if len(scores) != self.rank:
            return False
        size = scores[self.axis]
        if self.before is None or self.after is None:
            return size % (heads * (self.before or self.after or 1)) == 0
        return size == heads * self.before * self.after

    def for_any_batch(self, scores: Sequence[int], heads: int) -> HeadLayout | None:
        """The layout for batches of other sizes, or None if this one does not show it.

        A batch of one sample, or of as many samples as there are heads or tokens, does not: the
        sizes that the module's code reads could then belong to another axis.
        """
        if heads == 1:
            return self
        samples, tokens = math.prod(scores[:-2]) // heads, scores[-1]
        if len({samples, heads, tokens, 1}) < 4:
            return None
        if (self.before, self.after) == (1, 1):
            return self
        if self.after == 1:
            return self._replace(before=None)
        if self.before == 1:
            return self._replace(after=None)
        # which of the two grows with the batch is unknown
        return None


def possible_layouts(scores: Sequence[int], heads: int) -> list[HeadLayout]:
    """The layouts that a map of shape ``scores`` may have, judging by its sizes alone."""
    rank = len(scores)
    if heads == 1:
        return [HeadLayout(rank, -3)]
    found = []
    for place, size in enumerate(scores[:-2]):
        if size == 0:
            # an empty batch; any place of the heads will do
            found.append(HeadLayout(rank, place - rank, 0))
        elif size % heads == 0:
            rest = size // heads
            befores = [before for before in range(1, rest + 1) if rest % before == 0]
            found += [HeadLayout(rank, place - rank, b, rest // b) for b in befores]
    # heads with an axis of their own come first
    return sorted(found, key=lambda layout: (layout.before, layout.after) != (1, 1))


@dataclass(frozen=True)
class Verified:
    """What the proof has shown of one call of a module."""

    layout: HeadLayout
    equal_inputs: tuple[tuple[str, str], ...] = ()
    """Pairs of inputs that must hold the same tokens."""


# a module that is called with ever new sizes is proven again for some of them
_CALLS_KEPT = 256


@dataclass
class Memory:
    """What the proofs of one traced module have shown."""

    known: bool = False
    """Whether tests have verified the module's class: heads are the third axis from the end."""
    verified: dict[Hashable, Verified] = field(default_factory=dict)
    """By the signature of the call."""
    for_any_batch: dict[Hashable, Verified] = field(default_factory=dict)
    """By the kind of the call, without sizes: for graphs that are compiled."""
    rows_checked: bool = False

    def keep(
        self, signature: Hashable, kind: Hashable, proven: Verified, any_batch: Verified | None
    ) -> None:
        """Remember what was proven of a call, and for any batch of its kind if that is known."""
        if len(self.verified) >= _CALLS_KEPT:
            self.verified.clear()
        self.verified[signature] = proven
        if any_batch is not None and self.for_any_batch.setdefault(kind, any_batch) != any_batch:
            # two paths through the forward: which of them a compiled graph takes is unknown
            self.for_any_batch[kind] = Verified(HeadLayout(0, 0))


def attention_lead(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> torch.Size:
    """The leading sizes of torch's attention, which broadcasts (multi-query attention)."""
    if enable_gqa:
        return query.shape[:-2]
    return torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])


NOT_SQUARE = (
    "its map is {}×{}, not square: cross-attention, pooling with a few queries, or decoding with a "
    "cache (pass use_cache=False in transformers; an adapter of your own can keep A·v beside the "
    "cache: docs/adapters.md) has no powers"
)


BROKEN = (
    "torch.compile breaks the graph inside of its forward, and the parts that it compiles on their "
    "own cannot be followed"
)


def no_heads(scores: Sequence[int], heads: int) -> str:
    return f"its map has shape {tuple(scores)}, with no axis for its {heads} heads"


class FilteredProduct:
    """The one attention product of a forward, with the filter in it.

    Args:
        filter: the module's filter.
        verified: where the heads are, or the reason why that is unknown.
        history: the maps of this forward.
        refusals: raises what is refused.
        wants_maps: whether attention weights that the module returns are looked at.
        memory: whether the rows of the module's map have been checked.
    """

    def __init__(
        self,
        filter: GraphFilter,
        verified: HeadLayout | str | None,
        history: MapHistory,
        refusals: Refusals,
        wants_maps: bool,
        memory: Memory,
    ) -> None:
        self.filter = filter
        self.verified = verified
        self.history = history
        self.refusals = refusals
        self.wants_maps = wants_maps
        self.memory = memory
        self.compiling = torch.compiler.is_compiling()
        # how many products the forward has had so far
        self.count = 0
        self.undropped: Tensor | None = None
        self.dropout_p = 0.0
        self.layout: HeadLayout | None = None
        self.late_refusal: str | None = None
        # the map that multiplied the values, with its heads apart, its shape there, the values
        self.filtered: tuple[Step, Tensor, torch.Size, Tensor] | None = None

    def take_dropout(self, matrix: Tensor, p: float, inplace: bool) -> bool:
        """Note a dropout of the map; returns whether the filter drops entries of H instead."""
        self.undropped = matrix.clone() if inplace and not self.memory.rows_checked else matrix
        if self.filter.dropout_after != "filter":
            return False
        self.dropout_p = p
        return True

    def of_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``H·v`` in place of a call of torch's own attention, with its arguments."""
        lead = attention_lead(query, key, value, enable_gqa)
        layout = self._verify((*lead, query.shape[-2], key.shape[-2]))
        heads = self.filter.num_heads
        if not enable_gqa:
            query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
        dims, shape = query.dim(), query.shape
        query, key, value = (layout.split(x, heads) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = layout.split(attn_mask[(None,) * (dims - attn_mask.dim())], heads)
        operator = AttentionOperator(
            query,
            key,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            dropout_after=self.filter.dropout_after,
        )
        return layout.join(self._filter(operator, value), heads, shape)

    def of_flex(self, flex: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Any:
        """``H·v`` in place of flex_attention, which is linear in v: each power is a call of it."""
        lead, heads = query.shape[:-2], self.filter.num_heads
        # the compiler, which traces this call, would make an error of its own of ours
        self.late_refusal = self._refusal((*lead, query.shape[-2], key.shape[-2]))
        layout = self.layout
        if self.late_refusal is not None or layout is None:
            return flex(query, key, value, *args)
        key, value = (repeat_heads(x, query).expand(*lead, *x.shape[-2:]) for x in (key, value))
        shape, calls = value.shape, []

        def apply(x: Tensor) -> Tensor:
            calls.append(flex(query, key, layout.join(x, heads, shape), *args))
            return layout.split(calls[-1][0], heads)

        y = layout.join(
            self._filter(FunctionOperator(apply), layout.split(value, heads)), heads, shape
        )
        # the sums of the rows' exponentials, and their largest scores
        return layout.join(y, heads, shape), *calls[0][1:]

    def of_map(self, step: Step, matrix: Tensor, values: Tensor) -> Tensor:
        """``H·v`` in place of ``matrix @ values``; ``step`` is the map that ``matrix`` is of."""
        # a product broadcasts: multi-query attention has one head of values
        lead = torch.broadcast_shapes(matrix.shape[:-2], values.shape[:-2])
        layout = self._verify((*lead, *matrix.shape[-2:]))
        heads = self.filter.num_heads
        if not self.memory.rows_checked:
            self._check_rows(matrix if self.undropped is None else self.undropped)
        of_map = matrix
        matrix, values = (x.expand(*lead, *x.shape[-2:]) for x in (matrix, values))
        shape = values.shape
        split = layout.split(matrix, heads)
        operator = DenseOperator(split, self.dropout_p, self.filter.dropout_after)
        values = self.filter.mixed(operator, layout.split(values, heads))
        y = layout.join(self._filter(operator, values), heads, shape)
        if self.wants_maps:
            self.filtered = self.history.find(of_map) or step, split, matrix.shape, values
        return y

    def filtered_map(self, x: Tensor) -> Tensor:
        """H in place of ``x``, if that is an attention map that the module returns."""
        assert self.filtered is not None
        assert self.layout is not None
        own = self.history.find(x)
        if own is None:
            return x
        # built here, because H costs a product of maps and few modules return them
        step, split, shape, values = self.filtered
        new = self.filter.map(DenseOperator(split), values).to(split.dtype)
        new = self.layout.join(new, self.filter.num_heads, shape)
        returned = None
        if new.shape == step.tensor.shape:
            returned = self.history.transfer(new, step, own)
        if returned is None:
            self.refusals.refuse(
                "it returns attention weights that are not the map that multiplies its values, so "
                "there is no filtered map in their place. Do not ask it for attention weights"
            )
        return returned.to(x.dtype)

    def _filter(self, operator: Operator, values: Tensor) -> Tensor:
        y: Tensor = self.filter(operator, values)
        return y

    def _verify(self, scores: Sequence[int]) -> HeadLayout:
        """The place of the heads in a map of this shape; raises if that is unknown."""
        refusal = self._refusal(scores)
        if refusal is not None or self.layout is None:
            self.refusals.refuse(str(refusal))
        return self.layout

    def _refusal(self, scores: Sequence[int]) -> str | None:
        """Why a product with a map of this shape cannot be filtered; None sets its layout."""
        if self.compiling and not torch.compiler.is_compiling():
            return BROKEN
        self.count += 1
        if self.count > 1:
            return "its forward has more than one attention product"
        if scores[-2] != scores[-1]:
            return NOT_SQUARE.format(*scores[-2:])
        # without one, tests have verified the class
        layout = HeadLayout(len(scores), -3) if self.verified is None else self.verified
        if isinstance(layout, str):
            return layout
        if not layout.fits(scores, self.filter.num_heads):
            return no_heads(scores, self.filter.num_heads)
        self.layout = layout
        return None

    def _check_rows(self, matrix: Tensor) -> None:
        if torch.compiler.is_compiling() or matrix.is_meta:
            return
        self.memory.rows_checked = True
        sums = matrix.detach().sum(-1, dtype=torch.float32)
        # a fully masked row may be zeros
        off = torch.where(sums == 0, 0.0, (sums - 1).abs())
        if bool((off > 1e-2).any()):
            warnings.warn(
                f"the rows of the attention map of {self.refusals.name} do not sum to one (by up "
                f"to {off.max().item():.3g}); the filter uses the map as it is",
                stacklevel=2,
            )
