"""Save the filters of a model; put saved ones into a model, checked first, all or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gfsa._version import __version__
from gfsa.filters import GraphFilter, spec
from gfsa.filters.spec import MOST_DEGREE, numbers_of
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.distributed import gathered, refuse_distributed
from gfsa.plugs.install import device_of, dtype_for, install, notify_adapters
from gfsa.plugs.saving import files, identity
from gfsa.plugs.saving.identity import canonical_name, fingerprint_of, some_of
from gfsa.plugs.sites import (
    PlugReport,
    Site,
    check_model,
    is_sharded,
    plugged_sites,
    refuse_sharded,
    report_of,
    sites,
)
from gfsa.plugs.tracing.adapter import TracerAdapter
from gfsa.plugs.transaction import all_or_nothing

FORMAT = 1

_TRACED = "traced"
"""The entry of a described filter that says whether its layer was traced."""

# with larger coefficients the outputs of a layer overflow in float16
_LARGEST = 1e4
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def save(model: nn.Module, path: str | Path) -> None:
    """Write the model's filters, and nothing else of the model, into the folder ``path``.

    ``filters.safetensors`` holds the learned numbers and, in its header, what each filter is and
    the class and shapes of its layer. Until it is complete on the disk, an earlier save stays.

    A backbone that was trained with the filters is not saved: save the whole model then
    (``torch.save(model.state_dict(), file)``, or ``model.save_pretrained(folder)``). If the model
    is sharded over processes, every process has to call this, and the first one writes.

    Args:
        model: a plugged model.
        path: the folder; it is created if it does not exist.

    Warns:
        UserWarning: if the backbone has parameters that require gradients.

    Raises:
        ValueError: if the model has no filters, or one that :func:`load` could not build again: of
            a class of the caller's own, or with values that are not finite or offloaded.

    Examples:
        >>> report = gfsa.plug(model)
        >>> gfsa.save(model, "filters")
        >>> [path.name for path in pathlib.Path("filters").iterdir()]
        ['filters.safetensors']
    """
    write_filters(model, path)
    trainable = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and CHILD not in name.split(".")
    ]
    if trainable:
        warnings.warn(
            f"gfsa.save wrote the filters alone; {some_of(trainable)} of {type(model).__name__} "
            "can be trained, and are not saved: save the whole model too, or freeze them",
            stacklevel=2,
        )


def write_filters(model: nn.Module, path: str | Path) -> None:
    """What :func:`save` does, for callers that save the backbone themselves."""
    plugged = plugged_sites(model)
    if not plugged:
        raise ValueError(f"{type(model).__name__} has no filters to save; gfsa.plug(model) first")
    for name, site in plugged.items():
        kind = spec.kind_of(type(site.filter))
        if kind not in spec.KINDS:
            raise ValueError(
                f"the filter of {name or 'the model'} is a {kind}, which gfsa.load cannot build: "
                f"it builds {', '.join(sorted(spec.KINDS))}. Save model.state_dict() instead, or "
                "replace each filter by its polynomial, filter.fold() (docs/reference/filters.md)"
            )
    names = {name: canonical_name(model, name) for name in plugged}
    if len(set(names.values())) != len(plugged):
        raise ValueError(
            f"{some_of(plugged)} have the same names without the prefixes of wrappers and task "
            "models; save the filters of each part on its own"
        )
    with gathered(p for site in plugged.values() for p in site.filter.parameters()):
        tensors = {
            f"{names[name]}.{key}": _whole(value, f"{name}.{key}")
            for name, site in plugged.items()
            for key, value in numbers_of(site.filter).items()
        }
    if any(is_sharded(site) for site in plugged.values()) and torch.distributed.get_rank() != 0:
        return
    description = {
        "format": FORMAT,
        "gfsa": __version__,
        "model": type(model).__name__,
        "filters": {
            names[name]: {
                **site.filter.describe(),
                "backbone": fingerprint_of(site.module),
                "weights": identity.weights_of(site.module),
                # gfsa.load traces only layers that were traced when they were saved
                _TRACED: isinstance(site.adapter, TracerAdapter),
            }
            for name, site in plugged.items()
        },
        "layers": identity.depths_of(model, names.values()),
    }
    files.write(Path(path), description, tensors)


def _whole(value: Any, name: str) -> Tensor:
    """A filter's tensor, whole, on the host, and a copy of its own.

    safetensors refuses tensors of layers that share one parameter.
    """
    if value.is_meta:
        raise ValueError(
            f"{name} is on the meta device and has no values to save: save the filters before "
            "accelerate offloads them"
        )
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    whole = whole.detach().clone(memory_format=torch.contiguous_format).cpu()
    if not bool(whole.isfinite().all()):
        raise ValueError(
            f"{name} has values that are not finite, which gfsa.load would refuse: nothing was "
            "written, and an earlier save in the folder is kept"
        )
    return whole


def load(
    model: nn.Module,
    path: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    max_degree: int = MOST_DEGREE,
) -> PlugReport:
    """Put saved filters into ``model``, plugging it where needed.

    Layers, kinds, head counts, shapes and values are checked first. If anything does not fit, an
    error says what; whatever is raised, by Ctrl-C too, the model is unchanged.

    Args:
        model: the backbone that the filters were saved from.
        path: the folder that :func:`save` wrote, or a repository on the Hugging Face Hub:
            ``"hub:user/name"``, or ``"user/name"`` if there is no folder ``user`` here.
        revision: of the repository: a branch, a tag or a commit.
        token: an access token for the Hub; by default the one that you are logged in with.
        max_degree: filters of a higher degree are refused: every degree is one attention pass.

    Returns:
        A report of the layers that have filters now, and of the others, as :func:`gfsa.plug` does.

    Warns:
        UserWarning: if the layers have other weights than those the filters were saved with.

    Raises:
        FileNotFoundError: if there are no filters at ``path``.
        ValueError: if the files are damaged, or the filters do not fit the model.

    Examples:
        >>> report = gfsa.plug(model)
        >>> gfsa.save(model, "filters")
        >>> gfsa.unplug(model)
        >>> report = gfsa.load(model, "filters")
        >>> list(gfsa.filters_of(model))
        ['layers.0.self_attn', 'layers.1.self_attn']
    """
    check_model(model)
    saved = Saved(str(path), *files.read(files.filter_folder(path, revision, token)))
    restore(model, saved, max_degree=max_degree)
    found = sites(model)
    plugged = [(site, site.filter) for site in found.values() if site.is_plugged]
    skipped = {
        name: site.refusal or "no filter was saved for it"
        for name, site in found.items()
        if not site.is_plugged
    }
    return report_of(plugged, skipped, found)


class Saved(NamedTuple):
    """Filters from a file, which may have any content."""

    source: str
    """Where they are from, for messages."""
    description: Mapping[str, Any]
    """What :func:`write_filters` puts into the header of the file."""
    tensors: Mapping[str, Tensor]
    """The numbers, by the name of the layer and of the filter's parameter."""
    matrices_of: Callable[[str], Mapping[str, Tensor]] = lambda layer: {}
    """The matrices of a layer in the file of a whole model, which does not describe them."""


def saved_among(tensors: Mapping[str, Tensor], name_of: Callable[[str], str], source: str) -> Saved:
    """The filters in a whole model's file, where each has its description beside its numbers.

    ``name_of`` turns the name of a layer in the file into its name in the description.
    """
    filters: dict[str, Any] = {}
    numbers = {}
    for key, value in tensors.items():
        layer, _, name = key.rpartition(f".{CHILD}.")
        layer = name_of(layer)
        if name == spec.EXTRA:
            filters[layer] = spec.read_description(value)
        else:
            numbers[f"{layer}.{name}"] = value
    return Saved(source, {"format": FORMAT, "filters": filters}, numbers)


def restore(
    model: nn.Module, saved: Saved, *, max_degree: int = MOST_DEGREE, check_only: bool = False
) -> None:
    """Give ``model``, plugged in the same layers or not at all, the saved filters.

    They are checked first, then put into the model all or nothing, unless ``check_only``.
    """
    planned = _plan(model, saved, max_degree)
    plugged, source = plugged_sites(model), saved.source
    if not check_only:
        refuse_sharded(plugged, "load filters")
    if plugged and set(plugged) != {site.name for _, site, _ in planned}:
        raise ValueError(
            f"the model is plugged in layers {some_of(plugged)}, but {source} has filters for "
            f"{some_of(site.name for _, site, _ in planned)}; gfsa.unplug(model) first"
        )
    left = dict(saved.tensors)
    for layer, site, filter in planned:
        _fill(layer, site, filter, left, source)
    if left:
        raise ValueError(
            f"{source} has numbers of no filter that it describes: {some_of(left)}; save the "
            "filters again"
        )
    if check_only:
        return
    if not plugged:
        if any(list(filter.parameters()) for _, _, filter in planned):
            refuse_distributed(model, [site.module for _, site, _ in planned])
        install(model, [(site, filter) for _, site, filter in planned])
        return
    # a filter that is plugged already keeps its device and precision
    numbers = [p for _, site, _ in planned for p in site.filter.parameters()]
    with all_or_nothing(model, values=numbers):
        for _, site, filter in planned:
            site.filter.load_state_dict(filter.state_dict())
        notify_adapters(model, plugged.values())


def _plan(model: nn.Module, saved: Saved, max_degree: int) -> list[tuple[str, Site, GraphFilter]]:
    """The name of each layer in the file, its site, and the filter without its numbers."""
    entries, source, kind = _entries_of(saved), saved.source, type(model).__name__
    refusing, tracing = sites(model), sites(model, unknown="trace")
    names = {name: canonical_name(model, name) for name in tracing}
    # checkpoints of whole models and adapters do not say of which
    of = saved.description.get("model")
    what = f"{source} (of a {of!s:.80})" if of else source
    planned: list[tuple[str, Site, GraphFilter]] = []
    misfits: dict[str, ValueError] = {}

    def rebuilt(layer: str, site: Site) -> GraphFilter:
        return spec.build(entries[layer], site.num_heads, site.name, source, max_degree)

    for layer, entry in entries.items():
        # older versions, and checkpoints of whole models, do not say which layers were traced
        known = tracing if entry.get(_TRACED, True) is True else refusing
        try:
            name = identity.layer_named(model, layer, names, what)
            site = known.get(name)
            if site is None or site.refusal:
                reason = "it is not attention" if site is None else site.refusal
                raise ValueError(f"{name} cannot take the filter of {source}: {reason}")
            # the heads first: they are why shapes differ
            filter = rebuilt(layer, site)
            _check_backbone(site, entry, source)
        except ValueError as error:
            misfits[layer] = error
        else:
            planned.append((layer, site, filter))
    others = [
        site.name
        for layer, site, _ in planned
        if not identity.has_weights(site.module, entries[layer].get("weights"))
    ]
    taken = {site.name for _, site, _ in planned}
    free = [s for s in refusing.values() if not s.refusal and s.name not in taken]
    unknown = {layer: entries[layer] for layer in misfits}
    renamed = identity.renamed_layers(free, unknown, saved.matrices_of)
    for layer, misfit in misfits.items():
        if layer not in renamed:
            raise misfit
        planned.append((layer, renamed[layer], rebuilt(layer, renamed[layer])))
    for _, site, filter in planned:
        own, wanted = site.filter.describe() if site.is_plugged else {}, filter.describe()
        if own and not spec.is_same_filter(own, wanted):
            raise ValueError(
                f"{site.name} is plugged with a {spec.shown(own)}, {source} has a "
                f"{spec.shown(wanted)}; gfsa.unplug(model) first"
            )
    if renamed:
        pairs = some_of(f"{layer} is {site.name}" for layer, site in renamed.items())
        warnings.warn(
            f"{source} was saved with another version of the library that {kind} "
            f"is from, in which {len(renamed)} of its layers have other names or parameters; "
            f"their filters were loaded: {pairs}. Save them again",
            stacklevel=4,
        )
    else:
        identity.check_depths(model, saved.description, entries, source)
    if others:
        warnings.warn(
            f"the filters of {source} were saved with other weights than {some_of(others)} of "
            f"{kind} {'has' if len(others) == 1 else 'have'}: if the backbone was trained with "
            "them, load that backbone first",
            stacklevel=4,
        )
    return planned


def _entries_of(saved: Saved) -> dict[str, dict[str, Any]]:
    """The description of each filter by the name of its layer; refuses another format."""
    found, entries = saved.description.get("format"), saved.description.get("filters")
    if type(found) is not int or found != FORMAT:
        writer = saved.description.get("gfsa")
        raise ValueError(
            f"{saved.source} has format {found!r:.40}, this version of gfsa ({__version__}) reads "
            f"format {FORMAT}; it was written by gfsa {writer!r:.40}: load it with that version"
        )
    is_known = isinstance(entries, dict) and all(isinstance(e, dict) for e in entries.values())
    if not entries or not is_known:
        raise ValueError(
            f"{saved.source} describes no filters: expected an object for each layer under "
            f"'filters', got {entries!r:.40}; save the filters of a plugged model again"
        )
    return dict(entries)


def _check_backbone(site: Site, entry: Mapping[str, Any], source: str) -> None:
    """Refuse a filter that was saved from a layer of another class or other shapes."""
    own = fingerprint_of(site.module)
    # a checkpoint of a whole model contains the backbone's weights, so it has no fingerprint
    saved = entry.get("backbone", own)
    if saved != own:
        kind = saved.get("class") if isinstance(saved, dict) else saved
        shapes = " with parameters of other shapes" if kind == own["class"] else ""
        raise ValueError(
            f"{source} belongs to another backbone: {site.name} is a {own['class']}, the filter "
            f"was saved from a {kind!s:.80}{shapes}; load it into that backbone"
        )


def _fill(
    layer: str, site: Site, filter: GraphFilter, left: dict[str, Tensor], source: str
) -> None:
    """Move the numbers into the rebuilt filter, in the precision that it will have in the model."""
    place = device_of(site.module) or torch.get_default_device()
    dtype = dtype_for(site.module) or filter.base.dtype
    if site.is_plugged:
        theta = site.filter.base if site.filter.theta is None else site.filter.theta
        place, dtype = theta.device, theta.dtype
    if place.type == "meta":
        raise ValueError(
            f"{site.name} is on the meta device, where the numbers of {source} would be lost: give "
            "the model its weights first, and load filters before accelerate offloads them"
        )
    with torch.inference_mode(False), torch.no_grad():
        filter.to(dtype=dtype)
        for key, value in numbers_of(filter).items():
            found = left.pop(f"{layer}.{key}", None)
            if found is None or found.shape != value.shape or found.dtype not in _DTYPES:
                got = "nothing" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
                raise ValueError(
                    f"{source}: {layer}.{key} should be floating point of shape "
                    f"{tuple(value.shape)}, got {got}; save the filters again"
                )
            value.copy_(found)
        # files have polynomials alone
        for term in (filter.coefficients(), filter.share(), filter.depth()):
            largest = 0.0 if term is None else term.abs().max().item()
            # NaN is not smaller, so it is refused, too
            if not largest <= _LARGEST:
                raise ValueError(
                    f"{source}: the filter of {site.name} has a coefficient of {largest:.3g} in "
                    f"{dtype}; those of trained filters are about 1, more than {_LARGEST:g} is "
                    "refused. Take an earlier save"
                )
