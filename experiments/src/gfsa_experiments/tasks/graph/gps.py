"""GPS on padded graphs: PyG's layers, its encodings of positions, and batches of one shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GINEConv, GPSConv, ResGatedGraphConv
from torch_geometric.transforms import AddRandomWalkPE
from torch_geometric.utils import to_undirected

from gfsa_experiments.models import graphs

if TYPE_CHECKING:
    from gfsa_experiments.tasks.graph.recipe import GraphConfig


@dataclass
class GPSBatch(graphs.Batch):
    """B graphs, padded to N nodes.

    ``x``: ``(B, N, F)``; ``padding``: ``(B, N)``, True where there is no node; ``edge_index``:
    ``(2, E)``, nodes counted through all B·N; ``edge_attr``: ``(E, F)``; ``encoding``:
    ``(B, N, k)``; ``y``: ``(B, T)`` or None. Padding edges lead from padding to padding.
    """

    x: Tensor
    padding: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    encoding: Tensor
    y: Tensor | None


@dataclass(frozen=True)
class GPSCollator(graphs.Collator):
    """Graphs to a :class:`GPSBatch`, padded to a multiple, with one padding node at least."""

    encoding: str = "none"
    encoding_size: int = 0
    pad_to_multiple: int = 1

    def features(self, edge_index: Tensor, num_nodes: int) -> dict[str, Tensor]:
        """The graph's edges, and the encoding of its nodes."""
        graph = Data(edge_index=to_undirected(edge_index, num_nodes=num_nodes), num_nodes=num_nodes)
        if self.encoding == "walk":
            # how likely a random walk is back after 1, 2, … steps
            encoding = AddRandomWalkPE(self.encoding_size)(graph).random_walk_pe
        elif self.encoding == "laplacian":
            encoding = lowest_eigenvectors(graph.edge_index, num_nodes, self.encoding_size)
        else:
            encoding = torch.zeros(num_nodes, 0)
        return {"edge_index": edge_index, "encoding": encoding}

    def join(self, several: graphs.Several) -> GPSBatch:
        nodes = several.sizes("x")
        size = graphs.above(max(nodes), self.pad_to_multiple)
        padding = several.padding("x", size)
        ends = [ends + size * graph for graph, ends in enumerate(several.each("edge_index"))]
        # padding edges are spread over many rows: a GPU adds up rows of one index sequentially
        spare = padding.flatten().nonzero()[:, 0]
        real = sum(several.sizes("edge_attr"))
        edges = self.few(real)
        ends.append(spare[torch.arange(edges - real) % len(spare)].expand(2, -1))
        return GPSBatch(
            x=several.pad("x", size),
            padding=padding,
            edge_index=torch.cat(ends, 1),
            edge_attr=several.rows("edge_attr", edges),
            encoding=several.pad("encoding", size),
            y=several.labels(),
        )


def lowest_eigenvectors(edge_index: Tensor, num_nodes: int, count: int) -> Tensor:
    """The eigenvectors of the ``count`` lowest frequencies of a graph's Laplacian D − A.

    ``(N, 2·count)``: vectors of unit length and arbitrary sign, then the frequencies, the same for
    all nodes, -1 where the graph has fewer.
    """
    links = graphs.dense_adjacency(edge_index, num_nodes).double().fill_diagonal_(0.0)
    values, vectors = torch.linalg.eigh(torch.diag(links.sum(1)) - links)
    missing = max(0, count - len(values))
    vectors = F.pad(vectors[:, :count], (0, missing))
    values = F.pad(values[:count].clamp(min=0.0), (0, missing), value=-1.0)
    return torch.cat([vectors, values.expand_as(vectors)], 1).float()


class DenseGPSConv(GPSConv):
    r"""PyG's ``GPSConv`` on graphs of one padded size.

    .. math:: h = \mathrm{BN}(x + \mathrm{MPNN}(x)) + \mathrm{BN}(x + \mathrm{MHA}(x)), \qquad
              y = \mathrm{BN}(h + \mathrm{MLP}(h))

    The same modules, and the same outputs for real nodes. ``GPSConv`` reads sizes from the GPU and
    gathers the real nodes from the padded ones in every layer; here the rows stay padded.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for norm in (self.norm1, self.norm2, self.norm3):
            norm.module = graphs.MaskedBatchNorm(norm.module.num_features)

    def forward(self, x: Tensor, edge_index: Tensor, padding: Tensor, **kwargs: Any) -> Tensor:
        """``x``: ``(B, N, channels)``; ``padding``: ``(B, N)``."""
        rows, real = x.flatten(0, 1), ~padding.flatten()
        local = self.conv(rows, edge_index, **kwargs)
        local = self.norm1.module(rows + F.dropout(local, self.dropout, self.training), real)
        attended, _ = self.attn(x, x, x, key_padding_mask=padding, need_weights=False)
        attended = F.dropout(attended.flatten(0, 1), self.dropout, self.training)
        h = local + self.norm2.module(rows + attended, real)
        return self.norm3.module(h + self.mlp(h), real).view_as(x)


class WalkFeatures(nn.Module):
    """Random-walk encodings to vectors: batch norm, then a linear layer."""

    def __init__(self, steps: int, dim: int) -> None:
        super().__init__()
        self.norm = graphs.MaskedBatchNorm(steps)
        self.linear = nn.Linear(steps, dim)

    def forward(self, batch: GPSBatch) -> Tensor:
        """``(B, N, dim)``."""
        rows = self.norm(batch.encoding.flatten(0, 1), ~batch.padding.flatten())
        return self.linear(rows).view(*batch.padding.shape, -1)


class LaplacianFeatures(nn.Module):
    r"""Eigenvectors to vectors, :math:`\sum_k \mathrm{MLP}(v_{ik}, λ_k)`.

    In training the sign of each eigenvector is random, since it is arbitrary.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        inner = nn.Linear(2, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim), nn.ReLU()
        self.mlp = nn.Sequential(*inner)

    def forward(self, batch: GPSBatch) -> Tensor:
        """``(B, N, dim)``."""
        vectors, values = batch.encoding.chunk(2, -1)
        if self.training:
            heads = torch.rand_like(vectors[:, :1]) < 0.5
            vectors = torch.where(heads, vectors, -vectors)
        pairs = torch.stack([vectors, values], -1)
        # small graphs have fewer frequencies: missing ones are marked by -1
        return (self.mlp(pairs) * (values >= 0)[..., None]).sum(2)


class GPS(nn.Module):
    """GPS for properties of whole graphs; ``config`` has its sizes, encoding and pooling."""

    def __init__(
        self, config: GraphConfig, nodes: graphs.Features, edges: graphs.Features, num_outputs: int
    ) -> None:
        super().__init__()
        dim, of_encoding = config.width, config.encoding_width
        self.pooling = config.pooling
        self.encoding: nn.Module | None = None
        if config.encoding == "walk":
            self.encoding = WalkFeatures(config.encoding_size, of_encoding)
        elif config.encoding == "laplacian":
            self.encoding = LaplacianFeatures(of_encoding)
        rest = dim if self.encoding is None else dim - of_encoding
        self.nodes = graphs.FeatureEncoder(nodes, rest)
        self.edges = graphs.FeatureEncoder(edges, dim)

        def local() -> nn.Module:
            if config.local == "gated":
                return ResGatedGraphConv(dim, dim, edge_dim=dim)
            return GINEConv(nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)))

        attention = {"dropout": config.attention_dropout}
        self.layers = nn.ModuleList(
            DenseGPSConv(dim, local(), config.heads, config.dropout, attn_kwargs=attention)
            for _ in range(config.depth)
        )
        self.head = nn.Sequential(
            nn.Linear(dim, dim // 2),
            nn.ReLU(),
            nn.Linear(dim // 2, dim // 4),
            nn.ReLU(),
            nn.Linear(dim // 4, num_outputs),
        )

    def forward(self, batch: GPSBatch) -> Tensor:
        """``(B, num_outputs)``."""
        real = ~batch.padding
        x = self.nodes(batch.x)
        if self.encoding is not None:
            x = torch.cat([x, self.encoding(batch).to(x.dtype)], -1)
        edges = self.edges(batch.edge_attr)
        for layer in self.layers:
            x = layer(x, batch.edge_index, batch.padding, edge_attr=edges)
        x = (x * real[..., None]).sum(1)
        if self.pooling == "mean":
            x = x / real.sum(1, keepdim=True)
        return self.head(x)
