"""The proof that a traced attention product is attention of the module's tokens to themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gfsa.plugs.tracing.axes import size_of
from gfsa.plugs.tracing.following import AxisFollower
from gfsa.plugs.tracing.layout import HeadLayout, find_heads
from gfsa.plugs.tracing.sides import Side


class SelfAttention:
    """The sides of one attention product, and what they show.

    Args:
        rows, columns, values: the tokens of queries, keys and values.
        follower: what followed them.
        equal: whether two inputs, by name, hold the same tokens.
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
        # the inputs that hold the tokens, once the refusal is None
        self.main: set[str] = set()

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
