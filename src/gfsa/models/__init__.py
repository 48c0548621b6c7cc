"""Models that no maintained library carries, written from their papers' formulas.

Each of them takes filters like any other model: ``gfsa.plug(gfsa.models.Graphormer.slim())``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gfsa.models.encoder import Encoder
    from gfsa.models.graph_vit import GraphViT
    from gfsa.models.graphormer import Graphormer
    from gfsa.models.pairs import GraphormerBatch, GraphormerCollator
    from gfsa.models.patches import GraphViTBatch, GraphViTCollator

_HOMES = {
    "Encoder": "encoder",
    "GraphViT": "graph_vit",
    "GraphViTBatch": "patches",
    "GraphViTCollator": "patches",
    "Graphormer": "graphormer",
    "GraphormerBatch": "pairs",
    "GraphormerCollator": "pairs",
}

__all__ = [
    "Encoder",
    "GraphViT",
    "GraphViTBatch",
    "GraphViTCollator",
    "Graphormer",
    "GraphormerBatch",
    "GraphormerCollator",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
