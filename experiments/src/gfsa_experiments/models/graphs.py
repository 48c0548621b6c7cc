"""Graphs as the models take them: batches of tensors, features of pairs, and shared layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from gfsa.operators.operator import at_least_float32

if TYPE_CHECKING:
    from typing_extensions import Self


Graph = Any
"""A graph in the form of torch_geometric's ``Data``; any object with these attributes works.

``x``: ``(N, F)`` or ``(N,)``; ``edge_index``: ``(2, E)``, a column ``(source, target)`` per edge,
two for an undirected bond; ``edge_attr``: ``(E, F)``, ``(E,)`` or None; ``y``: labels or None.
"""


class Prepared(SimpleNamespace):
    """A graph with what a collator computes of it once: store these instead of the raw graphs."""


class Batch:
    """A dataclass of tensors that moves between devices, for data loaders and accelerate."""

    padding: Tensor

    def __len__(self) -> int:
        return len(self.padding)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, function: Callable[[Tensor], Tensor]) -> Self:
        values = vars(self).items()
        return type(self)(**{k: function(v) if isinstance(v, Tensor) else v for k, v in values})


def on_the_host() -> AbstractContextManager[Any]:
    """A context in which tensors are made on the CPU, whatever torch's default device is."""
    # torch.device slows down every operation: only where it is needed
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


class Collator(ABC):
    """Graphs to a batch: what is expensive once per graph, the rest in every batch."""

    pad_to_multiple: int
    """Sizes of batches are rounded up, so that few shapes occur; 1: no more than is necessary."""

    def prepare(self, graph: Graph) -> Prepared:
        """What batches need of one graph: do this once, not every epoch."""
        x, edge_index = _columns(graph.x), graph.edge_index
        if not len(x):
            raise ValueError("expected a graph with at least one node; leave this one out")
        check_edges(edge_index, len(x))
        edges, y = edge_index.shape[1], getattr(graph, "y", None)
        edge_attr = getattr(graph, "edge_attr", None)
        # one kind for all where there are no features
        edge_attr = edge_index.new_zeros(edges, 1) if edge_attr is None else _columns(edge_attr)
        if len(edge_attr) != edges:
            raise ValueError(f"edge_attr has {len(edge_attr)} rows for {edges} edges")
        label = None if y is None else torch.as_tensor(y).reshape(-1)
        with on_the_host():
            computed = self.features(edge_index, len(x))
        return Prepared(x=x, edge_attr=edge_attr, y=label, **computed)

    @abstractmethod
    def features(self, edge_index: Tensor, num_nodes: int) -> dict[str, Tensor]:
        """What a model needs beside the features of nodes and edges."""

    @abstractmethod
    def join(self, graphs: Several) -> Any:
        """The batch of some graphs."""

    def __call__(self, graphs: Sequence[Graph | Prepared]) -> Any:
        with on_the_host():
            prepared = [g if isinstance(g, Prepared) else self.prepare(g) for g in graphs]
            return self.join(Several(prepared))

    def few(self, count: int) -> int:
        """A number above ``count``, one of four per power of two; ``count`` without padding."""
        if self.pad_to_multiple == 1:
            return count
        return above(count, max(self.pad_to_multiple, 1 << max(0, count.bit_length() - 3)))


def above(count: int, multiple: int) -> int:
    """The first multiple above ``count``: at least one row is padding."""
    return (count // multiple + 1) * multiple


class Several:
    """Graphs that become one batch: an attribute of all of them, joined to one tensor."""

    def __init__(self, graphs: Sequence[Prepared]) -> None:
        self.graphs = graphs

    def each(self, name: str) -> list[Any]:
        """The attribute of every graph."""
        return [getattr(graph, name) for graph in self.graphs]

    def sizes(self, name: str) -> list[int]:
        return [len(rows) for rows in self.each(name)]

    def padding(self, name: str, size: int) -> Tensor:
        """``(B, size)``, True behind the rows that graph b has."""
        return torch.arange(size) >= torch.tensor(self.sizes(name))[:, None]

    def pad(self, name: str, size: int, value: float = 0, axes: int = 1) -> Tensor:
        """``(B, size, ...)``: the first ``axes`` axes, which differ in length, are padded."""
        rows, there = self.each(name), ~self.padding(name, size)
        if axes == 2:
            there = there[:, :, None] & there[:, None, :]
        content = torch.cat([row.flatten(0, axes - 1) for row in rows])
        padded = content.new_full((there.numel(), *content.shape[1:]), value)
        padded.index_copy_(0, there.flatten().nonzero()[:, 0], content)
        return padded.view(*there.shape, *content.shape[1:])

    def rows(self, name: str, count: int) -> Tensor:
        """``(count, ...)``: the rows of all graphs, then zeros."""
        joined = torch.cat(self.each(name))
        return torch.cat([joined, joined.new_zeros(count - len(joined), *joined.shape[1:])])

    def labels(self) -> Tensor | None:
        """``(B, T)``, or None if no graph has a label."""
        sizes = [None if y is None else len(y) for y in self.each("y")]
        if len(set(sizes)) > 1:
            raise ValueError(f"expected the same number of labels for every graph, got {sizes}")
        return None if sizes[0] is None else torch.stack(self.each("y"))


def _columns(features: Any) -> Tensor:
    features = torch.as_tensor(features)
    if features.dim() == 1:
        features = features[:, None]
    return features if features.is_floating_point() else features.long()


def distances(edge_index: Tensor, num_nodes: int) -> Tensor:
    """``(N, N)``: edges on a shortest path from row to column, -1 where there is no path."""
    distance = np.where(dense_adjacency(edge_index, num_nodes), np.float32(1), np.float32(np.inf))
    np.fill_diagonal(distance, 0)
    for via in range(num_nodes):
        np.minimum(distance, distance[:, via, None] + distance[via], out=distance)
    distance[np.isinf(distance)] = -1
    return torch.from_numpy(distance).long()


def path_edges(edge_index: Tensor, distance: Tensor, max_hops: int) -> Tensor:
    """``(N, N, max_hops)``: the first edges (columns of ``edge_index``) on one shortest path.

    Entries behind the end of a path, and where there is no path, are -1. Among several shortest
    paths, the one whose next edge comes first in ``edge_index`` is taken at every node.

    Args:
        distance: what :func:`distances` returns for the same edges.
    """
    num_nodes, num_edges = len(distance), edge_index.shape[1]
    source, target = edge_index
    # an edge i→u lies on a shortest path to j if u is one step closer to j than i
    remaining = distance[target]
    closer = (remaining >= 0) & (remaining == distance[source] - 1)
    edge = torch.arange(num_edges)[:, None].expand(num_edges, num_nodes)
    # the extra row stands for paths that have ended
    first = torch.full((num_nodes + 1, num_nodes), num_edges)
    first.scatter_reduce_(
        0, source[:, None].expand_as(edge), edge.masked_fill(~closer, num_edges), "amin"
    )
    # follow all pairs at once, hop by hop
    goal = torch.arange(num_nodes).expand(num_nodes, num_nodes)
    here = goal.T
    target = torch.cat([target, torch.tensor([num_nodes])])
    hops = []
    for _ in range(max_hops):
        hop = first[here, goal]
        hops.append(hop)
        here = target[hop]
    paths = torch.stack(hops, dim=-1)
    return paths.masked_fill_(paths == num_edges, -1)


def dense_adjacency(edge_index: Tensor, num_nodes: int) -> Tensor:
    """``(N, N)`` of zeros and ones; parallel edges count once."""
    check_edges(edge_index, num_nodes)
    adjacency = torch.zeros(num_nodes, num_nodes)
    adjacency[edge_index[0], edge_index[1]] = 1.0
    return adjacency


def check_edges(edge_index: Tensor, num_nodes: int) -> None:
    """Raise ValueError unless the edges are pairs of this graph's nodes."""
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype != torch.long:
        raise ValueError(
            "expected edge_index of shape (2, E) and dtype int64, sources above targets, "
            f"got {tuple(edge_index.shape)} of {edge_index.dtype}"
        )
    least, most = map(int, edge_index.aminmax()) if edge_index.numel() else (0, 0)
    if least < 0 or most >= num_nodes:
        raise ValueError(
            f"edge_index names nodes from {least} to {most}, but the graph has nodes 0 to "
            f"{num_nodes - 1}"
        )


Features = int | Sequence[int]
"""The sizes of the vocabularies, one per integer column, or the number of real columns."""


class FeatureEncoder(nn.Module):
    r"""Node or edge features to vectors.

    .. math:: \textstyle\sum_c \mathrm{table}_c[x_c] \quad\text{or}\quad W x + b
    """

    def __init__(self, features: Features, dim: int) -> None:
        super().__init__()
        self.features = features if isinstance(features, int) else tuple(features)
        if isinstance(self.features, int):
            self.linear = nn.Linear(self.features, dim)
        else:
            self.tables = nn.ModuleList(nn.Embedding(size, dim) for size in self.features)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., columns)`` to ``(..., dim)``."""
        reals = isinstance(self.features, int)
        columns = self.features if isinstance(self.features, int) else len(self.features)
        if x.shape[-1] != columns or reals != x.is_floating_point():
            kind = "floating-point" if reals else "integer"
            raise ValueError(
                f"expected {columns} {kind} columns of features, got {x.shape[-1]} of {x.dtype}; "
                "pass the model the sizes of its vocabularies, or the number of real columns"
            )
        if reals:
            return self.linear(x.to(self.linear.weight.dtype))
        vectors = [table(x[..., column]) for column, table in enumerate(self.tables)]
        return torch.stack(vectors).sum(0) if len(vectors) > 1 else vectors[0]


class MaskedBatchNorm(nn.BatchNorm1d):
    r"""``nn.BatchNorm1d`` over the real rows; padding rows become zero.

    .. math:: μ = \sum_i s_i x_i, \qquad σ^2 = \sum_i s_i (x_i - μ)^2

    with :math:`s_i` one over the number of real rows, and zero for padding. No shape depends on
    that number, so that a step can be replayed as a CUDA graph. Padding is reset because it would
    grow from layer to layer (padding edges join padding) until it overflows.
    """

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """``x``: ``(rows, features)``; ``real``: ``(rows,)``, True where a row is real."""
        if real is None:
            return super().forward(x)
        if not self.training:
            return super().forward(x).masked_fill(~real[:, None], 0.0)
        norm: Any = self
        wide = at_least_float32(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            count = real.sum()
            share = real.to(wide) / count
            mean = share @ x.to(wide)
            centred = x.to(wide) - mean
            variance = share @ centred.square()
            scale = self.weight * torch.rsqrt(variance + self.eps)
            y = torch.addcmul(self.bias, centred, scale).masked_fill(~real[:, None], 0.0)
        with torch.no_grad():
            unbiased = variance * (count / (count - 1).clamp(min=1))
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(unbiased, norm.momentum)
            norm.num_batches_tracked.add_(1)
        return y.to(x.dtype)
