"""Graphormer (Ying et al., 2021): a Transformer over the nodes of a graph, and its batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa_experiments.models import graphs
from gfsa_experiments.models.attention import Block, SoftmaxAttention


@dataclass
class GraphormerBatch(graphs.Batch):
    """B graphs, padded to N nodes; the E edges of all graphs concatenated.

    ``x``: ``(B, N, F)``; ``padding``: ``(B, N)``, True where there is no node; ``in_degree``,
    ``out_degree``: ``(B, N)``; ``distance``: ``(B, N, N)``, -1 without a path; ``paths``:
    ``(B, N, N, hops)``, indices into ``edge_attr``, ``(E, F)``, or -1; ``y``: ``(B, T)`` or None.
    """

    x: Tensor
    padding: Tensor
    in_degree: Tensor
    out_degree: Tensor
    distance: Tensor
    edge_attr: Tensor
    paths: Tensor
    y: Tensor | None


@dataclass(frozen=True)
class GraphormerCollator(graphs.Collator):
    """Graphs to a :class:`GraphormerBatch`; hand it to a data loader as ``collate_fn``.

    Args:
        max_hops: how many edges of each shortest path are kept; at least the model's ``max_hops``.
        pad_to_multiple: nodes, the virtual one included, are padded to a multiple of this.
    """

    max_hops: int = 5
    pad_to_multiple: int = 1

    def __post_init__(self) -> None:
        if self.max_hops < 1:
            raise ValueError(f"max_hops must be at least 1, got {self.max_hops}")

    def features(self, edge_index: Tensor, num_nodes: int) -> dict[str, Tensor]:
        """Degrees, distances and paths, in the smallest integers that hold them."""
        source, target = edge_index
        small = torch.int16 if max(num_nodes, len(source)) < 2**15 else torch.int32
        distance = graphs.distances(edge_index, num_nodes)
        return {
            "in_degree": torch.bincount(target, minlength=num_nodes),
            "out_degree": torch.bincount(source, minlength=num_nodes),
            "distance": distance.to(small),
            "paths": graphs.path_edges(edge_index, distance, self.max_hops).to(small),
        }

    def join(self, several: graphs.Several) -> GraphormerBatch:
        edges = several.sizes("edge_attr")
        # a multiple together with the virtual node, which suits attention kernels
        size = graphs.above(max(several.sizes("x")), self.pad_to_multiple) - 1
        paths = several.pad("paths", size, -1, axes=2).int()
        # edges are concatenated: those of a graph are numbered after those before it
        counts = torch.tensor(edges)
        first = (counts.cumsum(0) - counts).int()[:, None, None, None]
        return GraphormerBatch(
            x=several.pad("x", size),
            padding=several.padding("x", size),
            in_degree=several.pad("in_degree", size),
            out_degree=several.pad("out_degree", size),
            distance=several.pad("distance", size, -1, axes=2).int(),
            edge_attr=several.rows("edge_attr", self.few(sum(edges))),
            paths=torch.where(paths < 0, paths, paths + first),
            y=several.labels(),
        )


class GraphBias(nn.Module):
    r"""The bias of the attention scores: spatial and edge encoding of the graph, per head.

    .. math:: b_{ij} = s_{φ(i,j)} + \frac{1}{T} \sum_{t=1}^{T} w_t^\top x_{e_t}

    φ is the distance of i and j, :math:`e_1, …, e_T` are the first (at most ``max_hops``) edges on
    a shortest path from i to j, :math:`x_e` is the embedded edge. The virtual node has a separate
    bias to and from all nodes. Distances are 0, 1, …, then "further", then "no path".
    """

    def __init__(
        self, edge_features: graphs.Features, num_heads: int, num_distances: int, max_hops: int
    ) -> None:
        super().__init__()
        self.spatial = nn.Embedding(num_distances, num_heads)
        self.virtual = nn.Parameter(torch.empty(num_heads))
        self.edges = graphs.FeatureEncoder(edge_features, num_heads)
        self.hops = nn.Parameter(torch.empty(max_hops, num_heads, num_heads))
        nn.init.normal_(self.virtual, std=0.02)
        nn.init.normal_(self.hops, std=0.02)

    def forward(self, batch: GraphormerBatch) -> Tensor:
        """``(B, H, N+1, N+1)``, the virtual node first, -inf for keys that are padding."""
        # the last rows of the table are for pairs that are further apart, and without a path
        last, distance = self.spatial.num_embeddings - 1, batch.distance
        row = torch.where(distance < 0, last, distance.clamp(max=last - 1))
        nodes = (self.spatial(row) + self.along_paths(batch)).permute(0, 3, 1, 2)
        virtual = self.virtual.to(nodes.dtype)[None, :, None, None]
        size, heads, length, _ = nodes.shape
        bias = torch.cat([virtual.expand(size, heads, length, 1), nodes], dim=3)
        bias = torch.cat([virtual.expand(size, heads, 1, length + 1), bias], dim=2)
        padding = F.pad(batch.padding, (1, 0), value=False)
        return bias.masked_fill(padding[:, None, None, :], -torch.inf)

    def along_paths(self, batch: GraphormerBatch) -> Tensor:
        """``(B, N, N, H)``: the mean along each path of edge times weight of the hop."""
        hops = len(self.hops)
        if batch.paths.shape[-1] < hops:
            raise ValueError(
                f"the batch has the first {batch.paths.shape[-1]} edges of each path, the model "
                f"needs {hops}: GraphormerCollator(max_hops={hops})"
            )
        paths = batch.paths[..., :hops]
        # each edge at each hop is computed once and looked up; an added row of zeros pads the paths
        products = torch.einsum("ed,tdh->eth", self.edges(batch.edge_attr), self.hops)
        products = F.pad(products.flatten(0, 1), (0, 0, 0, 1))
        hop = torch.arange(hops, device=paths.device, dtype=paths.dtype)
        ended = paths < 0
        index = torch.where(ended, len(products) - 1, paths * hops + hop)
        length = (~ended).sum(-1, keepdim=True).clamp(min=1)
        return F.embedding(index, products).sum(-2) / length


class Graphormer(nn.Module):
    r"""A pre-norm Transformer whose tokens are a virtual node and the nodes of a graph.

    .. math:: h_i = x_i + z^-_{\deg^-(i)} + z^+_{\deg^+(i)}, \qquad
              A = \mathrm{softmax}(q k^\top / \sqrt d + b)

    with centrality encodings z and the bias b of :class:`GraphBias`, shared by all layers. The
    output is a linear function of the virtual node.

    Args:
        node_features, edge_features: sizes of the vocabularies, one for each integer column, or
            the number of real columns.
        num_outputs: how many numbers are predicted for a graph.
        dim, depth, num_heads, ffn_dim: the Transformer's sizes.
        num_degrees: degrees that are distinguished; the last one stands for all higher degrees.
        num_distances, max_hops: see :class:`GraphBias`.
        dropout: on the input tokens and on the branches of the blocks.
        mlp_dropout: inside the MLPs.
        attention_dropout: on entries of A.
    """

    def __init__(
        self,
        node_features: graphs.Features,
        edge_features: graphs.Features,
        num_outputs: int = 1,
        *,
        dim: int,
        depth: int,
        num_heads: int,
        ffn_dim: int,
        num_degrees: int = 64,
        num_distances: int = 40,
        max_hops: int = 5,
        dropout: float = 0.0,
        mlp_dropout: float = 0.1,
        attention_dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.nodes = graphs.FeatureEncoder(node_features, dim)
        self.in_degree = nn.Embedding(num_degrees, dim)
        self.out_degree = nn.Embedding(num_degrees, dim)
        self.virtual_node = nn.Parameter(torch.empty(dim))
        self.bias = GraphBias(edge_features, num_heads, num_distances, max_hops)
        self.dropout = nn.Dropout(dropout)
        attention = partial(SoftmaxAttention, dim, num_heads, attention_dropout)
        self.blocks = nn.ModuleList(
            Block(attention(), dim, ffn_dim, dropout, mlp_dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_outputs)
        self.reset_parameters()

    @classmethod
    def slim(
        cls,
        node_features: graphs.Features = (64,),
        edge_features: graphs.Features = (64,),
        num_outputs: int = 1,
        **options: Any,
    ) -> Graphormer:
        """Graphormer-SLIM, for ZINC: 12 layers, 80 wide, 8 heads of 10."""
        sizes = {"dim": 80, "depth": 12, "num_heads": 8, "ffn_dim": 80}
        return cls(node_features, edge_features, num_outputs, **{**sizes, **options})

    @classmethod
    def base(
        cls,
        node_features: graphs.Features = (512,) * 9,
        edge_features: graphs.Features = (512,) * 3,
        num_outputs: int = 1,
        **options: Any,
    ) -> Graphormer:
        """Graphormer, for PCQM4M: 12 layers, 768 wide, 32 heads of 24."""
        sizes = {"dim": 768, "depth": 12, "num_heads": 32, "ffn_dim": 768}
        tables = {"num_degrees": 512, "num_distances": 512}
        return cls(node_features, edge_features, num_outputs, **{**sizes, **tables, **options})

    def reset_parameters(self) -> None:
        """Small normal weights, smaller in deep models: the published initialisation."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02 / len(self.blocks) ** 0.5)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.normal_(self.virtual_node, std=0.02)

    def forward(self, batch: GraphormerBatch) -> Tensor:
        """``(B, num_outputs)``."""
        x, most = self.nodes(batch.x), self.in_degree.num_embeddings - 1
        x = x + self.in_degree(batch.in_degree.clamp(max=most))
        x = x + self.out_degree(batch.out_degree.clamp(max=most))
        virtual = self.virtual_node.to(x.dtype).expand(len(x), 1, -1)
        x = self.dropout(torch.cat([virtual, x], dim=1))
        bias = self.bias(batch)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x[:, 0]))
