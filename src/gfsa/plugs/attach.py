"""Attach filters to the sites of a model, and detach them again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from gfsa.filters import GraphFilter
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.call_check import stop_checking, watch_first_forward
from gfsa.plugs.cross_attention import forget_tokens
from gfsa.plugs.sites import ADAPTER, Site


def install(model: nn.Module, planned: Sequence[tuple[Site, GraphFilter]]) -> None:
    """Attach each filter to its site of ``model``; the next forward checks that all are called."""
    for site, filter in planned:
        attach(site, filter)
    notify_adapters(model, [site for site, _ in planned])
    watch_first_forward(model, {site.name: (site.module, filter) for site, filter in planned})


def uninstall(model: nn.Module, plugged: Sequence[Site]) -> None:
    """Detach the filters of these sites of ``model``."""
    for site in plugged:
        detach(site)
    notify_adapters(model, plugged)


def attach(site: Site, filter: GraphFilter) -> None:
    """Make ``filter`` the filter of one site, on the module's device."""
    module = site.module
    double = any(p.dtype == torch.float64 for p in module.parameters())
    # filters stay in float32 in a half-precision model, where small optimiser steps would be lost
    filter = filter.to(device=_device_of(module), dtype=torch.float64 if double else None)
    filter.train(module.training)
    module.add_module(CHILD, filter)
    module.__dict__[ADAPTER] = site.adapter
    site.adapter.install(module)


def detach(site: Site) -> None:
    """Remove the filter of one site."""
    stop_checking(site.filter)
    site.adapter.remove(site.module)
    delattr(site.module, CHILD)
    del site.module.__dict__[ADAPTER]
    forget_tokens(site.module)


def notify_adapters(model: nn.Module, changed: Iterable[Site]) -> None:
    """Tell the adapters of these sites that the filters of ``model`` have changed."""
    for adapter in {site.adapter for site in changed}:
        adapter.mark(model)


def _device_of(module: nn.Module) -> torch.device | None:
    """The device the module computes on; accelerate may have offloaded its weights elsewhere."""
    execution_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if execution_device is not None:
        return torch.device(execution_device)
    tensor = next((x for x in (*module.parameters(), *module.buffers())), None)
    return None if tensor is None else tensor.device
