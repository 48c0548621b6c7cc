"""PyTorch Geometric's own data sets, from the files that it has made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gfsa_experiments.tasks.graph.graphs import ATOMS, BONDS, GraphSet, Kind, usable
from gfsa_experiments.tasks.graph.zinc import ATOM_TYPES, BOND_TYPES


@dataclass(frozen=True)
class PygSet:
    """One of PyG's data sets: how to open a part of it, and what its labels mean."""

    name: str
    kind: Kind
    sizes: tuple[int, int, int]
    folder: str
    """The root that PyG is given, under ``data_dir``."""
    inner: str
    """Where under that root PyG keeps ``raw/`` and ``processed/``."""
    open: Callable[[str, str], Any]
    """``open(root, part)`` with part train, val or test."""
    node_features: int | tuple[int, ...]
    edge_features: int | tuple[int, ...]

    def processed(self, data_dir: Path) -> Path:
        """The folder that PyG leaves when it has read the data set once."""
        return data_dir / self.folder / self.inner / "processed"


def _zinc(root: str, part: str) -> Any:
    from torch_geometric.datasets import ZINC

    return ZINC(root, subset=True, split=part)


def _peptides(name: str) -> Callable[[str, str], Any]:
    def open_it(root: str, part: str) -> Any:
        from torch_geometric.datasets import LRGBDataset

        return LRGBDataset(root, name, split=part)

    return open_it


def _superpixels(name: str) -> Callable[[str, str], Any]:
    def open_it(root: str, part: str) -> Any:
        from torch_geometric.datasets import GNNBenchmarkDataset

        return GNNBenchmarkDataset(root, name, split=part)

    return open_it


_PEPTIDES = (10_873, 2_331, 2_331)

PYG = {
    one.name: one
    for one in (
        PygSet(
            "zinc",
            "regression",
            (10_000, 1_000, 1_000),
            "ZINC",
            "subset",
            _zinc,
            (ATOM_TYPES,),
            (BOND_TYPES,),
        ),
        PygSet(
            "peptides-func",
            "labels",
            _PEPTIDES,
            "LRGB",
            "peptides-func",
            _peptides("Peptides-func"),
            ATOMS,
            BONDS,
        ),
        PygSet(
            "peptides-struct",
            "regression",
            _PEPTIDES,
            "LRGB",
            "peptides-struct",
            _peptides("Peptides-struct"),
            ATOMS,
            BONDS,
        ),
        PygSet(
            "mnist",
            "classes",
            (55_000, 5_000, 10_000),
            "GNNBenchmark",
            "MNIST",
            _superpixels("MNIST"),
            3,
            1,
        ),
        PygSet(
            "cifar10",
            "classes",
            (45_000, 5_000, 10_000),
            "GNNBenchmark",
            "CIFAR10",
            _superpixels("CIFAR10"),
            5,
            1,
        ),
    )
}


def read_pyg(which: PygSet, data_dir: Path) -> GraphSet:
    """The data set as PyG has it on disk."""
    root = data_dir / which.folder
    parts = [which.open(str(root), part) for part in ("train", "val", "test")]
    return usable(from_parts(which, parts), root, which.sizes)


def from_parts(which: PygSet, parts: Sequence[Sequence[Any]]) -> GraphSet:
    """PyG's ``Data`` objects of train, valid and test in one."""
    graphs = [graph for part in parts for graph in part]
    integers = not isinstance(which.node_features, int)
    x = torch.cat([_nodes(graph) for graph in graphs])
    edge_attr = torch.cat([_columns(graph.edge_attr) for graph in graphs])
    return GraphSet(
        name=which.name,
        kind=which.kind,
        x=x.to(torch.int16) if integers else x.float(),
        edge_index=torch.cat([graph.edge_index for graph in graphs], 1).int(),
        edge_attr=edge_attr.to(torch.int16) if integers else edge_attr.float(),
        nodes=torch.tensor([graph.num_nodes for graph in graphs]),
        edges=torch.tensor([graph.edge_index.shape[1] for graph in graphs]),
        y=torch.stack([graph.y.float().reshape(-1) for graph in graphs]),
        split=torch.repeat_interleave(
            torch.arange(len(parts)), torch.tensor([len(part) for part in parts])
        ).to(torch.uint8),
        node_features=which.node_features,
        edge_features=which.edge_features,
    )


def _nodes(graph: Any) -> torch.Tensor:
    """Features; of superpixels, which have a place, colour and place."""
    x = _columns(graph.x)
    place = getattr(graph, "pos", None)
    return x if place is None else torch.cat([x, place.to(x.dtype)], 1)


def _columns(features: torch.Tensor) -> torch.Tensor:
    return features[:, None] if features.dim() == 1 else features
