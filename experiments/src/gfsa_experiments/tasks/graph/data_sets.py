"""The graph data sets by name: which layouts each may have, and how it is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from gfsa_experiments.engine.task import DataSource
from gfsa_experiments.tasks.graph.graphs import GraphSet, Kind, not_found
from gfsa_experiments.tasks.graph.molecules import Molecules, read_molecules
from gfsa_experiments.tasks.graph.pyg import PYG, read_pyg
from gfsa_experiments.tasks.graph.superpixels import FOLDERS as SUPERPIXEL_FOLDERS
from gfsa_experiments.tasks.graph.superpixels import read_superpixel_mnist
from gfsa_experiments.tasks.graph.zinc import FOLDERS as ZINC_FOLDERS
from gfsa_experiments.tasks.graph.zinc import read_zinc

DataName = Literal[
    "zinc",
    "pcqm4m",
    "pcqm4mv2",
    "qm8",
    "peptides-func",
    "peptides-struct",
    "mnist",
    "cifar10",
    "molhiv",
    "moltox21",
    "molesol",
]
Metric = Literal["mae", "rmse", "ap", "rocauc", "accuracy"]

METRICS: dict[str, Metric] = {
    "zinc": "mae",
    "pcqm4m": "mae",
    "pcqm4mv2": "mae",
    "qm8": "mae",
    "peptides-func": "ap",
    "peptides-struct": "mae",
    "mnist": "accuracy",
    "cifar10": "accuracy",
    "molhiv": "rocauc",
    "moltox21": "rocauc",
    "molesol": "rmse",
}

_OGB = "https://snap.stanford.edu/ogb/data/graphproppred/csv_mol_download"
_NPZ = "{0}_graphs.npz (node_feat, edge, edge_feat, n_node, n_edge, y, split)"


@dataclass(frozen=True)
class _Layouts:
    source: DataSource
    folders: tuple[str, ...]
    read: Callable[[Path], GraphSet | None]


def _molecules(
    name: str,
    kind: Kind,
    sizes: tuple[int, int, int] | None,
    where: str,
    ogb_split: str = "",
    folders: tuple[str, ...] = (),
) -> _Layouts:
    files = _NPZ.format(name.replace("-", "_"))
    if ogb_split:
        files += f", or OGB's raw/*.csv.gz with split/{ogb_split}/*.csv.gz"
    source = DataSource(name, files, where)
    folders = (name.replace("-", "_"), *folders)
    which = Molecules(name, kind, sizes, folders, source, ogb_split)
    return _Layouts(source, folders, lambda data_dir: read_molecules(which, data_dir))


_LAYOUTS = (
    _Layouts(
        DataSource(
            "zinc",
            "zinc12k_graphs.npz (atom_type, edge, bond_type, n_node, n_edge, y, split), or PyG's "
            "ZINC/subset/processed/*.pt",
            "torch_geometric.datasets.ZINC(root='DATA_DIR/ZINC', subset=True)",
        ),
        (*ZINC_FOLDERS, "ZINC/subset/processed"),
        read_zinc,
    ),
    # the labels of their test sets are hidden: whoever writes the file makes the split
    _molecules("pcqm4m", "regression", None, "https://ogb.stanford.edu/kddcup2021/pcqm4m"),
    _molecules("pcqm4mv2", "regression", None, "https://ogb.stanford.edu/docs/lsc/pcqm4mv2"),
    _molecules("qm8", "regression", (17_428, 2_179, 2_179), "https://moleculenet.org"),
    _molecules(
        "peptides-func",
        "labels",
        (10_873, 2_331, 2_331),
        "torch_geometric.datasets.LRGBDataset(root='DATA_DIR/LRGB', name='Peptides-func')",
        folders=("LRGB/peptides-func/processed",),
    ),
    _molecules(
        "peptides-struct",
        "regression",
        (10_873, 2_331, 2_331),
        "torch_geometric.datasets.LRGBDataset(root='DATA_DIR/LRGB', name='Peptides-struct')",
        folders=("LRGB/peptides-struct/processed",),
    ),
    _Layouts(
        DataSource(
            "mnist",
            "superpixel_mnist.npz (feat, n_node and y of train and test), or PyG's "
            "GNNBenchmark/MNIST/processed/*.pt",
            "torch_geometric.datasets.GNNBenchmarkDataset(root='DATA_DIR/GNNBenchmark', "
            "name='MNIST')",
        ),
        (*SUPERPIXEL_FOLDERS, "GNNBenchmark/MNIST/processed"),
        read_superpixel_mnist,
    ),
    _Layouts(
        DataSource(
            "cifar10",
            "PyG's GNNBenchmark/CIFAR10/processed/*.pt",
            "torch_geometric.datasets.GNNBenchmarkDataset(root='DATA_DIR/GNNBenchmark', "
            "name='CIFAR10')",
        ),
        ("GNNBenchmark/CIFAR10/processed",),
        lambda data_dir: None,
    ),
    _molecules(
        "molhiv",
        "labels",
        (32_901, 4_113, 4_113),
        f"{_OGB}/hiv.zip",
        "scaffold",
        ("hiv", "ogbg_molhiv"),
    ),
    _molecules(
        "moltox21",
        "labels",
        (6_264, 783, 784),
        f"{_OGB}/tox21.zip",
        "scaffold",
        ("tox21", "ogbg_moltox21"),
    ),
    _molecules(
        "molesol",
        "regression",
        (902, 113, 113),
        f"{_OGB}/esol.zip",
        "scaffold",
        ("esol", "ogbg_molesol"),
    ),
)
_BY_NAME = {layouts.source.name: layouts for layouts in _LAYOUTS}
SOURCES = tuple(layouts.source for layouts in _LAYOUTS)
assert tuple(_BY_NAME) == get_args(DataName) == tuple(METRICS)


@lru_cache(maxsize=4)
def read_graphs(name: str, data_dir: Path) -> GraphSet:
    """The data set called ``name``, from whichever of its layouts is under ``data_dir``.

    PyG's own files are read where they are there already; nothing is downloaded unasked.
    """
    layouts = _BY_NAME[name]
    found = layouts.read(data_dir)
    if found is not None:
        return found
    if name in PYG and PYG[name].processed(data_dir).is_dir():
        return read_pyg(PYG[name], data_dir)
    raise not_found(data_dir, layouts.folders, layouts.source)
