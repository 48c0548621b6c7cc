"""Graph-ViT (He et al., 2023): a Transformer over patches of a graph, with Hadamard attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from gfsa_experiments.models import graphs
from gfsa_experiments.models.attention import Block, HadamardAttention

Partition = Callable[[Tensor, int, int], Tensor]
"""``(edge_index, num_nodes, num_parts) -> (num_nodes,)``: the part of each node, counted from 0."""


def bisection(edge_index: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    """Halve the graph, then its halves, each time where few edges cross.

    Deterministic. The size of most parts is within half of the mean; if there are no more nodes
    than parts, each node is a part. Meant for graphs that are nearly trees, such as molecules.
    """
    links = graphs.dense_adjacency(edge_index, num_nodes, both_ways=True).numpy()
    neighbours = [row.nonzero()[0].tolist() for row in links]
    part = torch.zeros(num_nodes, dtype=torch.long)
    waiting = [([*range(num_nodes)], 0, min(num_parts, num_nodes))]
    while waiting:
        nodes, label, parts = waiting.pop()
        if parts in (1, len(nodes)):
            part[nodes] = label + torch.arange(parts)
            continue
        order = _branch_by_branch(nodes, neighbours)
        ahead = np.triu(links[np.ix_(order, order)], 1)
        # how many edges lead from the first nodes of the order, up to this one, to the others
        crossing = np.cumsum(ahead.sum(1) - ahead.sum(0))
        half = parts // 2
        middle = round(len(nodes) * half / parts)
        # at most half a part off the middle; both halves keep a node for each of their parts
        slack = len(nodes) // parts // 2
        lowest = max(half, middle - slack)
        highest = max(lowest, min(len(nodes) - parts + half, middle + slack))
        cuts = [(crossing[n - 1], abs(n - middle), n) for n in range(lowest, highest + 1)]
        size = min(cuts)[-1]
        waiting.append((order[:size], label, half))
        waiting.append((order[size:], label + half, parts - half))
    return part


def _branch_by_branch(nodes: list[int], neighbours: list[list[int]]) -> list[int]:
    """Depth first from a peripheral node, small branches first: connected nodes are adjacent."""
    order: list[int] = []
    unseen = dict.fromkeys(nodes)
    while unseen:
        # one component after the other
        far = _breadth_first(next(iter(unseen)), unseen, neighbours)[0][-1]
        found, parent = _breadth_first(far, unseen, neighbours)
        weight = dict.fromkeys(found, 1)
        children: dict[int, list[int]] = {node: [] for node in found}
        for node in found[:0:-1]:
            weight[parent[node]] += weight[node]
            children[parent[node]].append(node)
        stack = [far]
        while stack:
            node = stack.pop()
            del unseen[node]
            order.append(node)
            stack += sorted(children[node], key=weight.__getitem__, reverse=True)
    return order


def _breadth_first(
    start: int, among: Iterable[int], neighbours: list[list[int]]
) -> tuple[list[int], dict[int, int]]:
    """The nodes that are reached from ``start``, in order, and the parent of each other node."""
    found, parent, unseen = [start], dict[int, int](), {*among} - {start}
    for node in found:
        for other in neighbours[node]:
            if other in unseen:
                unseen.remove(other)
                parent[other] = node
                found.append(other)
    return found, parent


@dataclass
class GraphViTBatch(graphs.Batch):
    """B graphs of at most P patches.

    Nodes and edges of all graphs are concatenated: ``x``, ``(N, F)``, ``edge_attr``, ``(E, F)``,
    and the nodes' random-walk encoding ``walk``. A node in several patches has a copy in each:
    ``copy_node`` and ``copy_patch`` say which node of which patch a copy is, with patch p of graph
    b numbered ``b·P + p``; ``copy_edges``, ``(2, ·)``, joins copies within a patch, and
    ``copy_edge_id`` says along which edge. ``patch_walk``, ``(B, P, steps)``, is the patches'
    random-walk encoding, ``adjacency``, ``(B, P, P)``, counts the nodes that two patches share;
    ``padding``, ``(B, P)``, is True where there is no patch. ``real_nodes``, ``(N,)``, and
    ``real_copies``, ``(C,)``, are False for padding. ``y`` is ``(B, T)`` or None.
    """

    x: Tensor
    edge_attr: Tensor
    walk: Tensor
    copy_node: Tensor
    copy_patch: Tensor
    copy_edges: Tensor
    copy_edge_id: Tensor
    patch_walk: Tensor
    adjacency: Tensor
    padding: Tensor
    real_nodes: Tensor
    real_copies: Tensor
    y: Tensor | None


@dataclass(frozen=True)
class GraphViTCollator(graphs.Collator):
    """Graphs to a :class:`GraphViTBatch`; hand it to a data loader as ``collate_fn``.

    Args:
        num_patches: the largest number of patches per graph.
        hops: each patch also contains the neighbours of its nodes up to this distance, so that
            patches overlap.
        walk_steps: length of the nodes' random-walk encoding.
        patch_walk_steps: length of the patches' random-walk encoding.
        partition: ``bisection``, or a function of your own.
        pad_to_multiple: above 1, numbers of nodes, edges and copies are rounded up to a multiple of
            this, large ones by up to a quarter: batches have few shapes.
    """

    num_patches: int = 32
    hops: int = 1
    walk_steps: int = 20
    patch_walk_steps: int = 8
    partition: Partition = bisection
    pad_to_multiple: int = 1

    def __post_init__(self) -> None:
        if self.num_patches < 1:
            raise ValueError(f"num_patches must be at least 1, got {self.num_patches}")

    def features(self, edge_index: Tensor, num_nodes: int) -> dict[str, Tensor]:
        """The graph cut into patches, and random walks on its nodes and on its patches."""
        part = self.partition(edge_index, num_nodes, self.num_patches)
        if part.shape != (num_nodes,):
            shape = tuple(part.shape)
            raise ValueError(f"expected for each of {num_nodes} nodes a part, got shape {shape}")
        # number the parts without gaps: the partitioner may have left some empty
        part = torch.unique(part, return_inverse=True)[1]
        adjacency = graphs.dense_adjacency(edge_index, num_nodes)
        # (P, N), True where a patch contains a node: its part and the neighbours of that
        inside = part == torch.arange(int(part.max()) + 1)[:, None]
        for _ in range(self.hops):
            inside = inside | (inside.float() @ (adjacency + adjacency.T) > 0)
        patch, node = inside.nonzero().T
        number = torch.full(inside.shape, -1)
        number[patch, node] = torch.arange(len(node))
        # (P, 2, E): the copies of both ends of each edge, -1 where the patch lacks the node
        ends = number[:, edge_index]
        patch_of_edge, edge = (ends >= 0).all(1).nonzero().T
        shared = inside.float() @ inside.float().T
        return {
            "walk": graphs.random_walk_encoding(adjacency, self.walk_steps),
            "copy_node": node.int(),
            "copy_patch": patch.int(),
            "copy_edges": ends[patch_of_edge, :, edge].T.int(),
            "copy_edge_id": edge.int(),
            "adjacency": shared,
            "patch_walk": graphs.random_walk_encoding(shared, self.patch_walk_steps),
        }

    def join(self, several: graphs.Several) -> GraphViTBatch:
        nodes, edges, copies, patches = map(
            several.sizes, ("x", "edge_attr", "copy_node", "adjacency")
        )
        copy_edge_id = several.shifted("copy_edge_id", edges)
        # padding copies need a patch to be in
        slots = max(patches) if self.pad_to_multiple == 1 else self.num_patches + 1
        copy_patch = several.shifted("copy_patch", [slots] * len(patches))
        padding = several.padding("adjacency", slots)
        n, e, c = sum(nodes), sum(edges), sum(copies)
        some_nodes, some_edges, some_copies = self.few(n), self.few(e), self.few(c)
        joins, spare = self.few(len(copy_edge_id)), torch.arange(c, some_copies)
        return GraphViTBatch(
            x=several.rows("x", some_nodes),
            edge_attr=several.rows("edge_attr", some_edges),
            walk=several.rows("walk", some_nodes),
            copy_node=graphs.filled(
                several.shifted("copy_node", nodes), some_copies, torch.arange(n, some_nodes)
            ),
            copy_patch=graphs.filled(copy_patch, some_copies, padding.flatten().nonzero()[:, 0]),
            copy_edges=graphs.filled(several.shifted("copy_edges", copies), joins, spare),
            copy_edge_id=graphs.filled(copy_edge_id, joins, torch.arange(e, some_edges)),
            patch_walk=several.pad("patch_walk", slots),
            adjacency=several.pad("adjacency", slots, axes=2),
            padding=padding,
            real_nodes=torch.arange(some_nodes) < n,
            real_copies=torch.arange(some_copies) < c,
            y=several.labels(),
        )


class GINELayer(nn.Module):
    r"""Message passing with edge features (GINE), normalised, with a residual connection.

    .. math:: m_i = (1 + ε)\,h_i + \sum_{j → i} \mathrm{ReLU}(h_j + e_{ji}), \qquad
              h_i ← W\,(h_i + \mathrm{ReLU}(\mathrm{BN}(\mathrm{MLP}(m_i)))) + b
    """

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.epsilon = nn.Parameter(torch.zeros(()))
        self.mlp = graphs.MaskedSequential(*_norm_relu(dim, dim), nn.Linear(dim, dim, bias=False))
        self.norm = graphs.MaskedBatchNorm(dim)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(dim, dim)

    def forward(self, h: Tensor, edge_index: Tensor, e: Tensor, real: Tensor) -> Tensor:
        """Nodes ``(N, dim)`` and embedded edges ``(E, dim)`` to nodes; ``real``: ``(N,)``."""
        source, target = edge_index
        # not h[source], whose gradient adds the edges of a node one after another
        messages = torch.relu(h.index_select(0, source) + e)
        gathered = (1 + self.epsilon) * h
        gathered = gathered.index_add(0, target, messages.to(gathered.dtype))
        gathered = self.norm(self.mlp(gathered, real), real)
        return self.out(h + self.dropout(torch.relu(gathered)))


class WalkEncoder(nn.Module):
    r"""Adds a position encoding, :math:`x ← x + \mathrm{ReLU}(\mathrm{BN}(W p))`.

    p is the token's random-walk encoding of ``steps`` numbers; with 0 steps, x stays as it is.
    """

    def __init__(self, steps: int, dim: int) -> None:
        super().__init__()
        self.steps = steps
        self.encode = graphs.MaskedSequential(*_norm_relu(steps, dim)) if steps else None

    def forward(self, x: Tensor, walk: Tensor, real: Tensor) -> Tensor:
        """``x``: ``(N, dim)``; ``walk``: ``(N, steps)``; ``real``: ``(N,)``, False for padding."""
        if walk.shape[-1] != self.steps:
            raise ValueError(
                f"the model expects random walks of {self.steps} steps, the batch has "
                f"{walk.shape[-1]}; pass model and collator the same walk_steps and "
                "patch_walk_steps"
            )
        return x if self.encode is None else x + self.encode(walk.to(x.dtype), real)


class GraphViT(nn.Module):
    r"""A Transformer over the patches of a graph, aware of how they are connected.

    .. math:: A = \mathrm{softmax}(q k^\top / \sqrt d) ∘ \tilde A

    :math:`\tilde A` is the patches' adjacency, from the batch. A patch's token is the mean of its
    nodes after a few GINE layers within the patch; between layers the patch's mean is added to each
    node, and the copies of a node in overlapping patches are averaged. The output is a small MLP of
    the mean over patches.

    Args:
        node_features, edge_features: sizes of the vocabularies, one per integer column, or the
            number of real columns.
        num_outputs: how many numbers are predicted for a graph.
        dim: width throughout; twice as wide inside the Transformer's MLPs.
        gnn_depth: GINE layers within patches, with ``gnn_dropout``.
        depth, num_heads: Transformer blocks over patches, with ``dropout``, on entries of A too.
        walk_steps, patch_walk_steps: lengths of the random-walk encodings in the batch; 0 for none.
    """

    def __init__(
        self,
        node_features: graphs.Features,
        edge_features: graphs.Features,
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
        self.nodes = graphs.FeatureEncoder(node_features, dim)
        self.edges = graphs.FeatureEncoder(edge_features, dim)
        self.walk = WalkEncoder(walk_steps, dim)
        self.patch_walk = WalkEncoder(patch_walk_steps, dim)
        self.gnn = nn.ModuleList(GINELayer(dim, gnn_dropout) for _ in range(gnn_depth))
        self.patch_to_node = nn.ModuleList(
            graphs.MaskedSequential(*_norm_relu(dim, dim)) for _ in range(gnn_depth - 1)
        )
        attention = partial(HadamardAttention, dim, num_heads, dropout)
        self.blocks = nn.ModuleList(
            Block(attention(), dim, 2 * dim, dropout, activation=nn.ReLU) for _ in range(depth)
        )
        self.head = nn.Sequential(*_norm_relu(dim, dim), nn.Linear(dim, num_outputs))

    def forward(self, batch: GraphViTBatch) -> Tensor:
        """``(B, num_outputs)``."""
        x = self.encode_patches(batch).view(*batch.padding.shape, -1)
        adjacency = batch.adjacency.to(x.dtype)
        for block in self.blocks:
            x = block(x, batch.padding, adjacency)
        there = ~batch.padding[:, :, None]
        return self.head((x * there).sum(1) / there.sum(1))

    def encode_patches(self, batch: GraphViTBatch) -> Tensor:
        """``(B·P, dim)``: a token for each patch of each graph."""
        real, there = batch.real_copies, ~batch.padding.flatten()
        h = self.walk(self.nodes(batch.x), batch.walk, batch.real_nodes)
        e = self.edges(batch.edge_attr).index_select(0, batch.copy_edge_id)
        h = h.index_select(0, batch.copy_node)
        patches, nodes = len(there), len(batch.x)
        for number, layer in enumerate(self.gnn):
            if number:
                mean = graphs.mean_by(batch.copy_patch, h, patches)
                of_patch = self.patch_to_node[number - 1](mean, there)
                h = h + of_patch.index_select(0, batch.copy_patch)
                h = graphs.mean_by(batch.copy_node, h, nodes).index_select(0, batch.copy_node)
            h = layer(h, batch.copy_edges, e, real)
        tokens = graphs.mean_by(batch.copy_patch, h, patches)
        return self.patch_walk(tokens, batch.patch_walk.flatten(0, 1), there)


def _norm_relu(inputs: int, outputs: int) -> list[nn.Module]:
    # no bias: the norm would subtract it
    return [nn.Linear(inputs, outputs, bias=False), graphs.MaskedBatchNorm(outputs), nn.ReLU()]
