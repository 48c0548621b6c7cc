"""The tokens along the sides of an attention map: which input they come from, in which order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gfsa.plugs.tracing.axes import Dim, Origin, is_constant, is_features


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
