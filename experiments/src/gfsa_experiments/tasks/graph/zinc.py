"""ZINC-12k: molecules by atom and bond type, and a solubility to predict."""

from __future__ import annotations

from pathlib import Path

from gfsa_experiments.tasks.graph.graphs import (
    TEST,
    GraphSet,
    both_ways,
    find_folder,
    load_npz,
    usable,
)

FOLDERS = ("zinc12k", "zinc", "ZINC")
FILE = "zinc12k_graphs.npz"
SIZES = (10_000, 1_000, 1_000)
ATOM_TYPES, BOND_TYPES = 28, 4
_ARRAYS = ("atom_type", "edge", "bond_type", "n_node", "n_edge", "y", "split")


def read_zinc(data_dir: Path) -> GraphSet | None:
    """The data set from ``zinc12k_graphs.npz``, or None if it is not there.

    Its fourth split, molecules that the official 12,000 do not have, is left out.
    """
    folder = find_folder(data_dir, FOLDERS, [FILE])
    if folder is None:
        return None
    path = folder / FILE
    arrays = load_npz(path, _ARRAYS)
    edge_index, edge_attr, edges = both_ways(
        arrays["edge"].int(), arrays["bond_type"][:, None], arrays["n_edge"].long()
    )
    graphs = GraphSet(
        name="zinc",
        kind="regression",
        x=arrays["atom_type"][:, None],
        edge_index=edge_index,
        edge_attr=edge_attr,
        nodes=arrays["n_node"].long(),
        edges=edges,
        y=arrays["y"].float()[:, None],
        split=arrays["split"],
        node_features=(ATOM_TYPES,),
        edge_features=(BOND_TYPES,),
    )
    return usable(graphs, path, SIZES, unused=TEST + 1)
