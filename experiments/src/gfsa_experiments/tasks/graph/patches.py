"""Graph-ViT's patches of all graphs of a data set, cut once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gfsa.models.partition import bisection
from gfsa_experiments.tasks.graph.encodings import adjacency
from gfsa_experiments.tasks.graph.graphs import GraphSet, spans

# graphs whose patches are one sparse matrix
_CHUNK = 1024


def patch_features(
    graphs: GraphSet, num_patches: int, hops: int, walk_steps: int
) -> dict[str, Tensor]:
    """Each graph in at most ``num_patches`` overlapping patches.

    A node in several patches has a copy in each. Of all graphs in one row, counted from each
    graph's first: ``copy_node``, ``copy_patch``: ``(C,)``; ``copy_edges``: ``(2, D)``, copies that
    an edge joins within a patch; ``copy_edge_id``: ``(D,)``, that edge; ``shared``: the numbers of
    nodes that two patches of a graph share, row by row; ``patch_walk``: ``(S, walk_steps)``. The
    counts per graph are ``copies``, ``joins`` and ``patches``. What
    :meth:`gfsa.models.GraphViTCollator.prepare` makes of one graph, for all.
    """
    part = torch.cat(_cut(graphs, num_patches))
    pieces = []
    for at in range(0, len(graphs), _CHUNK):
        chunk = torch.arange(at, min(at + _CHUNK, len(graphs)))
        node, _ = spans(graphs.first_node[chunk], graphs.nodes[chunk])
        pieces.append(_chunk(graphs, chunk, part[node], hops, walk_steps))
    return {
        name: torch.cat([piece[name] for piece in pieces], -1 if name == "copy_edges" else 0)
        for name in pieces[0]
    }


def _cut(graphs: GraphSet, num_patches: int) -> list[Tensor]:
    """The part of each node."""
    edges = graphs.edge_index.long().split(graphs.edges.tolist(), 1)
    return [
        bisection(edge_index, nodes, num_patches)
        for edge_index, nodes in zip(edges, graphs.nodes.tolist(), strict=True)
    ]


def _chunk(
    graphs: GraphSet, chunk: Tensor, part: Tensor, hops: int, walk_steps: int
) -> dict[str, Tensor]:
    from scipy import sparse

    nodes = graphs.nodes[chunk]
    _, graph_of_node = spans(torch.zeros_like(nodes), nodes)
    # bisection leaves no part empty: a graph's last part says how many there are
    patches = torch.zeros(len(chunk), dtype=torch.long)
    patches = patches.scatter_reduce(0, graph_of_node, part + 1, "amax")
    first_patch = patches.cumsum(0) - patches
    patch_of_node = part + first_patch[graph_of_node]
    shape = int(patches.sum()), len(part)
    ones = np.ones(len(part), dtype=np.float32)
    inside: Any = sparse.csr_array(
        (ones, (patch_of_node.numpy(), np.arange(len(part)))), shape=shape
    )
    reach = adjacency(graphs, chunk)
    for _ in range(hops):
        inside = (inside + inside @ reach).tocsr()
        inside.data[:] = 1.0
    inside.sort_indices()

    rows = torch.repeat_interleave(torch.arange(shape[0]), torch.from_numpy(np.diff(inside.indptr)))
    columns = torch.from_numpy(inside.indices).long()
    graph_of_patch = torch.repeat_interleave(torch.arange(len(chunk)), patches)
    graph_of_copy = graph_of_patch[rows]
    copies = torch.bincount(graph_of_copy, minlength=len(chunk))
    first_copy = copies.cumsum(0) - copies
    first_node = nodes.cumsum(0) - nodes

    patch, edge, ends = _joined(graphs, chunk, inside)
    graph_of_join = graph_of_patch[patch]
    edges = graphs.edges[chunk]
    first_edge = edges.cumsum(0) - edges
    shared = (inside @ inside.T).tocsr()
    blocks = _blocks(shared, patches, graph_of_patch, first_patch)
    return {
        "copy_node": (columns - first_node[graph_of_copy]).to(torch.int16),
        "copy_patch": (rows - first_patch[graph_of_copy]).to(torch.int16),
        "copy_edges": (ends - first_copy[graph_of_join]).to(torch.int32),
        "copy_edge_id": (edge - first_edge[graph_of_join]).to(torch.int32),
        "shared": blocks[_real(patches, blocks.shape[1])].to(torch.int16),
        "patch_walk": _patch_walk(blocks, patches, walk_steps),
        "copies": copies,
        "joins": torch.bincount(graph_of_join, minlength=len(chunk)),
        "patches": patches,
    }


def _joined(graphs: GraphSet, chunk: Tensor, inside: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Patch, edge and copies at both ends, ``(2, ·)``, of each edge within a patch."""
    nodes = graphs.nodes[chunk]
    edge, owner = spans(graphs.first_edge[chunk], graphs.edges[chunk])
    source, target = graphs.edge_index[:, edge].long() + (nodes.cumsum(0) - nodes)[owner]
    # the number of each copy, from 1 so that none is a zero of the sparse matrix
    numbered = inside.copy()
    numbered.data = np.arange(1, inside.nnz + 1, dtype=np.float64)
    numbered, inside = numbered.tocsc(), inside.tocsc().astype(np.float64)
    at_source = numbered[:, source.numpy()].multiply(inside[:, target.numpy()]).tocsr()
    at_target = numbered[:, target.numpy()].multiply(inside[:, source.numpy()]).tocsr()
    at_source.sort_indices()
    at_target.sort_indices()
    patch = np.repeat(np.arange(inside.shape[0]), np.diff(at_source.indptr))
    ends = np.stack([at_source.data, at_target.data]).astype(np.int64) - 1
    return (
        torch.from_numpy(patch),
        torch.from_numpy(at_source.indices).long(),
        torch.from_numpy(ends),
    )


def _blocks(shared: Any, patches: Tensor, graph_of_patch: Tensor, first_patch: Tensor) -> Tensor:
    """``(B, P, P)``: the blocks of a block-diagonal matrix, padded with zeros."""
    size = int(patches.max())
    coordinates = shared.tocoo()
    row, column = (torch.from_numpy(c).long() for c in (coordinates.row, coordinates.col))
    graph = graph_of_patch[row]
    blocks = torch.zeros(len(patches), size, size)
    values = torch.from_numpy(coordinates.data).float()
    blocks[graph, row - first_patch[graph], column - first_patch[graph]] = values
    return blocks


def _real(patches: Tensor, size: int) -> Tensor:
    there = torch.arange(size) < patches[:, None]
    return there[:, :, None] & there[:, None, :]


def _patch_walk(blocks: Tensor, patches: Tensor, steps: int) -> Tensor:
    """``(S, steps)``: the random-walk encoding of patches, linked by the nodes they share."""
    total = blocks.sum(-1, keepdim=True)
    walk = blocks / total.masked_fill(total == 0, 1.0)
    there = torch.arange(blocks.shape[1]) < patches[:, None]
    power, returns = walk, []
    for _ in range(steps):
        returns.append(power.diagonal(dim1=1, dim2=2)[there])
        power = power @ walk
    return torch.stack(returns, -1) if returns else torch.zeros(int(patches.sum()), 0)
