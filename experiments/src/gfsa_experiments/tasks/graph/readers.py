"""Readers of graph files: npz archives, OGB's csv folders and PyTorch Geometric's own files.

``NAME_graphs.npz`` holds ``node_feat``, ``edge_feat``, ``edge`` with each bond once, ``n_node``,
``n_edge``, ``y`` and ``split``; ``zinc12k_graphs.npz`` calls the features ``atom_type`` and
``bond_type``.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gfsa_experiments.data.files import read_npz
from gfsa_experiments.data.sources import source_of
from gfsa_experiments.engine.task import DataSource
from gfsa_experiments.tasks.graph.graphs import KINDS, TEST, Features, GraphSet, Metric, usable

# OGB's vocabularies of atoms (element, chirality, degree, charge, hydrogens, radicals,
# hybridisation, aromatic, in a ring) and bonds (type, stereo, conjugated)
ATOMS = (119, 5, 12, 12, 10, 6, 6, 2, 2)
BONDS = (5, 6, 2)

_OGB_TABLES = ("edge", "node-feat", "edge-feat", "num-node-list", "num-edge-list", "graph-label")
# QM8 gives energies in hartree; PCQM4M, which it stands in for, in electronvolts
_HARTREE = 27.211386


@dataclass(frozen=True)
class PygFiles:
    """How PyTorch Geometric opens and stores a data set."""

    loader: str
    """The class in ``torch_geometric.datasets``."""
    root: str
    """The root that PyG is given, under ``data_dir``."""
    inner: str
    """The folder under that root in which PyG keeps ``raw/`` and ``processed/``."""
    arguments: dict[str, Any]

    @property
    def processed(self) -> str:
        """The folder that PyG leaves once it has read the data set."""
        return f"{self.root}/{self.inner}/processed"


@dataclass(frozen=True)
class Facts:
    """One data set: what its labels mean, and which files it may come in."""

    name: str
    metric: Metric
    npz: str = ""
    ogb: bool = False
    """Whether OGB has this set."""
    pyg: PygFiles | None = None
    node_features: Features = field(default=ATOMS)
    edge_features: Features = field(default=BONDS)

    @property
    def source(self) -> DataSource:
        return source_of(f"graph {self.name}")

    def graph_set(self, **tensors: Any) -> GraphSet:
        return GraphSet(
            name=self.name,
            kind=KINDS[self.metric],
            metric=self.metric,
            node_features=self.node_features,
            edge_features=self.edge_features,
            **tensors,
        )


def find_folder(data_dir: Path, folders: Iterable[str], file: str) -> Path | None:
    """The first of the folders in ``data_dir`` that has the file, if any has."""
    for folder in folders:
        if (data_dir / folder / file).is_file():
            return data_dir / folder
    return None


def read_molecules(facts: Facts, path: Path) -> GraphSet:
    """Molecules from an npz file; every bond becomes an edge in each direction."""
    zinc = facts.name == "zinc"
    atoms, bonds = ("atom_type", "bond_type") if zinc else ("node_feat", "edge_feat")
    arrays = _tensors(path, (atoms, "edge", bonds, "n_node", "n_edge", "y", "split"))
    y = _columns(arrays["y"].float())
    if KINDS[facts.metric] == "labels":
        y = torch.where(y == -1, torch.nan, y)
    if facts.name == "qm8":
        # the first excitation energy is the closest to PCQM4M's gap
        y = y[:, :1] * _HARTREE
    graphs = _from_bonds(
        facts,
        arrays["edge"],
        _columns(arrays[bonds]),
        arrays["n_edge"],
        x=_columns(arrays[atoms]),
        nodes=arrays["n_node"].long(),
        y=y,
        split=arrays["split"],
    )
    # the fourth split of zinc12k has molecules that the official 12,000 lack
    return usable(graphs, path, facts.source.sizes, unused=TEST + 1 if zinc else None)


def read_ogb(facts: Facts, folder: Path) -> GraphSet:
    """Molecules from OGB's ``raw/*.csv.gz`` and ``split/scaffold/*.csv.gz``."""
    tables = {name: _csv(folder / "raw" / f"{name}.csv.gz") for name in _OGB_TABLES}
    nodes = tables["num-node-list"][:, 0].long()
    split = torch.full((len(nodes),), 255, dtype=torch.uint8)
    for number, part in enumerate(("train", "valid", "test")):
        index = _csv(folder / "split" / "scaffold" / f"{part}.csv.gz")[:, 0].long()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(nodes):
            raise ValueError(
                f"{folder}: the split names graphs up to {int(index.max())} of {len(nodes)}"
            )
        split[index] = number
    graphs = _from_bonds(
        facts,
        tables["edge"],
        tables["edge-feat"].to(torch.int16),
        tables["num-edge-list"][:, 0],
        x=tables["node-feat"].to(torch.int16),
        nodes=nodes,
        y=tables["graph-label"].float(),
        split=split,
    )
    return usable(graphs, folder / "raw", facts.source.sizes)


def read_pyg(facts: Facts, data_dir: Path) -> GraphSet:
    """A data set that PyG has already processed; nothing is downloaded."""
    import torch_geometric.datasets

    assert facts.pyg is not None
    root, load = data_dir / facts.pyg.root, getattr(torch_geometric.datasets, facts.pyg.loader)
    parts: Sequence[Sequence[Any]] = [
        load(str(root), split=part, **facts.pyg.arguments) for part in ("train", "val", "test")
    ]
    graphs = [graph for part in parts for graph in part]
    dtype = torch.float32 if isinstance(facts.node_features, int) else torch.int16
    sizes = torch.tensor([len(part) for part in parts])
    joined = facts.graph_set(
        x=torch.cat([_nodes(graph) for graph in graphs]).to(dtype),
        edge_index=torch.cat([graph.edge_index for graph in graphs], 1).int(),
        edge_attr=torch.cat([_columns(graph.edge_attr) for graph in graphs]).to(dtype),
        nodes=torch.tensor([graph.num_nodes for graph in graphs]),
        edges=torch.tensor([graph.edge_index.shape[1] for graph in graphs]),
        y=torch.stack([graph.y.float().reshape(-1) for graph in graphs]),
        split=torch.repeat_interleave(torch.arange(len(parts)), sizes).to(torch.uint8),
    )
    return usable(joined, root, facts.source.sizes)


def _from_bonds(
    facts: Facts, bonds: Tensor, attributes: Tensor, counts: Tensor, **others: Tensor
) -> GraphSet:
    """Bonds listed once, ``(E, 2)``, as edges; both directions side by side, as in OGB."""
    bonds = bonds.int()
    directed = torch.stack([bonds, bonds.flip(1)], 1).reshape(-1, 2)
    return facts.graph_set(
        edge_index=directed.T.contiguous(),
        edge_attr=attributes.repeat_interleave(2, 0),
        edges=2 * counts.long(),
        **others,
    )


def _tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    # torch has few operations on unsigned integers: convert to the next larger signed type
    signed: dict[str, Any] = {"uint16": np.int32, "uint32": np.int64}
    return {
        name: torch.from_numpy(array.astype(signed.get(array.dtype.name, array.dtype), copy=False))
        for name, array in read_npz(path, list(names)).items()
    }


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


def _nodes(graph: Any) -> Tensor:
    """Node features; superpixels have a position in addition to their colour."""
    x = _columns(graph.x)
    position = getattr(graph, "pos", None)
    return x if position is None else torch.cat([x, position.to(x.dtype)], 1)


def _columns(features: Tensor) -> Tensor:
    return features[:, None] if features.dim() == 1 else features
