"""Degrees, distances, paths and random walks against plain Python."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gfsa_experiments.models.graph_features import (
    degrees,
    dense_adjacency,
    distances,
    path_edges,
    random_walk_encoding,
)
from support.graphs import molecule


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
    incoming, outgoing = degrees(edge_index, 4)
    assert incoming.tolist() == [0, 1, 3, 0]
    assert outgoing.tolist() == [2, 1, 1, 0]


def test_random_walks_return_with_the_probability_of_their_matrix() -> None:
    graph = molecule(8, extra=3)
    adjacency = dense_adjacency(graph.edge_index, 9).double()
    walk = random_walk_encoding(adjacency, 5)
    # the ninth node is alone and never moves, so it never comes back
    step = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
    for steps in range(1, 6):
        expected = torch.linalg.matrix_power(step, steps).diagonal()
        torch.testing.assert_close(walk[:, steps - 1], expected, rtol=0, atol=1e-12)
    assert walk[8].abs().max() == 0
    assert random_walk_encoding(adjacency, 0).shape == (9, 0)


def test_edges_to_nowhere_are_refused() -> None:
    with pytest.raises(ValueError, match=r"names nodes from 0 to 3, .* nodes 0 to 2"):
        distances(torch.tensor([[0], [3]]), 3)
    with pytest.raises(ValueError, match=r"expected edge_index of shape \(2, E\)"):
        degrees(torch.zeros(3, 2, dtype=torch.long), 3)
    with pytest.raises(ValueError, match="int64"):
        degrees(torch.zeros(2, 3), 3)
