"""Plugs: filters in models that already exist."""

from gfsa.plugs.adapter import Adapter, SwapClass, register_adapter
from gfsa.plugs.call_check import FilterNotCalledError
from gfsa.plugs.plug import PlugReport, filters_of, parameter_groups, plug, unplug

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
