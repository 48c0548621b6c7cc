"""Graph-ViT's input: graphs cut into overlapping patches, and the collator that makes batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
from gfsa_experiments.models.graph_features import (
    dense_adjacency,
    random_walk_encoding,
    row_normalised,
)
from gfsa_experiments.models.partition import Partition, bisection


@dataclass
class PatchGraph:
    """One graph cut into patches: store these instead of raw graphs if the cut stays the same."""

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

    Nodes and edges of all graphs are concatenated: ``x``, ``(N, F)``, ``edge_attr``, ``(E, F)``,
    and the nodes' random-walk encoding ``walk``. A node in several patches has a copy in each:
    ``copy_node`` and ``copy_patch`` say which node of which patch a copy is, ``copy_edges``,
    ``(2, ·)``, joins copies within a patch, ``copy_edge_id`` says along which edge.
    ``patch_graph`` and ``patch_slot``, ``(S,)``, place a patch in its graph; ``patch_walk`` is the
    patches' random-walk encoding, ``adjacency``, ``(B, P, P)``, counts the nodes that two patches
    share (or the result of diffusion on it); ``padding``, ``(B, P)``, is True where there
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

    It cuts raw graphs anew at every call, as training with ``drop_edges`` requires; graphs that
    went through :meth:`prepare` keep their cut.

    Args:
        num_patches: the largest number of patches per graph.
        hops: each patch also contains the neighbours of its nodes up to this distance, so that
            patches overlap.
        walk_steps: length of the nodes' random-walk encoding; it does not depend on the cut, so a
            graph may carry it as ``graph.walk``.
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
        inside = self.patches(graph.edge_index, len(x))
        copies = copies_in_patches(inside[None], graph.edge_index)
        shared = inside.float() @ inside.float().T
        return PatchGraph(
            x=x,
            edge_attr=edges_of(graph),
            walk=self.walk(graph),
            copy_node=copies.node,
            copy_patch=copies.patch,
            copy_edges=copies.edges,
            copy_edge_id=copies.edge_id,
            adjacency=self.diffused(shared),
            patch_walk=random_walk_encoding(shared, self.patch_walk_steps),
            y=label_of(graph),
        )

    def walk(self, graph: Graph) -> Tensor:
        """``(N, walk_steps)``: the nodes' random-walk encoding."""
        given = getattr(graph, "walk", None)
        if given is not None:
            return torch.as_tensor(given)
        adjacency = dense_adjacency(graph.edge_index, len(graph.x))
        return random_walk_encoding(adjacency, self.walk_steps)

    def patches(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        """``(patches, nodes)``, True where a patch contains a node or reached it by its hops."""
        visible = edge_index
        if self.drop_edges:
            visible = edge_index[:, torch.rand(edge_index.shape[1]) >= self.drop_edges]
        part = self.partition(visible, num_nodes, self.num_patches)
        if part.shape != (num_nodes,):
            raise ValueError(
                f"the partitioner must give each of {num_nodes} nodes a part, "
                f"got a result of shape {tuple(part.shape)}"
            )
        # number the parts without gaps: the partitioner may have left some empty
        part = torch.unique(part, return_inverse=True)[1]
        adjacency = dense_adjacency(edge_index, num_nodes)
        return grown_patches(part[None], adjacency[None], self.hops)[0]

    def diffused(self, shared: Tensor) -> Tensor:
        """The multiplier of the attention maps, from the numbers of shared nodes."""
        if self.diffusion == 0:
            return shared
        return torch.linalg.matrix_power(row_normalised(shared), self.diffusion)

    @on_the_host
    def __call__(self, graphs: Sequence[Graph | PatchGraph]) -> GraphViTBatch:
        ready = [g if isinstance(g, PatchGraph) else self.prepare(g) for g in graphs]
        # everything is concatenated: the numbers of a graph start after those before it
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


class Copies(NamedTuple):
    """The copies of nodes in patches, graph by graph, patch by patch.

    Copy c is node ``node[c]`` in patch ``patch[c]`` of graph ``graph[c]``, both counted within the
    graph; ``edges``, ``(2, ·)``, are pairs of copies that an edge joins within a patch, and
    ``edge_id`` is the column of that edge in ``edge_index``.
    """

    graph: Tensor
    patch: Tensor
    node: Tensor
    edges: Tensor
    edge_id: Tensor


def grown_patches(part: Tensor, adjacency: Tensor, hops: int) -> Tensor:
    """``(B, P, N)``, True where a patch contains a node: its part and the neighbours of that.

    Args:
        part: ``(B, N)``, the part of each node, -1 for padding.
        adjacency: ``(B, N, N)``; edges count in both directions.
        hops: how far from its part a patch extends.
    """
    inside = (part[:, None] == torch.arange(int(part.max()) + 1)[:, None]).float()
    reach = adjacency + adjacency.mT
    for _ in range(hops):
        inside = ((inside + inside @ reach) > 0).float()
    return inside > 0


def copies_in_patches(inside: Tensor, edge_index: Tensor) -> Copies:
    """A copy of every node in every patch that contains it, and the edges between copies.

    Args:
        inside: ``(B, P, N)``, as :func:`grown_patches` returns it.
        edge_index: ``(2, E)``, node i of graph b numbered ``b·N + i``, the edges of a graph side by
            side.
    """
    _, patches, nodes = inside.shape
    graph, patch, node = inside.nonzero().T
    number = torch.full(inside.shape, -1)
    number[graph, patch, node] = torch.arange(len(node))
    # (2, E, P): the copies of both ends of each edge, -1 where the patch lacks the node
    ends = number.transpose(1, 2).flatten(0, 1)[edge_index]
    edge, patch_of_edge = (ends >= 0).all(0).nonzero().T
    order = torch.argsort(edge_index[0, edge] // nodes * patches + patch_of_edge, stable=True)
    edge, patch_of_edge = edge[order], patch_of_edge[order]
    return Copies(graph, patch, node, ends[:, edge, patch_of_edge], edge)


def _starts(counts: list[int]) -> list[int]:
    return [sum(counts[:position]) for position in range(len(counts))]


def _shifted(parts: list[Tensor], starts: list[int]) -> Tensor:
    return torch.cat([part + start for part, start in zip(parts, starts, strict=True)], dim=-1)
