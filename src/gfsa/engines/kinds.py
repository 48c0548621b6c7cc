"""The filters that an engine's configuration can name."""

from __future__ import annotations

from gfsa.filters import GFSA, Exclusive, GraphFilter, Laplacian, PageRank, Polynomial, Twicing

_KINDS: dict[str, type[GraphFilter]] = {
    kind.__name__: kind for kind in (GFSA, Exclusive, Polynomial, Twicing, Laplacian, PageRank)
}


def kind_named(name: str) -> type[GraphFilter]:
    """The class of the filters called ``name``."""
    if name not in _KINDS:
        raise ValueError(f"filter must be one of {', '.join(_KINDS)}; got {name!r:.80}")
    return _KINDS[name]
