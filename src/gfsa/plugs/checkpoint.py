"""Filters on disk: a folder with their numbers (safetensors) and their description (JSON)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gfsa import filters as filter_kinds
from gfsa._version import __version__
from gfsa.filters import GraphFilter
from gfsa.filters.base import kind_of
from gfsa.filters.partial import PartialPolynomial
from gfsa.operators.call import check_dropout_place
from gfsa.plugs.attach import device_of, dtype_for, install, notify_adapters
from gfsa.plugs.backbone import canonical_name, check_depths, depths_of, fingerprint_of, some_of
from gfsa.plugs.filter_files import DIGEST, FilterFiles, write_files
from gfsa.plugs.hub.download import filter_folder
from gfsa.plugs.other_versions import in_installed_names, warn_of_other_names
from gfsa.plugs.parallel import refuse_distributed
from gfsa.plugs.partitioned import gathered
from gfsa.plugs.rollback import all_or_nothing
from gfsa.plugs.sites import (
    Site,
    check_model,
    is_sharded,
    plugged_sites,
    refuse_sharded,
    sites,
)
from gfsa.plugs.tracing.adapter import TracerAdapter

FORMAT = 1
EXTRA = "_extra_state"
TRACED = "traced"

# all filters of a file together: far above any use, and little memory
_MOST_COEFFICIENTS = 2**22
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KINDS = {
    kind.__name__: kind
    for kind in (
        filter_kinds.GFSA,
        filter_kinds.Polynomial,
        filter_kinds.Twicing,
        filter_kinds.Laplacian,
        filter_kinds.PageRank,
        PartialPolynomial,
    )
}
"""The filters that can be built from their description: polynomials of the attention map."""


def save(model: nn.Module, path: str | Path) -> None:
    """Write the model's filters, and nothing else of the model, into the folder ``path``.

    A few kB: ``filters.safetensors`` holds the learned numbers, ``filters.json`` the kind of each
    filter, the layer it belongs to, the class and shapes of that layer, and a digest of both files.
    Until both are complete on the disk, an earlier save in the folder stays as it is.

    If the model is sharded over processes, every process has to call this: the filters are
    gathered, and the first process writes them.
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
            for key, value in _numbers(site.filter).items()
        }
    if any(is_sharded(site) for site in plugged.values()) and torch.distributed.get_rank() != 0:
        return
    from safetensors.torch import save as serialise

    write_files(Path(path), description, serialise(tensors, metadata={"format": "pt"}))


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
    """
    check_model(model)
    folder = filter_folder(path, revision, token)
    source = str(path)
    with FilterFiles(folder) as files:
        plans = _plan(model, files.description(), source, other_versions=True)
        tensors = files.tensors(_most_bytes(plans))
    _put(model, plans, tensors, source)


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


def check_restorable(
    model: nn.Module, description: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str
) -> None:
    """Raise where :func:`restore` would; the model is unchanged."""
    plans = _plan(model, description, source)
    _check_tensors(plans, tensors, source)
    _check_same_layers(plugged_sites(model), plans, source)
    for plan in plans:
        _fill(plan, tensors, source)


def restore(
    model: nn.Module,
    description: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    source: str,
    *,
    other_versions: bool = False,
) -> None:
    """Give ``model`` the filters of ``description`` with the numbers in ``tensors``.

    Args:
        model: plugged in the same layers, or not plugged.
        description: what :func:`describe` returns.
        tensors: the numbers, by the name of the layer and of the filter's parameter.
        source: where they are from, for messages.
        other_versions: whether layers may have the names of another version of the model's library.
    """
    plans = _plan(model, description, source, other_versions=other_versions)
    _put(model, plans, tensors, source)


def _put(model: nn.Module, plans: list[_Plan], tensors: Mapping[str, Tensor], source: str) -> None:
    """Give every planned site its filter: checked outside of the model, then all or nothing."""
    _check_tensors(plans, tensors, source)
    plugged = plugged_sites(model)
    refuse_sharded(plugged, "load filters")
    _check_same_layers(plugged, plans, source)
    for plan in plans:
        _fill(plan, tensors, source)
    if not plugged:
        if any(list(plan.filter.parameters()) for plan in plans):
            refuse_distributed(model, [plan.site.module for plan in plans])
        install(model, [(plan.site, plan.filter) for plan in plans])
        return
    # a filter that is plugged already keeps its device and precision
    targets = [plan.site.filter for plan in plans]
    with all_or_nothing(model, values=[p for target in targets for p in target.parameters()]):
        for plan, target in zip(plans, targets, strict=True):
            target.load_state_dict(plan.filter.state_dict())
        notify_adapters(model, plugged.values())


def _check_same_layers(plugged: Mapping[str, Site], plans: list[_Plan], source: str) -> None:
    """Refuse a model that is plugged in other layers than those of the plans."""
    if plugged and set(plugged) != {plan.site.name for plan in plans}:
        raise ValueError(
            f"the model is plugged in layers {some_of(plugged)}, but {source} has filters for "
            f"{some_of([plan.site.name for plan in plans])}; gfsa.unplug(model) first"
        )


def _fill(plan: _Plan, tensors: Mapping[str, Tensor], source: str) -> None:
    """Give the rebuilt filter its numbers, in the precision that it will have in the model."""
    name, filter = plan.site.name, plan.filter
    if plan.site.is_plugged:
        current = plan.site.filter
        place, dtype = current.base.device, current.base.dtype
        if current.theta is not None:
            place, dtype = current.theta.device, current.theta.dtype
    else:
        place = device_of(plan.site.module) or torch.get_default_device()
        dtype = dtype_for(plan.site.module) or filter.base.dtype
    if place.type == "meta":
        raise ValueError(
            f"{name} is on the meta device, where the numbers of {source} would be lost: give the "
            "model its weights first, and load filters before accelerate offloads them"
        )
    with torch.inference_mode(False), torch.no_grad():
        filter.to(dtype=dtype)
        for key, value in _numbers(filter).items():
            value.copy_(tensors[f"{plan.saved}.{key}"])
            _check_finite(value, f"{source}: {plan.saved}.{key}", f"in {value.dtype}")
        if filter.is_polynomial:
            _check_finite(filter.coefficients(), f"{source}: the filter of {name}", "as a sum")


def _check_finite(tensor: Tensor, name: str, how: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} has values that are not finite {how}")


def _values(value: Any, name: str) -> Tensor:
    """A filter's tensor, whole, on the host."""
    if value.is_meta:
        raise ValueError(
            f"{name} is on the meta device and has no values to save: save the filters before "
            "accelerate offloads them"
        )
    gathered: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    tensor = gathered.detach().cpu().contiguous()
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(
            f"{name} has values that are not finite, which gfsa.load would refuse; an earlier save "
            "is not overwritten with them"
        )
    return tensor


def _most_bytes(plans: list[_Plan]) -> int:
    """The largest file that the numbers of these filters can have, in float64."""
    numbers = {
        f"{plan.saved}.{key}": value.numel()
        for plan in plans
        for key, value in _numbers(plan.filter).items()
    }
    # a header with names, dtypes, shapes and offsets, and room for metadata
    header = 2**16 + sum(6 * len(name) + 256 for name in numbers)
    return header + 8 * sum(numbers.values())


def _numbers(filter: GraphFilter) -> dict[str, Tensor]:
    """A filter's state without its description, which is saved as JSON."""
    return {key: value for key, value in filter.state_dict().items() if key != EXTRA}


@dataclass
class _Plan:
    """One saved filter and the site it goes to."""

    site: Site
    saved: str
    """The layer's name in the file."""
    filter: GraphFilter
    """The filter rebuilt from its description, without its numbers."""


def _plan(
    model: nn.Module,
    description: Mapping[str, Any],
    source: str,
    *,
    other_versions: bool = False,
) -> list[_Plan]:
    """Find the site of every described filter and rebuild the filters, within the model's sizes."""
    names = {canonical_name(model, name): name for name, _ in model.named_modules()}
    refusing, tracing = sites(model), sites(model, unknown="trace")
    names_in_file: dict[str, str] = {}
    if other_versions:
        description, names_in_file = in_installed_names(model, refusing, description)
    # files of older versions do not say which layers were traced
    says_traced = DIGEST in description
    by_saved_name: dict[str, list[str]] = {}
    for name in tracing:
        by_saved_name.setdefault(canonical_name(model, name), []).append(name)
    plans = []
    room = _MOST_COEFFICIENTS
    for saved, entry in _entries(description, source).items():
        if saved not in names:
            raise ValueError(
                f"{source} has a filter for the layer {saved!r:.80}, which {type(model).__name__} "
                f"does not have; it was saved from {description.get('model')!r:.80}"
            )
        name, *others = by_saved_name.get(saved, [names[saved]])
        if others:
            raise ValueError(
                f"{source} has a filter for {saved!r}, which both {name} and {others[0]} can be; "
                "load the filters of each part on its own"
            )
        traced = entry.get(TRACED) is True or not says_traced
        found = tracing if traced else refusing
        if name not in found or found[name].refusal:
            reason = found[name].refusal if name in found else "it is not attention"
            kind = type(model.get_submodule(name)).__name__
            raise ValueError(f"{name} ({kind}) cannot take the filter of {source}: {reason}")
        site = found[name]
        fingerprint = fingerprint_of(site.module)
        # a checkpoint of a whole model contains the backbone's weights, so it has no fingerprint
        if fingerprint != entry.get("backbone", fingerprint):
            raise ValueError(
                f"{source} belongs to another backbone: {name} is {fingerprint}, the filter was "
                f"saved from {entry['backbone']!r:.120}"
            )
        room = _check_size(entry, site.num_heads, name, source, room)
        rebuilt = _rebuild(entry, name, source)
        if site.is_plugged:
            _check_same_filter(site, rebuilt, source)
        plans.append(_Plan(site, names_in_file.get(saved, saved), rebuilt))
    check_depths(model, description, description["filters"], source)
    if names_in_file:
        warn_of_other_names(model, names_in_file, source)
    return plans


def build(entry: Mapping[str, Any], heads: int, name: str, source: str) -> GraphFilter:
    """A described filter without its numbers, for the layer ``name`` with ``heads`` heads."""
    _check_size(entry, heads, name, source, room=_MOST_COEFFICIENTS)
    return _rebuild(entry, name, source)


def _check_size(entry: Mapping[str, Any], heads: int, name: str, source: str, room: int) -> int:
    """How many coefficients there is room for after this filter; raises if there is none."""
    room -= _coefficients(entry, heads, name, source)
    if room < 0:
        raise ValueError(
            f"{source} describes filters with more than {_MOST_COEFFICIENTS} coefficients, "
            "which is refused: filters are a few numbers per head"
        )
    return room


def _coefficients(entry: Mapping[str, Any], heads: int, name: str, source: str) -> int:
    """How many coefficients the described filter would have in memory, before it is built.

    The heads must be the model's. An order that is no integer is left to the filter to refuse.
    """
    kind, arguments = _kind_and_arguments(entry, name, source)
    described = arguments.get("num_heads")
    if type(described) is not int or described != heads:
        raise ValueError(f"{source} has a filter for {described!r:.40} heads, {name} has {heads}")
    exact = arguments.get("power") == "exact"
    orders = [arguments.get("degree"), arguments.get("hops"), arguments.get("K") if exact else 2]
    powers = 1 + max((order for order in orders if type(order) is int and order > 0), default=2)
    learned = powers if issubclass(kind, filter_kinds.Polynomial) else 3
    tables = heads if issubclass(kind, PartialPolynomial) else 1
    return heads * powers + tables * learned * powers


def _check_same_filter(site: Site, rebuilt: GraphFilter, source: str) -> None:
    """Refuse to load a filter into a plugged one of another kind or with other settings."""
    current = site.filter
    if type(current) is not type(rebuilt):
        raise ValueError(
            f"{site.name} is plugged with a {kind_of(type(current))}, {source} has a "
            f"{kind_of(type(rebuilt))}; gfsa.unplug(model) first"
        )
    if current.config() != rebuilt.config():
        raise ValueError(
            f"{site.name} is plugged with {current}, {source} has {rebuilt}; "
            "gfsa.unplug(model) first"
        )


def _entries(description: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    if not isinstance(description, Mapping):
        raise ValueError(f"{source} describes no filters, got {type(description).__name__}")
    if type(description.get("format")) is not int or description["format"] != FORMAT:
        raise ValueError(
            f"{source} has format {description.get('format')!r:.40}, this version of gfsa "
            f"({__version__}) reads format {FORMAT}; it was written by gfsa "
            f"{description.get('gfsa')!r:.40}"
        )
    entries = description.get("filters")
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"{source} describes no filters")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
            raise ValueError(f"{source}: the entry of {name!r:.80} describes no filter")
    return entries


def _kind_and_arguments(
    entry: Mapping[str, Any], name: str, source: str
) -> tuple[type[GraphFilter], dict[str, Any]]:
    kind, arguments = entry.get("kind"), entry.get("arguments")
    if kind not in KINDS or not isinstance(arguments, dict):
        raise ValueError(
            f"{source}: the filter of {name} is a {kind!r:.80}; known are {', '.join(KINDS)}"
        )
    return KINDS[kind], arguments


def _rebuild(entry: Mapping[str, Any], name: str, source: str) -> GraphFilter:
    kind, arguments = _kind_and_arguments(entry, name, source)
    try:
        # on the host and trainable, wherever load is called
        with torch.device("cpu"), torch.inference_mode(False):
            rebuilt = kind(**arguments)
        # files of older versions may not contain it
        rebuilt.dropout_after = check_dropout_place(entry.get("dropout_after", "attention"))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"{source}: the filter of {name} cannot be built: {error!s:.300}"
        ) from error
    return rebuilt


def _check_tensors(plans: list[_Plan], tensors: Mapping[str, Tensor], source: str) -> None:
    expected = {
        f"{plan.saved}.{key}": value
        for plan in plans
        for key, value in _numbers(plan.filter).items()
    }
    missing, extra = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or extra:
        raise ValueError(
            f"{source} and its description disagree: missing {some_of(missing)}, "
            f"not expected {some_of(extra)}"
        )
    for name, wanted in expected.items():
        found = tensors[name]
        if found.shape != wanted.shape or found.dtype not in _DTYPES:
            raise ValueError(
                f"{source}: {name} should be floating point of shape {tuple(wanted.shape)}, "
                f"got {found.dtype} of shape {tuple(found.shape)}"
            )
