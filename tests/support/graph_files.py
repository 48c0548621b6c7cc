"""Small random molecules and superpixels, written in the layouts that the graph recipe reads."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gfsa_experiments.tasks.graph.data_sets import ATOMS, BONDS
from gfsa_experiments.tasks.graph.graphs import GraphSet
from support.graphs import molecule

Arrays = dict[str, np.ndarray]


def molecules(count: int = 24, seed: int = 0, smallest: int = 3, largest: int = 12) -> Arrays:
    """The arrays of ``NAME_graphs.npz``: bonds once each; of four graphs, one tests, one validates.

    The last but one graph is a single atom, the last has two components.
    """
    rng = np.random.default_rng(seed)
    nodes, bonds, edges = [], [], []
    for number in range(count):
        size = 1 if number == count - 2 else int(rng.integers(smallest, largest + 1))
        graph = molecule(size, 1 if size > 3 else 0, seed + number, number != count - 1)
        pairs = graph.edge_index.T.numpy()
        pairs = pairs[pairs[:, 0] < pairs[:, 1]]
        nodes.append(size)
        bonds.append(len(pairs))
        edges.append(pairs)
    edge = np.concatenate(edges)
    return {
        "node_feat": rng.integers(0, ATOMS, (sum(nodes), len(ATOMS))).astype(np.uint8),
        "edge": edge.astype(np.uint16),
        "edge_feat": rng.integers(0, BONDS, (len(edge), len(BONDS))).astype(np.uint8),
        "n_node": np.array(nodes, dtype=np.int32),
        "n_edge": np.array(bonds, dtype=np.int32),
        "split": np.array([(0, 0, 1, 2)[number % 4] for number in range(count)], dtype=np.uint8),
    }


def labels(count: int, columns: int = 1, seed: int = 0) -> np.ndarray:
    """Zeros and ones, by turns in every split."""
    grid = np.arange(count)[:, None] // 4 + np.arange(columns) + seed
    return (grid % 2).astype(np.int8)


def write_molecules(folder: Path, name: str, y: np.ndarray, **changes: Any) -> Arrays:
    """``folder/NAME/NAME_graphs.npz`` with one graph for each row of ``y``."""
    arrays = {**molecules(len(y)), "y": y, **changes}
    (folder / name).mkdir(parents=True, exist_ok=True)
    np.savez(folder / name / f"{name}_graphs.npz", **arrays)
    return arrays


def write_zinc(folder: Path, count: int = 24, extra: int = 2) -> Arrays:
    """``folder/zinc12k/zinc12k_graphs.npz``; the target is the number of atoms over ten."""
    made = molecules(count + extra)
    split = made["split"].copy()
    split[:extra] = 3
    arrays = {
        "atom_type": made["node_feat"][:, 0] % 18,
        "edge": made["edge"].astype(np.uint8),
        "bond_type": (1 + made["edge_feat"][:, 0] % 3).astype(np.uint8),
        "n_node": made["n_node"].astype(np.uint8),
        "n_edge": made["n_edge"].astype(np.uint8),
        "y": (made["n_node"] / 10).astype(np.float32),
        "split": split,
    }
    (folder / "zinc12k").mkdir(parents=True, exist_ok=True)
    np.savez(folder / "zinc12k" / "zinc12k_graphs.npz", **arrays)
    return arrays


def write_superpixels(folder: Path, train: int = 24, test: int = 6) -> Arrays:
    """``folder/superpixel_mnist/superpixel_mnist.npz`` with images of 5 to 14 superpixels."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", train), ("test", test)):
        nodes = rng.integers(5, 15, count).astype(np.uint8)
        feat = rng.integers(0, (256, 224, 224), (int(nodes.sum()), 3)).astype(np.uint8)
        arrays |= {
            f"feat_{part}": feat,
            f"n_node_{part}": nodes,
            f"y_{part}": (np.arange(count) % 10).astype(np.uint8),
        }
    (folder / "superpixel_mnist").mkdir(parents=True, exist_ok=True)
    np.savez(folder / "superpixel_mnist" / "superpixel_mnist.npz", **arrays)
    return arrays


def write_ogb(folder: Path, arrays: Arrays) -> None:
    """The same molecules in OGB's csv layout; a label of -1 becomes an empty cell."""
    y = arrays["y"].reshape(len(arrays["n_node"]), -1)
    tables = {
        "raw/edge": arrays["edge"],
        "raw/node-feat": arrays["node_feat"],
        "raw/edge-feat": arrays["edge_feat"],
        "raw/num-node-list": arrays["n_node"][:, None],
        "raw/num-edge-list": arrays["n_edge"][:, None],
        "raw/graph-label": [["" if cell == -1 else cell for cell in row] for row in y.tolist()],
    }
    for number, part in enumerate(("train", "valid", "test")):
        tables[f"split/scaffold/{part}"] = np.flatnonzero(arrays["split"] == number)[:, None]
    for name, table in tables.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as file:
            for row in table:
                file.write(",".join(str(cell) for cell in row) + "\n")


def write_pyg_zinc(folder: Path, graphs: GraphSet) -> None:
    """The files that PyG leaves after it has read ZINC's subset."""
    from torch_geometric.data import Data, InMemoryDataset

    (folder / "ZINC/raw").mkdir(parents=True)
    (folder / "ZINC/subset/processed").mkdir(parents=True)
    for number, part in enumerate(("train", "val", "test")):
        data = [
            Data(x=g.x, edge_index=g.edge_index, edge_attr=g.edge_attr[:, 0], y=g.y)
            for g in separate(graphs, graphs.part(number).tolist())
        ]
        InMemoryDataset.save(data, str(folder / f"ZINC/subset/processed/{part}.pt"))
        for ending in ("pickle", "index"):
            (folder / f"ZINC/raw/{part}.{ending}").touch()


def separate(graphs: GraphSet, numbers: Sequence[int]) -> list[SimpleNamespace]:
    """Some graphs one by one, as the collators of gfsa.models take them."""
    found = []
    for number in numbers:
        node, edge = int(graphs.first_node[number]), int(graphs.first_edge[number])
        nodes = slice(node, node + int(graphs.nodes[number]))
        edges = slice(edge, edge + int(graphs.edges[number]))
        integers = not isinstance(graphs.node_features, int)
        kind = torch.int64 if integers else torch.float32
        found.append(
            SimpleNamespace(
                x=graphs.x[nodes].to(kind),
                edge_index=graphs.edge_index[:, edges].long(),
                edge_attr=graphs.edge_attr[edges].to(kind),
                y=graphs.y[number],
            )
        )
    return found
