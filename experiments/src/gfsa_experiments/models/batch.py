"""Batches of graphs, and the functions that the collators of the graph models share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from gfsa_experiments.models.graph_features import check_edges


class Graph(Protocol):
    """A graph in the form of torch_geometric's ``Data``; any object with these attributes works.

    ``x``: ``(N, F)`` or ``(N,)``; ``edge_index``: ``(2, E)``; ``edge_attr``: ``(E, F)``, ``(E,)``
    or None; ``y``: the graph's label or labels, or None.
    """

    x: Any
    edge_index: Any
    edge_attr: Any
    y: Any


BatchT = TypeVar("BatchT", bound="Batch")


class Batch:
    """A dataclass of tensors that moves between devices, for data loaders and accelerate."""

    def to(self: BatchT, device: torch.device | str, non_blocking: bool = False) -> BatchT:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self: BatchT) -> BatchT:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self: BatchT, function: Any) -> BatchT:
        moved = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            moved[field.name] = function(value) if isinstance(value, Tensor) else value
        return type(self)(**moved)


P = ParamSpec("P")
R = TypeVar("R")


def on_the_host(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function`` create its tensors on the CPU, whatever torch's default device is."""

    @wraps(function)
    def on_cpu(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return on_cpu


def nodes_of(graph: Graph) -> Tensor:
    """The node features, ``(N, F)``, integers as int64."""
    x = _columns(graph.x)
    if not len(x):
        raise ValueError("expected a graph with at least one node, got none; leave the graph out")
    check_edges(graph.edge_index, len(x))
    return x


def edges_of(graph: Graph) -> Tensor:
    """The edge features, ``(E, F)``; one column of zeros if the graph has none."""
    num_edges = graph.edge_index.shape[1]
    attributes = getattr(graph, "edge_attr", None)
    if attributes is None:
        return torch.zeros(num_edges, 1, dtype=torch.long)
    attributes = _columns(attributes)
    if len(attributes) != num_edges:
        raise ValueError(f"edge_attr has {len(attributes)} rows for {num_edges} edges")
    return attributes


def label_of(graph: Graph) -> Tensor | None:
    """The graph's labels in one row, ``(T,)``, or None."""
    y = getattr(graph, "y", None)
    return None if y is None else torch.as_tensor(y).reshape(-1)


def stack_labels(labels: Sequence[Tensor | None]) -> Tensor | None:
    """``(B, T)``, or None if no graph has a label."""
    given = [label for label in labels if label is not None]
    if not given:
        return None
    if len({len(label) for label in given}) > 1 or len(given) < len(labels):
        raise ValueError(
            "expected the same number of labels for every graph in a batch, "
            f"got {[None if label is None else len(label) for label in labels]}"
        )
    return torch.stack(given)


def pad(rows: Sequence[Tensor], value: float) -> Tensor:
    """Tensors of different sizes as one tensor, padded with ``value`` at the end of each axis."""
    size = [max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)]
    padded = rows[0].new_full((len(rows), *size), value)
    for target, row in zip(padded, rows, strict=True):
        target[tuple(slice(length) for length in row.shape)] = row
    return padded


def _columns(features: Any) -> Tensor:
    features = torch.as_tensor(features)
    if features.dim() == 1:
        features = features[:, None]
    return features if features.is_floating_point() else features.long()
