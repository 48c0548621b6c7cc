"""What a filter is, as plain data: its name in files, and its description in a checkpoint.

θ alone does not tell which polynomial it belongs to. The checkpoint of a whole model therefore has,
beside each θ, the description of the filter (its kind and the arguments that build it) as the bytes
of a JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# names of the library's own filters, which files use for them
_LIBRARY_KINDS: set[str] = set()

# far above any use: a damaged file must not be read as text of any size
_MOST_DESCRIPTION = 2**22
# how far decay·x + (1 - decay)·x drifts from a byte x in float32, with decay up to 0.9999 (0.016)
_ROUNDING = 0.05


def note_kind(cls: type) -> None:
    """Reserve the name of a filter class for it, if the class is one of the library."""
    if _is_of_library(cls):
        _LIBRARY_KINDS.add(cls.__name__)


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
