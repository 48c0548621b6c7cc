"""Graph-ViT on padded batches, whose tensors have few different shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gfsa_experiments.models.graph_vit import GraphViT
from gfsa_experiments.models.patches import GraphViTBatch
from gfsa_experiments.tasks.graph.norm import mask_norms, real_rows


@dataclass
class PaddedPatches(GraphViTBatch):
    """A :class:`~gfsa_experiments.models.GraphViTBatch` with padding nodes and padding copies.

    ``real_nodes``: ``(N,)`` and ``real_copies``: ``(C,)`` are False for padding; ``padding`` marks
    the patches.
    """

    real_nodes: Tensor
    real_copies: Tensor


class PaddedGraphViT(GraphViT):
    """:class:`~gfsa_experiments.models.GraphViT` whose batch norms ignore padding."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._node_norms = mask_norms(self.walk)
        self._copy_norms = mask_norms(self.gnn)
        self._patch_norms = mask_norms(self.patch_to_node) + mask_norms(self.patch_walk)

    def forward(self, batch: GraphViTBatch) -> Tensor:
        """``(B, num_outputs)``."""
        assert isinstance(batch, PaddedPatches)
        with real_rows(
            (self._node_norms, batch.real_nodes),
            (self._copy_norms, batch.real_copies),
            (self._patch_norms, ~batch.padding.flatten()),
        ):
            return super().forward(batch)
