"""Features of all graphs of a data set, computed once: pairs, walks, eigenvectors and patches.

The formulas are those of :mod:`gfsa_experiments.models`; here they run on chunks of graphs of
similar size.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gfsa_experiments.models.graph_vit import bisection, copies_in_patches, grown_patches
from gfsa_experiments.models.graphs import (
    dense_adjacency,
    distances,
    path_edges,
    random_walk_encoding,
)
from gfsa_experiments.tasks.graph.graphs import GraphSet, Tensors, spans, starts

MAX_HOPS = 5
"""Edges of a path that count in the published Graphormers."""

# pairs of padded nodes in one chunk
_CHUNK = 1 << 21
# a pair takes 8 bytes: beyond this, GPS and Graph-ViT are the right models
_MOST_PAIRS = 1 << 30
_MOST_KINDS = 127
# graphs whose adjacency is one sparse matrix
_JOINED = 1024


def chunks_of_similar_size(nodes: Tensor) -> Iterator[Tensor]:
    """Numbers of graphs to be processed together, each padded to the largest of its chunk."""
    order = torch.argsort(nodes, stable=True)
    at = 0
    while at < len(order):
        # as many as would fit if all were as large as the last of them
        size = int(nodes[order[at]])
        count = max(1, _CHUNK // max(1, size * size))
        largest = int(nodes[order[min(at + count, len(order)) - 1]])
        count = max(1, _CHUNK // (largest * largest))
        yield order[at : at + count]
        at += count


def padded_edges(graphs: GraphSet, chunk: Tensor) -> tuple[Tensor, Tensor, int]:
    """The edges of a chunk as :mod:`gfsa_experiments.models.graphs` takes them.

    Returns:
        ``edge_index`` with node i of the chunk's graph b numbered ``b·N + i``, the columns of these
        edges in the data set, and N.
    """
    size = int(graphs.nodes[chunk].max())
    edge, owner = spans(graphs.first_edge[chunk], graphs.edges[chunk])
    return graphs.edge_index[:, edge].long() + owner * size, edge, size


def undirected_adjacency(graphs: GraphSet, chunk: Tensor) -> Tensor:
    """``(B, N, N)`` of zeros and ones; every edge counts once and in both directions."""
    edge_index, _, size = padded_edges(graphs, chunk)
    adjacency = dense_adjacency(edge_index, size, len(chunk)).view(-1, size, size)
    return torch.maximum(adjacency, adjacency.mT)


def pair_features(graphs: GraphSet) -> Tensors:
    """Graphormer: distances and shortest paths between all pairs of nodes of each graph.

    ``distance``: ``(P + 1,)`` and ``paths``: ``(P + 1, MAX_HOPS)``, with P the number of pairs of
    all graphs, n² for a graph of n nodes, row by row; the last entry is the one for padding.
    ``kinds``: ``(U, F)``, the distinct rows of ``edge_attr``; paths are sequences of their numbers,
    -1 where there is no path, or it has ended.
    """
    if isinstance(graphs.edge_features, int):
        raise ValueError(
            f"{graphs.name} has real numbers on its edges; Graphormer's paths are sums over kinds "
            "of edges. Use model=gps or model=graph-vit"
        )
    pairs = graphs.nodes**2
    total = int(pairs.sum())
    if total > _MOST_PAIRS:
        raise ValueError(
            f"{graphs.name} has {total:,} pairs of nodes, {8 * total / 2**30:.0f} GiB of distances "
            "and paths. Use model=gps or model=graph-vit"
        )
    kinds, kind = torch.unique(graphs.edge_attr, dim=0, return_inverse=True)
    if len(kinds) > _MOST_KINDS:
        raise ValueError(
            f"{graphs.name} has {len(kinds)} kinds of edges; paths can name at most {_MOST_KINDS}"
        )
    all_distances = torch.full((total + 1,), -1, dtype=torch.int16)
    all_paths = torch.full((total + 1, MAX_HOPS), -1, dtype=torch.int8)
    first_pair = starts(pairs)
    for chunk in chunks_of_similar_size(graphs.nodes):
        edge_index, edge, size = padded_edges(graphs, chunk)
        distance = distances(edge_index, size, len(chunk))
        paths = path_edges(edge_index, distance, MAX_HOPS)
        # -1 selects the last entry
        paths = torch.cat([kind[edge], torch.tensor([-1])])[paths]
        node = torch.arange(size) < graphs.nodes[chunk][:, None]
        real = (node[:, :, None] & node[:, None, :]).view(-1, size)
        at, _ = spans(first_pair[chunk], pairs[chunk])
        all_distances[at] = distance[real].short()
        all_paths[at] = paths[real].char()
    return {"distance": all_distances, "paths": all_paths, "kinds": kinds}


def walk_encoding(graphs: GraphSet, steps: int) -> Tensors:
    r"""``walk``: ``(N, steps)``, the probability of being back after 1, 2, … random steps.

    .. math:: p_{i,t} = (P^t)_{ii} = \sum_j (S^a)_{ij} (S^{t-a})_{ij},
              \qquad P = D^{-1} A, \quad S = D^{-1/2} A D^{-1/2}

    P and the symmetric S have the same diagonals of powers, so half of the powers are enough.
    Graphs are the blocks of one sparse matrix: the powers of a large molecule are mostly zeros.
    """
    numbers = torch.arange(len(graphs))
    walks = [_walk(_joined_adjacency(graphs, chunk), steps) for chunk in numbers.split(_JOINED)]
    return {"walk": torch.from_numpy(np.concatenate(walks))}


def _walk(adjacency: Any, steps: int) -> np.ndarray:
    from scipy import sparse

    scale = sparse.diags_array(1.0 / np.sqrt(np.maximum(adjacency.sum(1), 1.0)))
    step = (scale @ adjacency @ scale).tocsr().astype(np.float32)
    walk = np.zeros((len(adjacency.indptr) - 1, steps), dtype=np.float32)
    power: Any = sparse.csr_array(sparse.identity(len(walk), dtype=np.float32))
    for number in range(steps):
        # S^a times S^a and S^a times S^(a + 1) in turn
        before, power = power, power @ step if number % 2 == 0 else power
        walk[:, number] = before.multiply(power).sum(1)
    return walk


def _joined_adjacency(graphs: GraphSet, chunk: Tensor) -> Any:
    """The blocks of one sparse matrix of zeros and ones; edges count once, in both directions."""
    from scipy import sparse

    nodes = graphs.nodes[chunk]
    edge, owner = spans(graphs.first_edge[chunk], graphs.edges[chunk])
    source, target = (graphs.edge_index[:, edge].long() + starts(nodes)[owner]).numpy()
    ends = np.concatenate([source, target]), np.concatenate([target, source])
    ones, size = np.ones(2 * len(edge), dtype=np.float32), int(nodes.sum())
    adjacency = sparse.csr_array((ones, ends), shape=(size, size))
    adjacency.data[:] = 1.0
    return adjacency


def laplacian_encoding(graphs: GraphSet, count: int) -> Tensors:
    """The eigenvectors of the ``count`` lowest frequencies of each graph's Laplacian D − A.

    ``vectors``: ``(N, count)``, of unit length; ``values``: ``(G, count)``, -1 where a graph has
    fewer. The sign of a vector is arbitrary.
    """
    vectors = np.zeros((len(graphs.x), count), dtype=np.float32)
    values = np.full((len(graphs), count), -1.0, dtype=np.float32)
    first, nodes = graphs.first_node.tolist(), graphs.nodes.tolist()
    edges = np.split(graphs.edge_index.numpy(), graphs.first_edge[1:].numpy(), axis=1)

    def lowest(graph: int) -> None:
        from scipy.linalg import eigh

        source, target = edges[graph]
        laplacian = np.zeros((nodes[graph], nodes[graph]))
        laplacian[source, target] = laplacian[target, source] = -1.0
        np.fill_diagonal(laplacian, 0.0)
        np.fill_diagonal(laplacian, -laplacian.sum(1))
        kept = min(count, nodes[graph])
        value, vector = eigh(laplacian, subset_by_index=(0, kept - 1), check_finite=False)
        values[graph, :kept] = np.maximum(value, 0.0)
        vectors[first[graph] : first[graph] + nodes[graph], :kept] = vector

    # LAPACK releases Python's lock
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for _ in pool.map(lowest, range(len(graphs)), chunksize=64):
            pass
    return {"vectors": torch.from_numpy(vectors), "values": torch.from_numpy(values)}


def patch_features(graphs: GraphSet, num_patches: int, hops: int, walk_steps: int) -> Tensors:
    """Graph-ViT: each graph in at most ``num_patches`` overlapping patches.

    A node in several patches has a copy in each. Concatenated over graphs, and counted from each
    graph's first: ``copy_node``, ``copy_patch``: ``(C,)``; ``copy_edges``: ``(2, D)``, copies that
    an edge joins within a patch; ``copy_edge_id``: ``(D,)``, that edge; ``shared``: the numbers of
    nodes that two patches of a graph share, row by row; ``patch_walk``: ``(S, walk_steps)``. The
    counts per graph are ``copies``, ``joins`` and ``patches``.
    """
    edges = graphs.edge_index.long().split(graphs.edges.tolist(), 1)
    parts = [
        bisection(edge_index, nodes, num_patches)
        for edge_index, nodes in zip(edges, graphs.nodes.tolist(), strict=True)
    ]
    chunks = list(chunks_of_similar_size(graphs.nodes))
    found = [_patches_of_chunk(graphs, chunk, parts, hops, walk_steps) for chunk in chunks]
    joined = {
        name: torch.cat([of_chunk[name] for of_chunk in found], -1 if name == "copy_edges" else 0)
        for name in found[0]
    }
    return _in_order_of_graphs(joined, torch.cat(chunks))


def _patches_of_chunk(
    graphs: GraphSet, chunk: Tensor, parts: list[Tensor], hops: int, walk_steps: int
) -> Tensors:
    edge_index, _, size = padded_edges(graphs, chunk)
    part = torch.full((len(chunk), size), -1)
    for row, number in zip(part, chunk.tolist(), strict=True):
        row[: len(parts[number])] = parts[number]
    inside = grown_patches(part, undirected_adjacency(graphs, chunk), hops)
    copies = copies_in_patches(inside, edge_index)
    count = torch.bincount(copies.graph, minlength=len(chunk))
    joined = copies.graph[copies.edges[0]]
    shared = inside.float() @ inside.float().mT
    # bisection leaves no part empty
    patches = part.amax(1) + 1
    real = torch.arange(inside.shape[1]) < patches[:, None]
    return {
        "copy_node": copies.node.to(torch.int16),
        "copy_patch": copies.patch.to(torch.int16),
        "copy_edges": (copies.edges - starts(count)[joined]).to(torch.int32),
        "copy_edge_id": (copies.edge_id - starts(graphs.edges[chunk])[joined]).to(torch.int32),
        "shared": shared[real[:, :, None] & real[:, None, :]].to(torch.int16),
        "patch_walk": random_walk_encoding(shared, walk_steps)[real],
        "copies": count,
        "joins": torch.bincount(joined, minlength=len(chunk)),
        "patches": patches,
    }


def _in_order_of_graphs(features: Tensors, order: Tensor) -> Tensors:
    """What was computed for graphs in another ``order``, rearranged to that of the data set."""
    rank = torch.argsort(order)
    counted = {
        "copy_node": features["copies"],
        "copy_patch": features["copies"],
        "copy_edges": features["joins"],
        "copy_edge_id": features["joins"],
        "shared": features["patches"] ** 2,
        "patch_walk": features["patches"],
    }
    rearranged = {name: features[name][rank] for name in ("copies", "joins", "patches")}
    for name, counts in counted.items():
        index, _ = spans(starts(counts)[rank], counts[rank])
        values = features[name]
        rearranged[name] = values[:, index] if name == "copy_edges" else values[index]
    return rearranged
