"""Where the heads are in a traced map, and the proof that the map is over the module's tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gfsa.plugs.tracing.axes import (
    Dim,
    Origin,
    is_constant,
    is_features,
    size_of,
)
from gfsa.plugs.tracing.following import AxisFollower


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


class Side(NamedTuple):
    """Tokens along one side of a map, or those of the values."""

    source: str
    lead: tuple[Dim, ...]
    tokens: Dim
    picks: frozenset[tuple[Dim, int]]

    def order(self) -> tuple[object, ...]:
        """Equal for the same tokens in the same order; heads and constant axes do not count."""
        lead = tuple(
            tuple(f for f in dim if f.atom is not None and not is_features((f,)))
            for dim in self.lead
        )
        while lead and not lead[0]:
            lead = lead[1:]
        return lead, self.tokens, self.picks


def sides_of_map(origins: Iterable[Origin]) -> tuple[list[Side], list[Side]]:
    """The tokens of the rows and of the columns of a map ``(..., N, N)``."""
    rows, columns = [], []
    for origin in origins:
        *lead, row, column = origin.dims
        # a bias or a mask for pairs of tokens depends on both, and says nothing about either
        if is_constant(column) and (row == () or not is_constant(row)):
            rows.append(Side(origin.source, tuple(lead), row, origin.picks))
        elif is_constant(row) and not is_constant(column):
            columns.append(Side(origin.source, tuple(lead), column, origin.picks))
    return rows, columns


def sides_of_tokens(origins: Iterable[Origin]) -> list[Side]:
    """The tokens of queries, keys or values ``(..., N, D)``."""
    return [Side(o.source, o.dims[:-2], o.dims[-2], o.picks) for o in origins]


class SelfAttention:
    """The sides of one attention product, and what they show.

    Args:
        rows, columns, values: the tokens of queries, keys and values.
        follower: what followed them.
        equal: name of an input → name of another one that holds the same tokens.
    """

    def __init__(
        self,
        rows: list[Side],
        columns: list[Side],
        values: list[Side],
        follower: AxisFollower,
        equal: Callable[[str, str], bool],
    ) -> None:
        self.rows, self.columns, self.values = rows, columns, values
        self.follower = follower
        self.equal = equal
        self.equal_inputs: list[tuple[str, str]] = []

    def refusal(self) -> str | None:
        """Why this is not attention of tokens to themselves, or None if it is."""
        named = {"queries": self.rows, "keys": self.columns, "values": self.values}
        for name, sides in named.items():
            if not sides:
                lost = self.follower.lost
                return (
                    f"how its {name} follow from its inputs could not be followed"
                    + (f" (the last operation that is not understood is {lost})" if lost else "")
                    + ", so whether queries and keys are the same tokens is not known"
                )
        return self._refusal_of_sources() or self._refusal_of_channels() or self._refusal_of_order()

    def _refusal_of_sources(self) -> str | None:
        rows, columns, values = (_sources(s) for s in (self.rows, self.columns, self.values))
        self.main = _main(rows, columns, values)
        if not self.main:
            # another input may hold the same tokens, as in attention(x, x, x)
            self._unite()
            rows, columns, values = (_sources(s) for s in (self.rows, self.columns, self.values))
            self.main = _main(rows, columns, values)
        if self.main:
            return None
        return (
            f"its queries come from {_listed(rows)} and its keys from {_listed(columns)}, which "
            "hold different tokens: cross-attention has no powers"
        )

    def _unite(self) -> None:
        """Give inputs that hold the same tokens one name."""
        names = list(dict.fromkeys(s.source for s in (*self.rows, *self.columns, *self.values)))
        first: dict[str, str] = {}
        for name in names:
            twin = next((n for n in names if n in first.values() and self.equal(n, name)), name)
            first[name] = twin
            if twin != name:
                self.equal_inputs.append((twin, name))
        self.rows, self.columns, self.values = (
            [side._replace(source=first[side.source]) for side in sides]
            for sides in (self.rows, self.columns, self.values)
        )

    def _refusal_of_channels(self) -> str | None:
        for side in self.rows:
            atoms = [factor.atom for factor in side.tokens if factor.atom is not None]
            if side.source in self.main and any(
                atom.kind == "features" or (side.source, atom) in self.follower.channels
                for atom in atoms
            ):
                size = size_of(side.tokens)
                return f"its map is {size}×{size} over channels, not tokens"
        return None

    def _refusal_of_order(self) -> str | None:
        for source in sorted(self.main):
            rows, columns = (
                {side.order() for side in sides if side.source == source}
                for sides in (self.rows, self.columns)
            )
            if rows != columns:
                return (
                    f"its queries and keys are different parts of {source}, or the same tokens in "
                    "another order: the product of its map with itself would join different tokens"
                )
        shared = [side for side in self.values if side.source in self.main]
        places = {side.order() if shared else side.tokens for side in shared or self.values}
        wanted = {
            side.order() if shared else side.tokens
            for side in self.columns
            if side.source in self.main
        }
        if not places <= wanted:
            return (
                "its values are other tokens than its keys, or the same tokens in another order: "
                "the product of its map with itself would join different tokens"
            )
        return None

    def layout(self, scores: Sequence[int], heads: int) -> HeadLayout | str:
        """Where the heads are, or why that is not known."""
        return find_heads([side for side in self.rows if side.source in self.main], scores, heads)


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


def _sources(sides: Iterable[Side]) -> set[str]:
    return {side.source for side in sides}


def _main(rows: set[str], columns: set[str], values: set[str]) -> set[str]:
    """The inputs that hold the tokens: queries, keys and values come from them.

    Positions may be an input too, and be added to the queries and keys of two sequences. So all
    inputs of the values count; if the values have an input of their own, queries and keys must
    come from the same inputs.
    """
    shared = rows & columns
    if values <= shared:
        return values
    return shared if rows == columns else set()


def _listed(names: set[str]) -> str:
    return " and ".join(sorted(names))
