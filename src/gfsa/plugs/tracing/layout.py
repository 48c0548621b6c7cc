"""Where the heads are among the axes of a traced map."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gfsa.plugs.tracing.axes import Dim, is_constant, is_features, size_of
from gfsa.plugs.tracing.sides import Side


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
        sizes = (self.before or -1, heads, self.after or -1)
        # a mask may be the same for all heads
        x = x.unflatten(axis, (1, 1, 1) if x.shape[axis] == 1 else sizes)
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
        merged = (self.before or 1) * (self.after or 1)
        size = scores[self.axis]
        if self.before is None or self.after is None:
            return size % (heads * merged) == 0
        return size == heads * merged


@dataclass(frozen=True)
class Verified:
    """What one forward has shown about a module."""

    layout: HeadLayout
    equal_inputs: tuple[tuple[str, str], ...] = ()
    """Pairs of inputs that must hold the same tokens."""


def find_heads(sides: Sequence[Side], scores: Sequence[int], heads: int) -> HeadLayout | str:
    """Where the heads of the queries are, or why that is not known."""
    rank = len(scores)
    if heads == 1:
        return HeadLayout(rank, -3)
    found = set()
    for side in sides:
        for place, dim in enumerate(side.lead):
            found |= _heads_in(dim, place - len(side.lead) - 2, rank, heads)
    if not found:
        # no projection made the heads: an axis of their number that holds no tokens
        for place, size in enumerate(scores[:-2]):
            if size == heads and all(is_constant(_lead(side, place, rank)) for side in sides):
                found.add(HeadLayout(rank, place - rank))
    if len(found) == 1:
        return found.pop()
    many = "more than one axis that could be" if found else "no axis for"
    return f"its map has shape {tuple(scores)}, with {many} its {heads} heads"


def _lead(side: Side, place: int, rank: int) -> Dim:
    place -= rank - 2 - len(side.lead)
    return side.lead[place] if place >= 0 else ()


def _heads_in(dim: Dim, axis: int, rank: int, heads: int) -> set[HeadLayout]:
    """The layouts in which an axis holds the heads: a part of a projection's features."""
    found = set()
    place = 0
    for of_features, run in itertools.groupby(dim, key=lambda factor: is_features((factor,))):
        factors = list(run)
        # groups of heads and the heads of each group may be two neighbouring factors
        if of_features and size_of(tuple(factors)) == heads:
            before, after = size_of(dim[:place]), size_of(dim[place + len(factors) :])
            found.add(HeadLayout(rank, axis, before, after))
        place += len(factors)
    return found


def settled(layout: HeadLayout, scores: Sequence[int], heads: int) -> HeadLayout | None:
    """The layout for any batch, or None if this forward does not show it.

    A batch of one sample, or of as many as there are heads or tokens, shows nothing: the sizes
    that the module's code reads could then belong to another axis.
    """
    if heads == 1:
        return layout
    samples, tokens = math.prod(scores[:-2]) // heads, scores[-1]
    if len({samples, heads, tokens, 1}) < 4:
        return None
    if (layout.before, layout.after) == (1, 1):
        return layout
    if layout.after == 1:
        return layout._replace(before=None)
    if layout.before == 1:
        return layout._replace(after=None)
    # which of the two grows with the batch is not known
    return None
