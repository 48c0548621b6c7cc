"""The descriptions of the filters that a transformers checkpoint contains.

vLLM asks for every model that it serves, so a checkpoint without filters must cost little: a folder
is looked through by its headers, and of a name on the hub only the index, or the header of its one
file, is fetched before vLLM fetches the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gfsa.filters.spec import EXTRA, read_description
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.saving.pretrained import filter_tensors


def descriptions_in(
    model: str | Path, revision: str | None = None, token: Any = None
) -> dict[str, dict[str, Any]]:
    """What each filter is, by the name of its layer; empty if the checkpoint has no filters.

    Args:
        model: a folder, or a name on the hub.
        revision, token: of the hub.
    """
    hub = {"revision": revision, "token": token}
    if not any(f".{CHILD}." in name for name in _tensor_names(model, hub)):
        return {}
    tensors = filter_tensors(model, hub, index_first=True)
    found = {
        key.removesuffix(f".{CHILD}.{EXTRA}"): read_description(value)
        for key, value in tensors.items()
        if key.endswith(f".{CHILD}.{EXTRA}")
    }
    undescribed = {key.rpartition(f".{CHILD}.")[0] for key in tensors} - found.keys()
    if undescribed:
        raise ValueError(
            f"{model} has a filter for {min(undescribed)!r:.80} without its description "
            f"({CHILD}.{EXTRA}); save the plugged model again with save_pretrained"
        )
    return found


def _tensor_names(model: str | Path, hub: dict[str, Any]) -> Iterable[str]:
    """The names in a checkpoint of safetensors; none where there is no such checkpoint."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    if Path(model).is_dir():
        index, weights = Path(model, SAFE_WEIGHTS_INDEX_NAME), Path(model, SAFE_WEIGHTS_NAME)
        if index.is_file():
            return _names_in_index(index)
        return _names_in_file(weights) if weights.is_file() else ()
    found = _cached(model, SAFE_WEIGHTS_INDEX_NAME, **hub)
    if found is not None:
        return _names_in_index(found)
    found = _cached(model, SAFE_WEIGHTS_NAME, **hub, local_files_only=True)
    if found is not None:
        return _names_in_file(found)
    return _names_in_header(model, SAFE_WEIGHTS_NAME, hub)


def _names_in_index(index: Path) -> Iterable[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{index} is damaged: {error!r:.200}") from error
    return [str(name) for name in weight_map]


def _names_in_file(file: Path) -> Iterable[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as checkpoint:
        return list(checkpoint.keys())


def _cached(model: str | Path, name: str, **hub: Any) -> Path | None:
    """A file of the hub, fetched if it is not in the cache; None if it cannot be had."""
    from transformers.utils.hub import cached_file

    try:
        file = cached_file(str(model), name, **hub)
    # no such file or repository, no connection, or a name of another kind than the hub's: whatever
    # it is, vLLM will say so when it loads the weights, and refuses filters that were not found
    except (OSError, ValueError):
        return None
    return None if file is None else Path(file)


def _names_in_header(model: str | Path, name: str, hub: dict[str, Any]) -> Iterable[str]:
    """From the first bytes of a file on the hub, which is not fetched."""
    from huggingface_hub import parse_safetensors_file_metadata

    try:
        return list(parse_safetensors_file_metadata(str(model), name, **hub).tensors)
    # as in _cached, and whatever the hub's client raises where there is no connection
    except Exception:
        return ()
