"""Graph data: its layouts, what is refused, and what is worked out once for all graphs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gfsa_experiments.models.graphs import dense_adjacency, random_walk_encoding
from gfsa_experiments.tasks.graph.features import (
    laplacian_encoding,
    pair_features,
    walk_encoding,
)
from gfsa_experiments.tasks.graph.graphs import GraphSet
from gfsa_experiments.tasks.graph.readers import read_graphs
from support.graph_files import (
    labels,
    separate,
    write_molecules,
    write_zinc,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*results are not those of the official")


@pytest.fixture(autouse=True)
def _read_anew() -> None:
    read_graphs.cache_clear()


@pytest.fixture
def solubility(tmp_path: Path) -> GraphSet:
    y = np.arange(24, dtype=np.float32) / 7
    write_molecules(tmp_path, "molesol", y)
    return read_graphs("molesol", tmp_path)


def test_bonds_become_edges_in_both_directions(tmp_path: Path) -> None:
    arrays = write_molecules(tmp_path, "molesol", np.arange(8, dtype=np.float32))
    graphs = read_graphs("molesol", tmp_path)
    assert graphs.nodes.tolist() == arrays["n_node"].tolist()
    assert graphs.edges.tolist() == (2 * arrays["n_edge"]).tolist()
    assert graphs.edge_index[:, ::2].T.tolist() == arrays["edge"].tolist()
    assert graphs.edge_index[:, 1::2].flip(0).T.tolist() == arrays["edge"].tolist()
    assert graphs.edge_attr[::2].tolist() == arrays["edge_feat"].tolist()
    assert torch.equal(graphs.edge_attr[::2], graphs.edge_attr[1::2])
    assert graphs.y[:, 0].tolist() == list(range(8))
    assert [graphs.part(which).tolist() for which in range(3)] == [[0, 1, 4, 5], [2, 6], [3, 7]]


def test_missing_labels_are_nan(tmp_path: Path) -> None:
    y = labels(8, 12)
    y[3, 5] = -1
    write_molecules(tmp_path, "moltox21", y)
    missing = read_graphs("moltox21", tmp_path).y.isnan()
    assert missing.nonzero().tolist() == [[3, 5]]


def test_qm8_is_in_electronvolts_of_the_first_excitation(tmp_path: Path) -> None:
    y = np.random.default_rng(0).random((8, 16)).astype(np.float32)
    write_molecules(tmp_path, "qm8", y)
    graphs = read_graphs("qm8", tmp_path)
    assert graphs.y.shape == (8, 1)
    torch.testing.assert_close(graphs.y[:, 0], torch.from_numpy(y[:, 0]) * 27.211386)


def test_zinc_leaves_out_what_is_extra(tmp_path: Path) -> None:
    arrays = write_zinc(tmp_path, count=12, extra=3)
    graphs = read_graphs("zinc", tmp_path)
    assert len(graphs) == 12
    assert graphs.x[:, 0].tolist() == arrays["atom_type"][arrays["n_node"][:3].sum() :].tolist()
    torch.testing.assert_close(graphs.y[:, 0], torch.from_numpy(arrays["y"][3:]))


def test_nothing_there_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"zinc12k_graphs\.npz.*pyg:ZINC.*--data-dir"):
        read_graphs("zinc", tmp_path)


def test_pickled_arrays_are_never_opened(tmp_path: Path) -> None:
    objects = np.array([{"a": 1}] * 8, dtype=object)
    write_molecules(tmp_path, "molesol", objects)
    with pytest.raises(ValueError, match="is damaged"):
        read_graphs("molesol", tmp_path)


def spoiled(what: str, count: int, bad: list[int]) -> dict[str, Any]:
    """One fault in each of some molecules."""
    from support.graph_files import molecules

    arrays = molecules(count)
    first_node = np.cumsum(arrays["n_node"]) - arrays["n_node"]
    first_edge = np.cumsum(arrays["n_edge"]) - arrays["n_edge"]
    y = np.zeros(count, dtype=np.float32)
    for graph in bad:
        if what == "an edge to a node that it does not have":
            arrays["edge"][first_edge[graph], 1] = arrays["n_node"][graph]
        elif what == "unknown features of nodes":
            arrays["node_feat"][first_node[graph], 1] = 5
        elif what == "unknown features of edges":
            arrays["edge_feat"][first_edge[graph], 0] = 5
        elif what == "a wrong split":
            arrays["split"][graph] = 3
        else:
            y[graph] = np.nan
    return {**arrays, "y": y}


@pytest.mark.parametrize(
    "what",
    [
        "an edge to a node that it does not have",
        "unknown features of nodes",
        "unknown features of edges",
        "a wrong label",
        "a wrong split",
    ],
)
def test_a_few_bad_graphs_are_reported_and_many_refused(tmp_path: Path, what: str) -> None:
    arrays = spoiled(what, 120, [4])
    write_molecules(tmp_path, "molesol", arrays.pop("y"), **arrays)
    with pytest.warns(UserWarning, match=f"1 of 120 graphs cannot be used; graph 4: {what}"):
        graphs = read_graphs("molesol", tmp_path)
    assert len(graphs) == 119
    assert graphs.nodes.tolist() == [*arrays["n_node"][:4], *arrays["n_node"][5:]]
    arrays = spoiled(what, 120, [4, 7])
    write_molecules(tmp_path / "worse", "molesol", arrays.pop("y"), **arrays)
    with pytest.raises(ValueError, match=r"2 of 120 graphs cannot be used.*More than 1 %"):
        read_graphs("molesol", tmp_path / "worse")


def test_graphormer_wants_kinds_of_edges(solubility: GraphSet) -> None:
    real = dataclasses.replace(
        solubility, edge_attr=torch.rand(len(solubility.edge_attr), 1), edge_features=1
    )
    with pytest.raises(ValueError, match=r"real numbers on its edges.*model=gps"):
        pair_features(real)


def test_walks_are_those_of_each_graph(solubility: GraphSet) -> None:
    walk = walk_encoding(solubility, 7)["walk"]
    assert walk.shape == (len(solubility.x), 7)
    for number, graph in enumerate(separate(solubility, range(len(solubility)))):
        dense = dense_adjacency(graph.edge_index, len(graph.x))
        expected = random_walk_encoding(dense, 7)
        first = int(solubility.first_node[number])
        torch.testing.assert_close(walk[first : first + len(graph.x)], expected, atol=1e-6, rtol=0)


def test_eigenvectors_are_the_lowest_of_each_graph(solubility: GraphSet) -> None:
    found = laplacian_encoding(solubility, 5)
    for number, graph in enumerate(separate(solubility, range(len(solubility)))):
        size, first = len(graph.x), int(solubility.first_node[number])
        adjacency = dense_adjacency(graph.edge_index, size)
        laplacian = torch.diag(adjacency.sum(1)) - adjacency
        kept = min(5, size)
        values = found["values"][number]
        lowest = torch.linalg.eigvalsh(laplacian)[:kept]
        torch.testing.assert_close(values[:kept], lowest, atol=1e-5, rtol=0)
        assert (values[kept:] == -1).all()
        vectors = found["vectors"][first : first + size]
        torch.testing.assert_close(
            laplacian @ vectors[:, :kept], vectors[:, :kept] * values[:kept], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            vectors[:, :kept].T @ vectors[:, :kept], torch.eye(kept), atol=1e-5, rtol=0
        )
        assert (vectors[:, kept:] == 0).all()
