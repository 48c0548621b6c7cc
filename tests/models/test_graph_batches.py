"""Graphs as the models take them: batches, distances, paths and walks."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from gfsa_experiments.models import GraphormerCollator
from gfsa_experiments.models.graphs import (
    Prepared,
    Several,
    dense_adjacency,
    distances,
    path_edges,
)
from gfsa_experiments.tasks.graph.gps import GPSCollator
from support.graphs import molecule

COLLATORS = [GraphormerCollator(), GPSCollator("walk", 4)]


def same(first: object, second: object) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b
        for a, b in zip(vars(first).values(), vars(second).values(), strict=True)
    )


@pytest.mark.parametrize("collate", COLLATORS)
def test_prepared_graphs_give_the_same_batch(collate: GraphormerCollator) -> None:
    graphs = [molecule(6, 1), molecule(9, 2, seed=1)]
    batch = collate(graphs)
    assert len(batch) == 2
    assert same(batch, collate([collate.prepare(graph) for graph in graphs]))
    assert same(batch, next(iter(DataLoader(graphs, batch_size=2, collate_fn=collate))))


@pytest.mark.parametrize("collate", COLLATORS)
def test_batches_are_made_on_the_host(collate: GraphormerCollator) -> None:
    graphs = [molecule(6, 1), molecule(9, 2, seed=1)]
    batch = collate(graphs)
    with torch.device("meta"):
        assert same(batch, collate(graphs))


@pytest.mark.parametrize("collate", COLLATORS)
def test_graphs_of_torch_geometric_are_taken_as_they_are(collate: GraphormerCollator) -> None:
    data = pytest.importorskip("torch_geometric.data")
    graphs = [molecule(6, 1), molecule(9, 2, seed=1)]
    assert same(collate(graphs), collate([data.Data(**vars(graph)) for graph in graphs]))


@pytest.mark.parametrize("collate", COLLATORS)
def test_a_batch_moves_as_one(collate: GraphormerCollator) -> None:
    moved = collate([molecule(6, 1)]).to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 6
    assert all(tensor.device.type == "meta" for tensor in tensors)
    operations = pytest.importorskip("accelerate.utils.operations")
    assert operations.send_to_device(collate([molecule(6, 1)]), "meta").x.device.type == "meta"


@pytest.mark.parametrize("collate", COLLATORS)
def test_features_and_labels_may_be_missing(collate: GraphormerCollator) -> None:
    bare = SimpleNamespace(x=torch.rand(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
    batch = collate([bare])
    assert batch.y is None
    assert batch.edge_attr.tolist() == [[0], [0]]
    assert batch.x.dtype == torch.float32
    alone = SimpleNamespace(x=torch.tensor([3]), edge_index=torch.zeros(2, 0, dtype=torch.long))
    assert collate([alone]).x.shape[-1] == 1


@pytest.mark.parametrize("collate", COLLATORS)
def test_what_makes_no_sense_is_refused(collate: GraphormerCollator) -> None:
    empty = SimpleNamespace(x=torch.zeros(0, 1), edge_index=torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one node"):
        collate([empty])
    graph = molecule(5)
    graph.edge_attr = graph.edge_attr[1:]
    with pytest.raises(ValueError, match="edge_attr has 7 rows for 8 edges"):
        collate([graph])
    labelled, other = molecule(5), molecule(5)
    other.y = torch.zeros(3)
    with pytest.raises(ValueError, match=r"same number of labels .* got \[1, 3\]"):
        collate([labelled, other])
    other.y = None
    with pytest.raises(ValueError, match=r"got \[1, None\]"):
        collate([labelled, other])


def test_arguments_of_the_collators_are_checked() -> None:
    with pytest.raises(ValueError, match="max_hops"):
        GraphormerCollator(0)


def test_padding_fills_every_dimension() -> None:
    def pad(*rows: torch.Tensor, **how: int) -> torch.Tensor:
        return Several([Prepared(x=x) for x in rows]).pad("x", value=7.0, **how)

    padded = pad(torch.ones(1, 1), 2 * torch.ones(2, 2), size=3, axes=2)
    assert padded[0].tolist() == [[1, 7, 7], [7, 7, 7], [7, 7, 7]]
    assert padded[1].tolist() == [[2, 2, 7], [2, 2, 7], [7, 7, 7]]
    assert pad(torch.ones(1, 2), torch.ones(2, 2), size=2).tolist() == [
        [[1, 1], [7, 7]],
        [[1, 1], [1, 1]],
    ]


@st.composite
def directed_graphs(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Any edges at all: loops, parallel edges, one-way streets, parts that do not meet."""
    nodes = draw(st.integers(1, 9))
    node = st.integers(0, nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=20))
    return torch.tensor(edges, dtype=torch.long).reshape(-1, 2).T, nodes


def brute_force_distances(edge_index: torch.Tensor, nodes: int) -> list[list[int]]:
    ahead = {node: [b for a, b in edge_index.T.tolist() if a == node] for node in range(nodes)}
    table = []
    for start in range(nodes):
        found = {start: 0}
        queue = deque([start])
        while queue:
            here = queue.popleft()
            for there in ahead[here]:
                if there not in found:
                    found[there] = found[here] + 1
                    queue.append(there)
        table.append([found.get(node, -1) for node in range(nodes)])
    return table


@given(directed_graphs())
def test_distances_are_those_of_a_breadth_first_search(graph: tuple[torch.Tensor, int]) -> None:
    edge_index, nodes = graph
    assert distances(edge_index, nodes).tolist() == brute_force_distances(edge_index, nodes)


@given(directed_graphs(), st.integers(1, 5))
def test_paths_are_shortest_paths(graph: tuple[torch.Tensor, int], hops: int) -> None:
    edge_index, nodes = graph
    table = brute_force_distances(edge_index, nodes)
    paths = path_edges(edge_index, distances(edge_index, nodes), hops).tolist()
    for start in range(nodes):
        for goal in range(nodes):
            edges = [edge for edge in paths[start][goal] if edge >= 0]
            # as long as it has to be, cut at max_hops, and filled up behind
            assert len(edges) == max(0, min(table[start][goal], hops))
            assert paths[start][goal][len(edges) :] == [-1] * (hops - len(edges))
            here = start
            for edge in edges:
                source, target = edge_index[:, edge].tolist()
                assert source == here
                assert table[target][goal] == table[here][goal] - 1
                here = target
            if 0 <= table[start][goal] <= hops:
                assert here == goal


def test_of_equally_short_paths_the_first_edges_are_taken() -> None:
    square = torch.tensor([[0, 0, 1, 2], [1, 2, 3, 3]])
    assert path_edges(square, distances(square, 4), 2)[0, 3].tolist() == [0, 2]
    swapped = square[:, [1, 0, 2, 3]]
    assert path_edges(swapped, distances(swapped, 4), 2)[0, 3].tolist() == [0, 3]


def test_degrees_count_edges_both_ways() -> None:
    edge_index = torch.tensor([[0, 0, 1, 2], [1, 2, 2, 2]])
    graph = SimpleNamespace(x=torch.zeros(4, 1), edge_index=edge_index)
    found = GraphormerCollator().prepare(graph)
    assert found.in_degree.tolist() == [0, 1, 3, 0]
    assert found.out_degree.tolist() == [2, 1, 1, 0]


def test_random_walks_return_with_the_probability_of_their_matrix() -> None:
    graph = molecule(8, extra=3)
    # the ninth node is alone and never moves, so it never comes back
    graph.x = torch.zeros(9, 1)
    walk = GPSCollator("walk", 5).prepare(graph).encoding
    adjacency = dense_adjacency(graph.edge_index, 9)
    step = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
    for steps in range(1, 6):
        expected = torch.linalg.matrix_power(step, steps).diagonal()
        torch.testing.assert_close(walk[:, steps - 1], expected, rtol=0, atol=1e-6)
    assert walk[8].abs().max() == 0
    assert GPSCollator().prepare(graph).encoding.shape == (9, 0)


def test_edges_to_nowhere_are_refused() -> None:
    with pytest.raises(ValueError, match=r"names nodes from 0 to 3, .* nodes 0 to 2"):
        distances(torch.tensor([[0], [3]]), 3)
    with pytest.raises(ValueError, match=r"expected edge_index of shape \(2, E\)"):
        distances(torch.zeros(3, 2, dtype=torch.long), 3)
    with pytest.raises(ValueError, match="int64"):
        distances(torch.zeros(2, 3), 3)
