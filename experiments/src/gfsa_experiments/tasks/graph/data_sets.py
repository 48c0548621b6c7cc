"""The graph data sets by name: their metric, their files, and the reader for each."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from gfsa_experiments.data.files import not_found
from gfsa_experiments.data.labels import Wanted
from gfsa_experiments.tasks.graph.graphs import GraphSet, Metric
from gfsa_experiments.tasks.graph.own import read_own
from gfsa_experiments.tasks.graph.readers import (
    Facts,
    PygFiles,
    find_folder,
    read_molecules,
    read_ogb,
    read_pyg,
)
from gfsa_experiments.tasks.graph.superpixels import read_superpixels

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


def _molecules(name: str, metric: Metric, ogb: bool = False, lrgb: str = "") -> Facts:
    npz = f"{name.replace('-', '_')}_graphs.npz"
    pyg = PygFiles("LRGBDataset", "LRGB", name, {"name": lrgb}) if lrgb else None
    return Facts(name, metric, npz=npz, ogb=ogb, pyg=pyg)


def _superpixels(name: str, npz: str, node_features: int) -> Facts:
    pyg = PygFiles("GNNBenchmarkDataset", "GNNBenchmark", name.upper(), {"name": name.upper()})
    return Facts(name, "accuracy", npz=npz, pyg=pyg, node_features=node_features, edge_features=1)


_FACTS = {
    facts.name: facts
    for facts in (
        Facts(
            "zinc",
            "mae",
            npz="zinc12k_graphs.npz",
            pyg=PygFiles("ZINC", "ZINC", "subset", {"subset": True}),
            node_features=(28,),
            edge_features=(4,),
        ),
        # the labels of the two test sets are hidden: whoever writes the npz file makes the split
        _molecules("pcqm4m", "mae"),
        _molecules("pcqm4mv2", "mae"),
        _molecules("qm8", "mae"),
        _molecules("peptides-func", "ap", lrgb="Peptides-func"),
        _molecules("peptides-struct", "mae", lrgb="Peptides-struct"),
        _superpixels("mnist", "superpixel_mnist.npz", node_features=3),
        _superpixels("cifar10", "", node_features=5),
        _molecules("molhiv", "rocauc", ogb=True),
        _molecules("moltox21", "rocauc", ogb=True),
        _molecules("molesol", "rmse", ogb=True),
    )
}
assert tuple(_FACTS) == get_args(DataName)
DATA_NAMES = tuple(_FACTS)


@lru_cache(maxsize=4)
def read_graphs(name: str, data_dir: Path, labels: Wanted = "auto") -> GraphSet:
    """The data set called ``name``, from whichever of its files are under ``data_dir``.

    PyG's own files are read if PyG has written them already; nothing is downloaded. Any other name
    is one of the caller's own graphs (:mod:`gfsa_experiments.tasks.graph.own`), whose ``labels``
    are to be decided.
    """
    if name not in _FACTS:
        return read_own(name, data_dir, labels)
    facts = _FACTS[name]
    folders = facts.source.folders
    folder = find_folder(data_dir, folders, facts.npz) if facts.npz else None
    if folder is not None:
        read = read_superpixels if name == "mnist" else read_molecules
        return read(facts, folder / facts.npz)
    folder = find_folder(data_dir, folders, "raw/edge.csv.gz") if facts.ogb else None
    if folder is not None:
        return read_ogb(facts, folder)
    if facts.pyg is not None and (data_dir / facts.pyg.processed).is_dir():
        return read_pyg(facts, data_dir)
    raise not_found(data_dir, facts.source.files, facts.source)
