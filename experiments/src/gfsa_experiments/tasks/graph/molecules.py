"""Molecules in OGB's encoding: nine features an atom, three a bond.

Two layouts: one ``NAME_graphs.npz`` (``node_feat``, ``edge_feat``, ``edge`` with each bond once,
``n_node``, ``n_edge``, ``y``, ``split``), or OGB's own folder of ``.csv.gz`` files.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gfsa_experiments.engine.task import DataSource
from gfsa_experiments.tasks.graph.graphs import (
    ATOMS,
    BONDS,
    GraphSet,
    Kind,
    both_ways,
    find_folder,
    load_npz,
    usable,
)

_ARRAYS = ("node_feat", "edge", "edge_feat", "n_node", "n_edge", "y", "split")
_OGB_FILES = ("edge", "node-feat", "edge-feat", "num-node-list", "num-edge-list", "graph-label")
# QM8 gives energies in hartree; PCQM4M, whose stand-in it is, in electronvolts
_HARTREE = 27.211386


@dataclass(frozen=True)
class Molecules:
    """One data set: where its files are and what its labels mean."""

    name: str
    kind: Kind
    sizes: tuple[int, int, int] | None
    """The official numbers of graphs to train, validate and test on."""
    folders: tuple[str, ...]
    source: DataSource
    ogb_split: str = ""
    """The folder in OGB's ``split/``; empty if OGB has not this set."""

    @property
    def npz(self) -> str:
        return f"{self.name.replace('-', '_')}_graphs.npz"


def read_molecules(which: Molecules, data_dir: Path) -> GraphSet | None:
    """The data set from either layout, or None if neither is there."""
    folder = find_folder(data_dir, which.folders, [which.npz])
    if folder is not None:
        return _from_npz(which, folder / which.npz)
    if which.ogb_split:
        folder = find_folder(data_dir, which.folders, ["raw/edge.csv.gz"])
        if folder is not None:
            return _from_ogb(which, folder)
    return None


def _from_npz(which: Molecules, path: Path) -> GraphSet:
    arrays = load_npz(path, _ARRAYS)
    y = arrays["y"].float()
    y = y[:, None] if y.dim() == 1 else y
    if which.kind == "labels":
        y = torch.where(y == -1, torch.nan, y)
    if which.name == "qm8":
        # the first excitation energy is the nearest to PCQM4M's gap
        y = y[:, :1] * _HARTREE
    return _assemble(
        which,
        path,
        node_feat=arrays["node_feat"],
        edge=arrays["edge"],
        edge_feat=arrays["edge_feat"],
        nodes=arrays["n_node"],
        bonds=arrays["n_edge"],
        y=y,
        split=arrays["split"],
    )


def _from_ogb(which: Molecules, folder: Path) -> GraphSet:
    raw = folder / "raw"
    tables = {name: _csv(raw / f"{name}.csv.gz") for name in _OGB_FILES}
    nodes = tables["num-node-list"][:, 0].long()
    split = torch.full((len(nodes),), 255, dtype=torch.uint8)
    for number, part in enumerate(("train", "valid", "test")):
        index = _csv(folder / "split" / which.ogb_split / f"{part}.csv.gz")[:, 0].long()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(nodes):
            raise ValueError(
                f"{folder}: the split names graphs up to {int(index.max())} of {len(nodes)}"
            )
        split[index] = number
    return _assemble(
        which,
        raw,
        node_feat=tables["node-feat"].to(torch.int16),
        edge=tables["edge"].int(),
        edge_feat=tables["edge-feat"].to(torch.int16),
        nodes=nodes,
        bonds=tables["num-edge-list"][:, 0].long(),
        y=tables["graph-label"].float(),
        split=split,
    )


def _assemble(
    which: Molecules,
    path: Path,
    node_feat: Tensor,
    edge: Tensor,
    edge_feat: Tensor,
    nodes: Tensor,
    bonds: Tensor,
    y: Tensor,
    split: Tensor,
) -> GraphSet:
    edge_index, edge_attr, edges = both_ways(edge, edge_feat, bonds.long())
    graphs = GraphSet(
        name=which.name,
        kind=which.kind,
        x=node_feat,
        edge_index=edge_index,
        edge_attr=edge_attr,
        nodes=nodes.long(),
        edges=edges,
        y=y,
        split=split,
        node_features=ATOMS,
        edge_features=BONDS,
    )
    return usable(graphs, path, which.sizes)


def _csv(path: Path) -> Tensor:
    """A table of numbers without a header; an empty cell is NaN."""
    try:
        with gzip.open(path, "rt") as file:
            table = np.genfromtxt(file, delimiter=",", dtype=np.float64, ndmin=2)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; OGB's folder is incomplete") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); get it again") from error
    return torch.from_numpy(table)
