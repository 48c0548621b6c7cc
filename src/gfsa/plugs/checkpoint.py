"""Filters on disk: a folder with their numbers (safetensors) and their description (JSON)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gfsa._version import __version__
from gfsa.filters.description import kind_of
from gfsa.plugs.backbone import canonical_name, depths_of, fingerprint_of, some_of
from gfsa.plugs.described_filters import FORMAT, KINDS, numbers_of
from gfsa.plugs.filter_files import FilterFiles, write_files
from gfsa.plugs.hub.download import filter_folder
from gfsa.plugs.partitioned import gathered
from gfsa.plugs.restoring import TRACED, make_plans, most_bytes, put_filters
from gfsa.plugs.sites import check_model, is_sharded, plugged_sites
from gfsa.plugs.tracing.adapter import TracerAdapter


def save(model: nn.Module, path: str | Path) -> None:
    """Write the model's filters, and nothing else of the model, into the folder ``path``.

    A few kB: ``filters.safetensors`` holds the learned numbers, ``filters.json`` the kind of each
    filter, the layer it belongs to, the class and shapes of that layer, and a digest of both files.
    Until both are complete on the disk, an earlier save in the folder stays as it is.

    If the model is sharded over processes, every process has to call this: the filters are
    gathered, and the first process writes them.

    Args:
        model: a plugged model.
        path: the folder; it is created if it does not exist.

    Raises:
        TypeError: if ``model`` is no ``nn.Module``.
        ValueError: if the model has no filters, a filter is of a class that :func:`load` cannot
            build, or a value is not finite or has been offloaded.

    Examples:
        >>> report = gfsa.plug(model)
        >>> gfsa.save(model, "filters")
        >>> sorted(path.name for path in pathlib.Path("filters").iterdir())
        ['filters.json', 'filters.safetensors']
    """
    description = describe(model)
    if not description["filters"]:
        raise ValueError(f"{type(model).__name__} has no filters to save; gfsa.plug(model) first")
    plugged = plugged_sites(model)
    for name, site in plugged.items():
        kind = type(site.filter)
        if KINDS.get(kind.__name__) is not kind:
            raise ValueError(
                f"the filter of {name or 'the model'} is a {kind_of(kind)}, which gfsa.load cannot "
                f"build: it builds {', '.join(KINDS)}. Save model.state_dict() instead, or, if a "
                "polynomial that has learned is enough, replace each filter by filter.fold() "
                "(docs/reference/filters.md)"
            )
    if len(description["filters"]) != len(plugged):
        raise ValueError(
            f"{some_of(plugged)} have the same names without the prefixes of wrappers and task "
            "models; save the filters of each part on its own"
        )
    with gathered(p for site in plugged.values() for p in site.filter.parameters()):
        tensors = {
            f"{canonical_name(model, name)}.{key}": _values(value, f"{name}.{key}")
            for name, site in plugged.items()
            for key, value in numbers_of(site.filter).items()
        }
    if any(is_sharded(site) for site in plugged.values()) and torch.distributed.get_rank() != 0:
        return
    from safetensors.torch import save as serialise

    write_files(Path(path), description, serialise(tensors, metadata={"format": "pt"}))


def _values(value: Any, name: str) -> Tensor:
    """A filter's tensor, whole, on the host."""
    if value.is_meta:
        raise ValueError(
            f"{name} is on the meta device and has no values to save: save the filters before "
            "accelerate offloads them"
        )
    gathered: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    # a copy of its own: safetensors refuses tensors of layers that share one parameter
    tensor = gathered.detach().clone(memory_format=torch.contiguous_format).cpu()
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(
            f"{name} has values that are not finite, which gfsa.load would refuse: nothing was "
            "written, and an earlier save in the folder is kept"
        )
    return tensor


def load(
    model: nn.Module,
    path: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
) -> None:
    """Put saved filters into ``model``, plugging it where needed.

    Layers, kinds, head counts, shapes and values are checked first. If anything does not fit, an
    error says what; whatever is raised, by Ctrl-C too, the model is unchanged.

    Args:
        model: the backbone that the filters were saved from.
        path: the folder that :func:`save` wrote, or a repository on the Hugging Face Hub,
            ``"user/name"``, if there is no such folder.
        revision: of the repository: a branch, a tag or a commit.
        token: an access token for the Hub; by default the one that you are logged in with.

    Raises:
        TypeError: if ``model`` is no ``nn.Module``.
        FileNotFoundError: if there are no filters at ``path``.
        ValueError: if the files are damaged, or the filters do not fit the model.

    Examples:
        >>> report = gfsa.plug(model)
        >>> gfsa.save(model, "filters")
        >>> gfsa.unplug(model)
        >>> gfsa.load(model, "filters")
        >>> list(gfsa.filters_of(model))
        ['layers.0.self_attn', 'layers.1.self_attn']
    """
    check_model(model)
    folder = filter_folder(path, revision, token)
    source = str(path)
    with FilterFiles(folder) as files:
        plans = make_plans(model, files.description(), source, other_versions=True)
        tensors = files.tensors(most_bytes(plans))
    put_filters(model, plans, tensors, source)


def describe(model: nn.Module) -> dict[str, Any]:
    """The filters of a model and their layers, as plain data."""
    names = {name: canonical_name(model, name) for name in plugged_sites(model)}
    return {
        "format": FORMAT,
        "gfsa": __version__,
        "model": type(model).__name__,
        "filters": {
            names[name]: {
                **site.filter.describe(),
                "backbone": fingerprint_of(site.module),
                # gfsa.load traces only layers that were traced when they were saved
                **({TRACED: True} if isinstance(site.adapter, TracerAdapter) else {}),
            }
            for name, site in plugged_sites(model).items()
        },
        "layers": depths_of(model, names.values()),
    }
