"""Models that no maintained library carries, written from their papers' formulas.

They take filters like any other model: ``gfsa.plug(gfsa.models.Graphormer.slim())``.
"""

from gfsa.models import adapter as _adapter  # noqa: F401  (registers the attention of this package)
from gfsa.models.encoder import Encoder
from gfsa.models.graph_vit import GraphViT
from gfsa.models.graphormer import Graphormer
from gfsa.models.pairs import GraphormerBatch, GraphormerCollator
from gfsa.models.patches import GraphViTBatch, GraphViTCollator

__all__ = [
    "Encoder",
    "GraphViT",
    "GraphViTBatch",
    "GraphViTCollator",
    "Graphormer",
    "GraphormerBatch",
    "GraphormerCollator",
]
