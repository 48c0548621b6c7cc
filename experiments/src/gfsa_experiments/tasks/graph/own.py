"""Graphs of a caller's own: an npz file, PyG's processed files, or any PyG data set.

``graphs.npz`` has the arrays of ``NAME_graphs.npz`` (:mod:`.readers`): ``n_node``, ``n_edge``,
``edge`` with each edge once, ``y``, and if there are some ``node_feat``, ``edge_feat`` and
``split``. A ``.pt`` file is a list of PyG's ``Data``, or what ``InMemoryDataset`` writes.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gfsa_experiments.data.files import read_npz
from gfsa_experiments.data.own import (
    PARTS,
    Labels,
    Wanted,
    decide,
    digest_of,
    entries_of,
    find_own,
    name_of,
    part_named,
    refuse_unseen,
    three_parts,
)
from gfsa_experiments.engine.task import OwnData
from gfsa_experiments.tasks.graph.graphs import KINDS, Features, GraphSet, Metric, usable

EXPECTED = (
    "a .npz or .pt file, a folder of train.pt, val.pt and test.pt, pyg:CLASS:NAME or "
    "MODULE:CLASS:NAME"
)
_NEEDED = ("n_node", "n_edge", "edge", "y")
_OPTIONAL = ("node_feat", "edge_feat", "split")
_IMPORTED = re.compile(r"[A-Za-z_][\w.]*(:[\w.-]+){1,2}")
_SPLITS = ("train", "val", "test")
_MOST_KINDS = 1 << 20


def is_own(data: str) -> bool:
    """Whether ``data`` has the form of graphs of the caller's own."""
    looks_like_a_path = data.endswith((".npz", ".pt")) or "/" in data or data.startswith((".", "~"))
    return looks_like_a_path or _IMPORTED.fullmatch(data) is not None


def own_name(data: str) -> str:
    """The name in rows: ``TUDataset-MUTAG`` for ``pyg:TUDataset:MUTAG``, a file's own otherwise."""
    return "-".join(data.split(":")[1:]) if _IMPORTED.fullmatch(data) else name_of(data)


def read_own(data: str, data_dir: Path, labels: Wanted = "auto") -> GraphSet:
    """The graphs that ``data`` names, with their kind of labels decided and their parts chosen."""
    if _IMPORTED.fullmatch(data):
        where, graphs, parts = data, *_imported(data, data_dir)
        return _graph_set(data, where, _joined(where, graphs), parts, labels)
    path = find_own(data, data_dir, EXPECTED)
    where = str(path)
    if path.suffix == ".npz":
        return _graph_set(data, where, *_from_npz(path), labels)
    files = {"train": path} if path.is_file() else _processed_files(path)
    graphs, parts = [], {}
    for part, file in files.items():
        found = _load(file)
        parts[part] = list(range(len(graphs), len(graphs) + len(found)))
        graphs += found
    return _graph_set(data, where, _joined(where, graphs), parts, labels)


Parts = dict[str, list[int]]
Tensors = dict[str, Tensor]


def _graph_set(data: str, where: str, read: Tensors, named: Parts, labels: Wanted) -> GraphSet:
    y, metric, classes, why = _labels(read["y"], labels)
    of_class = y[:, 0].tolist() if metric == "accuracy" else None
    parts, split_by = three_parts(named, where, of_class)
    if of_class is not None:
        known = y[:, 0].isfinite().tolist()
        labelled = {part: [row for row in rows if known[row]] for part, rows in parts.items()}
        refuse_unseen(Labels("classes", classes, of_class, why), labelled, where)
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
    own = OwnData(
        name=graphs.name,
        source=where,
        splits={part: len(graphs.part(number)) for number, part in enumerate(PARTS)},
        split_by=split_by,
        labels=why,
        unit="graphs",
        digest=_digest(graphs),
    )
    return dataclasses.replace(graphs, own=own)


def _digest(graphs: GraphSet) -> str:
    """A hash of everything that was read, labels and parts included."""
    structure = graphs.nodes, graphs.edges, graphs.edge_index, graphs.edge_attr
    every = (*structure, graphs.x, graphs.y, graphs.split)
    return digest_of(np.ascontiguousarray(part.numpy()).tobytes() for part in every)


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
        metric: Metric = "accuracy" if found.kind == "classes" else "mae"
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


def _from_npz(path: Path) -> tuple[Tensors, Parts]:
    arrays = read_npz(path, _NEEDED)
    with np.load(path, allow_pickle=False) as file:
        present = [name for name in _OPTIONAL if name in file.files]
    arrays |= read_npz(path, present)
    found = {name: _signed(array) for name, array in arrays.items()}
    nodes, edges, pairs = found["n_node"].long(), found["n_edge"].long(), found["edge"].long()
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(
            f"{path}: expected edge of shape (edges, 2), each edge once, got {tuple(pairs.shape)}"
        )
    both = torch.stack([pairs, pairs.flip(1)], 1).reshape(-1, 2)
    none = torch.zeros(len(pairs), 1, dtype=torch.int)
    y = found["y"].reshape(len(found["y"]), -1)
    read = {
        "x": found.get("node_feat", torch.zeros(int(nodes.sum()), 1, dtype=torch.int)),
        "edge_index": both.T.contiguous(),
        "edge_attr": found.get("edge_feat", none).repeat_interleave(2, 0),
        "nodes": nodes,
        "edges": 2 * edges,
        "y": y,
    }
    if "split" not in found:
        return read, {"train": list(range(len(y)))}
    split = found["split"].tolist()
    unknown = sorted(set(split) - {0, 1, 2})
    if unknown or len(split) != len(y):
        raise ValueError(
            f"{path}: expected split to have 0 (train), 1 (valid) or 2 (test) for each of "
            f"{len(y)} graphs, got {len(split)} numbers{f', such as {unknown[0]}' * bool(unknown)}"
        )
    return read, {
        part: [row for row, of in enumerate(split) if of == number]
        for number, part in enumerate(PARTS)
    }


def _signed(array: np.ndarray) -> Tensor:
    # torch has few operations on unsigned integers
    wide = array.astype(np.int64) if array.dtype.kind in "ub" else array
    return torch.from_numpy(wide)


def _processed_files(folder: Path) -> dict[str, Path]:
    """The files that a PyG data set with parts leaves in its folder ``processed``."""
    inside = folder / "processed" if (folder / "processed").is_dir() else folder
    files = sorted(inside.glob("*.pt"))
    found = {part: file for file in files if (part := part_named(file.stem)) is not None}
    if found:
        return {part: found[part] for part in PARTS if part in found}
    # beside them PyG leaves pre_transform.pt and pre_filter.pt
    data = [file for file in files if not file.stem.startswith("pre_")]
    if len(data) == 1:
        return {"train": data[0]}
    raise FileNotFoundError(
        f"expected train.pt, val.pt and test.pt, or one data.pt, in {inside}{entries_of(inside)}"
    )


def _load(path: Path) -> list[Any]:
    """The graphs of a ``.pt`` file; nothing but tensors and PyG's own records is unpickled."""
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.separate import separate
    from torch_geometric.data.storage import GlobalStorage

    known = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]
    try:
        with torch.serialization.safe_globals(known):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # a damaged file raises errors of many kinds
        reason = str(error).split(". ")[0]
        raise ValueError(
            f"{path} is damaged, or has more in it than tensors and PyG's Data ({reason}); "
            "expected a list of Data, or what InMemoryDataset.save writes"
        ) from error
    if isinstance(found, (list, tuple)) and all(isinstance(graph, Data) for graph in found):
        return list(found)
    if isinstance(found, tuple) and len(found) in (2, 3) and isinstance(found[0], (dict, Data)):
        data, slices = found[0], found[1]
        joined = Data.from_dict(data) if isinstance(data, dict) else data
        if slices is None:
            return [joined]
        count = len(next(iter(slices.values()))) - 1
        return [separate(Data, joined, i, slices, decrement=False) for i in range(count)]
    raise ValueError(
        f"{path}: expected a list of PyG's Data, or what InMemoryDataset.save writes, got "
        f"{type(found).__name__}"
    )


def _imported(data: str, data_dir: Path) -> tuple[list[Any], Parts]:
    """The graphs of a PyG data set that is constructed, which may download it."""
    module, name, *rest = data.split(":")
    make = _find_class("torch_geometric.datasets" if module == "pyg" else module, name, data)
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
        found = _construct(make, arguments, data)
        parts[str(part_named(split))] = list(range(len(graphs), len(graphs) + len(found)))
        graphs += found
    return graphs, parts


def _find_class(module: str, name: str, data: str) -> Callable[..., Any]:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"data={data}: the module {module} cannot be imported ({error}); expected "
            "pyg:CLASS:NAME or MODULE:CLASS:NAME, from the working directory or installed"
        ) from error
    make = getattr(found, name, None)
    if not callable(make):
        raise ValueError(f"data={data}: the module {module} has no data set {name}")
    return make


def _construct(make: Callable[..., Any], arguments: dict[str, Any], data: str) -> list[Any]:
    try:
        return list(make(**arguments))
    except Exception as error:
        # a data set of the caller's own may fail in any way
        words = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ValueError(
            f"data={data} could not be constructed with {words or 'no arguments'}: "
            f"{type(error).__name__}: {error}"
        ) from error


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
    for what, rows in (("x", x), ("edge_attr", edge_attr)):
        _refuse_mixed(where, what, [row.shape[-1] for row in rows])
    _refuse_mixed(where, "y", [len(row) for row in y])
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


def _refuse_mixed(where: str, what: str, sizes: Sequence[int]) -> None:
    """Raise ValueError if graphs have different numbers of columns."""
    if len(set(sizes)) > 1:
        other = next(number for number, size in enumerate(sizes) if size != sizes[0])
        raise ValueError(
            f"{where}: {what} of graph 0 has {sizes[0]} columns, of graph {other} {sizes[other]}; "
            "expected one label or row of labels per graph, and the same columns in all of them"
        )
