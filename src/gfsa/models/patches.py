"""Graph-ViT's view of a graph: overlapping patches, and how they are connected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gfsa.models.batch import (
    Batch,
    Graph,
    edges_of,
    label_of,
    nodes_of,
    on_the_host,
    pad,
    stack_labels,
)
from gfsa.models.graph_features import dense_adjacency, random_walk_encoding, row_normalised
from gfsa.models.partition import Partition, bisection


@dataclass
class PatchGraph:
    """One graph cut into patches: keep these instead of raw graphs if the cut stays the same."""

    x: Tensor
    edge_attr: Tensor
    walk: Tensor
    copy_node: Tensor
    copy_patch: Tensor
    copy_edges: Tensor
    copy_edge_id: Tensor
    adjacency: Tensor
    patch_walk: Tensor
    y: Tensor | None


@dataclass
class GraphViTBatch(Batch):
    """B graphs with S patches in all, at most P in a graph.

    Nodes and edges of all graphs stand in one row: ``x``, ``(N, F)``, ``edge_attr``, ``(E, F)``,
    and the nodes' random-walk encoding ``walk``. A node in several patches has a copy in each:
    ``copy_node`` and ``copy_patch`` say which node of which patch a copy is, ``copy_edges``,
    ``(2, ·)``, joins copies within a patch, ``copy_edge_id`` says along which edge.
    ``patch_graph`` and ``patch_slot``, ``(S,)``, place a patch in its graph; ``patch_walk`` is the
    patches' random-walk encoding, ``adjacency``, ``(B, P, P)``, counts the nodes that two patches
    share (or what has become of that by diffusion); ``padding``, ``(B, P)``, is True where there
    is no patch; ``y`` is ``(B, T)`` or None.
    """

    x: Tensor
    edge_attr: Tensor
    walk: Tensor
    copy_node: Tensor
    copy_patch: Tensor
    copy_edges: Tensor
    copy_edge_id: Tensor
    patch_graph: Tensor
    patch_slot: Tensor
    patch_walk: Tensor
    adjacency: Tensor
    padding: Tensor
    y: Tensor | None

    def __len__(self) -> int:
        return len(self.padding)


class GraphViTCollator:
    r"""Graphs to a :class:`GraphViTBatch`; hand it to a data loader as ``collate_fn``.

    Given raw graphs it cuts them anew at every call, which is what training with
    ``drop_edges`` wants; graphs that were :meth:`prepare`\ d keep their cut.

    Args:
        num_patches: at most so many a graph.
        hops: each patch takes in its neighbours up to this far, so that patches overlap.
        walk_steps: length of the nodes' random-walk encoding; it does not depend on the cut, so a
            graph may bring it along as ``graph.walk``.
        patch_walk_steps: length of the patches' random-walk encoding.
        diffusion: 0 takes the number of shared nodes as the patches' adjacency; t ≥ 1 the t-step
            random walk on it, :math:`(D^{-1} A)^t`.
        drop_edges: share of edges hidden at random from the partitioner (and only from it).
        partition: ``bisection``, ``metis``, or a function of your own.
    """

    def __init__(
        self,
        num_patches: int = 32,
        hops: int = 1,
        walk_steps: int = 20,
        patch_walk_steps: int = 8,
        diffusion: int = 0,
        drop_edges: float = 0.0,
        partition: Partition = bisection,
    ) -> None:
        if num_patches < 1:
            raise ValueError(f"num_patches must be at least 1, got {num_patches}")
        if not 0.0 <= drop_edges < 1.0:
            raise ValueError(
                f"drop_edges is a share, expected 0 ≤ drop_edges < 1, got {drop_edges}"
            )
        self.num_patches = num_patches
        self.hops = hops
        self.walk_steps = walk_steps
        self.patch_walk_steps = patch_walk_steps
        self.diffusion = diffusion
        self.drop_edges = drop_edges
        self.partition = partition

    @on_the_host
    def prepare(self, graph: Graph) -> PatchGraph:
        """Cut one graph."""
        x = nodes_of(graph)
        edge_index: Tensor = graph.edge_index
        inside = self.patches(edge_index, len(x))
        copy_patch, copy_node = inside.nonzero().T
        # the number of the copy of a node in a patch
        copy = torch.full(inside.shape, -1)
        copy[copy_patch, copy_node] = torch.arange(len(copy_node))
        both = inside[:, edge_index[0]] & inside[:, edge_index[1]]
        patch, copy_edge_id = both.nonzero().T
        source, target = edge_index[:, copy_edge_id]
        shared = inside.float() @ inside.float().T
        return PatchGraph(
            x=x,
            edge_attr=edges_of(graph),
            walk=self.walk(graph),
            copy_node=copy_node,
            copy_patch=copy_patch,
            copy_edges=torch.stack([copy[patch, source], copy[patch, target]]),
            copy_edge_id=copy_edge_id,
            adjacency=self.diffused(shared),
            patch_walk=random_walk_encoding(shared, self.patch_walk_steps),
            y=label_of(graph),
        )

    def walk(self, graph: Graph) -> Tensor:
        """``(N, walk_steps)``: the nodes' random-walk encoding."""
        brought = getattr(graph, "walk", None)
        if brought is not None:
            return torch.as_tensor(brought)
        adjacency = dense_adjacency(graph.edge_index, len(graph.x))
        return random_walk_encoding(adjacency, self.walk_steps)

    def patches(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        """``(patches, nodes)``, True where a patch has a node, its surroundings included."""
        shown = edge_index
        if self.drop_edges:
            shown = edge_index[:, torch.rand(edge_index.shape[1]) >= self.drop_edges]
        part = self.partition(shown, num_nodes, self.num_patches)
        if part.shape != (num_nodes,):
            raise ValueError(
                f"the partitioner must give each of {num_nodes} nodes a part, "
                f"got a result of shape {tuple(part.shape)}"
            )
        inside = torch.zeros(int(part.max()) + 1, num_nodes)
        inside[part, torch.arange(num_nodes)] = 1.0
        # parts that the partitioner left empty are not there
        inside = inside[inside.any(1)]
        adjacency = dense_adjacency(edge_index, num_nodes)
        reach = adjacency + adjacency.T
        for _ in range(self.hops):
            inside = ((inside + inside @ reach) > 0).float()
        return inside > 0

    def diffused(self, shared: Tensor) -> Tensor:
        """The multiplier of the attention maps, from the numbers of shared nodes."""
        if self.diffusion == 0:
            return shared
        return torch.linalg.matrix_power(row_normalised(shared), self.diffusion)

    @on_the_host
    def __call__(self, graphs: Sequence[Graph | PatchGraph]) -> GraphViTBatch:
        ready = [g if isinstance(g, PatchGraph) else self.prepare(g) for g in graphs]
        # everything stands in one row: each graph's numbers start behind those before it
        nodes = _starts([len(g.x) for g in ready])
        edges = _starts([len(g.edge_attr) for g in ready])
        copies = _starts([len(g.copy_node) for g in ready])
        patches = _starts([len(g.adjacency) for g in ready])
        counts = [len(g.adjacency) for g in ready]
        return GraphViTBatch(
            x=torch.cat([g.x for g in ready]),
            edge_attr=torch.cat([g.edge_attr for g in ready]),
            walk=torch.cat([g.walk for g in ready]),
            copy_node=_shifted([g.copy_node for g in ready], nodes),
            copy_patch=_shifted([g.copy_patch for g in ready], patches),
            copy_edges=_shifted([g.copy_edges for g in ready], copies),
            copy_edge_id=_shifted([g.copy_edge_id for g in ready], edges),
            patch_graph=torch.repeat_interleave(torch.arange(len(ready)), torch.tensor(counts)),
            patch_slot=torch.cat([torch.arange(count) for count in counts]),
            patch_walk=torch.cat([g.patch_walk for g in ready]),
            adjacency=pad([g.adjacency for g in ready], 0.0),
            padding=pad([torch.zeros(count, dtype=torch.bool) for count in counts], True),
            y=stack_labels([g.y for g in ready]),
        )


def _starts(counts: list[int]) -> list[int]:
    return [sum(counts[:position]) for position in range(len(counts))]


def _shifted(parts: list[Tensor], starts: list[int]) -> Tensor:
    return torch.cat([part + start for part, start in zip(parts, starts, strict=True)], dim=-1)
