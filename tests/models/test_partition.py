"""Partitions: every node in one part, parts of about equal size, connected where possible."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from gfsa_experiments.models.partition import bisection, metis
from support.graphs import molecule


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8, 32])
@pytest.mark.parametrize("nodes", [8, 9, 33, 60])
def test_bisection_gives_parts_of_about_one_size(nodes: int, parts: int) -> None:
    graph = molecule(nodes, extra=nodes // 5, seed=nodes)
    part = bisection(graph.edge_index, nodes, parts)
    sizes = torch.bincount(part)
    mean = nodes / min(parts, nodes)
    assert len(sizes) == min(parts, nodes)
    assert sizes.min() >= 1
    # half a part to either side at each of five halvings: 33/32 · 17/16 · 9/8 · 5/4 · 3/2
    assert sizes.max() <= 2.31 * mean + 1


def test_bisection_cuts_few_edges() -> None:
    for seed in range(10):
        graph = molecule(60, extra=6, seed=seed)
        part = bisection(graph.edge_index, 60, 8)
        # a tree of 60 nodes falls into 8 parts by cutting 7 of its 59 bonds, if it is lucky
        cut = int((part[graph.edge_index[0]] != part[graph.edge_index[1]]).sum()) / 2
        assert cut <= 15


def test_bisection_cuts_a_chain_where_it_should() -> None:
    order = torch.randperm(12)
    chain = torch.stack([order[:-1], order[1:]])
    part = bisection(chain, 12, 4)
    # twelve nodes in a row, four parts of three: three bonds are cut
    assert torch.bincount(part).tolist() == [3, 3, 3, 3]
    assert int((part[chain[0]] != part[chain[1]]).sum()) == 3


def test_bisection_of_two_components_does_not_mix_them() -> None:
    triangle = torch.tensor([[0, 1, 2], [1, 2, 0]])
    two = torch.cat([triangle, triangle + 3], dim=1)
    assert len(set(bisection(two, 6, 2)[:3].tolist())) == 1


def test_bisection_is_deterministic_and_needs_no_edges() -> None:
    graph = molecule(30, extra=4)
    first, second = (bisection(graph.edge_index, 30, 8) for _ in range(2))
    assert torch.equal(first, second)
    assert bisection(torch.zeros(2, 0, dtype=torch.long), 5, 2).bincount().tolist() == [2, 3]


def test_metis_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ImportError, match="pip install pymetis"):
        metis(torch.zeros(2, 0, dtype=torch.long), 5, 2)


def test_metis_gets_a_symmetric_graph_and_empty_parts_vanish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {}

    def part_graph(parts: int, adjacency: list[list[int]]) -> tuple[int, list[int]]:
        asked.update(parts=parts, adjacency=adjacency)
        return 1, [0, 0, 3, 3]

    monkeypatch.setitem(sys.modules, "pymetis", SimpleNamespace(part_graph=part_graph))
    part = metis(torch.tensor([[0, 1, 2, 2], [1, 2, 3, 2]]), 4, 3)
    assert asked == {"parts": 3, "adjacency": [[1], [0, 2], [1, 3], [2]]}
    assert part.tolist() == [0, 0, 1, 1]
    assert metis(torch.zeros(2, 0, dtype=torch.long), 2, 3).tolist() == [0, 1]
