"""What a filter is, as plain data: its kind, the arguments that build it, and how it is rebuilt.

θ alone does not tell which polynomial it belongs to. Files therefore keep a description of each
filter; the checkpoint of a whole model has it beside each θ as the bytes of a JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gfsa.operators.call import check_dropout_place

if TYPE_CHECKING:
    from gfsa.filters.base import GraphFilter

EXTRA = "_extra_state"
"""The key of a filter's state under which its description is."""

KINDS: dict[str, type[GraphFilter]] = {}
"""The filters that can be built from their description: the classes of ``gfsa.filters``."""

MOST_DEGREE = 16
"""Degree of a rebuilt filter, unless the caller allows more: every power is an attention pass."""

# names of all filter classes of the library, comparison methods among them
_LIBRARY_KINDS: set[str] = set()

# far above any use: a damaged file must not be read as text of any size
_MOST_DESCRIPTION = 2**22
# how far decay·x + (1 - decay)·x drifts from a byte x in float32, with decay up to 0.9999 (0.016)
_ROUNDING = 0.05


def note_kind(cls: type[GraphFilter]) -> None:
    """Reserve the name of a filter class for it, if the class is one of the library."""
    if _is_of_library(cls):
        _LIBRARY_KINDS.add(cls.__name__)
    if cls.__module__.startswith("gfsa.filters."):
        KINDS[cls.__name__] = cls


def kind_of(cls: type) -> str:
    """The name of a filter class in files; a class of the user's never has that of one of ours."""
    if _is_of_library(cls) or cls.__name__ not in _LIBRARY_KINDS:
        return cls.__name__
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_of_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "gfsa"


def is_same_filter(saved: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether two descriptions are of one filter; where its dropout acts is left aside."""
    compared = ("kind", "arguments", "exclusive", "depth")
    return all(saved.get(key) == own.get(key) for key in compared)


def write_description(description: Mapping[str, Any]) -> Tensor:
    """A description as the bytes that a checkpoint keeps."""
    return torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)


def read_description(state: Tensor) -> dict[str, Any]:
    """A filter's description from the bytes that a checkpoint keeps."""
    if state.numel() > _MOST_DESCRIPTION:
        raise ValueError(
            f"the description of a filter has {state.numel()} bytes; more than {_MOST_DESCRIPTION} "
            "are refused, because a filter needs far fewer. Take another copy of the checkpoint"
        )
    # a checkpoint that was averaged with others, or cast, has the same bytes as floats
    if state.is_floating_point() and bool(((state - state.round()).abs() < _ROUNDING).all()):
        state = state.round().to(torch.int64)
    try:
        description = json.loads(bytes(state.tolist()))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the description of a filter is damaged: {error}. It is the bytes of a text: where "
            "checkpoints are averaged, take keys that end in _extra_state from one of them"
        ) from error
    if not isinstance(description, dict):
        raise ValueError(
            "the description of a filter is damaged: expected a JSON object, got "
            f"{description!r:.80}. Take another copy of the checkpoint"
        )
    return description


def numbers_of(filter: GraphFilter) -> dict[str, Tensor]:
    """A filter's state without its description."""
    return {key: value for key, value in filter.state_dict().items() if key != EXTRA}


def build(
    entry: Mapping[str, Any], heads: int, name: str, source: str, max_degree: int = MOST_DEGREE
) -> GraphFilter:
    """A described filter without its numbers.

    Args:
        entry: the description, from a file that may have any content.
        heads: of the layer; the description must have as many.
        name: of the layer, for messages.
        source: where the description is from, for messages.
        max_degree: the highest degree that is accepted.
    """
    kind, arguments = entry.get("kind"), entry.get("arguments")
    if not isinstance(kind, str) or kind not in KINDS or not isinstance(arguments, dict):
        raise ValueError(
            f"{source}: the filter of {name} is a {kind!r:.80}; known are "
            f"{', '.join(sorted(KINDS))}, with their arguments as a JSON object. If a newer gfsa "
            "wrote it, install that version"
        )
    described = arguments.get("num_heads")
    if type(described) is not int or described != heads:
        raise ValueError(
            f"{source} has a filter for {described!r:.40} heads, {name} has {heads}; load it into "
            "the backbone that it was saved from"
        )
    try:
        # on the host and trainable, wherever load is called
        with torch.device("cpu"), torch.inference_mode(False):
            built = KINDS[kind](**arguments)
            if entry.get("exclusive") is not None:
                built.exclude(**entry["exclusive"])
            if entry.get("depth"):
                built.add_depth()
        # files of older versions may not contain it
        built.dropout_after = check_dropout_place(entry.get("dropout_after", "attention"))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{source}: the filter of {name} cannot be built: {error!s:.300}") from (
            error
        )
    if built.degree > max_degree:
        raise ValueError(
            f"{source}: the filter of {name} has degree {built.degree}, which needs as many "
            f"attention passes; more than {max_degree} is refused. If you trust the file, pass "
            f"max_degree={built.degree}"
        )
    return built
