"""The graph data sets by name: their metric, their files, and the reader for each."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from gfsa_experiments.data.files import not_found
from gfsa_experiments.engine.task import DataSource
from gfsa_experiments.tasks.graph.graphs import GraphSet, Metric
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
# where data sets that neither OGB nor PyG offers as files come from
_WEBSITES = {
    # the labels of their test sets are hidden: whoever writes the npz file makes the split
    "pcqm4m": "https://ogb.stanford.edu/kddcup2021/pcqm4m",
    "pcqm4mv2": "https://ogb.stanford.edu/docs/lsc/pcqm4mv2",
    "qm8": "https://moleculenet.org",
}
_OGB = "https://snap.stanford.edu/ogb/data/graphproppred/csv_mol_download"


def _molecules(
    name: str, metric: Metric, sizes: tuple[int, int, int] | None, ogb: str = "", lrgb: str = ""
) -> Facts:
    folder = name.replace("-", "_")
    return Facts(
        name,
        metric,
        sizes,
        folders=(folder, *((ogb, f"ogbg_{name}") if ogb else ())),
        npz=f"{folder}_graphs.npz",
        ogb=f"{_OGB}/{ogb}.zip" if ogb else "",
        pyg=PygFiles("LRGBDataset", "LRGB", name, {"name": lrgb}) if lrgb else None,
    )


def _superpixels(name: str) -> PygFiles:
    return PygFiles("GNNBenchmarkDataset", "GNNBenchmark", name, {"name": name})


_FACTS = {
    facts.name: facts
    for facts in (
        Facts(
            "zinc",
            "mae",
            (10_000, 1_000, 1_000),
            folders=("zinc12k", "zinc", "ZINC"),
            npz="zinc12k_graphs.npz",
            pyg=PygFiles("ZINC", "ZINC", "subset", {"subset": True}),
            node_features=(28,),
            edge_features=(4,),
        ),
        _molecules("pcqm4m", "mae", None),
        _molecules("pcqm4mv2", "mae", None),
        _molecules("qm8", "mae", (17_428, 2_179, 2_179)),
        _molecules("peptides-func", "ap", (10_873, 2_331, 2_331), lrgb="Peptides-func"),
        _molecules("peptides-struct", "mae", (10_873, 2_331, 2_331), lrgb="Peptides-struct"),
        Facts(
            "mnist",
            "accuracy",
            (55_000, 5_000, 10_000),
            folders=("superpixel_mnist", "mnist_superpixels", "MNIST"),
            npz="superpixel_mnist.npz",
            pyg=_superpixels("MNIST"),
            node_features=3,
            edge_features=1,
        ),
        Facts(
            "cifar10",
            "accuracy",
            (45_000, 5_000, 10_000),
            pyg=_superpixels("CIFAR10"),
            node_features=5,
            edge_features=1,
        ),
        _molecules("molhiv", "rocauc", (32_901, 4_113, 4_113), ogb="hiv"),
        _molecules("moltox21", "rocauc", (6_264, 783, 784), ogb="tox21"),
        _molecules("molesol", "rmse", (902, 113, 113), ogb="esol"),
    )
}
assert tuple(_FACTS) == get_args(DataName)
METRICS = {name: facts.metric for name, facts in _FACTS.items()}


def _source(facts: Facts) -> DataSource:
    files = [facts.npz] if facts.npz else []
    if facts.ogb:
        files.append("OGB's raw/*.csv.gz with split/scaffold/*.csv.gz")
    if facts.pyg is not None:
        files.append(f"PyG's {facts.pyg.processed}/*.pt")
    where = facts.pyg.call if facts.pyg is not None else facts.ogb
    return DataSource(facts.name, ", or ".join(files), where or _WEBSITES[facts.name])


SOURCES = tuple(_source(facts) for facts in _FACTS.values())


@lru_cache(maxsize=4)
def read_graphs(name: str, data_dir: Path) -> GraphSet:
    """The data set called ``name``, from whichever of its files are under ``data_dir``.

    PyG's own files are read if PyG has written them already; nothing is downloaded.
    """
    facts = _FACTS[name]
    folder = find_folder(data_dir, facts.folders, facts.npz) if facts.npz else None
    if folder is not None:
        read = read_superpixels if name == "mnist" else read_molecules
        return read(facts, folder / facts.npz)
    folder = find_folder(data_dir, facts.folders, "raw/edge.csv.gz") if facts.ogb else None
    if folder is not None:
        return read_ogb(facts, folder)
    if facts.pyg is not None and (data_dir / facts.pyg.processed).is_dir():
        return read_pyg(facts, data_dir)
    source = _source(facts)
    raise not_found(data_dir, source.files, source, facts.folders)
