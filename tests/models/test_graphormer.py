"""Graphormer against its formulas written out, and its invariances."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import gfsa
from gfsa_experiments.models import Graphormer, GraphormerCollator
from gfsa_experiments.models.graphs import Prepared
from support.graphs import (
    ATOMS,
    BONDS,
    layer_norm,
    molecule,
    one_way,
    permuted,
    randomise,
    reference_blocks,
    softmax,
)

HOPS, DISTANCES, DEGREES = 3, 6, 4


def small(**options: object) -> Graphormer:
    sizes = {"dim": 12, "depth": 2, "num_heads": 3, "ffn_dim": 10}
    tables = {"num_degrees": DEGREES, "num_distances": DISTANCES, "max_hops": HOPS}
    model = Graphormer((ATOMS,), (BONDS,), 2, **{**sizes, **tables, **options})
    return randomise(model).double().eval()


def graphs() -> list[SimpleNamespace]:
    """Of different sizes, beyond the tables of degrees and distances; in pieces; one-way."""
    pieces = molecule(8, connected=False)
    return [molecule(9, 3), molecule(14, 1, seed=1), molecule(1), pieces, one_way(molecule(7, 2))]


def reference_bias(model: Graphormer, graph: Prepared) -> Tensor:
    """``(H, N+1, N+1)``, pair by pair, hop by hop."""
    bias, nodes, heads = model.bias, len(graph.x), 3
    table = bias.edges.tables[0].weight
    total = torch.empty(heads, nodes + 1, nodes + 1, dtype=torch.float64)
    for head in range(heads):
        total[head] = bias.virtual[head]
        for i in range(nodes):
            for j in range(nodes):
                distance = int(graph.distance[i, j])
                row = DISTANCES - 1 if distance < 0 else min(distance, DISTANCES - 2)
                score = bias.spatial.weight[row, head]
                edges = [e for e in graph.paths[i, j, :HOPS].tolist() if e >= 0]
                for hop, edge in enumerate(edges):
                    x = table[int(graph.edge_attr[edge])]
                    score = score + (x @ bias.hops[hop, :, head]) / len(edges)
                total[head, i + 1, j + 1] = score
    return total


def reference_forward(
    model: Graphormer, graph: Prepared, coefficients: list[Tensor] | None = None
) -> Tensor:
    bias = reference_bias(model, graph)
    tokens = [model.virtual_node]
    for node, kind in enumerate(graph.x[:, 0].tolist()):
        incoming = min(int(graph.in_degree[node]), DEGREES - 1)
        outgoing = min(int(graph.out_degree[node]), DEGREES - 1)
        centrality = model.in_degree.weight[incoming] + model.out_degree.weight[outgoing]
        tokens.append(model.nodes.tables[0].weight[kind] + centrality)

    def map_of(q: Tensor, k: Tensor, head: int) -> Tensor:
        return softmax(q @ k.T / q.shape[1] ** 0.5 + bias[head])

    x = reference_blocks(model.blocks, torch.stack(tokens), map_of, coefficients)
    return layer_norm(model.norm, x[0]) @ model.head.weight.T + model.head.bias


@torch.no_grad()
def test_forward_is_the_formula_with_and_without_a_filter() -> None:
    model, collate = small(), GraphormerCollator(HOPS)
    prepared = [collate.prepare(graph) for graph in graphs()]
    plain = model(collate(graphs()))
    expected = torch.stack([reference_forward(model, graph) for graph in prepared])
    assert expected.std() > 0.1
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-10)
    gfsa.plug(model, K=4)
    assert torch.equal(model(collate(graphs())), plain)
    for filter in gfsa.filters_of(model).values():
        filter.theta.normal_()
    coefficients = [filter.coefficients() for filter in gfsa.filters_of(model).values()]
    expected = torch.stack([reference_forward(model, graph, coefficients) for graph in prepared])
    got = model(collate(prepared))
    assert (got - plain).abs().max() > 0.1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_the_names_of_nodes_do_not_matter() -> None:
    # in a tree each path is the only one
    model, collate = small(), GraphormerCollator(HOPS)
    tree = molecule(13, seed=5)
    renamed = permuted(tree, torch.randperm(13))
    torch.testing.assert_close(
        model(collate([tree])), model(collate([renamed])), rtol=0, atol=1e-12
    )


def count(model: Graphormer) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_published_sizes() -> None:
    layer = 4 * (80 * 80 + 80) + 2 * (80 * 80 + 80) + 4 * 80
    tables = (64 + 64 + 64 + 1) * 80 + (40 + 64 + 1) * 8 + 5 * 8 * 8
    assert count(Graphormer.slim()) == 12 * layer + tables + 2 * 80 + 81 == 487_241

    with torch.device("meta"):
        base = Graphormer.base()
    layer = 4 * (768 * 768 + 768) + 2 * (768 * 768 + 768) + 4 * 768
    tables = (9 * 512 + 512 + 512 + 1) * 768 + (512 + 3 * 512 + 1) * 32 + 5 * 32 * 32
    assert count(base) == 12 * layer + tables + 2 * 768 + 769 == 46_958_625
    # the paper's filters: one number for each head of each layer
    assert gfsa.plug(Graphormer.slim(), preset="paper").parameters == 12 * 8


def test_too_short_paths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs 3: GraphormerCollator\(max_hops=3\)"):
        small()(GraphormerCollator(2)(graphs()))


def test_wrong_features_are_refused() -> None:
    batch = GraphormerCollator(HOPS)(graphs())
    batch.x = batch.x.float()
    with pytest.raises(ValueError, match="expected 1 integer columns of features, got 1 of"):
        small()(batch)
