"""Plugs: filters in models that already exist."""

from gfsa.plugs.adapter import Adapter, SwapClass, register_adapter
from gfsa.plugs.core import PlugReport, filters_of, parameter_groups, plug, unplug
from gfsa.plugs.watch import FilterNotCalledError

__all__ = [
    "Adapter",
    "FilterNotCalledError",
    "PlugReport",
    "SwapClass",
    "filters_of",
    "parameter_groups",
    "plug",
    "register_adapter",
    "unplug",
]
