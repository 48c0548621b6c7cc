"""Graphs of known data sets and of the caller's own, from npz files, PyG's files or its classes.

``NAME_graphs.npz`` holds ``n_node``, ``n_edge``, ``edge`` with each edge once, ``y``, and perhaps
``node_feat``, ``edge_feat`` and ``split``; ``zinc12k_graphs.npz`` calls the features ``atom_type``
and ``bond_type``. A ``.pt`` file is a list of PyG's ``Data``.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gfsa_experiments.data.files import find_file, read_npz, source_of
from gfsa_experiments.data.own import (
    PARTS,
    Labels,
    Wanted,
    decide,
    digest_of,
    find_own,
    name_of,
    part_named,
    refuse_unseen,
    three_parts,
)
from gfsa_experiments.engine.task import OwnData
from gfsa_experiments.tasks.graph.graphs import (
    KINDS,
    TEST,
    Features,
    GraphSet,
    Metric,
    Tensors,
    usable,
)

# OGB's vocabularies of atoms (element, chirality, degree, charge, hydrogens, radicals,
# hybridisation, aromatic, in a ring) and bonds (type, stereo, conjugated)
ATOMS = (119, 5, 12, 12, 10, 6, 6, 2, 2)
BONDS = (5, 6, 2)
_MOLECULES = (ATOMS, BONDS)
# QM8 gives energies in hartree; PCQM4M, which it stands in for, in electronvolts
_HARTREE = 27.211386

# file, metric, features of nodes and edges; the labels of pcqm4m's test sets are hidden: whoever
# writes the npz file makes the split
_FACTS: dict[str, tuple[str, Metric, tuple[Features, Features]]] = {
    "zinc": ("zinc12k_graphs.npz", "mae", ((28,), (4,))),
    "pcqm4m": ("pcqm4m_graphs.npz", "mae", _MOLECULES),
    "pcqm4mv2": ("pcqm4mv2_graphs.npz", "mae", _MOLECULES),
    "qm8": ("qm8_graphs.npz", "mae", _MOLECULES),
    "peptides-func": ("peptides_func_graphs.npz", "ap", _MOLECULES),
    "peptides-struct": ("peptides_struct_graphs.npz", "mae", _MOLECULES),
    "molhiv": ("molhiv_graphs.npz", "rocauc", _MOLECULES),
    "moltox21": ("moltox21_graphs.npz", "rocauc", _MOLECULES),
    "molesol": ("molesol_graphs.npz", "rmse", _MOLECULES),
}
DATA_NAMES = tuple(_FACTS)
EXPECTED = "a .npz or .pt file, pyg:CLASS:NAME or MODULE:CLASS:NAME"
_IMPORTED = re.compile(r"[A-Za-z_][\w.]*(:[\w.-]+){1,2}")
_SPLITS = ("train", "val", "test")
_MOST_KINDS = 1 << 20

Parts = dict[str, list[int]]


def is_own(data: str) -> bool:
    """Whether ``data`` has the form of graphs of the caller's own."""
    looks_like_a_path = data.endswith((".npz", ".pt")) or "/" in data or data.startswith((".", "~"))
    return looks_like_a_path or _IMPORTED.fullmatch(data) is not None


def own_name(data: str) -> str:
    """The name in rows: ``TUDataset-MUTAG`` for ``pyg:TUDataset:MUTAG``, a file's own otherwise."""
    return "-".join(data.split(":")[1:]) if _IMPORTED.fullmatch(data) else name_of(data)


@lru_cache(maxsize=4)
def read_graphs(data: str, data_dir: Path, labels: Wanted = "auto") -> GraphSet:
    """The data set that ``data`` names; of own graphs the labels are decided and parts chosen."""
    if data in _FACTS:
        return _known(data, data_dir)
    if _IMPORTED.fullmatch(data):
        graphs, parts = _imported(data, data_dir)
        return _own(data, data, _joined(data, graphs), parts, labels)
    path = find_own(data, data_dir, EXPECTED)
    if path.suffix == ".npz":
        read = _from_npz(path)
        return _own(data, str(path), read, _named_parts(path, read), labels)
    graphs = _load(path)
    parts = {"train": list(range(len(graphs)))}
    return _own(data, str(path), _joined(str(path), graphs), parts, labels)


def _known(name: str, data_dir: Path) -> GraphSet:
    file, metric, (nodes, edges) = _FACTS[name]
    source = source_of(f"graph {name}")
    path = find_file(data_dir, [file], source)
    read = _from_npz(path, ("split",))
    y = read.pop("y").float()
    if KINDS[metric] == "labels":
        y = torch.where(y == -1, torch.nan, y)
    if name == "qm8":
        # the first excitation energy is the closest to PCQM4M's gap
        y = y[:, :1] * _HARTREE
    facts: dict[str, Any] = {"metric": metric, "node_features": nodes, "edge_features": edges}
    graphs = GraphSet(name=name, kind=KINDS[metric], y=y, **(facts | read))
    # the fourth split of zinc12k has molecules that the official 12,000 lack
    return usable(graphs, path, source.sizes, unused=TEST + 1 if name == "zinc" else None)


def _from_npz(path: Path, needed: tuple[str, ...] = ()) -> Tensors:
    """The graphs of a file; every edge becomes one in each direction, side by side, as in OGB."""
    arrays = read_npz(path, ("n_node", "n_edge", "edge", "y", *needed))
    with np.load(path, allow_pickle=False) as file:
        optional = {"node_feat", "edge_feat", "split", "atom_type", "bond_type"} & {*file.files}
    arrays |= read_npz(path, optional - arrays.keys())
    # torch has few operations on unsigned integers: convert to the next larger signed type
    signed: dict[str, Any] = {"uint16": np.int32, "uint32": np.int64, "bool": np.uint8}
    found = {
        key: torch.from_numpy(array.astype(signed.get(array.dtype.name, array.dtype), copy=False))
        for key, array in arrays.items()
    }
    nodes, pairs = found["n_node"].long(), found["edge"].int()
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(
            f"{path}: expected edge of shape (edges, 2), each edge once, got {tuple(pairs.shape)}"
        )
    none = torch.zeros(int(nodes.sum()) + len(pairs), 1, dtype=torch.int)
    x = found.get("atom_type", found.get("node_feat", none[: int(nodes.sum())]))
    edge_attr = found.get("bond_type", found.get("edge_feat", none[: len(pairs)]))
    read = {
        "x": _columns(x, len(x)),
        "edge_index": torch.stack([pairs, pairs.flip(1)], 1).reshape(-1, 2).T.contiguous(),
        "edge_attr": _columns(edge_attr, len(edge_attr)).repeat_interleave(2, 0),
        "nodes": nodes,
        "edges": 2 * found["n_edge"].long(),
        "y": _columns(found["y"], len(found["y"])),
    }
    return read | ({"split": found["split"]} if "split" in found else {})


def _named_parts(path: Path, read: Tensors) -> Parts:
    """The rows of each part that the array ``split`` names; all in ``train`` without it."""
    count = len(read["y"])
    if "split" not in read:
        return {"train": list(range(count))}
    split = read.pop("split").tolist()
    unknown = sorted(set(split) - {0, 1, 2})
    if unknown or len(split) != count:
        raise ValueError(
            f"{path}: expected split to have 0 (train), 1 (valid) or 2 (test) for each of "
            f"{count} graphs, got {len(split)} numbers{f', such as {unknown[0]}' * bool(unknown)}"
        )
    return {p: [row for row, of in enumerate(split) if of == n] for n, p in enumerate(PARTS)}


def _own(data: str, where: str, read: Tensors, named: Parts, labels: Wanted) -> GraphSet:
    y, metric, classes, why = _labels(read["y"], labels)
    of_class = y[:, 0].tolist() if metric == "accuracy" else None
    parts, split_by = three_parts(named, where, of_class)
    if of_class is not None:
        known = y[:, 0].isfinite().tolist()
        labelled = {part: [row for row in rows if known[row]] for part, rows in parts.items()}
        refuse_unseen(Labels(classes, of_class, why), labelled, where)
    split = torch.full((len(y),), 255, dtype=torch.uint8)
    for number, part in enumerate(PARTS):
        split[torch.tensor(parts[part])] = number
    x, node_features = _features(read["x"], where, "nodes")
    edge_attr, edge_features = _features(read["edge_attr"], where, "edges")
    graphs = GraphSet(
        name=own_name(data),
        kind=KINDS[metric],
        metric=metric,
        classes=len(classes),
        x=x,
        # a number beyond 32 bits stays one of no node
        edge_index=read["edge_index"].clamp(-1, 2**31 - 1).int(),
        edge_attr=edge_attr,
        nodes=read["nodes"].long(),
        edges=read["edges"].long(),
        y=y,
        split=split,
        node_features=node_features,
        edge_features=edge_features,
    )
    graphs = usable(graphs, Path(where))
    structure = graphs.nodes, graphs.edges, graphs.edge_index, graphs.edge_attr
    every = (*structure, graphs.x, graphs.y, graphs.split)
    own = OwnData(
        name=graphs.name,
        source=where,
        splits={part: len(graphs.part(number)) for number, part in enumerate(PARTS)},
        split_by=split_by,
        labels=why,
        unit="graphs",
        digest=digest_of(np.ascontiguousarray(part.numpy()).tobytes() for part in every),
    )
    return dataclasses.replace(graphs, own=own)


def _labels(y: Tensor, wanted: Wanted) -> tuple[Tensor, Metric, tuple[str, ...], str]:
    """The labels as float32, the metric for them, the names of the classes, and why.

    One column is classes or a number, by the rule of :func:`~gfsa_experiments.data.own.decide`.
    Several columns are yes-or-no labels if they have no numbers but 0 and 1 (−1 and NaN: unknown),
    otherwise numbers.
    """
    if y.shape[1] == 1:
        # graphs without a label are left out later, counted and reported
        known = y[:, 0].isfinite()
        if not known.any():
            raise ValueError(f"y is NaN or infinite in all {len(y)} graphs; give each its label")
        texts = [str(value) for value in y[known, 0].tolist()]
        found = decide(texts, "y", wanted, advice="give every graph its class or number as y")
        values = torch.full(y.shape, torch.nan)
        values[known, 0] = torch.tensor(found.values)
        metric: Metric = "accuracy" if found.classes else "mae"
        return values, metric, found.classes, f"y: {found.why}; measured by {metric}"
    if wanted == "classes":
        raise ValueError(f"labels=classes takes one column y, got {y.shape[1]}")
    values = y.float()
    unknown = values.isnan() | (values == -1)
    yes_or_no = bool((unknown | (values == 0) | (values == 1)).all())
    if yes_or_no and wanted == "auto":
        why = f"y: {y.shape[1]} columns of 0 and 1 (−1, NaN: unknown); measured by rocauc"
        return torch.where(unknown, torch.nan, values), "rocauc", (), why
    return values, "mae", (), f"y: {y.shape[1]} columns of numbers; measured by mae"


def _features(features: Tensor, where: str, of: str) -> tuple[Tensor, Features]:
    """Integers as columns of kinds, reals as they are; one-hot rows become one column of kinds."""
    if features.dim() != 2:
        features = features.reshape(len(features), -1)
    if features.is_floating_point():
        one_hot = features.shape[1] > 1 and bool(
            (((features == 0) | (features == 1)).all(1) & (features.sum(1) == 1)).all()
        )
        if not one_hot or not len(features):
            return features.float(), features.shape[1]
        features = features.argmax(1, keepdim=True)
    # as int64: what does not fit into 32 bits would become another kind
    least, most = (int(end) for end in features.long().aminmax()) if features.numel() else (0, 0)
    if least < 0 or most >= _MOST_KINDS:
        wrong = f"{least} is below 0" if least < 0 else f"{most} would need as many embeddings"
        raise ValueError(
            f"{where}: the features of {of} are whole numbers, which count as kinds, but {wrong}; "
            "store them as floats to have them read as quantities"
        )
    kinds = features.int()
    sizes = kinds.amax(0) + 1 if len(kinds) else torch.ones(kinds.shape[1], dtype=torch.int)
    return kinds, tuple(sizes.tolist())


def _load(path: Path) -> list[Any]:
    """The list of graphs in a ``.pt`` file; nothing but tensors and PyG's records is unpickled."""
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    try:
        with torch.serialization.safe_globals([Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # a damaged file raises errors of many kinds
        reason = str(error).split(". ")[0]
        raise ValueError(
            f"{path} is damaged, or has more in it than tensors and PyG's Data ({reason}); "
            "expected a list of Data"
        ) from error
    if not isinstance(found, (list, tuple)) or not all(isinstance(g, Data) for g in found):
        raise ValueError(f"{path}: expected a list of PyG's Data, got a {type(found).__name__}")
    return list(found)


def _imported(data: str, data_dir: Path) -> tuple[list[Any], Parts]:
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
    given: dict[str, Any] = {}
    if "root" in takes:
        given["root"] = str(data_dir / name)
    if rest:
        if "name" not in takes:
            raise ValueError(f"data={data}: {name} takes no name; leave :{rest[0]} out")
        given["name"] = rest[0]
    graphs: list[Any] = []
    parts: Parts = {}
    for split in _SPLITS if "split" in takes else ("train",):
        arguments = given | ({"split": split} if "split" in takes else {})
        try:
            found = list(make(**arguments))
        except Exception as error:
            # a data set of the caller's own may fail in any way
            raise ValueError(
                f"data={data} could not be constructed with {arguments}: "
                f"{type(error).__name__}: {error}"
            ) from error
        parts[str(part_named(split))] = list(range(len(graphs), len(graphs) + len(found)))
        graphs += found
    return graphs, parts


def _joined(where: str, graphs: Sequence[Any]) -> Tensors:
    """PyG's graphs as a few long tensors."""
    for number, graph in enumerate(graphs):
        lacking = [key for key in ("edge_index", "y") if getattr(graph, key, None) is None]
        if lacking:
            raise ValueError(
                f"{where}, graph {number}: expected PyG's Data with edge_index and y (x and "
                f"edge_attr if there are some), this has no {' and '.join(lacking)}: {graph}"
            )
    if not graphs:
        raise ValueError(f"{where} has no graphs")
    x = [_columns(graph.x, graph.num_nodes) for graph in graphs]
    edge_attr = [_columns(graph.edge_attr, graph.edge_index.shape[1]) for graph in graphs]
    y = [torch.as_tensor(graph.y).reshape(-1) for graph in graphs]
    for what, rows in (("x", x), ("edge_attr", edge_attr), ("y", y)):
        if len({row.shape[-1] for row in rows}) > 1:
            raise ValueError(
                f"{where}: expected as many columns of {what} in every graph, and one label or "
                f"row of labels each, got {sorted({row.shape[-1] for row in rows})}"
            )
    return {
        "x": torch.cat(x),
        "edge_index": torch.cat([graph.edge_index.long() for graph in graphs], 1),
        "edge_attr": torch.cat(edge_attr),
        "nodes": torch.tensor([graph.num_nodes for graph in graphs]),
        "edges": torch.tensor([graph.edge_index.shape[1] for graph in graphs]),
        "y": torch.stack(y),
    }


def _columns(features: Tensor | None, count: int) -> Tensor:
    """``(count, columns)``; one kind for all where there are no features."""
    if features is None:
        return torch.zeros(count, 1, dtype=torch.int)
    return features.reshape(count, -1) if count else features.reshape(0, features.shape[-1])
