"""A data set of graphs as a few long tensors, and the checks that every reader applies to it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gfsa_experiments.data.files import BadRows, check_count
from gfsa_experiments.engine.task import OwnData

Tensors = dict[str, Tensor]
TRAIN, VALID, TEST = range(3)
Kind = Literal["regression", "labels", "classes"]
Metric = Literal["mae", "rmse", "ap", "rocauc", "accuracy"]
KINDS: dict[Metric, Kind] = {
    "mae": "regression",
    "rmse": "regression",
    "ap": "labels",
    "rocauc": "labels",
    "accuracy": "classes",
}
"""What the labels are that a metric measures."""
Features = int | tuple[int, ...]
"""The sizes of the vocabularies, one per integer column, or the number of real columns."""


@dataclass(frozen=True)
class GraphSet:
    """G graphs with N nodes and E directed edges in all; those of a graph are consecutive.

    ``x``: ``(N, F)``; ``edge_index``: ``(2, E)``, sources above targets, counted from each graph's
    first node; ``edge_attr``: ``(E, F)``; ``nodes``, ``edges``: ``(G,)``, how many each graph has;
    ``y``: ``(G, T)`` float32, NaN where a label is missing; ``split``: ``(G,)``, 0 train, 1 valid,
    2 test.
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
    node_features: Features
    edge_features: Features
    metric: Metric = "mae"
    classes: int = 10
    """Of a data set whose labels are classes."""
    own: OwnData | None = None
    """What was read, if the graphs are the caller's own."""

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
        return self.classes if self.kind == "classes" else self.y.shape[1]

    def part(self, which: int) -> Tensor:
        """The numbers of the graphs of one split."""
        return (self.split == which).nonzero().flatten()

    def source(self, number: int) -> dict[str, Tensor]:
        """One graph as it was read."""
        first, edge = int(self.first_node[number]), int(self.first_edge[number])
        edges = slice(edge, edge + int(self.edges[number]))
        return {
            "x": self.x[first : first + int(self.nodes[number])],
            "y": self.y[number],
            "edge_index": self.edge_index[:, edges],
            "edge_attr": self.edge_attr[edges],
        }

    def only(self, keep: Tensor) -> GraphSet:
        """The graphs where ``keep``, ``(G,)``, is True."""
        chosen = keep.nonzero().flatten()
        node, _ = spans(self.first_node[chosen], self.nodes[chosen])
        edge, _ = spans(self.first_edge[chosen], self.edges[chosen])
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        kept |= {name: kept[name][chosen] for name in ("nodes", "edges", "y", "split")}
        kept |= {"x": self.x[node], "edge_attr": self.edge_attr[edge]}
        return GraphSet(**kept | {"edge_index": self.edge_index[:, edge]})


def starts(counts: Tensor) -> Tensor:
    """Where each of several consecutive runs begins."""
    return counts.cumsum(0) - counts


def spans(first: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """``first[i], …, first[i] + counts[i] - 1`` for all i, concatenated, and the i of each."""
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    index = torch.arange(len(owner)) + (first - starts(counts))[owner]
    return index, owner


def usable(
    graphs: GraphSet,
    path: Path,
    sizes: tuple[int, ...] = (),
    unused: int | None = None,
) -> GraphSet:
    """The graphs without invalid ones, which are counted and reported.

    Args:
        graphs: as read.
        path: the file they come from, for messages.
        sizes: the official numbers of graphs in train, valid and test, if there are some; a
            warning names others.
        unused: a split to leave out.
    """
    _check_totals(graphs, path)
    if unused is not None:
        graphs = graphs.only(graphs.split != unused)
    faults = _faults(graphs)
    invalid = torch.stack(list(faults.values())).any(0)
    bad = BadRows(path, "graphs", "graph")
    for number in invalid.nonzero().flatten().tolist():
        bad.add(number, ", ".join(reason for reason, where in faults.items() if where[number]))
    bad.report(len(graphs) - bad.count)
    if bad.count:
        graphs = graphs.only(~invalid)
    found = tuple(len(graphs.part(which)) for which in (TRAIN, VALID, TEST))
    if not all(found):
        raise ValueError(f"{path}: expected graphs to train, validate and test on, got {found}")
    if sizes:
        check_count(path, found, sizes, "graphs to train, validate and test on")
    return graphs


def _check_totals(graphs: GraphSet, path: Path) -> None:
    totals = {
        "nodes": (int(graphs.nodes.sum()), len(graphs.x)),
        "edges": (int(graphs.edges.sum()), graphs.edge_index.shape[1]),
        "features of edges": (graphs.edge_index.shape[1], len(graphs.edge_attr)),
        "labels": (len(graphs), len(graphs.y)),
        "split numbers": (len(graphs), len(graphs.split)),
    }
    for what, (expected, found) in totals.items():
        if expected != found:
            raise ValueError(
                f"{path} is damaged: expected {expected} {what} by its counts, got {found}"
            )


def _faults(graphs: GraphSet) -> dict[str, Tensor]:
    """Reasons why graphs cannot be used: for each ``(G,)``, True where it applies."""
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


def _unknown(features: Tensor, allowed: Features) -> Tensor:
    columns = allowed if isinstance(allowed, int) else len(allowed)
    if features.dim() != 2 or features.shape[1] != columns:
        raise ValueError(f"expected {columns} columns of features, got {tuple(features.shape)}")
    if isinstance(allowed, int):
        return ~features.isfinite().all(1)
    wrong = [
        (features[:, c] < 0) | (features[:, c].int() >= size) for c, size in enumerate(allowed)
    ]
    return torch.stack(wrong).any(0)
