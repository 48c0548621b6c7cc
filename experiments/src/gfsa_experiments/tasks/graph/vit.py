"""Graph-ViT on batches whose tensors have few different shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gfsa.models.graph_vit import GraphViT
from gfsa.models.patches import GraphViTBatch
from gfsa_experiments.tasks.graph.norm import mask_norms, real_rows


@dataclass
class PaddedPatches(GraphViTBatch):
    """A :class:`~gfsa.models.GraphViTBatch` filled up with nodes and copies that are not there.

    ``real_nodes``: ``(N,)`` and ``real_copies``: ``(C,)``, True where there is one; ``padding``
    says it of patches.
    """

    real_nodes: Tensor
    real_copies: Tensor


class PaddedGraphViT(GraphViT):
    """:class:`~gfsa.models.GraphViT` whose batch norms leave out what only fills up a batch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._of_nodes = mask_norms(self.walk)
        self._of_copies = mask_norms(self.gnn)
        self._of_patches = mask_norms(self.patch_to_node) + mask_norms(self.patch_walk)

    def forward(self, batch: GraphViTBatch) -> Tensor:
        """``(B, num_outputs)``."""
        assert isinstance(batch, PaddedPatches)
        with real_rows(
            (self._of_nodes, batch.real_nodes),
            (self._of_copies, batch.real_copies),
            (self._of_patches, ~batch.padding.flatten()),
        ):
            return super().forward(batch)
