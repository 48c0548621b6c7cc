"""Graphormer's input: distance and path of every pair of nodes, and the collator for batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gfsa_experiments.models.batch import (
    Batch,
    Graph,
    edges_of,
    label_of,
    nodes_of,
    on_the_host,
    pad,
    stack_labels,
)
from gfsa_experiments.models.graph_features import degrees, distances, path_edges


@dataclass
class PairGraph:
    """One graph with all its pair features: store these instead of the raw graphs."""

    x: Tensor
    edge_attr: Tensor
    in_degree: Tensor
    out_degree: Tensor
    distance: Tensor
    paths: Tensor
    y: Tensor | None


@dataclass
class GraphormerBatch(Batch):
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

    def __len__(self) -> int:
        return len(self.x)


class GraphormerCollator:
    """Graphs to a :class:`GraphormerBatch`; hand it to a data loader as ``collate_fn``.

    .. code-block:: python

        collate = GraphormerCollator()
        graphs = [collate.prepare(graph) for graph in dataset]      # once, not every epoch
        loader = DataLoader(graphs, batch_size=256, collate_fn=collate)

    Args:
        max_hops: how many edges of each shortest path are kept; at least as many as the model's
            ``max_hops`` (its default, 5).
    """

    def __init__(self, max_hops: int = 5) -> None:
        if max_hops < 1:
            raise ValueError(f"max_hops must be at least 1, got {max_hops}")
        self.max_hops = max_hops

    @on_the_host
    def prepare(self, graph: Graph) -> PairGraph:
        """Compute degrees, distances and paths, in the smallest integers that hold them."""
        x = nodes_of(graph)
        edge_attr = edges_of(graph)
        small = torch.int16 if max(len(x), len(edge_attr)) < 2**15 else torch.int32
        incoming, outgoing = degrees(graph.edge_index, len(x))
        distance = distances(graph.edge_index, len(x))
        paths = path_edges(graph.edge_index, distance, self.max_hops)
        return PairGraph(
            x=x,
            edge_attr=edge_attr,
            in_degree=incoming,
            out_degree=outgoing,
            distance=distance.to(small),
            paths=paths.to(small),
            y=label_of(graph),
        )

    @on_the_host
    def __call__(self, graphs: Sequence[Graph | PairGraph]) -> GraphormerBatch:
        ready = [g if isinstance(g, PairGraph) else self.prepare(g) for g in graphs]
        paths, edges_before = [], 0
        for graph in ready:
            # edges are concatenated: those of a graph are numbered after those before it
            own = graph.paths.int()
            paths.append(torch.where(own < 0, own, own + edges_before))
            edges_before += len(graph.edge_attr)
        return GraphormerBatch(
            x=pad([g.x for g in ready], 0),
            padding=pad([torch.zeros(len(g.x), dtype=torch.bool) for g in ready], True),
            in_degree=pad([g.in_degree for g in ready], 0),
            out_degree=pad([g.out_degree for g in ready], 0),
            distance=pad([g.distance.int() for g in ready], -1),
            edge_attr=torch.cat([g.edge_attr for g in ready]),
            paths=pad(paths, -1),
            y=stack_labels([g.y for g in ready]),
        )
