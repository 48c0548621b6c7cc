"""Graph data: its layouts, what is refused, and the encodings of positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gfsa_experiments.models.graphs import dense_adjacency
from gfsa_experiments.tasks.graph.data import read_graphs
from gfsa_experiments.tasks.graph.gps import GPSCollator
from support.graph_files import labels, write_molecules, write_zinc
from support.graphs import molecule

pytestmark = pytest.mark.filterwarnings("ignore:.*results are not those of the official")


def test_bonds_become_edges_in_both_directions(tmp_path: Path) -> None:
    arrays = write_molecules(tmp_path, "molesol", np.arange(8, dtype=np.float32))
    found = read_graphs("molesol", tmp_path)
    assert [graph.num_nodes for graph in found.graphs] == arrays["n_node"].tolist()
    assert [graph.num_edges for graph in found.graphs] == (2 * arrays["n_edge"]).tolist()
    edges = torch.cat([graph.edge_index for graph in found.graphs], 1)
    assert edges[:, ::2].T.tolist() == edges[:, 1::2].flip(0).T.tolist() == arrays["edge"].tolist()
    kinds = torch.cat([graph.edge_attr for graph in found.graphs])
    assert kinds[::2].tolist() == kinds[1::2].tolist() == arrays["edge_feat"].tolist()
    assert [graph.y.tolist() for graph in found.graphs] == [[number] for number in range(8)]
    assert found.parts == {"train": [0, 1, 4, 5], "valid": [2, 6], "test": [3, 7]}


def test_missing_labels_are_nan(tmp_path: Path) -> None:
    y = labels(8, 12)
    y[3, 5] = -1
    write_molecules(tmp_path, "moltox21", y)
    missing = torch.stack([graph.y for graph in read_graphs("moltox21", tmp_path).graphs]).isnan()
    assert missing.nonzero().tolist() == [[3, 5]]


def test_qm8_is_in_electronvolts_of_the_first_excitation(tmp_path: Path) -> None:
    y = np.random.default_rng(0).random((8, 16)).astype(np.float32)
    write_molecules(tmp_path, "qm8", y)
    found = torch.stack([graph.y for graph in read_graphs("qm8", tmp_path).graphs])
    torch.testing.assert_close(found, torch.from_numpy(y[:, :1]) * 27.211386)


def test_zinc_leaves_out_what_is_extra(tmp_path: Path) -> None:
    arrays = write_zinc(tmp_path, count=12, extra=3)
    found = read_graphs("zinc", tmp_path)
    assert sorted(row for rows in found.parts.values() for row in rows) == [*range(3, 15)]
    x = torch.cat([graph.x[:, 0] for graph in found.graphs])
    assert x.tolist() == arrays["atom_type"].tolist()


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
    ],
)
def test_a_few_bad_graphs_are_reported_and_many_refused(tmp_path: Path, what: str) -> None:
    arrays = spoiled(what, 120, [4])
    write_molecules(tmp_path, "molesol", arrays.pop("y"), **arrays)
    with pytest.warns(UserWarning, match=f"1 of 120 graphs cannot be used; graph 4: {what}"):
        graphs = read_graphs("molesol", tmp_path)
    used = {row for rows in graphs.parts.values() for row in rows}
    assert used == {*range(120)} - {4}
    arrays = spoiled(what, 120, [4, 7])
    write_molecules(tmp_path / "worse", "molesol", arrays.pop("y"), **arrays)
    with pytest.raises(ValueError, match=r"2 of 120 graphs cannot be used.*More than 1 %"):
        read_graphs("molesol", tmp_path / "worse")


def test_eigenvectors_are_the_lowest_of_each_graph() -> None:
    collate = GPSCollator("laplacian", 5)
    for size in (1, 3, 12):
        graph = molecule(size, min(2, size // 2))
        adjacency = dense_adjacency(graph.edge_index, size)
        laplacian = torch.diag(adjacency.sum(1)) - adjacency
        kept = min(5, size)
        vectors, (values, *others) = collate.prepare(graph).encoding.split(5, dim=1)
        assert all(torch.equal(other, values) for other in others)
        lowest = torch.linalg.eigvalsh(laplacian)[:kept]
        torch.testing.assert_close(values[:kept], lowest, atol=1e-5, rtol=0)
        assert (values[kept:] == -1).all()
        torch.testing.assert_close(
            laplacian @ vectors[:, :kept], vectors[:, :kept] * values[:kept], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            vectors[:, :kept].T @ vectors[:, :kept], torch.eye(kept), atol=1e-5, rtol=0
        )
        assert (vectors[:, kept:] == 0).all()
