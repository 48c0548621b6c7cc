"""Graph-ViT (He et al., 2023): a Transformer over patches of a graph, with Hadamard attention.

First how a graph is cut into overlapping patches, then the batches, then the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gfsa_experiments.models.attention import Block, HadamardAttention
from gfsa_experiments.models.graphs import (
    Batch,
    FeatureEncoder,
    Graph,
    dense_adjacency,
    edges_of,
    label_of,
    mean_by,
    nodes_of,
    on_the_host,
    pad,
    random_walk_encoding,
    stack_labels,
)

Partition = Callable[[Tensor, int, int], Tensor]
"""``(edge_index, num_nodes, num_parts) -> (num_nodes,)``: the part of each node, counted from 0."""


def bisection(edge_index: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    """Halve the graph, then its halves, each time where few edges cross.

    Deterministic, in plain Python. The size of most parts is within half of the mean; if there are
    no more nodes than parts, each node is a part. Meant for graphs that are nearly trees, such as
    molecules.
    """
    neighbours: list[list[int]] = [[] for _ in range(num_nodes)]
    for a, b in edge_index.T.tolist():
        neighbours[a].append(b)
        neighbours[b].append(a)
    part = [0] * num_nodes
    waiting = [(list(range(num_nodes)), 0, min(num_parts, num_nodes))]
    while waiting:
        nodes, label, parts = waiting.pop()
        if parts == 1:
            for node in nodes:
                part[node] = label
            continue
        order = _branch_by_branch(nodes, neighbours)
        size = _fewest_crossings(order, neighbours, parts)
        waiting.append((order[:size], label, parts // 2))
        waiting.append((order[size:], label + parts // 2, parts - parts // 2))
    return torch.tensor(part, dtype=torch.long)


def _branch_by_branch(nodes: list[int], neighbours: list[list[int]]) -> list[int]:
    """Depth first from a peripheral node, small branches first: connected nodes are adjacent."""
    far = _breadth_first(nodes, nodes[0], neighbours)[0][-1]
    found, parent = _breadth_first(nodes, far, neighbours)
    weight = dict.fromkeys(found, 1)
    children: dict[int, list[int]] = {node: [] for node in found}
    roots = []
    for node in reversed(found):
        if node in parent:
            weight[parent[node]] += weight[node]
            children[parent[node]].append(node)
        else:
            roots.append(node)
    order = []
    stack = roots
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(sorted(children[node], key=lambda child: -weight[child]))
    return order


def _breadth_first(
    nodes: list[int], start: int, neighbours: list[list[int]]
) -> tuple[list[int], dict[int, int]]:
    """The nodes in the order in which they are found, and each node's parent.

    The first node of a component has none.
    """
    unseen = dict.fromkeys(nodes)
    found: list[int] = []
    parent: dict[int, int] = {}
    queue: deque[int] = deque()
    while unseen:
        # the next component, once one is finished
        first = start if start in unseen else next(iter(unseen))
        del unseen[first]
        queue.append(first)
        while queue:
            node = queue.popleft()
            found.append(node)
            for other in neighbours[node]:
                if other in unseen:
                    del unseen[other]
                    parent[other] = node
                    queue.append(other)
    return found, parent


def _fewest_crossings(order: list[int], neighbours: list[list[int]], parts: int) -> int:
    """The number of nodes of ``order`` in the first half: near the middle, with few crossings."""
    first, second = parts // 2, parts - parts // 2
    middle = round(len(order) * first / parts)
    # at most half a part off the middle; both halves keep at least a node for each of their parts
    slack = len(order) // parts // 2
    lowest = max(first, middle - slack)
    highest = max(lowest, min(len(order) - second, middle + slack))
    place = {node: position for position, node in enumerate(order)}
    change = [0] * (len(order) + 1)
    for node in order:
        for other in neighbours[node]:
            if place.get(other, -1) > place[node]:
                change[place[node] + 1] += 1
                change[place[other] + 1] -= 1
    crossings = list(accumulate(change))
    return min(range(lowest, highest + 1), key=lambda size: (crossings[size], abs(size - middle)))


@dataclass
class PatchGraph:
    """One graph cut into patches: store these instead of the raw graphs."""

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
    share; ``padding``, ``(B, P)``, is True where there is no patch; ``y`` is ``(B, T)`` or None.
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
    """Graphs to a :class:`GraphViTBatch`; hand it to a data loader as ``collate_fn``.

    Args:
        num_patches: the largest number of patches per graph.
        hops: each patch also contains the neighbours of its nodes up to this distance, so that
            patches overlap.
        walk_steps: length of the nodes' random-walk encoding.
        patch_walk_steps: length of the patches' random-walk encoding.
        partition: ``bisection``, or a function of your own.
    """

    def __init__(
        self,
        num_patches: int = 32,
        hops: int = 1,
        walk_steps: int = 20,
        patch_walk_steps: int = 8,
        partition: Partition = bisection,
    ) -> None:
        if num_patches < 1:
            raise ValueError(f"num_patches must be at least 1, got {num_patches}")
        self.num_patches, self.hops, self.partition = num_patches, hops, partition
        self.walk_steps, self.patch_walk_steps = walk_steps, patch_walk_steps

    @on_the_host
    def prepare(self, graph: Graph) -> PatchGraph:
        """Cut one graph into patches, once, not every epoch."""
        x = nodes_of(graph)
        part = self.partition(graph.edge_index, len(x), self.num_patches)
        if part.shape != (len(x),):
            raise ValueError(
                f"the partitioner must give each of {len(x)} nodes a part, "
                f"got a result of shape {tuple(part.shape)}"
            )
        # number the parts without gaps: the partitioner may have left some empty
        part = torch.unique(part, return_inverse=True)[1]
        adjacency = dense_adjacency(graph.edge_index, len(x))
        inside = grown_patches(part[None], adjacency[None], self.hops)[0]
        copies = copies_in_patches(inside[None], graph.edge_index)
        shared = inside.float() @ inside.float().T
        return PatchGraph(
            x=x,
            edge_attr=edges_of(graph),
            walk=random_walk_encoding(adjacency, self.walk_steps),
            copy_node=copies.node,
            copy_patch=copies.patch,
            copy_edges=copies.edges,
            copy_edge_id=copies.edge_id,
            adjacency=shared,
            patch_walk=random_walk_encoding(shared, self.patch_walk_steps),
            y=label_of(graph),
        )

    @on_the_host
    def __call__(self, graphs: Sequence[Graph | PatchGraph]) -> GraphViTBatch:
        ready = [g if isinstance(g, PatchGraph) else self.prepare(g) for g in graphs]
        # everything is concatenated: the numbers of a graph start after those before it
        counts = [len(g.adjacency) for g in ready]
        nodes, edges, copies, patches = (
            [0, *accumulate(sizes)][:-1]
            for sizes in (
                [len(g.x) for g in ready],
                [len(g.edge_attr) for g in ready],
                [len(g.copy_node) for g in ready],
                counts,
            )
        )
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


def _shifted(parts: list[Tensor], starts: list[int]) -> Tensor:
    return torch.cat([part + start for part, start in zip(parts, starts, strict=True)], dim=-1)


class GINELayer(nn.Module):
    r"""Message passing with edge features (GINE), normalised, with a residual connection.

    .. math:: m_i = (1 + ε)\,h_i + \sum_{j → i} \mathrm{ReLU}(h_j + e_{ji}), \qquad
              h_i ← W\,(h_i + \mathrm{ReLU}(\mathrm{BN}(\mathrm{MLP}(m_i)))) + b
    """

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.epsilon = nn.Parameter(torch.zeros(()))
        self.mlp = nn.Sequential(*_norm_relu(dim, dim), nn.Linear(dim, dim, bias=False))
        self.norm = nn.BatchNorm1d(dim)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(dim, dim)

    def forward(self, h: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        """Nodes ``(N, dim)`` and embedded edges ``(E, dim)`` to nodes."""
        source, target = edge_index
        # not h[source], whose gradient adds the edges of a node one after another
        messages = torch.relu(h.index_select(0, source) + e)
        gathered = (1 + self.epsilon) * h
        gathered = gathered.index_add(0, target, messages.to(gathered.dtype))
        return self.out(h + self.dropout(torch.relu(self.norm(self.mlp(gathered)))))


class WalkEncoder(nn.Module):
    r"""Adds a position encoding, :math:`x ← x + \mathrm{ReLU}(\mathrm{BN}(W p))`.

    p is the token's random-walk encoding of ``steps`` numbers; with 0 steps, x stays as it is.
    """

    def __init__(self, steps: int, dim: int) -> None:
        super().__init__()
        self.steps = steps
        self.encode = nn.Sequential(*_norm_relu(steps, dim)) if steps else None

    def forward(self, x: Tensor, walk: Tensor) -> Tensor:
        """``x``: ``(N, dim)``; ``walk``: ``(N, steps)``."""
        if walk.shape[-1] != self.steps:
            raise ValueError(
                f"the model expects random walks of {self.steps} steps, the batch has "
                f"{walk.shape[-1]}; pass model and collator the same walk_steps and "
                "patch_walk_steps"
            )
        return x if self.encode is None else x + self.encode(walk.to(x.dtype))


class GraphViT(nn.Module):
    r"""A Transformer over the patches of a graph, aware of how they are connected.

    .. math:: A = \mathrm{softmax}(q k^\top / \sqrt d) ∘ \tilde A

    :math:`\tilde A` is the patches' adjacency, from the batch. A patch's token is the mean of its
    nodes after a few GINE layers within the patch; between layers the patch's mean is added to each
    node, and the copies of a node in overlapping patches are averaged. The output is a small MLP of
    the mean over patches.

    Args:
        node_features, edge_features: sizes of the vocabularies, one for each integer column, or
            the number of real columns.
        num_outputs: how many numbers are predicted for a graph.
        dim: width throughout.
        gnn_depth: GINE layers within patches.
        depth, num_heads: Transformer blocks over patches, with MLPs twice as wide as ``dim``.
        walk_steps, patch_walk_steps: lengths of the random-walk encodings in the batch; 0 for none.
        gnn_dropout: within patches.
        dropout: in the Transformer, entries of A included.
    """

    def __init__(
        self,
        node_features: int | Sequence[int],
        edge_features: int | Sequence[int],
        num_outputs: int = 1,
        *,
        dim: int = 128,
        gnn_depth: int = 4,
        depth: int = 4,
        num_heads: int = 8,
        walk_steps: int = 20,
        patch_walk_steps: int = 8,
        gnn_dropout: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.nodes = FeatureEncoder(node_features, dim)
        self.edges = FeatureEncoder(edge_features, dim)
        self.walk = WalkEncoder(walk_steps, dim)
        self.patch_walk = WalkEncoder(patch_walk_steps, dim)
        self.gnn = nn.ModuleList(GINELayer(dim, gnn_dropout) for _ in range(gnn_depth))
        self.patch_to_node = nn.ModuleList(
            nn.Sequential(*_norm_relu(dim, dim)) for _ in range(gnn_depth - 1)
        )
        self.blocks = nn.ModuleList(
            Block(
                HadamardAttention(dim, num_heads, dropout),
                dim,
                2 * dim,
                dropout,
                activation=nn.ReLU,
            )
            for _ in range(depth)
        )
        self.head = nn.Sequential(*_norm_relu(dim, dim), nn.Linear(dim, num_outputs))

    def forward(self, batch: GraphViTBatch) -> Tensor:
        """``(B, num_outputs)``."""
        tokens = self.encode_patches(batch)
        graphs, slots = batch.padding.shape
        x = tokens.new_zeros(graphs * slots, tokens.shape[-1])
        x = x.index_copy(0, batch.patch_graph * slots + batch.patch_slot, tokens)
        x = x.view(graphs, slots, -1)
        adjacency = batch.adjacency.to(x.dtype)
        for block in self.blocks:
            x = block(x, batch.padding, adjacency)
        there = ~batch.padding[:, :, None]
        return self.head((x * there).sum(1) / there.sum(1))

    def encode_patches(self, batch: GraphViTBatch) -> Tensor:
        """``(S, dim)``: a token for each patch of each graph."""
        h = self.walk(self.nodes(batch.x), batch.walk)
        e = self.edges(batch.edge_attr).index_select(0, batch.copy_edge_id)
        h = h.index_select(0, batch.copy_node)
        patches, nodes = len(batch.patch_graph), len(batch.x)
        for number, layer in enumerate(self.gnn):
            if number:
                mean = mean_by(batch.copy_patch, h, patches)
                of_patch = self.patch_to_node[number - 1](mean)
                h = h + of_patch.index_select(0, batch.copy_patch)
                h = mean_by(batch.copy_node, h, nodes).index_select(0, batch.copy_node)
            h = layer(h, batch.copy_edges, e)
        return self.patch_walk(mean_by(batch.copy_patch, h, patches), batch.patch_walk)


def _norm_relu(inputs: int, outputs: int) -> list[nn.Module]:
    # no bias: the norm would subtract it
    return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
