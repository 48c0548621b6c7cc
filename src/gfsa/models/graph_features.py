"""What graph models ask of a graph: degrees, distances, shortest paths, random walks.

A graph is an ``edge_index``, ``(2, E)``, one column ``(source, target)`` a directed edge, and a
number of nodes; an undirected bond is two columns, as in torch_geometric.
"""

from __future__ import annotations

import torch
from torch import Tensor


def degrees(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """In- and out-degree of each node, ``(N,)`` each."""
    check_edges(edge_index, num_nodes)
    source, target = edge_index
    return (
        torch.bincount(target, minlength=num_nodes),
        torch.bincount(source, minlength=num_nodes),
    )


def distances(edge_index: Tensor, num_nodes: int) -> Tensor:
    """``(N, N)``: edges on a shortest path from row to column, -1 where there is no path."""
    check_edges(edge_index, num_nodes)
    ahead: list[list[int]] = [[] for _ in range(num_nodes)]
    for source, target in edge_index.T.tolist():
        ahead[source].append(target)
    # breadth first from each node, in plain Python: faster than tensors on graphs of this size
    rows = []
    for start in range(num_nodes):
        row = [-1] * num_nodes
        row[start] = step = 0
        frontier = [start]
        while frontier:
            step += 1
            reached = []
            for node in frontier:
                for other in ahead[node]:
                    if row[other] < 0:
                        row[other] = step
                        reached.append(other)
            frontier = reached
        rows.append(row)
    return torch.tensor(rows, dtype=torch.long).reshape(num_nodes, num_nodes)


def path_edges(edge_index: Tensor, distance: Tensor, max_hops: int) -> Tensor:
    """``(N, N, max_hops)``: the first edges (columns of ``edge_index``) on one shortest path.

    Filled with -1 behind the path's end and where there is no path. Of several shortest paths it
    takes, node after node, the edge that comes first in ``edge_index``.
    """
    num_nodes, num_edges = len(distance), edge_index.shape[1]
    source, target = edge_index
    # an edge i→u lies on a shortest path to j if it brings i one step closer
    remaining = distance[target]
    closer = (remaining >= 0) & (remaining == distance[source] - 1)
    edge = torch.arange(num_edges)[:, None].expand(num_edges, num_nodes)
    first = torch.full((num_nodes, num_nodes), num_edges)
    first.scatter_reduce_(
        0, source[:, None].expand_as(edge), edge.masked_fill(~closer, num_edges), "amin"
    )

    # walk all pairs in step; the extra row and column stand for paths that have ended
    ended = num_nodes
    goal = torch.arange(num_nodes).expand(num_nodes, num_nodes)
    here = goal.T
    first = torch.nn.functional.pad(first, (0, 0, 0, 1), value=num_edges)
    target = torch.cat([target, torch.tensor([ended])])
    hops = []
    for _ in range(max_hops):
        hop = first[here, goal]
        hops.append(hop)
        here = target[hop]
    paths = torch.stack(hops, dim=-1)
    return paths.masked_fill(paths == num_edges, -1)


def random_walk_encoding(adjacency: Tensor, steps: int) -> Tensor:
    r"""``(N, steps)``: the probability to be back after 1, 2, … steps of a random walk.

    .. math:: p_{i,t} = (P^t)_{ii}, \qquad P = D^{-1} A
    """
    walk = row_normalised(adjacency)
    power = walk
    returns = []
    for _ in range(steps):
        returns.append(power.diagonal())
        power = power @ walk
    return torch.stack(returns, dim=-1) if returns else adjacency.new_zeros(len(adjacency), 0)


def row_normalised(adjacency: Tensor) -> Tensor:
    """``D⁻¹A``; a row of zeros stays one."""
    total = adjacency.sum(-1, keepdim=True)
    return adjacency / total.masked_fill(total == 0, 1.0)


def dense_adjacency(edge_index: Tensor, num_nodes: int) -> Tensor:
    """``(N, N)`` of zeros and ones; parallel edges count once."""
    check_edges(edge_index, num_nodes)
    adjacency = torch.zeros(num_nodes, num_nodes)
    adjacency[edge_index[0], edge_index[1]] = 1.0
    return adjacency


def check_edges(edge_index: Tensor, num_nodes: int) -> None:
    """Refuse edges that are not pairs of this graph's nodes."""
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
