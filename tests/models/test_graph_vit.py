"""Graph-ViT against its formulas written out, patch by patch and node by node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import gfsa
from gfsa_experiments.models import GraphViT, GraphViTCollator
from gfsa_experiments.models.graph_vit import GINELayer, bisection
from gfsa_experiments.models.graphs import random_walk_encoding
from support.graphs import (
    ATOMS,
    BONDS,
    molecule,
    one_way,
    permuted,
    randomise,
    reference_blocks,
    softmax,
)

PATCHES, STEPS, PATCH_STEPS = 4, 5, 3


def small(**options: object) -> GraphViT:
    sizes = {"dim": 12, "gnn_depth": 3, "depth": 2, "num_heads": 3}
    walks = {"walk_steps": STEPS, "patch_walk_steps": PATCH_STEPS}
    model = GraphViT((ATOMS,), (BONDS,), 2, **{**sizes, **walks, **options})
    return randomise(model).double().eval()


def collator(**options: object) -> GraphViTCollator:
    walks = {"walk_steps": STEPS, "patch_walk_steps": PATCH_STEPS}
    return GraphViTCollator(PATCHES, **{**walks, **options})


def graphs() -> list[SimpleNamespace]:
    """With as many patches as allowed, with fewer, with one; in pieces; with one-way edges."""
    pieces = molecule(9, connected=False)
    return [molecule(11, 3), molecule(3, seed=1), molecule(1), pieces, one_way(molecule(7, 2))]


def batch_norm(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    scale = (norm.running_var + norm.eps).sqrt()
    return (x - norm.running_mean) / scale * norm.weight + norm.bias


def norm_relu(layers: nn.Sequential, x: Tensor) -> Tensor:
    return batch_norm(layers[1], x @ layers[0].weight.T).clamp(min=0)


def reference_patches(graph: SimpleNamespace, hops: int = 1) -> list[set[int]]:
    part = bisection(graph.edge_index, len(graph.x), PATCHES).tolist()
    patches = [{n for n, p in enumerate(part) if p == name} for name in sorted(set(part))]
    for _ in range(hops):
        patches = [
            patch
            | {b for a, b in graph.edge_index.T.tolist() if a in patch}
            | {a for a, b in graph.edge_index.T.tolist() if b in patch}
            for patch in patches
        ]
    return patches


def reference_tokens(model: GraphViT, graph: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """A token for each patch, and the numbers of nodes that patches share."""
    nodes, edges = len(graph.x), graph.edge_index.T.tolist()
    patches = reference_patches(graph)
    adjacency = torch.zeros(nodes, nodes)
    for a, b in edges:
        adjacency[a, b] = 1
    walk = random_walk_encoding(adjacency, STEPS).double()
    start = model.nodes.tables[0].weight[graph.x[:, 0]] + norm_relu(model.walk.encode, walk)
    h = {(p, n): start[n] for p, patch in enumerate(patches) for n in patch}
    for number, layer in enumerate(model.gnn):
        if number:
            means = [
                torch.stack([h[p, n] for n in patch]).mean(0) for p, patch in enumerate(patches)
            ]
            added = norm_relu(model.patch_to_node[number - 1], torch.stack(means))
            h = {(p, n): value + added[p] for (p, n), value in h.items()}
            for n in range(nodes):
                copies = [key for key in h if key[1] == n]
                mean = torch.stack([h[key] for key in copies]).mean(0)
                h.update(dict.fromkeys(copies, mean))
        h = {key: reference_gine(model, layer, graph, h, key) for key in h}
    tokens = torch.stack(
        [torch.stack([h[p, n] for n in patch]).mean(0) for p, patch in enumerate(patches)]
    )
    shared = torch.tensor([[float(len(a & b)) for b in patches] for a in patches])
    patch_walk = random_walk_encoding(shared, PATCH_STEPS).double()
    return tokens + norm_relu(model.patch_walk.encode, patch_walk), shared.double()


def reference_gine(
    model: GraphViT,
    layer: GINELayer,
    graph: SimpleNamespace,
    h: dict[tuple[int, int], Tensor],
    key: tuple[int, int],
) -> Tensor:
    patch, node = key
    message = (1 + layer.epsilon) * h[key]
    for (a, b), kind in zip(graph.edge_index.T.tolist(), graph.edge_attr.tolist(), strict=True):
        if b == node and (patch, a) in h:
            message = message + (h[patch, a] + model.edges.tables[0].weight[kind]).clamp(min=0)
    inner = norm_relu(layer.mlp, message) @ layer.mlp[3].weight.T
    total = h[key] + batch_norm(layer.norm, inner).clamp(min=0)
    return total @ layer.out.weight.T + layer.out.bias


def reference_forward(
    model: GraphViT, graph: SimpleNamespace, coefficients: list[Tensor] | None = None
) -> Tensor:
    tokens, shared = reference_tokens(model, graph)

    def map_of(q: Tensor, k: Tensor, head: int) -> Tensor:
        return softmax(q @ k.T / q.shape[1] ** 0.5) * shared

    mean = reference_blocks(model.blocks, tokens, map_of, coefficients).mean(0)
    return norm_relu(model.head, mean) @ model.head[3].weight.T + model.head[3].bias


@torch.no_grad()
def test_forward_is_the_formula_with_and_without_a_filter() -> None:
    model, batch = small(), collator()(graphs())
    plain = model(batch)
    expected = torch.stack([reference_forward(model, graph) for graph in graphs()])
    assert expected.std() > 0.1
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-10)
    gfsa.plug(model, K=4)
    assert torch.equal(model(batch), plain)
    for filter in gfsa.filters_of(model).values():
        filter.theta.normal_(std=0.3)
    coefficients = [filter.coefficients() for filter in gfsa.filters_of(model).values()]
    expected = torch.stack([reference_forward(model, g, coefficients) for g in graphs()])
    got = model(batch)
    assert (got - plain).abs().max() > 0.1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_rows_of_the_map_do_not_sum_to_one() -> None:
    model, batch = small(), collator()(graphs())
    attention = model.blocks[0].attention
    q, k, _ = attention.heads(torch.randn(5, PATCHES, 12, dtype=torch.float64))
    A = attention.operator(q, k, batch.padding, batch.adjacency.double()).dense()
    assert (A.sum(-1) - 1).abs().max() > 0.1
    assert A[1, :, :, 3].abs().max() == 0  # a graph of three patches has no fourth


@torch.no_grad()
def test_the_names_of_nodes_and_patches_do_not_matter() -> None:
    # once the graph is cut: which cut it is depends on the partitioner
    model, graph = small(), molecule(11, 3)
    order, names = torch.randperm(11), torch.randperm(PATCHES)
    part = bisection(graph.edge_index, 11, PATCHES)
    kept = collator(partition=lambda *_: part)([graph])
    renamed = collator(partition=lambda *_: names[part[order]])([permuted(graph, order)])
    # float32 random walks summed in another order
    torch.testing.assert_close(model(kept), model(renamed), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hops", [0, 1, 2])
def test_patches_overlap_by_their_hops(hops: int) -> None:
    graph = molecule(11, 3)
    cut = collator(hops=hops).prepare(graph)
    got = [set(cut.copy_node[cut.copy_patch == p].tolist()) for p in range(len(cut.adjacency))]
    assert got == reference_patches(graph, hops)
    # a patch has all edges between its nodes
    assert torch.equal(cut.copy_node[cut.copy_edges], graph.edge_index[:, cut.copy_edge_id])


def test_size_and_mismatched_walks() -> None:
    model = GraphViT((28,), (4,))
    assert sum(parameter.numel() for parameter in model.parameters()) == 803_973
    with pytest.raises(ValueError, match="walks of 20 steps, the batch has 5"):
        model(collator()(graphs()))


@torch.no_grad()
@pytest.mark.parametrize("plugged", [False, True])
def test_under_autocast_the_map_keeps_float32(plugged: bool) -> None:
    model, batch = small().float(), collator()(graphs())
    if plugged:
        gfsa.plug(model, w0=0.3, wK=-0.2)
    attention = model.blocks[0].attention
    given = batch.padding, batch.adjacency
    x = torch.randn(*batch.padding.shape, 12)
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = attention.heads(x)
        got = attention.attend(q, k, v, *given)
    assert q.dtype == got.dtype == torch.bfloat16
    assert torch.equal(got, attention.attend(q, k, v, *given))
