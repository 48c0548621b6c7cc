"""Attach filters to the sites of a model, and detach them again."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gfsa.filters import GraphFilter
from gfsa.filters.depth import FirstValues
from gfsa.plugs.adapter import ADAPTER, CHILD, CLASS, GIVEN_COPIES, NAME, has_bound_forward
from gfsa.plugs.checks.called import checks_of, modules_around, remove_checks, watch_forwards
from gfsa.plugs.optim import watch_optimizers
from gfsa.plugs.saving.identity import numbers_in, pattern_of
from gfsa.plugs.sites import Site, plugged_sites
from gfsa.plugs.transaction import all_or_nothing


def install(model: nn.Module, planned: Sequence[tuple[Site, GraphFilter]]) -> None:
    """Attach all filters to their sites, or none; the next forward checks that all are called."""
    _refuse_offloaded_whole(model, [site for site, _ in planned])
    with all_or_nothing(model):
        for site, filter in planned:
            if ADAPTER in site.module.__dict__:
                raise ValueError(
                    f"{site.name} was plugged by another thread in the meantime; change a model in "
                    "one thread"
                )
            attach(site, filter)
        connect_depth(model)
        notify_adapters(model, [site for site, _ in planned])
        watch_optimizers(model)
        watch_forwards(model, {site.name: (site.module, filter) for site, filter in planned})


def stacks_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The layers of each stack, by what their names have in common (``model.layers.*.self_attn``).

    Raises:
        ValueError: if more than one number counts the layers, so that their order is not known.
    """
    stacks: dict[str, list[str]] = {}
    for name in names:
        stacks.setdefault(pattern_of(name), []).append(name)
    for pattern, members in stacks.items():
        numbers = zip(*map(numbers_in, members), strict=True)
        if sum(len(set(column)) > 1 for column in numbers) > 1:
            raise ValueError(
                f"the depth term needs layers in one order, but {pattern} counts them by more than "
                "one number: choose the layers of one stack with plug(..., layers=...)"
            )
    return stacks


def connect_depth(model: nn.Module) -> None:
    """Let the filters of each stack that have a depth term share the first layer's values.

    A stack that is connected keeps its first layer when filters are added to it, as the lens does.
    """
    by_name = {name: site.filter for name, site in plugged_sites(model).items()}
    if not any(filter.has_depth for filter in by_name.values()):
        return
    for name, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        groups = getattr(config, "num_hidden_groups", None)
        if groups is not None and groups < config.num_hidden_layers:
            raise ValueError(
                f"the depth term needs layers that run once, but {type(config).__name__} has "
                f"{groups} groups of layers for {config.num_hidden_layers} depths: plug without "
                "depth=True"
            )
        if getattr(module, "is_kv_shared_layer", False):
            raise ValueError(
                "the depth term needs layers with values of their own, but "
                f"{name} attends to those of another layer: plug without depth=True"
            )
    for names in stacks_of(by_name).values():
        filters = [by_name[name] for name in names]
        known = (f for f in filters if f.first_values is not None and not f.has_depth)
        first = next(known, filters[0])
        readers = [filter for filter in filters if filter.has_depth]
        for name, filter in zip(names, filters[: filters.index(first) + 1], strict=False):
            if filter.has_depth:
                raise ValueError(
                    f"the filter of {name} has a depth term, but no filtered layer comes before it "
                    "whose values it could add: plug the first layer, too"
                )
        if readers:
            values = first.first_values or FirstValues()
            if first.first_values is None:
                for module in modules_around(model, names):
                    module.register_forward_pre_hook(values)
                    module.register_forward_hook(values, always_call=True)
            for place, filter in enumerate((first, *readers)):
                filter.first_values, filter.place = values, place


def uninstall(model: nn.Module, plugged: Sequence[Site]) -> None:
    """Detach the filters of these sites of ``model``: all of them, or none if anything raises."""
    with all_or_nothing(model):
        refuse_changed_since(plugged)
        for site in plugged:
            detach(site)
        remove_checks(model)
        for module in model.modules():
            if not any(isinstance(inner, GraphFilter) for inner in module.modules()):
                for hooks in (module._forward_pre_hooks, module._forward_hooks):
                    for key in [k for k, hook in hooks.items() if isinstance(hook, FirstValues)]:
                        del hooks[key]
                        module._forward_hooks_always_called.pop(key, None)
        notify_adapters(model, plugged)


def attach(site: Site, filter: GraphFilter) -> None:
    """Make ``filter`` the filter of one site, on the module's device."""
    module = site.module
    device = device_of(module) or torch.get_default_device()
    # parameters that are created in inference mode could never be trained
    with torch.inference_mode(False):
        filter = filter.to(device=device, dtype=dtype_for(module))
    filter.train(module.training)
    module.add_module(CHILD, filter)
    module.__dict__[ADAPTER] = site.adapter
    if has_bound_forward(module):
        del module.__dict__["forward"]
    site.adapter.install(module)


def detach(site: Site) -> None:
    """Remove the filter of one site."""
    for check in checks_of(site.filter):
        check.called = True
    remove_checks(site.filter)
    if has_bound_forward(site.module):
        del site.module.__dict__["forward"]
    site.adapter.remove(site.module)
    delattr(site.module, CHILD)
    for key in (ADAPTER, NAME, GIVEN_COPIES):
        site.module.__dict__.pop(key, None)


def refuse_changed_since(plugged: Iterable[Site]) -> None:
    """Raise if a module was changed after it was plugged in a way that unplugging would break."""
    for site in plugged:
        module = site.module
        # only plugging that gives the module another class gives it another forward
        if CLASS not in module.__dict__:
            continue
        own = module.__dict__.get("forward")
        wrapped = None if own is None else getattr(inspect.unwrap(own), "__func__", None)
        if wrapped is type(module).forward and not has_bound_forward(module):
            raise ValueError(
                f"the forward of {site.name} was wrapped after it was plugged (accelerate's hooks "
                "do that), and would still call the filter. Remove the wrapper first (for "
                "accelerate: remove_hook_from_module(model, recurse=True))"
            )
        # each parametrised tensor is a property of the class that is on top
        if any(name in vars(type(module)) for name in getattr(module, "parametrizations", {})):
            raise ValueError(
                f"{site.name} was parametrised after it was plugged, which changed its class. Call "
                "torch.nn.utils.parametrize.remove_parametrizations on it first, then "
                "gfsa.unplug(model)"
            )


def notify_adapters(model: nn.Module, changed: Iterable[Site]) -> None:
    """Name the plugged modules of ``model``, and tell the adapters of these sites of the change."""
    for name, site in plugged_sites(model).items():
        # errors of a forward name the layer
        site.module.__dict__[NAME] = name
    for adapter in {site.adapter for site in changed}:
        adapter.on_filters_changed(model)


def dtype_for(module: nn.Module) -> torch.dtype | None:
    """The precision of a module's filter, None for the filter's own."""
    # float32 in a half-precision model, too, where small optimiser steps would be lost
    double = any(p.dtype == torch.float64 for p in module.parameters())
    return torch.float64 if double else None


def device_of(module: nn.Module) -> torch.device | None:
    """The device the module computes on, None if it has no tensors."""
    # weights that accelerate has offloaded are on the meta device; its hooks know better
    for part in module.modules():
        for hook in _accelerate_hooks(getattr(part, "_hf_hook", None)):
            execution_device = getattr(hook, "execution_device", None)
            if execution_device is not None:
                return torch.device(execution_device)
    tensor = next((x for x in (*module.parameters(), *module.buffers())), None)
    return None if tensor is None else tensor.device


def _refuse_offloaded_whole(model: nn.Module, planned: Iterable[Site]) -> None:
    """Raise if accelerate offloads a block as a whole, by a list of weights that it made before."""
    offloaded = [
        f"{name}." if name else ""
        for name, module in model.named_modules()
        for hook in _accelerate_hooks(getattr(module, "_hf_hook", None))
        if getattr(hook, "offload", False) and getattr(hook, "place_submodules", False)
    ]
    for site in planned:
        if f"{site.name}.".startswith(tuple(offloaded)):
            raise ValueError(
                f"accelerate offloads the block around {site.name} as a whole "
                "(preload_module_classes) and would not find the weights of the filter: plug "
                "first, then offload"
            )


def _accelerate_hooks(hook: Any) -> Iterator[Any]:
    """The hooks in an accelerate hook, which may be a sequence of them."""
    yield hook
    for inner in getattr(hook, "hooks", ()):
        yield from _accelerate_hooks(inner)
