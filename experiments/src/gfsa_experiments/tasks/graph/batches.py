"""Batches of graphs by a few index operations, padded so that few different shapes occur.

A batch is padded to the size of its largest graph, rounded up; edges and copies of nodes are padded
to the largest number that graphs of that size have. So the number of graphs and that one size
determine all shapes. Padding edges and copies are spread over all padding nodes: a GPU adds up rows
of one index sequentially.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from gfsa_experiments.models.graphs import Batch
from gfsa_experiments.tasks.graph.graphs import GraphSet, Tensors, spans, starts


class GraphItems(Dataset[Tensors], ABC):
    """Some graphs of a data set, a batch at a time.

    Args:
        graphs: the data set.
        features: what was computed from it.
        chosen: the numbers of the graphs.
        multiple: sizes are rounded up to a multiple of this, or to one less than a multiple.
    """

    def __init__(
        self, graphs: GraphSet, features: Tensors, chosen: Tensor, multiple: int = 8
    ) -> None:
        self.graphs, self.features, self.chosen = graphs, features, chosen
        self.multiple = multiple
        self.index()

    def index(self) -> None:
        """Find out, once, where the features of each graph are."""

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Tensors:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Tensors:
        graphs = self.chosen[torch.as_tensor(indices)]
        return {**self.cut(graphs), "y": self.graphs.y[graphs]}

    @abstractmethod
    def cut(self, graphs: Tensor) -> Tensors:
        """The inputs of some graphs; integers in small types."""

    @staticmethod
    @abstractmethod
    def inputs(batch: Tensors) -> Batch:
        """The model's input for a batch that is on the device already."""

    def size(self, graphs: Tensor) -> int:
        """The number of nodes that graphs are padded to; at least one is padding."""
        largest = int(self.graphs.nodes[graphs].max())
        return (largest // self.multiple + 1) * self.multiple

    def most(self, counts: Tensor) -> Tensor:
        """For each padded size (over ``multiple``), the largest of ``counts`` up to that size."""
        bucket = self.graphs.nodes // self.multiple + 1
        most = torch.zeros(int(bucket.max()) + 1, dtype=torch.long)
        most = most.scatter_reduce(0, bucket, counts, "amax")
        return most.cummax(0).values

    def nodes(self, graphs: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """``(B, size)``: rows of the data set's nodes, and True for padding."""
        slot = torch.arange(size)
        padding = slot >= self.graphs.nodes[graphs][:, None]
        return (self.graphs.first_node[graphs][:, None] + slot).masked_fill_(padding, 0), padding


class PairItems(GraphItems):
    """For Graphormer: the pairs of nodes that :func:`pair_features` computed."""

    def index(self) -> None:
        graphs = self.graphs
        self._first_pair = starts(graphs.nodes**2)
        _, owner = spans(torch.zeros_like(graphs.edges), graphs.edges)
        source, target = graphs.edge_index.long() + graphs.first_node[owner]
        self._in_degree = torch.bincount(target, minlength=len(graphs.x)).to(torch.int16)
        self._out_degree = torch.bincount(source, minlength=len(graphs.x)).to(torch.int16)

    def cut(self, graphs: Tensor) -> Tensors:
        # a multiple together with the model's virtual node, which suits attention kernels
        size = self.size(graphs) - 1
        node, padding = self.nodes(graphs, size)
        slot, count = torch.arange(size), self.graphs.nodes[graphs][:, None]
        row = self._first_pair[graphs][:, None] + slot * count
        pair = row[:, :, None] + slot
        # the last entry is the one for padding
        pair.masked_fill_(
            padding[:, :, None] | padding[:, None, :], len(self.features["paths"]) - 1
        )
        return {
            "x": self.graphs.x[node].masked_fill_(padding[..., None], 0),
            "padding": padding,
            "in_degree": self._in_degree[node].masked_fill_(padding, 0),
            "out_degree": self._out_degree[node].masked_fill_(padding, 0),
            "edge_attr": self.features["kinds"],
            "distance": self.features["distance"][pair],
            "paths": self.features["paths"][pair],
        }

    @staticmethod
    def inputs(batch: Tensors) -> Batch:
        from gfsa_experiments.models.graphormer import GraphormerBatch

        pairs = {name: batch[name].int() for name in ("distance", "paths")}
        return GraphormerBatch(**_wide(batch) | pairs, y=None)


class DenseItems(GraphItems):
    """For GPS: padded nodes, and edges numbered through the batch."""

    def index(self) -> None:
        self._most_edges = self.most(self.graphs.edges)

    def cut(self, graphs: Tensor) -> Tensors:
        size = self.size(graphs)
        node, padding = self.nodes(graphs, size)
        edge, owner = spans(self.graphs.first_edge[graphs], self.graphs.edges[graphs])
        count = len(graphs) * int(self._most_edges[size // self.multiple])
        edge_index = self.graphs.edge_index[:, edge] + owner * size
        batch = {
            "x": self.graphs.x[node].masked_fill_(padding[..., None], 0),
            "padding": padding,
            "edge_index": _filled(edge_index, count, _rows(padding)).int(),
            "edge_attr": F.pad(self.graphs.edge_attr[edge], (0, 0, 0, count - len(edge))),
        }
        for name in ("walk", "vectors"):
            if name in self.features:
                batch["encoding"] = self.features[name][node].masked_fill_(padding[..., None], 0)
        if "values" in self.features:
            batch["values"] = self.features["values"][graphs]
        return batch

    @staticmethod
    def inputs(batch: Tensors) -> Batch:
        from gfsa_experiments.tasks.graph.gps import GPSBatch

        missing = {"encoding": None, "values": None}
        return GPSBatch(**{**missing, **_wide(batch)})


class PatchItems(GraphItems):
    """For Graph-ViT: the patches of :func:`patch_features`, as many slots for every graph."""

    def index(self) -> None:
        graphs, features = self.graphs, self.features
        self._first = {name: starts(features[name]) for name in ("copies", "joins", "patches")}
        self._first_shared = starts(features["patches"] ** 2)
        self._most = {
            "edges": self.most(graphs.edges),
            "copies": self.most(features["copies"]),
            "joins": self.most(features["joins"]),
        }
        # one slot more than patches, for padding copies
        self._slots = int(features["patches"].max()) + 1

    def cut(self, graphs: Tensor) -> Tensors:
        size, slots, f = self.size(graphs), self._slots, self.features
        count = {
            name: len(graphs) * int(most[size // self.multiple]) + 1
            for name, most in self._most.items()
        }
        node, no_node = self.nodes(graphs, size)
        edge, _ = spans(self.graphs.first_edge[graphs], self.graphs.edges[graphs])
        copies = f["copies"][graphs]
        copy, of_copy = spans(self._first["copies"][graphs], copies)
        join, of_join = spans(self._first["joins"][graphs], f["joins"][graphs])
        first_edge, first_copy = starts(self.graphs.edges[graphs]), starts(copies)
        slot = torch.arange(slots)
        no_patch = slot >= f["patches"][graphs][:, None]
        patch = (self._first["patches"][graphs][:, None] + slot).masked_fill_(no_patch, 0)
        shared = self._first_shared[graphs][:, None, None] + slot
        shared = shared + slot[:, None] * f["patches"][graphs][:, None, None]
        apart = no_patch[:, :, None] | no_patch[:, None, :]
        # padding copies and edges, at least one of each
        no_copy = torch.arange(len(copy), count["copies"])
        no_edge = torch.arange(len(edge), count["edges"])
        walk = f["walk"][node].masked_fill_(no_node[..., None], 0)
        return {
            "x": self.graphs.x[node].masked_fill_(no_node[..., None], 0).flatten(0, 1),
            "edge_attr": F.pad(self.graphs.edge_attr[edge], (0, 0, 0, len(no_edge))),
            "walk": walk.flatten(0, 1),
            "copy_node": _filled(
                f["copy_node"][copy] + of_copy * size, count["copies"], _rows(no_node)
            ),
            "copy_patch": _filled(
                f["copy_patch"][copy] + of_copy * slots, count["copies"], _rows(no_patch)
            ),
            "copy_edges": _filled(
                f["copy_edges"][:, join] + first_copy[of_join], count["joins"], no_copy
            ),
            "copy_edge_id": _filled(
                f["copy_edge_id"][join] + first_edge[of_join], count["joins"], no_edge
            ),
            "patch_graph": torch.arange(len(graphs)).repeat_interleave(slots),
            "patch_slot": slot.repeat(len(graphs)),
            "patch_walk": f["patch_walk"][patch].masked_fill_(no_patch[..., None], 0).flatten(0, 1),
            "adjacency": f["shared"][shared.masked_fill_(apart, 0)].masked_fill_(apart, 0).float(),
            "padding": no_patch,
            "real_nodes": ~no_node.flatten(),
            "real_copies": torch.arange(count["copies"]) < len(copy),
        }

    @staticmethod
    def inputs(batch: Tensors) -> Batch:
        from gfsa_experiments.tasks.graph.gps import PaddedPatches

        return PaddedPatches(**_wide(batch), y=None)


def _filled(values: Tensor, count: int, fillers: Tensor) -> Tensor:
    """``(..., count)``: ``values``, then ``fillers``, repeated in turn."""
    missing = torch.arange(count - values.shape[-1])
    filling = fillers[missing % len(fillers)]
    return torch.cat([values, filling.expand(*values.shape[:-1], -1)], -1)


def _rows(padding: Tensor) -> Tensor:
    """The numbers of padding rows, counted through the whole batch."""
    return padding.flatten().nonzero()[:, 0]


def _wide(batch: Tensors) -> dict[str, Any]:
    """The inputs without the labels, integers as int64."""
    wide = {}
    for name, tensor in batch.items():
        if name == "y":
            continue
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            tensor = tensor.long()
        wide[name] = tensor
    return wide
