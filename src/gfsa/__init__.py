"""gfsa: graph-filter self-attention for any PyTorch Transformer."""

from typing import TYPE_CHECKING, Any

from gfsa._version import __version__
from gfsa.filters import GFSA, GraphFilter, Laplacian, PageRank, Polynomial, Twicing
from gfsa.functional import graph_filter_attention, linear_graph_filter_attention
from gfsa.plugs import filters_of, parameter_groups, plug, register_adapter, unplug
from gfsa.plugs.adapters.transformers.pretrained import from_pretrained
from gfsa.plugs.checkpoint import load, save
from gfsa.plugs.prune import prune

if TYPE_CHECKING:
    from gfsa import baselines
    from gfsa.lens import diagnose

__all__ = [
    "GFSA",
    "GraphFilter",
    "Laplacian",
    "PageRank",
    "Polynomial",
    "Twicing",
    "__version__",
    "baselines",
    "diagnose",
    "filters_of",
    "from_pretrained",
    "graph_filter_attention",
    "linear_graph_filter_attention",
    "load",
    "parameter_groups",
    "plug",
    "prune",
    "register_adapter",
    "save",
    "unplug",
]


def __getattr__(name: str) -> Any:
    # the lens and the baselines are imported when they are first used
    if name == "baselines":
        import gfsa.baselines as baselines

        return baselines
    if name == "diagnose":
        from gfsa.lens import diagnose

        return diagnose
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
