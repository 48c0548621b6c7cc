"""Graphs of known data sets and of the caller's own, as PyG's ``Data``.

They come from PyG's classes, its files, or npz files with the arrays ``n_node``, ``n_edge``,
``edge`` with each edge once, ``y``, and perhaps ``node_feat``, ``edge_feat`` (zinc: ``atom_type``,
``bond_type``) and ``split``.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from gfsa_experiments.data import own
from gfsa_experiments.data.files import check_count, read_npz, report_bad, source_of
from gfsa_experiments.engine.task import OwnData
from gfsa_experiments.models.graphs import Features

if TYPE_CHECKING:
    from torch_geometric.data import Data

Metric = Literal["mae", "rmse", "ap", "rocauc", "accuracy"]
KINDS = {"ap": "labels", "rocauc": "labels", "accuracy": "classes"}
"""What the labels are that a metric measures, if they are no numbers."""
Parts = dict[str, list[int]]

# OGB's vocabularies of atoms (element, chirality, degree, charge, hydrogens, radicals,
# hybridisation, aromatic, in a ring) and bonds (type, stereo, conjugated)
ATOMS = (119, 5, 12, 12, 10, 6, 6, 2, 2)
BONDS = (5, 6, 2)
# QM8 gives energies in hartree; PCQM4M, which it stands in for, in electronvolts
_HARTREE = 27.211386

# the labels of pcqm4m's test sets are hidden: whoever writes the npz file makes the split
_SETS: dict[Metric, tuple[str, ...]] = {
    "mae": ("zinc", "pcqm4m", "pcqm4mv2", "qm8", "peptides-struct"),
    "ap": ("peptides-func",),
    "rocauc": ("molhiv", "moltox21"),
    "rmse": ("molesol",),
}
_METRICS = {name: metric for metric, names in _SETS.items() for name in names}
DATA_NAMES = tuple(_METRICS)
EXPECTED = "a .npz or .pt file, pyg:CLASS:NAME or MODULE:CLASS:NAME"
_IMPORTED = re.compile(r"[A-Za-z_][\w.]*(:[\w.-]+){1,2}")
_MOST_KINDS = 1 << 20


@dataclass(frozen=True)
class GraphSet:
    """Graphs, which of them are in ``train``, ``valid`` and ``test``, and what is predicted.

    A graph has ``x``, ``edge_index``, ``edge_attr`` and ``y``, ``(T,)`` float32, NaN where a label
    is missing.
    """

    name: str
    metric: Metric
    graphs: list[Data]
    parts: Parts
    node_features: Features
    edge_features: Features
    classes: int = 0
    """How many there are, if the labels are classes."""
    own: OwnData | None = None
    """What was read, if the graphs are the caller's own."""

    @property
    def outputs(self) -> int:
        """How many numbers a model predicts for a graph."""
        return self.classes or len(self.graphs[0].y)


def is_own(data: str) -> bool:
    """Whether ``data`` has the form of graphs of the caller's own."""
    is_path = data.endswith((".npz", ".pt")) or "/" in data or data.startswith((".", "~"))
    return is_path or _IMPORTED.fullmatch(data) is not None


def own_name(data: str) -> str:
    """The name in rows: ``TUDataset-MUTAG`` for ``pyg:TUDataset:MUTAG``, a file's own otherwise."""
    return "-".join(data.split(":")[1:]) if _IMPORTED.fullmatch(data) else own.name_of(data)


@lru_cache(maxsize=4)
def read_graphs(data: str, data_dir: Path, labels: own.Wanted = "auto") -> GraphSet:
    """The data set that ``data`` names; of own graphs the labels are decided and parts chosen."""
    if data in _METRICS:
        return _known(data, data_dir)
    if _IMPORTED.fullmatch(data):
        return _own(data, data, *_imported(data, data_dir), labels)
    path = own.find(data, data_dir, EXPECTED)
    if path.suffix == ".npz":
        return _own(data, str(path), *_from_npz(path), labels)
    graphs = _load(path)
    return _own(data, str(path), graphs, {"train": [*range(len(graphs))]}, labels)


def _known(name: str, data_dir: Path) -> GraphSet:
    metric = _METRICS[name]
    nodes, edges = ((28,), (4,)) if name == "zinc" else (ATOMS, BONDS)
    source = source_of(f"graph {name}")
    path = source.find(data_dir, source.files)
    # the fourth split of zinc12k has molecules that the official 12,000 lack
    graphs, parts = _from_npz(path, extra=name == "zinc")
    for graph in graphs:
        graph.y = graph.y.float()
        if metric in KINDS:
            graph.y[graph.y == -1] = torch.nan
        if name == "qm8":
            # the first excitation energy is the closest to PCQM4M's gap
            graph.y = graph.y[:1] * _HARTREE
    found = _usable(GraphSet(name, metric, graphs, parts, nodes, edges), path)
    if source.sizes:
        sizes = tuple(len(found.parts[part]) for part in own.PARTS)
        check_count(path, sizes, source.sizes, "graphs to train, validate and test on")
    return found


def _from_npz(path: Path, extra: bool = False) -> tuple[list[Data], Parts]:
    """The graphs of a file, and the parts that its array ``split`` names.

    Every edge becomes one in each direction, side by side, as in OGB. With ``extra``, graphs may
    belong to no part.
    """
    from torch_geometric.data import Data

    optional = "node_feat", "edge_feat", "split", "atom_type", "bond_type"
    arrays = read_npz(path, ("n_node", "n_edge", "edge", "y"), optional)
    # torch has few operations on unsigned integers
    found = {
        key: torch.from_numpy(array.astype(np.int64) if array.dtype.kind in "iub" else array)
        for key, array in arrays.items()
    }
    pairs = found["edge"].long()
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(
            f"{path}: expected edge of shape (edges, 2), each edge once, got {tuple(pairs.shape)}"
        )
    nodes, edges = found["n_node"].tolist(), found["n_edge"].tolist()
    x = _columns(found.get("atom_type", found.get("node_feat")), sum(nodes))
    edge_attr = _columns(found.get("bond_type", found.get("edge_feat")), len(pairs))
    sizes = sum(nodes), sum(edges), sum(edges), len(nodes), len(nodes), len(nodes)
    arrays_of = x, pairs, edge_attr, edges, found["y"], found.get("split", nodes)
    if sizes != (rows := tuple(map(len, arrays_of))):
        raise ValueError(
            f"{path} is damaged: by its counts expected {sizes} nodes, edges, features of edges, "
            f"n_edge, y and split, got {rows}"
        )
    each = zip(
        x.split(nodes),
        torch.stack([pairs, pairs.flip(1)], 1).reshape(-1, 2).T.split([2 * e for e in edges], 1),
        edge_attr.repeat_interleave(2, 0).split([2 * e for e in edges]),
        _columns(found["y"], len(nodes)),
        strict=True,
    )
    graphs = [Data(x, edge_index.contiguous(), attr, y) for x, edge_index, attr, y in each]
    split = found["split"].tolist() if "split" in found else [0] * len(graphs)
    unknown = sorted(set(split) - {0, 1, 2})
    if unknown and not extra:
        raise ValueError(
            f"{path}: expected split to have 0 (train), 1 (valid) or 2 (test) for each of "
            f"{len(graphs)} graphs, got numbers such as {unknown[0]}"
        )
    named = {p: [row for row, of in enumerate(split) if of == n] for n, p in enumerate(own.PARTS)}
    return graphs, {part: rows for part, rows in named.items() if rows}


def _columns(features: Tensor | None, count: int) -> Tensor:
    """``(count, columns)``; one kind for all where there are no features."""
    if features is None:
        return torch.zeros(count, 1).long()
    return features.reshape(len(features), -1) if len(features) else features.reshape(0, 1)


def _usable(found: GraphSet, path: Path) -> GraphSet:
    """The data set without invalid graphs, which are counted and reported."""
    rows = sorted(row for part in found.parts.values() for row in part)
    faults = {row: fault for row in rows if (fault := _fault(found, found.graphs[row]))}
    report_bad(list(faults.items()), len(rows) - len(faults), path, "graphs", "graph")
    parts = {p: [row for row in found.parts.get(p, []) if row not in faults] for p in own.PARTS}
    if not all(sizes := tuple(map(len, parts.values()))):
        raise ValueError(f"{path}: expected graphs to train, validate and test on, got {sizes}")
    return replace(found, parts=parts)


def _fault(found: GraphSet, graph: Data) -> str:
    """Why a graph cannot be used; empty if it can."""
    ends, y = graph.edge_index, graph.y
    if not len(graph.x):
        return "no nodes"
    if ends.numel() and not 0 <= int(ends.min()) <= int(ends.max()) < len(graph.x):
        return "an edge to a node that it does not have"
    if _unknown(graph.x, found.node_features):
        return "unknown features of nodes"
    if _unknown(graph.edge_attr, found.edge_features):
        return "unknown features of edges"
    # the numbers of classes are our own, NaN without a class
    binary = KINDS.get(found.metric) == "labels"
    right = (y == 0) | (y == 1) | y.isnan() if binary else y.isfinite()
    return "" if bool(right.all()) else "a wrong label"


def _unknown(features: Tensor, allowed: Features) -> bool:
    columns = allowed if isinstance(allowed, int) else len(allowed)
    if features.shape[1] != columns:
        raise ValueError(f"expected {columns} columns of features, got {tuple(features.shape)}")
    if isinstance(allowed, int):
        return not bool(features.isfinite().all())
    kinds = features.long()
    return bool(((kinds < 0) | (kinds >= torch.tensor(allowed))).any())


def _own(
    data: str, where: str, graphs: Sequence[Data], named: Parts, labels: own.Wanted
) -> GraphSet:
    """Graphs of the caller's own: what their labels and features are, and their parts."""
    from torch_geometric.data import Data

    if not graphs:
        raise ValueError(f"{where} has no graphs")
    for number, graph in enumerate(graphs):
        lacking = [key for key in ("edge_index", "y") if getattr(graph, key, None) is None]
        if lacking:
            raise ValueError(
                f"{where}, graph {number}: expected PyG's Data with edge_index and y (x and "
                f"edge_attr if there are some), this has no {' and '.join(lacking)}: {graph}"
            )
    columns = {
        "x": [_columns(graph.x, graph.num_nodes) for graph in graphs],
        "edge_attr": [_columns(graph.edge_attr, graph.num_edges) for graph in graphs],
        "y": [torch.as_tensor(graph.y).reshape(1, -1) for graph in graphs],
    }
    for what, rows in columns.items():
        found = {row.shape[1] for row in rows if len(row)}
        if len(found) > 1:
            raise ValueError(
                f"{where}: expected as many columns of {what} in every graph, and one label or "
                f"row of labels each, got {sorted(found)}"
            )
    y, metric, classes, why = _labels(torch.cat(columns["y"]), labels)
    of_class = y[:, 0].tolist() if metric == "accuracy" else None
    parts, split_by = own.three_parts(named, where, of_class)
    x, node_features = _features(columns["x"], where, "nodes")
    edge_attr, edge_features = _features(columns["edge_attr"], where, "edges")
    read = [
        Data(x, graph.edge_index.long(), attr, row)
        for graph, x, attr, row in zip(graphs, x, edge_attr, y, strict=True)
    ]
    features = node_features, edge_features
    made = GraphSet(own_name(data), metric, read, parts, *features, len(classes))
    made = _usable(made, Path(where))
    own.refuse_unseen(own.Labels(classes, y[:, 0].tolist(), why), made.parts, where)
    tensors = (
        t for rows in made.parts.values() for row in rows for t in read[row].to_dict().values()
    )
    pieces = (np.ascontiguousarray(tensor.numpy()).tobytes() for tensor in tensors)
    facts = own.facts(
        data, where, made.parts, split_by, pieces, name=made.name, labels=why, unit="graphs"
    )
    return replace(made, own=facts)


def _labels(y: Tensor, wanted: own.Wanted) -> tuple[Tensor, Metric, tuple[str, ...], str]:
    """The labels as float32, the metric for them, the names of the classes, and why.

    Several columns are binary if they have no numbers but 0 and 1 (−1 and NaN: unknown).
    """
    if y.shape[1] == 1:
        # graphs without a label are left out later, counted and reported
        known = y[:, 0].isfinite()
        if not known.any():
            raise ValueError(f"y is NaN or infinite in all {len(y)} graphs; give each its label")
        texts = [str(value) for value in y[known, 0].tolist()]
        found = own.decide(texts, "y", wanted, advice="give every graph its class or number as y")
        values = torch.full(y.shape, torch.nan)
        values[known, 0] = torch.tensor(found.values)
        metric: Metric = "accuracy" if found.classes else "mae"
        return values, metric, found.classes, f"y: {found.why}; measured by {metric}"
    if wanted == "classes":
        raise ValueError(f"labels=classes takes one column y, got {y.shape[1]}")
    values = y.float()
    unknown = values.isnan() | (values == -1)
    if wanted == "auto" and bool((unknown | (values == 0) | (values == 1)).all()):
        why = f"y: {y.shape[1]} columns of 0 and 1 (−1, NaN: unknown); measured by rocauc"
        return torch.where(unknown, torch.nan, values), "rocauc", (), why
    return values, "mae", (), f"y: {y.shape[1]} columns of numbers; measured by mae"


def _features(rows: list[Tensor], where: str, of: str) -> tuple[Sequence[Tensor], Features]:
    """Integers as columns of kinds, reals as they are."""
    sizes = [len(row) for row in rows]
    features = torch.cat([row for row in rows if len(row)] or rows)
    if features.is_floating_point():
        return features.float().split(sizes), features.shape[1]
    # as int64: what does not fit into 32 bits would become another kind
    kinds = features.long()
    least, most = (int(end) for end in kinds.aminmax()) if kinds.numel() else (0, 0)
    if least < 0 or most >= _MOST_KINDS:
        wrong = f"{least} is below 0" if least < 0 else f"{most} would need as many embeddings"
        raise ValueError(
            f"{where}: the features of {of} are whole numbers, which count as kinds, but {wrong}; "
            "store them as floats to have them read as quantities"
        )
    counts = kinds.amax(0) + 1 if len(kinds) else torch.ones(kinds.shape[1]).long()
    return kinds.split(sizes), tuple(counts.tolist())


def _load(path: Path) -> list[Data]:
    """The list of graphs in a ``.pt`` file; nothing but tensors and PyG's records is unpickled."""
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    try:
        with torch.serialization.safe_globals([Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # a damaged file raises errors of many kinds
        why = str(error).split(". ")[0]
        raise ValueError(
            f"{path} is damaged, or has more in it than a list of PyG's Data of tensors ({why})"
        ) from error
    if not isinstance(found, (list, tuple)) or not all(isinstance(g, Data) for g in found):
        raise ValueError(f"{path}: expected a list of PyG's Data, got a {type(found).__name__}")
    return list(found)


def _imported(data: str, data_dir: Path) -> tuple[list[Data], Parts]:
    """The graphs of a PyG data set that is constructed, which may download it."""
    module, name, *rest = data.split(":")
    module = "torch_geometric.datasets" if module == "pyg" else module
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"data={data}: there is no data set {name} in the module {module} ({error}); expected "
            "pyg:CLASS:NAME or MODULE:CLASS:NAME, from the working directory or installed"
        ) from error
    takes = inspect.signature(make).parameters
    given: dict[str, Any] = {"root": str(data_dir / name)} if "root" in takes else {}
    if rest:
        if "name" not in takes:
            raise ValueError(f"data={data}: {name} takes no name; leave :{rest[0]} out")
        given["name"] = rest[0]
    graphs: list[Data] = []
    parts: Parts = {}
    for split in ("train", "val", "test") if "split" in takes else ("train",):
        arguments = given | ({"split": split} if "split" in takes else {})
        try:
            found = list(make(**arguments))
        except Exception as error:
            # a data set of the caller's own may fail in any way
            raise ValueError(
                f"data={data} could not be constructed with {arguments}: "
                f"{type(error).__name__}: {error}"
            ) from error
        parts[str(own.part_named(split))] = [*range(len(graphs), len(graphs) + len(found))]
        graphs += found
    return graphs, parts
