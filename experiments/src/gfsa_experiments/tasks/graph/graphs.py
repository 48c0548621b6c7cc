"""Many graphs in a few long tensors: what every reader of graph data makes, and checks."""

from __future__ import annotations

import hashlib
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gfsa_experiments.engine.task import DataSource

TRAIN, VALID, TEST = range(3)
Kind = Literal["regression", "labels", "classes"]

# OGB's vocabularies of atoms (element, chirality, degree, charge, hydrogens, radicals,
# hybridisation, aromatic, in a ring) and bonds (type, stereo, conjugated)
ATOMS = (119, 5, 12, 12, 10, 6, 6, 2, 2)
BONDS = (5, 6, 2)

# more unusable graphs than this, and the file is not what it is taken for
_TOLERATED = 0.01
_SHOWN = 3


@dataclass(frozen=True)
class GraphSet:
    """G graphs with N nodes and E directed edges in all, those of a graph side by side.

    ``x``: ``(N, F)``; ``edge_index``: ``(2, E)``, sources above targets, counted from each graph's
    first node; ``edge_attr``: ``(E, F)``; ``nodes``, ``edges``: ``(G,)``, how many each graph has;
    ``y``: ``(G, T)`` float32, NaN where a label is missing; ``split``: ``(G,)``, 0 train, 1 valid,
    2 test. ``node_features`` and ``edge_features`` are the sizes of the vocabularies, one for each
    integer column, or the number of real columns.
    """

    name: str
    kind: Kind
    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    nodes: Tensor
    edges: Tensor
    y: Tensor
    split: Tensor
    node_features: int | tuple[int, ...]
    edge_features: int | tuple[int, ...]

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def first_node(self) -> Tensor:
        """``(G,)``: the row of ``x`` at which each graph begins."""
        return starts(self.nodes)

    @cached_property
    def first_edge(self) -> Tensor:
        """``(G,)``: the column of ``edge_index`` at which each graph begins."""
        return starts(self.edges)

    @property
    def outputs(self) -> int:
        """How many numbers a model predicts for a graph."""
        return 10 if self.kind == "classes" else self.y.shape[1]

    @cached_property
    def digest(self) -> str:
        """A fingerprint of nodes and edges, for what is worked out from them and kept."""
        sha = hashlib.sha256()
        for tensor in (self.nodes, self.edges, self.edge_index, self.edge_attr):
            sha.update(np.ascontiguousarray(tensor.numpy()).tobytes())
        return sha.hexdigest()[:16]

    def part(self, which: int) -> Tensor:
        """The numbers of the graphs of one split."""
        return (self.split == which).nonzero().flatten()

    def source(self, number: int) -> dict[str, Tensor]:
        """One graph as it was read; edges with real numbers are worked out from its nodes."""
        first, edge = int(self.first_node[number]), int(self.first_edge[number])
        read = {"x": self.x[first : first + int(self.nodes[number])], "y": self.y[number]}
        if not self.edge_attr.is_floating_point():
            edges = slice(edge, edge + int(self.edges[number]))
            read |= {"edge_index": self.edge_index[:, edges], "edge_attr": self.edge_attr[edges]}
        return read

    def only(self, keep: Tensor) -> GraphSet:
        """The graphs where ``keep``, ``(G,)``, is True."""
        chosen = keep.nonzero().flatten()
        node, _ = spans(self.first_node[chosen], self.nodes[chosen])
        edge, _ = spans(self.first_edge[chosen], self.edges[chosen])
        return GraphSet(
            name=self.name,
            kind=self.kind,
            x=self.x[node],
            edge_index=self.edge_index[:, edge],
            edge_attr=self.edge_attr[edge],
            nodes=self.nodes[chosen],
            edges=self.edges[chosen],
            y=self.y[chosen],
            split=self.split[chosen],
            node_features=self.node_features,
            edge_features=self.edge_features,
        )


def starts(counts: Tensor) -> Tensor:
    """Where each of some consecutive runs begins."""
    return counts.cumsum(0) - counts


def spans(first: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """``first[i] … first[i] + counts[i] - 1`` of all i in one row, and whose each of them is."""
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    index = torch.arange(len(owner)) + (first - starts(counts))[owner]
    return index, owner


def both_ways(edge: Tensor, attributes: Tensor, bonds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bonds that are listed once, ``(E, 2)``, as edges: ``(2, 2E)``, their features, counts.

    The two directions of a bond stand side by side, as in OGB.
    """
    directed = torch.stack([edge, edge.flip(1)], 1).reshape(-1, 2)
    return directed.T.contiguous(), attributes.repeat_interleave(2, 0), 2 * bonds


def usable(
    graphs: GraphSet,
    path: Path,
    sizes: tuple[int, int, int] | None = None,
    unused: int | None = None,
) -> GraphSet:
    """The graphs without those that make no sense, which are counted and reported.

    Args:
        graphs: as read.
        path: where from, for messages.
        sizes: the official numbers of graphs in train, valid and test; others are reported.
        unused: a split that is there to be left out.
    """
    _check_totals(graphs, path)
    if unused is not None:
        graphs = graphs.only(graphs.split != unused)
    faults = _faults(graphs)
    bad = torch.stack(list(faults.values())).any(0)
    if bad.any():
        examples = []
        for number in bad.nonzero().flatten()[:_SHOWN].tolist():
            why = [reason for reason, where in faults.items() if where[number]]
            examples.append(f"graph {number}: {', '.join(why)}")
        message = f"{path}: {int(bad.sum())} of {len(graphs)} graphs cannot be used; " + "; ".join(
            examples
        )
        if bad.float().mean() > _TOLERATED:
            raise ValueError(f"{message}. That is more than 1 %: get it again")
        warnings.warn(message, stacklevel=2)
        graphs = graphs.only(~bad)
    found = tuple(len(graphs.part(which)) for which in (TRAIN, VALID, TEST))
    if not all(found):
        raise ValueError(f"{path}: expected graphs to train, validate and test on, got {found}")
    if sizes is not None and found != sizes:
        warnings.warn(
            f"{path}: the official {graphs.name} has {sizes} graphs to train, validate and test "
            f"on, here are {found}",
            stacklevel=2,
        )
    return graphs


def _check_totals(graphs: GraphSet, path: Path) -> None:
    expected = {
        "nodes": (int(graphs.nodes.sum()), len(graphs.x)),
        "edges": (int(graphs.edges.sum()), graphs.edge_index.shape[1]),
        "features of edges": (graphs.edge_index.shape[1], len(graphs.edge_attr)),
        "labels": (len(graphs), len(graphs.y)),
        "places in a split": (len(graphs), len(graphs.split)),
    }
    for what, (counted, given) in expected.items():
        if counted != given:
            raise ValueError(
                f"{path} is damaged: its counts ask for {counted} {what}, it has {given}"
            )


def _faults(graphs: GraphSet) -> dict[str, Tensor]:
    """Why graphs cannot be used: for each reason ``(G,)``, True where it holds."""
    count = len(graphs)
    of_node = torch.repeat_interleave(torch.arange(count), graphs.nodes)
    of_edge = torch.repeat_interleave(torch.arange(count), graphs.edges)

    def where(bad: Tensor, owner: Tensor) -> Tensor:
        return torch.bincount(owner[bad], minlength=count) > 0

    ends = graphs.edge_index
    outside = ((ends < 0) | (ends >= graphs.nodes[of_edge])).any(0)
    y = graphs.y
    if graphs.kind == "regression":
        wrong = ~y.isfinite()
    elif graphs.kind == "labels":
        wrong = ~((y == 0) | (y == 1) | y.isnan())
    else:
        wrong = ~((y >= 0) & (y < graphs.outputs) & (y == y.round()))
    return {
        "no nodes": graphs.nodes == 0,
        "an edge to a node that it does not have": where(outside, of_edge),
        "unknown features of nodes": where(_unknown(graphs.x, graphs.node_features), of_node),
        "unknown features of edges": where(
            _unknown(graphs.edge_attr, graphs.edge_features), of_edge
        ),
        "a wrong label": wrong.any(1),
        "a wrong split": graphs.split > TEST,
    }


def _unknown(features: Tensor, allowed: int | tuple[int, ...]) -> Tensor:
    columns = allowed if isinstance(allowed, int) else len(allowed)
    if features.dim() != 2 or features.shape[1] != columns:
        raise ValueError(f"expected {columns} columns of features, got {tuple(features.shape)}")
    if isinstance(allowed, int):
        return ~features.isfinite().all(1)
    wrong = [
        (features[:, c] < 0) | (features[:, c].int() >= size) for c, size in enumerate(allowed)
    ]
    return torch.stack(wrong).any(0)


def find_folder(data_dir: Path, folders: Iterable[str], files: Iterable[str]) -> Path | None:
    """``data_dir`` or the first of its ``folders`` that has one of the files, if any has."""
    files = list(files)
    for folder in (".", *folders):
        if any((data_dir / folder / file).is_file() for file in files):
            return data_dir / folder
    return None


def not_found(data_dir: Path, folders: Iterable[str], source: DataSource) -> FileNotFoundError:
    """The error that says what was looked for, where, and where to get it."""
    also = ", ".join(f"{folder}/" for folder in folders)
    return FileNotFoundError(
        f"{source.name}: there is none of {source.files} in {data_dir.absolute()} or its {also}. "
        f"Get it from {source.where}, and give the folder with --data-dir"
    )


def load_npz(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Arrays of a ``.npz`` file by name, without ever unpickling."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in names if name not in file.files]
            if missing:
                raise ValueError(
                    f"{path} has no array {', '.join(missing)}; it has {', '.join(file.files)}"
                )
            return {name: _tensor(file[name]) for name in names}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        if "has no array" in str(error):
            raise
        raise ValueError(f"{path} is damaged ({error}); get it again") from error


def _tensor(array: np.ndarray) -> Tensor:
    # torch has few operations on these: the next larger integers that have a sign
    wider = {"uint16": np.int32, "uint32": np.int64}.get(array.dtype.name)
    return torch.from_numpy(array if wider is None else array.astype(wider))
