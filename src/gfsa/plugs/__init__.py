"""Plugs: filters in models that already exist."""

from gfsa.plugs.adapter import Adapter, SwapClass
from gfsa.plugs.api import plug, unplug
from gfsa.plugs.checks.called import FilterNotCalledError
from gfsa.plugs.optim import FilterRate, parameter_groups
from gfsa.plugs.registry import register_adapter
from gfsa.plugs.sites import PlugReport, Site, filters_of, sites

__all__ = [
    "Adapter",
    "FilterNotCalledError",
    "FilterRate",
    "PlugReport",
    "Site",
    "SwapClass",
    "filters_of",
    "parameter_groups",
    "plug",
    "register_adapter",
    "sites",
    "unplug",
]
