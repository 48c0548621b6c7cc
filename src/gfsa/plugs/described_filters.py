"""Filters built from their description, as files and checkpoints of whole models have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gfsa import filters as filter_kinds
from gfsa._version import __version__
from gfsa.filters import GraphFilter
from gfsa.filters.partial import PartialPolynomial
from gfsa.operators.call import check_dropout_place

FORMAT = 1
EXTRA = "_extra_state"
"""The key of a filter's state under which its description is."""

# all filters of a file together: far above any use, and little memory
_MOST_COEFFICIENTS = 2**22
KINDS = {
    kind.__name__: kind
    for kind in (
        filter_kinds.GFSA,
        filter_kinds.Polynomial,
        filter_kinds.Exclusive,
        filter_kinds.Twicing,
        filter_kinds.Laplacian,
        filter_kinds.PageRank,
        PartialPolynomial,
    )
}
"""The filters that can be built from their description: polynomials of the attention map."""


def build(entry: Mapping[str, Any], heads: int, name: str, source: str) -> GraphFilter:
    """A described filter without its numbers, for the layer ``name`` with ``heads`` heads."""
    return Builder(source).build(entry, heads, name)


class Builder:
    """Builds the filters of one source, which together must have a size that a model needs.

    Args:
        source: where the descriptions are from, for messages.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._room = _MOST_COEFFICIENTS

    def build(self, entry: Mapping[str, Any], heads: int, name: str) -> GraphFilter:
        """A described filter without its numbers, for the layer ``name`` with ``heads`` heads."""
        kind, arguments = self._kind_and_arguments(entry, name)
        self._room -= self._coefficients(kind, arguments, heads, name)
        if self._room < 0:
            raise ValueError(
                f"{self.source} describes filters with more than {_MOST_COEFFICIENTS} "
                "coefficients, which is refused: filters are a few numbers per head"
            )
        try:
            # on the host and trainable, wherever load is called
            with torch.device("cpu"), torch.inference_mode(False):
                built = kind(**arguments)
                if "exclusive" in entry:
                    built.exclude(**entry["exclusive"])
                if entry.get("depth"):
                    built.add_depth()
            # files of older versions may not contain it
            built.dropout_after = check_dropout_place(entry.get("dropout_after", "attention"))
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(
                f"{self.source}: the filter of {name} cannot be built: {error!s:.300}"
            ) from error
        return built

    def _kind_and_arguments(
        self, entry: Mapping[str, Any], name: str
    ) -> tuple[type[GraphFilter], dict[str, Any]]:
        kind, arguments = entry.get("kind"), entry.get("arguments")
        if kind not in KINDS or not isinstance(arguments, dict):
            raise ValueError(
                f"{self.source}: the filter of {name} is a {kind!r:.80}; known are "
                f"{', '.join(KINDS)}, with their arguments as a JSON object. If a newer gfsa wrote "
                "it, install that version"
            )
        return KINDS[kind], arguments

    def _coefficients(
        self, kind: type[GraphFilter], arguments: Mapping[str, Any], heads: int, name: str
    ) -> int:
        """How many coefficients the described filter would have in memory, before it is built.

        The heads must be the model's. An order that is no integer is left to the filter to refuse.
        """
        described = arguments.get("num_heads")
        if type(described) is not int or described != heads:
            raise ValueError(
                f"{self.source} has a filter for {described!r:.40} heads, {name} has {heads}; load "
                "it into the backbone that it was saved from"
            )
        exact = arguments.get("power") == "exact"
        orders = [
            arguments.get("degree"),
            arguments.get("hops"),
            arguments.get("K") if exact else 2,
        ]
        powers = 1 + max((order for order in orders if type(order) is int and order > 0), default=2)
        learned = powers if issubclass(kind, filter_kinds.Polynomial) else 3
        tables = heads if issubclass(kind, PartialPolynomial) else 1
        return heads * powers + tables * learned * powers


def entries_of(description: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """The description of each filter by the name of its layer; refuses another format."""
    if not isinstance(description, Mapping):
        raise ValueError(
            f"{source} describes no filters: expected a JSON object, got "
            f"{type(description).__name__}; save the filters again"
        )
    if type(description.get("format")) is not int or description["format"] != FORMAT:
        raise ValueError(
            f"{source} has format {description.get('format')!r:.40}, this version of gfsa "
            f"({__version__}) reads format {FORMAT}; it was written by gfsa "
            f"{description.get('gfsa')!r:.40}: load it with that version"
        )
    entries = description.get("filters")
    if not isinstance(entries, dict) or not entries:
        raise ValueError(
            f"{source} describes no filters: expected an entry for each layer under 'filters', got "
            f"{entries!r:.40}; save the filters of a plugged model again"
        )
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
            raise ValueError(
                f"{source}: the entry of {name!r:.80} describes no filter: expected an object with "
                f"a 'kind', got {entry!r:.40}; save the filters again"
            )
    return entries


def numbers_of(filter: GraphFilter) -> dict[str, Tensor]:
    """A filter's state without its description, which is saved as JSON."""
    return {key: value for key, value in filter.state_dict().items() if key != EXTRA}
