"""Features that graph models compute from edges: degrees, distances, shortest paths, random walks.

A graph is an ``edge_index``, ``(2, E)``, one column ``(source, target)`` per directed edge, and a
number of nodes; an undirected bond is two columns, as in torch_geometric.

Every function also takes B graphs at once, each padded to N nodes: node i of graph b then has the
number ``b·N + i``, and the rows of the graphs are stacked, ``(B·N, N)`` instead of ``(N, N)``.
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
    walk = row_normalised(adjacency)
    power = torch.eye(walk.shape[-1], dtype=walk.dtype).expand_as(walk)
    returns = []
    for step in range(steps):
        # P^a times P^a and P^a times P^(a + 1) in turn
        before, power = power, power @ walk if step % 2 == 0 else power
        returns.append((before * power.mT).sum(-1))
    return torch.stack(returns, dim=-1) if returns else adjacency.new_zeros(*walk.shape[:-1], 0)


def row_normalised(adjacency: Tensor) -> Tensor:
    """``D⁻¹A``; a row of zeros stays a row of zeros."""
    total = adjacency.sum(-1, keepdim=True)
    return adjacency / total.masked_fill(total == 0, 1.0)


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
