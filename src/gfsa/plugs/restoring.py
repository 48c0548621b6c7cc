"""Put described filters and their numbers into a model: checked first, then all or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.filters import GraphFilter
from gfsa.filters.description import kind_of
from gfsa.plugs.attach import device_of, dtype_for, install, notify_adapters
from gfsa.plugs.backbone import canonical_name, check_depths, fingerprint_of, some_of
from gfsa.plugs.described_filters import Builder, entries_of, numbers_of
from gfsa.plugs.filter_files import DIGEST
from gfsa.plugs.other_versions import in_installed_names, warn_of_other_names
from gfsa.plugs.parallel import refuse_distributed
from gfsa.plugs.rollback import all_or_nothing
from gfsa.plugs.sites import Site, plugged_sites, refuse_sharded, sites

TRACED = "traced"
"""The entry of a described filter whose layer was traced."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
        description: what :func:`gfsa.plugs.checkpoint.describe` returns.
        tensors: the numbers, by the name of the layer and of the filter's parameter.
        source: where they are from, for messages.
        other_versions: whether layers may have the names of another version of the model's library.
    """
    plans = make_plans(model, description, source, other_versions=other_versions)
    put_filters(model, plans, tensors, source)


def check_restorable(
    model: nn.Module, description: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str
) -> None:
    """Raise where :func:`restore` would; the model is unchanged."""
    plans = make_plans(model, description, source)
    _check_tensors(plans, tensors, source)
    _check_same_layers(plugged_sites(model), plans, source)
    for plan in plans:
        _fill(plan, tensors, source)


@dataclass
class Plan:
    """One saved filter and the site it goes to."""

    site: Site
    saved: str
    """The layer's name in the file."""
    filter: GraphFilter
    """The filter rebuilt from its description, without its numbers."""


def make_plans(
    model: nn.Module,
    description: Mapping[str, Any],
    source: str,
    *,
    other_versions: bool = False,
) -> list[Plan]:
    """Find the site of every described filter and rebuild the filters, within the model's sizes."""
    refusing, tracing = sites(model), sites(model, unknown="trace")
    layers = _LayersByCanonicalName(model, tracing)
    names_in_file: dict[str, str] = {}
    if other_versions:
        description, names_in_file = in_installed_names(model, refusing, description)
    # files of older versions do not say which layers were traced
    says_traced = DIGEST in description
    builder = Builder(source)
    plans = []
    for saved, entry in entries_of(description, source).items():
        name = layers.find(saved, source, saved_from=description.get("model"))
        traced = entry.get(TRACED) is True or not says_traced
        site = _accepting_site(model, name, tracing if traced else refusing, source)
        _check_backbone(site, entry, source)
        rebuilt = builder.build(entry, site.num_heads, name)
        if site.is_plugged:
            _check_same_filter(site, rebuilt, source)
        plans.append(Plan(site, names_in_file.get(saved, saved), rebuilt))
    check_depths(model, description, description["filters"], source)
    if names_in_file:
        warn_of_other_names(model, names_in_file, source)
    return plans


class _LayersByCanonicalName:
    """The modules of a model by the names that files use for them.

    Args:
        model: the model.
        attention: names of its attention modules: one of them is meant where several modules share
            a canonical name.
    """

    def __init__(self, model: nn.Module, attention: Iterable[str]) -> None:
        self.model = model
        self.modules = {canonical_name(model, name): name for name, _ in model.named_modules()}
        self.attention: dict[str, list[str]] = {}
        for name in attention:
            self.attention.setdefault(canonical_name(model, name), []).append(name)

    def find(self, saved: str, source: str, saved_from: Any) -> str:
        """The module's name in this model."""
        if saved not in self.modules:
            # checkpoints of whole models and adapters do not say it
            which = f", {saved_from!r:.80}" if saved_from else ""
            raise ValueError(
                f"{source} has a filter for the layer {saved!r:.80}, which "
                f"{type(self.model).__name__} does not have; load it into the model that it "
                f"was saved from{which}"
            )
        name, *others = self.attention.get(saved, [self.modules[saved]])
        if others:
            raise ValueError(
                f"{source} has a filter for {saved!r}, which both {name} and {others[0]} can be; "
                "load the filters of each part on its own"
            )
        return name


def _accepting_site(model: nn.Module, name: str, found: Mapping[str, Site], source: str) -> Site:
    """The site called ``name``; raises where no filter can be."""
    if name not in found or found[name].refusal:
        reason = found[name].refusal if name in found else "it is not attention"
        kind = type(model.get_submodule(name)).__name__
        raise ValueError(f"{name} ({kind}) cannot take the filter of {source}: {reason}")
    return found[name]


def _check_backbone(site: Site, entry: Mapping[str, Any], source: str) -> None:
    """Refuse a filter that was saved from a layer of another class or other shapes."""
    fingerprint = fingerprint_of(site.module)
    # a checkpoint of a whole model contains the backbone's weights, so it has no fingerprint
    if fingerprint != entry.get("backbone", fingerprint):
        raise ValueError(
            f"{source} belongs to another backbone: {site.name} is {fingerprint}, the filter was "
            f"saved from {entry['backbone']!r:.120}; load it into that backbone"
        )


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


def put_filters(
    model: nn.Module, plans: list[Plan], tensors: Mapping[str, Tensor], source: str
) -> None:
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


def most_bytes(plans: list[Plan]) -> int:
    """The largest file that the numbers of these filters can have, in float64."""
    numbers = _planned_numbers(plans)
    # a header with names, dtypes, shapes and offsets, and room for metadata
    header = 2**16 + sum(6 * len(name) + 256 for name in numbers)
    return header + 8 * sum(value.numel() for value in numbers.values())


def _planned_numbers(plans: list[Plan]) -> dict[str, Tensor]:
    """The tensors that the rebuilt filters need, by their names in the file."""
    return {
        f"{plan.saved}.{key}": value
        for plan in plans
        for key, value in numbers_of(plan.filter).items()
    }


def _check_tensors(plans: list[Plan], tensors: Mapping[str, Tensor], source: str) -> None:
    expected = _planned_numbers(plans)
    missing, extra = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or extra:
        raise ValueError(
            f"{source} and its description disagree: missing {some_of(missing)}, "
            f"not expected {some_of(extra)}; save the filters again"
        )
    for name, wanted in expected.items():
        found = tensors[name]
        if found.shape != wanted.shape or found.dtype not in _DTYPES:
            raise ValueError(
                f"{source}: {name} should be floating point of shape {tuple(wanted.shape)}, "
                f"got {found.dtype} of shape {tuple(found.shape)}; save the filters again"
            )


def _check_same_layers(plugged: Mapping[str, Site], plans: list[Plan], source: str) -> None:
    """Refuse a model that is plugged in other layers than those of the plans."""
    if plugged and set(plugged) != {plan.site.name for plan in plans}:
        raise ValueError(
            f"the model is plugged in layers {some_of(plugged)}, but {source} has filters for "
            f"{some_of([plan.site.name for plan in plans])}; gfsa.unplug(model) first"
        )


def _fill(plan: Plan, tensors: Mapping[str, Tensor], source: str) -> None:
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
        for key, value in numbers_of(filter).items():
            value.copy_(tensors[f"{plan.saved}.{key}"])
            _check_finite(value, f"{source}: {plan.saved}.{key}", f"in {value.dtype}")
        if filter.is_polynomial:
            _check_finite(filter.coefficients(), f"{source}: the filter of {name}", "as a sum")


def _check_finite(tensor: Tensor, name: str, how: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(
            f"{name} has values that are not finite {how}; take an earlier save, or a model in a "
            "wider dtype"
        )
