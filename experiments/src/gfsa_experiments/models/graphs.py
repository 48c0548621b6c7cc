"""Graphs as the models take them: batches of tensors, features of edges, and shared layers.

A graph is an ``edge_index``, ``(2, E)``, one column ``(source, target)`` per directed edge, and a
number of nodes; an undirected bond is two columns, as in torch_geometric. Functions of edges also
take B graphs at once, each padded to N nodes: node i of graph b then has the number ``b·N + i``,
and the rows of the graphs are stacked, ``(B·N, N)`` instead of ``(N, N)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from gfsa.operators.base import at_least_float32


class Graph(Protocol):
    """A graph in the form of torch_geometric's ``Data``; any object with these attributes works.

    ``x``: ``(N, F)`` or ``(N,)``; ``edge_index``: ``(2, E)``; ``edge_attr``: ``(E, F)``, ``(E,)``
    or None; ``y``: the graph's label or labels, or None.
    """

    x: Any
    edge_index: Any
    edge_attr: Any
    y: Any


BatchT = TypeVar("BatchT", bound="Batch")


class Batch:
    """A dataclass of tensors that moves between devices, for data loaders and accelerate."""

    def to(self: BatchT, device: torch.device | str, non_blocking: bool = False) -> BatchT:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self: BatchT) -> BatchT:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self: BatchT, function: Any) -> BatchT:
        moved = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            moved[field.name] = function(value) if isinstance(value, Tensor) else value
        return type(self)(**moved)


P = ParamSpec("P")
R = TypeVar("R")


def on_the_host(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function`` create its tensors on the CPU, whatever torch's default device is."""

    @wraps(function)
    def on_cpu(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return on_cpu


def nodes_of(graph: Graph) -> Tensor:
    """The node features, ``(N, F)``, integers as int64."""
    x = _columns(graph.x)
    if not len(x):
        raise ValueError("expected a graph with at least one node, got none; leave the graph out")
    check_edges(graph.edge_index, len(x))
    return x


def edges_of(graph: Graph) -> Tensor:
    """The edge features, ``(E, F)``; one column of zeros if the graph has none."""
    num_edges = graph.edge_index.shape[1]
    attributes = getattr(graph, "edge_attr", None)
    if attributes is None:
        return torch.zeros(num_edges, 1, dtype=torch.long)
    attributes = _columns(attributes)
    if len(attributes) != num_edges:
        raise ValueError(f"edge_attr has {len(attributes)} rows for {num_edges} edges")
    return attributes


def label_of(graph: Graph) -> Tensor | None:
    """The graph's labels in one row, ``(T,)``, or None."""
    y = getattr(graph, "y", None)
    return None if y is None else torch.as_tensor(y).reshape(-1)


def stack_labels(labels: Sequence[Tensor | None]) -> Tensor | None:
    """``(B, T)``, or None if no graph has a label."""
    given = [label for label in labels if label is not None]
    if not given:
        return None
    if len({len(label) for label in given}) > 1 or len(given) < len(labels):
        raise ValueError(
            "expected the same number of labels for every graph in a batch, "
            f"got {[None if label is None else len(label) for label in labels]}"
        )
    return torch.stack(given)


def pad(rows: Sequence[Tensor], value: float) -> Tensor:
    """Tensors of different sizes as one tensor, padded with ``value`` at the end of each axis."""
    size = [max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)]
    padded = rows[0].new_full((len(rows), *size), value)
    for target, row in zip(padded, rows, strict=True):
        target[tuple(slice(length) for length in row.shape)] = row
    return padded


def _columns(features: Any) -> Tensor:
    features = torch.as_tensor(features)
    if features.dim() == 1:
        features = features[:, None]
    return features if features.is_floating_point() else features.long()


def degrees(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """In- and out-degree of each node, ``(N,)`` each."""
    check_edges(edge_index, num_nodes)
    source, target = edge_index
    return (
        torch.bincount(target, minlength=num_nodes),
        torch.bincount(source, minlength=num_nodes),
    )


def distances(edge_index: Tensor, num_nodes: int, num_graphs: int = 1) -> Tensor:
    """``(B·N, N)``: edges on a shortest path from row to column, -1 where there is no path."""
    total = num_graphs * num_nodes
    check_edges(edge_index, total)
    distance = torch.full((total, num_nodes), -1)
    # column j holds the nodes that reach node j in exactly `step` edges
    reached = torch.eye(num_nodes).repeat(num_graphs, 1)
    step = 0
    # a sparse matrix: large graphs have few edges per node and many breadth-first steps; torch
    # warns of the checks that sparse tensors skip unless the caller says whether to skip them
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        adjacency = torch.sparse_coo_tensor(
            edge_index, torch.ones(edge_index.shape[1]), (total, total)
        ).coalesce()
        while True:
            new = (reached > 0) & (distance < 0)
            if not new.any():
                return distance
            distance.masked_fill_(new, step)
            reached = torch.sparse.mm(adjacency, new.float())
            step += 1


def path_edges(edge_index: Tensor, distance: Tensor, max_hops: int) -> Tensor:
    """``(B·N, N, max_hops)``: the first edges (columns of ``edge_index``) on one shortest path.

    Entries behind the end of a path, and where there is no path, are -1. Among several shortest
    paths, the one whose next edge comes first in ``edge_index`` is taken at every node.

    Args:
        distance: what :func:`distances` returns for the same edges.
    """
    (rows, num_nodes), num_edges = distance.shape, edge_index.shape[1]
    source, target = edge_index
    # an edge i→u lies on a shortest path to j if u is one step closer to j than i
    remaining = distance[target]
    closer = (remaining >= 0) & (remaining == distance[source] - 1)
    edge = torch.arange(num_edges)[:, None].expand(num_edges, num_nodes)
    # the extra row stands for paths that have ended
    first = torch.full((rows + 1, num_nodes), num_edges)
    first.scatter_reduce_(
        0, source[:, None].expand_as(edge), edge.masked_fill(~closer, num_edges), "amin"
    )
    # follow all pairs at once, hop by hop
    goal = torch.arange(num_nodes).expand(rows, num_nodes)
    here = torch.arange(rows)[:, None].expand(rows, num_nodes)
    target = torch.cat([target, torch.tensor([rows])])
    hops = []
    for _ in range(max_hops):
        hop = first[here, goal]
        hops.append(hop)
        here = target[hop]
    paths = torch.stack(hops, dim=-1)
    return paths.masked_fill_(paths == num_edges, -1)


def random_walk_encoding(adjacency: Tensor, steps: int) -> Tensor:
    r"""``(..., N, steps)``: the probability of being back after 1, 2, … steps of a random walk.

    .. math:: p_{i,t} = (P^t)_{ii} = \sum_j (P^a)_{ij} (P^{t-a})_{ji}, \qquad P = D^{-1} A

    The second form needs only half of the powers.

    Args:
        adjacency: ``(..., N, N)``.
    """
    total = adjacency.sum(-1, keepdim=True)
    # a row of zeros stays one
    walk = adjacency / total.masked_fill(total == 0, 1.0)
    power = torch.eye(walk.shape[-1], dtype=walk.dtype).expand_as(walk)
    returns = []
    for step in range(steps):
        # P^a times P^a and P^a times P^(a + 1) in turn
        before, power = power, power @ walk if step % 2 == 0 else power
        returns.append((before * power.mT).sum(-1))
    return torch.stack(returns, dim=-1) if returns else adjacency.new_zeros(*walk.shape[:-1], 0)


def dense_adjacency(edge_index: Tensor, num_nodes: int, num_graphs: int = 1) -> Tensor:
    """``(B·N, N)`` of zeros and ones; parallel edges count once."""
    check_edges(edge_index, num_graphs * num_nodes)
    adjacency = torch.zeros(num_graphs * num_nodes, num_nodes)
    adjacency[edge_index[0], edge_index[1] % num_nodes] = 1.0
    return adjacency


def check_edges(edge_index: Tensor, num_nodes: int) -> None:
    """Raise ValueError unless the edges are pairs of this graph's nodes."""
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype != torch.long:
        raise ValueError(
            "expected edge_index of shape (2, E) and dtype int64, sources above targets, "
            f"got {tuple(edge_index.shape)} of {edge_index.dtype}"
        )
    if edge_index.numel() and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < num_nodes:
        raise ValueError(
            f"edge_index names nodes from {int(edge_index.min())} to {int(edge_index.max())}, "
            f"but the graph has nodes 0 to {num_nodes - 1}"
        )


class FeatureEncoder(nn.Module):
    r"""Node or edge features to vectors.

    .. math:: \textstyle\sum_c \mathrm{table}_c[x_c] \quad\text{or}\quad W x + b

    Args:
        features: sizes of the vocabularies, one for each integer column; or the number of real
            columns.
        dim: width of the vectors.
    """

    def __init__(self, features: int | Sequence[int], dim: int) -> None:
        super().__init__()
        self.features = features if isinstance(features, int) else tuple(features)
        self.dim = dim
        if isinstance(self.features, int):
            self.linear = nn.Linear(self.features, dim)
        else:
            self.tables = nn.ModuleList(nn.Embedding(size, dim) for size in self.features)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., columns)`` to ``(..., dim)``."""
        integers = not isinstance(self.features, int)
        columns = len(self.features) if isinstance(self.features, tuple) else self.features
        if x.shape[-1] != columns or integers == x.is_floating_point():
            kind = "integer" if integers else "floating-point"
            raise ValueError(
                f"expected {columns} {kind} columns of features, "
                f"got {x.shape[-1]} of {x.dtype}; pass the model the sizes of its vocabularies, "
                "or the number of real columns"
            )
        if not integers:
            return self.linear(x.to(self.linear.weight.dtype))
        vectors = [table(x[..., column]) for column, table in enumerate(self.tables)]
        return torch.stack(vectors).sum(0) if len(vectors) > 1 else vectors[0]


def mean_by(index: Tensor, x: Tensor, size: int) -> Tensor:
    """``(size, ...)``: the mean of the rows of ``x`` that share an index; zeros without rows."""
    # sums of many half-precision rows are accumulated in float32
    dtype = at_least_float32(x.dtype)
    total = torch.zeros(size, *x.shape[1:], dtype=dtype, device=x.device)
    total = total.index_add(0, index, x.to(dtype))
    count = torch.zeros(size, dtype=dtype, device=x.device)
    count = count.index_add(0, index, torch.ones_like(index, dtype=dtype)).clamp(min=1.0)
    return (total / count.view(-1, *[1] * (x.dim() - 1))).to(x.dtype)
