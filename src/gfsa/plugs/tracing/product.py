"""The attention product of one traced forward: verify its map, and filter it.

A forward has exactly one, ``A·v`` with a map that it computed or a call of torch's own attention.
The filter's ``H·v`` takes its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator, DenseOperator, Operator
from gfsa.plugs.tracing.layout import HeadLayout
from gfsa.plugs.tracing.maps import MapHistory, Step
from gfsa.plugs.tracing.refusals import Refusals
from gfsa.plugs.tracing.sides import Side, sides_of_map, sides_of_tokens
from gfsa.plugs.tracing.verification import NewPathError, Verifier


class FilteredProduct:
    """The one attention product of a forward, with the filter in it.

    Args:
        filter: the module's filter.
        inputs: the module's inputs by name.
        verifier: refuses a map that is not tokens × tokens, and finds its axis of heads.
        history: the maps of this forward.
        refusals: raises what is refused.
        wants_maps: whether attention weights that the module returns are looked at.
    """

    def __init__(
        self,
        filter: GraphFilter,
        inputs: Mapping[str, Tensor],
        verifier: Verifier,
        history: MapHistory,
        refusals: Refusals,
        wants_maps: bool,
    ) -> None:
        self.filter = filter
        self.inputs = inputs
        self.verifier = verifier
        self.history = history
        self.refusals = refusals
        self.wants_maps = wants_maps
        self.memory = verifier.memory
        # how many products the forward has had so far
        self.count = 0
        self.undropped: Tensor | None = None
        self.dropout_p = 0.0
        self.layout: HeadLayout | None = None
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
        lead = query.shape[:-2]
        if not enable_gqa:
            # torch broadcasts here: multi-query attention has one head of keys and values
            lead = torch.broadcast_shapes(lead, key.shape[:-2], value.shape[:-2])
        rows, columns = (sides_of_tokens(self._origins(x)) for x in (query, key))
        scores = (*lead, query.shape[-2], key.shape[-2])
        layout, heads = self._verify(scores, rows, columns, value), self.filter.num_heads
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

    def of_map(self, step: Step, matrix: Tensor, values: Tensor) -> Tensor:
        """``H·v`` in place of ``matrix @ values``; ``step`` is the map that ``matrix`` is of."""
        rows, columns = sides_of_map(self._origins(matrix))
        # a product broadcasts: multi-query attention has one head of values
        lead = torch.broadcast_shapes(matrix.shape[:-2], values.shape[:-2])
        layout = self._verify((*lead, *matrix.shape[-2:]), rows, columns, values)
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

    def _origins(self, x: Tensor) -> Any:
        follower = self.verifier.follower
        return follower.of(x) if follower is not None else ()

    def _verify(
        self, scores: Sequence[int], rows: list[Side], columns: list[Side], values: Tensor
    ) -> HeadLayout:
        """Refuse a map that is not tokens × tokens, and find its axis of heads."""
        self.count += 1
        if self.count > 1:
            self.refusals.refuse("its forward has more than one attention product")
        try:
            layout = self.verifier.layout(scores, rows, columns, values, self.inputs)
        except (NewPathError, ValueError) as error:
            self.refusals.error = error
            raise
        if isinstance(layout, str):
            self.refusals.refuse(layout)
        self.layout = layout
        return layout

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
