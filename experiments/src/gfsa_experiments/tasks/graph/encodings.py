"""Where a node is in its graph: random walks and eigenvectors, for thousands of graphs at once.

Edges count once and in both directions, whatever the data set lists.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gfsa_experiments.tasks.graph.graphs import GraphSet, spans

# graphs whose adjacency is one sparse matrix
_CHUNK = 1024


def walk_encoding(graphs: GraphSet, steps: int) -> dict[str, Tensor]:
    r"""``walk``: ``(N, steps)``, the probability to be back after 1, 2, … steps of a random walk.

    .. math:: p_{i,t} = (P^t)_{ii} = \sum_j (S^a)_{ij} (S^{t-a})_{ij},
              \qquad P = D^{-1} A, \quad S = D^{-1/2} A D^{-1/2}

    P and the symmetric S have the same diagonals of powers, so half the powers do.
    """
    parts = [
        _walk(adjacency(graphs, torch.arange(at, min(at + _CHUNK, len(graphs)))), steps)
        for at in range(0, len(graphs), _CHUNK)
    ]
    return {"walk": torch.from_numpy(np.concatenate(parts))}


def _walk(joined: Any, steps: int) -> np.ndarray:
    from scipy import sparse

    degree = np.asarray(joined.sum(1)).ravel()
    scale = sparse.diags_array(1.0 / np.sqrt(np.maximum(degree, 1.0)))
    step = (scale @ joined @ scale).tocsr().astype(np.float32)
    result = np.zeros((joined.shape[0], steps), dtype=np.float32)
    power: Any = sparse.csr_array(sparse.identity(joined.shape[0], dtype=np.float32))
    for number in range(steps):
        # S^a twice, or S^a and S^(a + 1), by turns
        before, power = power, power @ step if number % 2 == 0 else power
        result[:, number] = before.multiply(power).sum(1)
    return result


def laplacian_encoding(graphs: GraphSet, count: int) -> dict[str, Tensor]:
    """The ``count`` lowest frequencies of each graph's Laplacian D − A.

    ``vectors``: ``(N, count)``, of length one; ``values``: ``(G, count)``, -1 where a graph has
    fewer. The sign of a vector means nothing.
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
        own, vector = eigh(laplacian, subset_by_index=(0, kept - 1), check_finite=False)
        values[graph, :kept] = np.maximum(own, 0.0)
        vectors[first[graph] : first[graph] + nodes[graph], :kept] = vector

    # LAPACK works outside Python's lock
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for _ in pool.map(lowest, range(len(graphs)), chunksize=64):
            pass
    return {"vectors": torch.from_numpy(vectors), "values": torch.from_numpy(values)}


def adjacency(graphs: GraphSet, chunk: Tensor) -> Any:
    """The adjacency of some graphs as the blocks of one sparse matrix of zeros and ones."""
    from scipy import sparse

    nodes = graphs.nodes[chunk]
    edge, owner = spans(graphs.first_edge[chunk], graphs.edges[chunk])
    source, target = graphs.edge_index[:, edge].long() + (nodes.cumsum(0) - nodes)[owner]
    size = int(nodes.sum())
    ones = np.ones(2 * len(edge), dtype=np.float32)
    rows = torch.cat([source, target]).numpy(), torch.cat([target, source]).numpy()
    joined = sparse.csr_array((ones, rows), shape=(size, size))
    joined.data[:] = 1.0
    return joined
