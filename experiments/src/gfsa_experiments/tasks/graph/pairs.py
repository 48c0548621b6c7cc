"""Graphormer's features of all pairs of nodes, for thousands of graphs at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gfsa_experiments.tasks.graph.graphs import GraphSet, spans, starts

MAX_HOPS = 5
"""Edges of a path that count in the published models."""

# pairs of padded graphs that are worked on together
_CHUNK = 1 << 21
# a pair takes 8 bytes: beyond this, GPS and Graph-ViT are the models to take
_MOST_PAIRS = 1 << 30
_MOST_KINDS = 127


def pair_features(graphs: GraphSet) -> dict[str, Tensor]:
    """Distances and shortest paths within each graph, pair after pair.

    With P the number of pairs of all graphs, n² of a graph of n nodes, row by row: ``pairs``,
    ``(P + 1,)``, what :func:`unpack` makes distances and paths of, the last being no pair at all;
    ``kinds``, ``(U, F)``, the different rows of ``edge_attr``, which paths count. Of several
    shortest paths it takes, node after node, the edge that comes first, as
    :class:`gfsa.models.GraphormerCollator` does.
    """
    if isinstance(graphs.edge_features, int):
        raise ValueError(
            f"{graphs.name} has real numbers on its edges; Graphormer's paths are sums over kinds "
            "of edges. Take model=gps or model=graph-vit"
        )
    pairs = graphs.nodes**2
    total = int(pairs.sum())
    if total > _MOST_PAIRS:
        raise ValueError(
            f"{graphs.name} has {total:,} pairs of nodes, {8 * total / 2**30:.0f} GiB of distances "
            "and paths. Take model=gps or model=graph-vit"
        )
    kinds, kind = torch.unique(graphs.edge_attr, dim=0, return_inverse=True)
    if len(kinds) > _MOST_KINDS:
        raise ValueError(
            f"{graphs.name} has {len(kinds)} kinds of edges; paths are kept for {_MOST_KINDS}"
        )
    packed = torch.full((total + 1,), -1)
    first_pair = starts(pairs)
    for chunk in _of_like_size(graphs.nodes):
        there, _ = spans(first_pair[chunk], pairs[chunk])
        distance, paths = _chunk(graphs, chunk, kind)
        node = torch.arange(distance.shape[1]) < graphs.nodes[chunk][:, None]
        # row by row in each graph: the order of the flat tensor
        packed[there] = pack(distance, paths)[node[:, :, None] & node[:, None, :]]
    return {"pairs": packed, "kinds": kinds}


def pack(distance: Tensor, paths: Tensor) -> Tensor:
    """Distance, ``(...)``, and kinds of edges, ``(..., MAX_HOPS)``, of a pair in one int64.

    A batch is then looked up in one go, on the host, and taken apart on the device.
    """
    packed = torch.full((*distance.shape, 8), -1, dtype=torch.int8)
    packed[..., :MAX_HOPS] = paths
    packed.view(torch.int16)[..., 3] = distance
    return packed.view(torch.int64)[..., 0]


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`pack` was given, as int32; -1 is no path, and no edge behind a path's end."""
    apart = packed[..., None]
    distance = apart.view(torch.int16)[..., 3]
    return distance.int(), apart.view(torch.int8)[..., :MAX_HOPS].int()


def _of_like_size(nodes: Tensor) -> Iterator[Tensor]:
    """Numbers of graphs that are worked on together, padded to the largest of them."""
    order = torch.argsort(nodes, stable=True)
    at = 0
    while at < len(order):
        # as many as fit if all were as large as the last of them
        size = int(nodes[order[at]])
        count = max(1, _CHUNK // max(1, size * size))
        largest = int(nodes[order[min(at + count, len(order)) - 1]])
        count = max(1, _CHUNK // (largest * largest))
        yield order[at : at + count]
        at += count


def _chunk(graphs: GraphSet, chunk: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
    """``(B, N, N)`` distances and ``(B, N, N, MAX_HOPS)`` kinds of edges of some graphs."""
    count, size = len(chunk), int(graphs.nodes[chunk].max())
    edge, owner = spans(graphs.first_edge[chunk], graphs.edges[chunk])
    source, target = graphs.edge_index[:, edge].long() + owner * size
    distance = _distances(source, target, count, size)
    return distance, _paths(source, target, kind[edge], distance)


def _distances(source: Tensor, target: Tensor, count: int, size: int) -> Tensor:
    """Breadth first from all nodes at once; nodes are numbered through all graphs."""
    adjacency = torch.zeros(count * size, size)
    adjacency[source, target % size] = 1.0
    adjacency = adjacency.view(count, size, size)
    distance = torch.full((count, size, size), -1)
    frontier = torch.eye(size).expand(count, size, size)
    step = 0
    while True:
        new = (frontier > 0) & (distance < 0)
        if not new.any():
            return distance
        distance.masked_fill_(new, step)
        frontier = new.float() @ adjacency
        step += 1


def _paths(source: Tensor, target: Tensor, kind: Tensor, distance: Tensor) -> Tensor:
    count, size, _ = distance.shape
    rows, edges = distance.view(count * size, size), len(source)
    # an edge i→u lies on a shortest path to j if it brings i one step closer
    remaining = rows[target]
    closer = (remaining >= 0) & (remaining == rows[source] - 1)
    number = torch.arange(edges)[:, None].expand(edges, size)
    first = torch.full((count * size + 1, size), edges)
    first.scatter_reduce_(
        0, source[:, None].expand(edges, size), number.masked_fill(~closer, edges), "amin"
    )
    # walk all pairs in step; the last row and the last edge stand for paths that have ended
    target = torch.cat([target, torch.tensor([count * size])])
    kind = torch.cat([kind, torch.tensor([-1])])
    goal = torch.arange(size).expand(count, size, size)
    here = torch.arange(count * size).view(count, size, 1).expand(count, size, size)
    hops = []
    for _ in range(MAX_HOPS):
        hop = first[here, goal]
        hops.append(kind[hop])
        here = target[hop]
    return torch.stack(hops, dim=-1)
