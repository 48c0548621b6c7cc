"""Filters on disk: a folder with their numbers (safetensors) and their description (JSON)."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gfsa import filters as filter_kinds
from gfsa._version import __version__
from gfsa.filters import GraphFilter
from gfsa.filters.partial import PartialPolynomial
from gfsa.plugs.attach import install
from gfsa.plugs.sites import Site, is_sharded, plugged_sites, refuse_sharded, sites

FORMAT = 1
EXTRA = "_extra_state"
TENSORS = "filters.safetensors"
DESCRIPTION = "filters.json"

# filters are a few numbers per head: a larger file is not one of ours
_MAX_TENSORS = 64 * 2**20
_MAX_DESCRIPTION = 4 * 2**20
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WRAPPERS_ANYWHERE = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "base_layer",
)
_WRAPPERS_IN_FRONT = ("module.", "base_model.model.")
_KINDS = {
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


def save(model: nn.Module, path: str | Path) -> None:
    """Write the model's filters, and nothing else of the model, into the folder ``path``.

    A few kB: ``filters.safetensors`` holds the learned numbers, ``filters.json`` the kind of each
    filter, the layer it belongs to, and the class and shapes of that layer.

    If the model is sharded over processes, every process has to call this: the filters are
    gathered, and the first process writes them.
    """
    description = describe(model)
    if not description["filters"]:
        raise ValueError(f"{type(model).__name__} has no filters to save; gfsa.plug(model) first")
    plugged = plugged_sites(model)
    for name, site in plugged.items():
        kind = type(site.filter).__name__
        if kind not in _KINDS:
            raise ValueError(
                f"the filter of {name} is a {kind}, which gfsa.load cannot build: it builds "
                f"{', '.join(_KINDS)}. Save its state_dict yourself, or plug filter.fold()"
            )
    from safetensors.torch import save_file

    tensors = {
        f"{canonical_name(model, name)}.{key}": _gathered(value).detach().cpu().contiguous()
        for name, site in plugged.items()
        for key, value in _numbers(site.filter).items()
    }
    if any(is_sharded(site) for site in plugged.values()) and torch.distributed.get_rank() != 0:
        return
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def load(model: nn.Module, path: str | Path) -> None:
    """Put the filters saved in the folder ``path`` into ``model``, plugging it where needed.

    Layers, kinds, head counts, shapes and values are checked first; if anything does not fit, an
    error says what, and the model is unchanged.
    """
    folder = Path(path)
    description = _read_description(folder / DESCRIPTION)
    restore(model, description, _read_tensors(folder / TENSORS), source=str(folder))


def describe(model: nn.Module) -> dict[str, Any]:
    """The filters of a model and their layers, as plain data."""
    names = {name: canonical_name(model, name) for name in plugged_sites(model)}
    return {
        "format": FORMAT,
        "gfsa": __version__,
        "model": type(model).__name__,
        "filters": {
            names[name]: {**site.filter.describe(), "backbone": _fingerprint(site.module)}
            for name, site in plugged_sites(model).items()
        },
        "layers": _depths(model, names.values()),
    }


def restore(
    model: nn.Module, description: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str
) -> None:
    """Give ``model`` the filters of ``description`` with the numbers in ``tensors``."""
    plans = _plan(model, description, source)
    _check_tensors(plans, tensors, source)
    plugged = plugged_sites(model)
    refuse_sharded(plugged, "load filters")
    if plugged and set(plugged) != {plan.site.name for plan in plans}:
        raise ValueError(
            f"the model is plugged in layers {_some(plugged)}, but {source} has filters for "
            f"{_some([plan.site.name for plan in plans])}; gfsa.unplug(model) first"
        )
    if not plugged:
        install(model, [(plan.site, plan.filter) for plan in plans])
    for plan in plans:
        # a filter that is plugged already keeps its device and precision
        target = plan.site.filter if plugged else plan.filter
        numbers = {key: tensors[f"{plan.saved}.{key}"] for key in _numbers(target)}
        target.load_state_dict({**numbers, **_extra(plan.filter)})


def _numbers(filter: GraphFilter) -> dict[str, Tensor]:
    """A filter's state without its description, which is saved as JSON."""
    return {key: value for key, value in filter.state_dict().items() if key != EXTRA}


def _extra(filter: GraphFilter) -> dict[str, Tensor]:
    return {key: value for key, value in filter.state_dict().items() if key == EXTRA}


def canonical_name(model: nn.Module, name: str) -> str:
    """A layer's name without the prefixes of wrappers and of task models.

    transformers calls the same layer ``bert.encoder…`` in a classifier and ``encoder…`` in the
    bare backbone; wrappers (compiled, distributed, peft) add prefixes of their own.
    """
    name = ".".join(part for part in name.split(".") if part not in _WRAPPERS_ANYWHERE)
    for wrapper in _WRAPPERS_IN_FRONT:
        name = name.removeprefix(wrapper)
    prefix = getattr(getattr(model, "module", model), "base_model_prefix", "")
    return name.removeprefix(f"{prefix}.") if prefix else name


@dataclass
class _Plan:
    """One saved filter and the site it goes to."""

    site: Site
    saved: str
    """The layer's name in the file."""
    filter: GraphFilter
    """The filter rebuilt from its description, without its numbers."""


def _plan(model: nn.Module, description: Mapping[str, Any], source: str) -> list[_Plan]:
    names = {canonical_name(model, name): name for name, _ in model.named_modules()}
    found = sites(model, unknown="trace")
    plans = []
    for saved, entry in _entries(description, source).items():
        if saved not in names:
            raise ValueError(
                f"{source} has a filter for the layer {saved!r}, which {type(model).__name__} "
                f"does not have; it was saved from {description.get('model')!r}"
            )
        name = names[saved]
        if name not in found or found[name].refusal:
            reason = found[name].refusal if name in found else "it is not attention"
            kind = type(model.get_submodule(name)).__name__
            raise ValueError(f"{name} ({kind}) cannot take the filter of {source}: {reason}")
        site = found[name]
        fingerprint = _fingerprint(site.module)
        # a checkpoint of a whole model contains the backbone's weights, so it has no fingerprint
        if fingerprint != entry.get("backbone", fingerprint):
            raise ValueError(
                f"{source} belongs to another backbone: {name} is {fingerprint}, the filter was "
                f"saved from {entry['backbone']}"
            )
        rebuilt = _rebuild(entry, name, source)
        if rebuilt.num_heads != site.num_heads:
            raise ValueError(
                f"{source} has a filter for {rebuilt.num_heads} heads, {name} has {site.num_heads}"
            )
        if site.is_plugged:
            _check_same_filter(site, rebuilt, source)
        plans.append(_Plan(site, saved, rebuilt))
    _check_depths(model, description, [plan.saved for plan in plans], source)
    return plans


def _check_same_filter(site: Site, rebuilt: GraphFilter, source: str) -> None:
    """Refuse to load a filter into a plugged one of another kind or with other settings."""
    current = site.filter
    if type(current).__name__ != type(rebuilt).__name__:
        raise ValueError(
            f"{site.name} is plugged with a {type(current).__name__}, {source} has a "
            f"{type(rebuilt).__name__}; gfsa.unplug(model) first"
        )
    if current.config() != rebuilt.config():
        raise ValueError(
            f"{site.name} is plugged with {current}, {source} has {rebuilt}; "
            "gfsa.unplug(model) first"
        )


def _depths(model: nn.Module, plugged: Iterable[str]) -> dict[str, int]:
    """How many layers each stack with a filter has, filtered or not: ``{"h.*.attn": 12}``."""
    patterns = {_pattern(name) for name in plugged}
    # a block that is shared by all depths has one name per depth
    modules = model.named_modules(remove_duplicate=False)
    names = {canonical_name(model, name) for name, _ in modules}
    counts = Counter(_stack(name) for name in names if _pattern(name) in patterns)
    return dict(sorted(counts.items()))


def _pattern(name: str) -> str:
    """A name with all its numbers replaced by ``*``."""
    return re.sub(r"\b\d+\b", "*", name)


def _stack(name: str) -> str:
    """A name with its last number replaced: in a hierarchy every stage has a depth of its own."""
    return re.sub(r"\b\d+\b(?!.*\b\d+\b)", "*", name)


def _check_depths(
    model: nn.Module, description: Mapping[str, Any], plugged: Iterable[str], source: str
) -> None:
    """Refuse a model of another depth, which may have all the layers that were saved."""
    found = _depths(model, plugged)
    # files of older versions do not contain it
    saved = description.get("layers", found)
    if saved != found:
        raise ValueError(
            f"{source} belongs to another backbone: {type(model).__name__} has "
            f"{_counted(found, saved)}, the filters were saved from a {description.get('model')} "
            f"with {_counted(saved, found)}"
        )


def _counted(stacks: Any, others: Any) -> str:
    """The stacks whose depth differs from ``others``, with their depth."""
    if not (isinstance(stacks, dict) and isinstance(others, dict)):
        return repr(stacks)[:80]
    differing = [stack for stack in stacks if stacks[stack] != others.get(stack)]
    return _some(f"{stacks[stack]} layers {stack}" for stack in differing)


def _entries(description: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    if not isinstance(description, Mapping):
        raise ValueError(f"{source} describes no filters, got {type(description).__name__}")
    if description.get("format") != FORMAT:
        raise ValueError(
            f"{source} has format {description.get('format')!r}, this version of gfsa "
            f"({__version__}) reads format {FORMAT}; it was written by gfsa "
            f"{description.get('gfsa')!r}"
        )
    entries = description.get("filters")
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"{source} describes no filters")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
            raise ValueError(f"{source}: the entry of {name!r:.80} describes no filter")
    return entries


def _rebuild(entry: Mapping[str, Any], name: str, source: str) -> GraphFilter:
    kind, arguments = entry.get("kind"), entry.get("arguments")
    if kind not in _KINDS or not isinstance(arguments, dict):
        raise ValueError(
            f"{source}: the filter of {name} is a {kind!r}; known are {', '.join(_KINDS)}"
        )
    try:
        rebuilt: GraphFilter = _KINDS[kind](**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: the filter of {name} cannot be built: {error}") from error
    if entry.get("dropout_after") in ("attention", "filter"):
        rebuilt.dropout_after = entry["dropout_after"]
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
            f"{source} and its description disagree: missing {_some(missing)}, "
            f"not expected {_some(extra)}"
        )
    for name, wanted in expected.items():
        found = tensors[name]
        if found.shape != wanted.shape or found.dtype not in _DTYPES:
            raise ValueError(
                f"{source}: {name} should be floating point of shape {tuple(wanted.shape)}, "
                f"got {found.dtype} of shape {tuple(found.shape)}"
            )
        if not bool(torch.isfinite(found).all()):
            raise ValueError(f"{source}: {name} has values that are not finite")


def _fingerprint(module: nn.Module) -> dict[str, str]:
    """A layer's class and a digest of its parameters' shapes, without those of its filter."""
    kind = module.__dict__.get("_gfsa_class", type(module))
    # peft keeps a layer that it adapts as base_layer, beside parameters of its own
    adapted = tuple(f"{name}." for name, m in module.named_modules() if hasattr(m, "base_layer"))
    shapes = sorted(
        (name.replace(".base_layer.", "."), tuple(p.shape))
        for name, p in module.named_parameters()
        if not name.startswith("gfsa.") and (".base_layer." in name or not name.startswith(adapted))
    )
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
    return {"class": kind.__name__, "shapes": digest}


def _read_description(file: Path) -> dict[str, Any]:
    _check_file(file, _MAX_DESCRIPTION)
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(description, dict):
        raise ValueError(f"{file} must be a JSON object that describes filters")
    return description


def _read_tensors(file: Path) -> dict[str, Tensor]:
    _check_file(file, _MAX_TENSORS)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def _check_file(file: Path, limit: int) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; gfsa.save(model, {str(file.parent)!r})")
    if file.stat().st_size > limit:
        raise ValueError(
            f"{file} has {file.stat().st_size} bytes; filters are a few numbers per head, more "
            f"than {limit} is refused"
        )


def _gathered(tensor: Any) -> Tensor:
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def _some(names: Any) -> str:
    names = sorted(names)
    shown = ", ".join(names[:3]) or "nothing"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
