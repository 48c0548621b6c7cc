"""The public names that need torch: ``gfsa`` imports all of them when the first is used."""

from gfsa.filters import GFSA, Exclusive, GraphFilter, Laplacian, PageRank, Polynomial, Twicing
from gfsa.functional import graph_filter_attention, linear_graph_filter_attention
from gfsa.plugs import FilterRate, filters_of, parameter_groups, plug, register_adapter, unplug
from gfsa.plugs.convert import convert
from gfsa.plugs.hub.push import push_to_hub
from gfsa.plugs.peft_adapters import load_peft
from gfsa.plugs.prune import prune
from gfsa.plugs.saving.checkpoint import load, save
from gfsa.plugs.saving.pretrained import from_pretrained

__all__ = [
    "GFSA",
    "Exclusive",
    "FilterRate",
    "GraphFilter",
    "Laplacian",
    "PageRank",
    "Polynomial",
    "Twicing",
    "convert",
    "filters_of",
    "from_pretrained",
    "graph_filter_attention",
    "linear_graph_filter_attention",
    "load",
    "load_peft",
    "parameter_groups",
    "plug",
    "prune",
    "push_to_hub",
    "register_adapter",
    "save",
    "unplug",
]
