"""Small random molecules, written in the layouts that the graph recipe reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gfsa_experiments.tasks.graph.data import ATOMS, BONDS
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
