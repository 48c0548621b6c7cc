"""gfsa: graph-filter self-attention for any PyTorch Transformer."""

from gfsa._version import __version__
from gfsa.filters import GFSA, GraphFilter, Laplacian, PageRank, Polynomial, Twicing
from gfsa.functional import graph_filter_attention, linear_graph_filter_attention

__all__ = [
    "GFSA",
    "GraphFilter",
    "Laplacian",
    "PageRank",
    "Polynomial",
    "Twicing",
    "__version__",
    "graph_filter_attention",
    "linear_graph_filter_attention",
]
