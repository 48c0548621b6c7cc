"""Graph-ViT (He et al., 2023) with Hadamard attention: a Transformer over patches of a graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gfsa_experiments.models.attention import Block, HadamardAttention
from gfsa_experiments.models.graph_layers import FeatureEncoder, mean_by
from gfsa_experiments.models.patches import GraphViTBatch


class GINELayer(nn.Module):
    r"""Message passing with edge features (GINE), normalised, with a residual connection.

    .. math:: m_i = (1 + ε)\,h_i + \sum_{j → i} \mathrm{ReLU}(h_j + e_{ji}), \qquad
              h_i ← W\,(h_i + \mathrm{ReLU}(\mathrm{BN}(\mathrm{MLP}(m_i)))) + b
    """

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.epsilon = nn.Parameter(torch.zeros(()))
        self.mlp = nn.Sequential(*_norm_relu(dim, dim), nn.Linear(dim, dim, bias=False))
        self.norm = nn.BatchNorm1d(dim)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(dim, dim)

    def forward(self, h: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        """Nodes ``(N, dim)`` and embedded edges ``(E, dim)`` to nodes."""
        source, target = edge_index
        # not h[source], whose gradient adds the edges of a node one after another
        messages = torch.relu(h.index_select(0, source) + e)
        gathered = (1 + self.epsilon) * h
        gathered = gathered.index_add(0, target, messages.to(gathered.dtype))
        return self.out(h + self.dropout(torch.relu(self.norm(self.mlp(gathered)))))


class WalkEncoder(nn.Module):
    r"""Adds a position encoding, :math:`x ← x + \mathrm{ReLU}(\mathrm{BN}(W p))`.

    p is the token's random-walk encoding of ``steps`` numbers; with 0 steps, x stays as it is.
    """

    def __init__(self, steps: int, dim: int) -> None:
        super().__init__()
        self.steps = steps
        self.encode = nn.Sequential(*_norm_relu(steps, dim)) if steps else None

    def forward(self, x: Tensor, walk: Tensor) -> Tensor:
        """``x``: ``(N, dim)``; ``walk``: ``(N, steps)``."""
        if walk.shape[-1] != self.steps:
            raise ValueError(
                f"the model expects random walks of {self.steps} steps, the batch has "
                f"{walk.shape[-1]}; pass model and collator the same walk_steps and "
                "patch_walk_steps"
            )
        return x if self.encode is None else x + self.encode(walk.to(x.dtype))


class GraphViT(nn.Module):
    r"""A Transformer over the patches of a graph, aware of how they are connected.

    .. math:: A = \mathrm{softmax}(q k^\top / \sqrt d) ∘ \tilde A

    :math:`\tilde A` is the patches' adjacency, from the batch. A patch's token is the mean of its
    nodes after a few GINE layers within the patch; between layers the patch's mean is added to each
    node, and the copies of a node in overlapping patches are averaged. The output is a small MLP of
    the mean over patches.

    Args:
        node_features, edge_features: sizes of the vocabularies, one for each integer column, or
            the number of real columns.
        num_outputs: how many numbers are predicted for a graph.
        dim: width throughout.
        gnn_depth: GINE layers within patches.
        depth, num_heads: Transformer blocks over patches, with MLPs twice as wide as ``dim``.
        walk_steps, patch_walk_steps: lengths of the random-walk encodings in the batch; 0 for none.
        gnn_dropout: within patches.
        dropout: in the Transformer, entries of A included.
    """

    def __init__(
        self,
        node_features: int | Sequence[int],
        edge_features: int | Sequence[int],
        num_outputs: int = 1,
        *,
        dim: int = 128,
        gnn_depth: int = 4,
        depth: int = 4,
        num_heads: int = 8,
        walk_steps: int = 20,
        patch_walk_steps: int = 8,
        gnn_dropout: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.nodes = FeatureEncoder(node_features, dim)
        self.edges = FeatureEncoder(edge_features, dim)
        self.walk = WalkEncoder(walk_steps, dim)
        self.patch_walk = WalkEncoder(patch_walk_steps, dim)
        self.gnn = nn.ModuleList(GINELayer(dim, gnn_dropout) for _ in range(gnn_depth))
        self.patch_to_node = nn.ModuleList(
            nn.Sequential(*_norm_relu(dim, dim)) for _ in range(gnn_depth - 1)
        )
        self.blocks = nn.ModuleList(
            Block(
                HadamardAttention(dim, num_heads, dropout),
                dim,
                2 * dim,
                dropout,
                activation=nn.ReLU,
            )
            for _ in range(depth)
        )
        self.head = nn.Sequential(*_norm_relu(dim, dim), nn.Linear(dim, num_outputs))

    def forward(self, batch: GraphViTBatch) -> Tensor:
        """``(B, num_outputs)``."""
        tokens = self.encode_patches(batch)
        graphs, slots = batch.padding.shape
        x = tokens.new_zeros(graphs * slots, tokens.shape[-1])
        x = x.index_copy(0, batch.patch_graph * slots + batch.patch_slot, tokens)
        x = x.view(graphs, slots, -1)
        adjacency = batch.adjacency.to(x.dtype)
        for block in self.blocks:
            x = block(x, batch.padding, adjacency)
        there = ~batch.padding[:, :, None]
        return self.head((x * there).sum(1) / there.sum(1))

    def encode_patches(self, batch: GraphViTBatch) -> Tensor:
        """``(S, dim)``: a token for each patch of each graph."""
        h = self.walk(self.nodes(batch.x), batch.walk)
        e = self.edges(batch.edge_attr).index_select(0, batch.copy_edge_id)
        h = h.index_select(0, batch.copy_node)
        patches, nodes = len(batch.patch_graph), len(batch.x)
        for number, layer in enumerate(self.gnn):
            if number:
                mean = mean_by(batch.copy_patch, h, patches)
                of_patch = self.patch_to_node[number - 1](mean)
                h = h + of_patch.index_select(0, batch.copy_patch)
                h = mean_by(batch.copy_node, h, nodes).index_select(0, batch.copy_node)
            h = layer(h, batch.copy_edges, e)
        return self.patch_walk(mean_by(batch.copy_patch, h, patches), batch.patch_walk)


def _norm_relu(inputs: int, outputs: int) -> list[nn.Module]:
    # no bias: the norm would subtract it
    return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
