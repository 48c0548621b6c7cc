"""The graph data sets by name, from npz archives: molecules, and images as superpixels.

``NAME_graphs.npz`` holds ``node_feat``, ``edge_feat``, ``edge`` with each bond once, ``n_node``,
``n_edge``, ``y`` and ``split``; ``zinc12k_graphs.npz`` calls the features ``atom_type`` and
``bond_type``. Other data sets of PyG are graphs of the caller's own, ``pyg:CLASS:NAME``.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gfsa_experiments.data.files import not_found, read_npz
from gfsa_experiments.data.own import Wanted
from gfsa_experiments.data.sources import source_of
from gfsa_experiments.tasks.graph.graphs import (
    KINDS,
    TEST,
    TRAIN,
    VALID,
    Features,
    GraphSet,
    Metric,
    spans,
    starts,
    usable,
)
from gfsa_experiments.tasks.graph.own import read_own

# OGB's vocabularies of atoms (element, chirality, degree, charge, hydrogens, radicals,
# hybridisation, aromatic, in a ring) and bonds (type, stereo, conjugated)
ATOMS = (119, 5, 12, 12, 10, 6, 6, 2, 2)
BONDS = (5, 6, 2)
_MOLECULES = (ATOMS, BONDS)
# QM8 gives energies in hartree; PCQM4M, which it stands in for, in electronvolts
_HARTREE = 27.211386
NEIGHBOURS = 8
# the file stores centres times 8, of images 28 pixels wide
_SCALE = torch.tensor([255.0, 224.0, 224.0])
_CHUNK = 2048

# file, metric, features of nodes and edges; the labels of pcqm4m's test sets are hidden: whoever
# writes the npz file makes the split
_FACTS: dict[str, tuple[str, Metric, tuple[Features, Features]]] = {
    "zinc": ("zinc12k_graphs.npz", "mae", ((28,), (4,))),
    "pcqm4m": ("pcqm4m_graphs.npz", "mae", _MOLECULES),
    "pcqm4mv2": ("pcqm4mv2_graphs.npz", "mae", _MOLECULES),
    "qm8": ("qm8_graphs.npz", "mae", _MOLECULES),
    "peptides-func": ("peptides_func_graphs.npz", "ap", _MOLECULES),
    "peptides-struct": ("peptides_struct_graphs.npz", "mae", _MOLECULES),
    "mnist": ("superpixel_mnist.npz", "accuracy", (3, 1)),
    "molhiv": ("molhiv_graphs.npz", "rocauc", _MOLECULES),
    "moltox21": ("moltox21_graphs.npz", "rocauc", _MOLECULES),
    "molesol": ("molesol_graphs.npz", "rmse", _MOLECULES),
}
DATA_NAMES = tuple(_FACTS)


@lru_cache(maxsize=4)
def read_graphs(name: str, data_dir: Path, labels: Wanted = "auto") -> GraphSet:
    """The data set called ``name``, or graphs of the caller's own (:mod:`.own`)."""
    if name not in _FACTS:
        return read_own(name, data_dir, labels)
    file, metric, (nodes, edges) = _FACTS[name]
    source = source_of(f"graph {name}")
    places = [data_dir / folder / file for folder in source.folders]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise not_found(data_dir, file, source)
    found = _superpixels(path) if name == "mnist" else _molecules(name, path, KINDS[metric])
    facts: dict[str, Any] = {"metric": metric, "node_features": nodes, "edge_features": edges}
    graphs = GraphSet(name=name, kind=KINDS[metric], **facts, **found)
    # the fourth split of zinc12k has molecules that the official 12,000 lack
    return usable(graphs, path, source.sizes, unused=TEST + 1 if name == "zinc" else None)


def _molecules(name: str, path: Path, kind: str) -> dict[str, Any]:
    """Every bond becomes an edge in each direction, side by side, as in OGB."""
    atoms, bonds = ("atom_type", "bond_type") if name == "zinc" else ("node_feat", "edge_feat")
    # torch has few operations on unsigned integers: convert to the next larger signed type
    signed: dict[str, Any] = {"uint16": np.int32, "uint32": np.int64}
    arrays = {
        key: torch.from_numpy(array.astype(signed.get(array.dtype.name, array.dtype), copy=False))
        for key, array in read_npz(
            path, (atoms, "edge", bonds, "n_node", "n_edge", "y", "split")
        ).items()
    }
    y = _columns(arrays["y"].float())
    if kind == "labels":
        y = torch.where(y == -1, torch.nan, y)
    if name == "qm8":
        # the first excitation energy is the closest to PCQM4M's gap
        y = y[:, :1] * _HARTREE
    pairs = arrays["edge"].int()
    return {
        "x": _columns(arrays[atoms]),
        "edge_index": torch.stack([pairs, pairs.flip(1)], 1).reshape(-1, 2).T.contiguous(),
        "edge_attr": _columns(arrays[bonds]).repeat_interleave(2, 0),
        "nodes": arrays["n_node"].long(),
        "edges": 2 * arrays["n_edge"].long(),
        "y": y,
        "split": arrays["split"],
    }


def _columns(features: Tensor) -> Tensor:
    return features[:, None] if features.dim() == 1 else features


def _superpixels(path: Path) -> dict[str, Any]:
    """Images as graphs of superpixels, each linked to the eight with the nearest centres.

    The last twelfth of the training images validates (5,000 of 60,000, as in the benchmark).
    """
    names = [f"{name}_{part}" for part in ("train", "test") for name in ("feat", "n_node", "y")]
    arrays = {name: torch.from_numpy(array) for name, array in read_npz(path, names).items()}
    nodes = torch.cat([arrays["n_node_train"], arrays["n_node_test"]]).long()
    x = torch.cat([arrays["feat_train"], arrays["feat_test"]]) / _SCALE
    if int(nodes.sum()) != len(x):
        raise ValueError(
            f"{path} is damaged: expected {int(nodes.sum())} nodes by its counts, got {len(x)}"
        )
    edge_index, weight, edges = nearest(x[:, 1:], nodes)
    images = len(arrays["n_node_train"])
    split = torch.full((len(nodes),), TEST, dtype=torch.uint8)
    split[:images] = TRAIN
    split[images - images // 12 : images] = VALID
    y = torch.cat([arrays["y_train"], arrays["y_test"]]).float()[:, None]
    return {
        "x": x,
        "edge_index": edge_index,
        "edge_attr": weight,
        "nodes": nodes,
        "edges": edges,
        "y": y,
        "split": split,
    }


def nearest(
    centres: Tensor, nodes: Tensor, neighbours: int = NEIGHBOURS
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Edges from each node's nearest ones to it, their weights, and edges per graph.

    .. math:: w_{ij} = \\exp(-\\lVert p_i - p_j \\rVert^2 / σ_i^2)

    with σ_i the mean distance of i to its neighbours. A graph of fewer nodes has fewer edges.
    """
    per_node = (nodes - 1).clamp(0, neighbours)
    sources, weights = [], []
    first = starts(nodes)
    for at in range(0, len(nodes), _CHUNK):
        count = nodes[at : at + _CHUNK]
        index, owner = spans(first[at : at + _CHUNK], count)
        slot = index - first[at : at + _CHUNK][owner]
        width = int(count.max())
        padded = torch.zeros(len(count), width, 2)
        padded[owner, slot] = centres[index]
        real_node = torch.arange(width) < count[:, None]
        distance = (padded[:, :, None] - padded[:, None]).square().sum(-1).sqrt()
        # neither a node itself nor padding is a neighbour
        distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
        distance.masked_fill_(~real_node[:, None], torch.inf)
        near = distance.topk(min(neighbours, width), dim=-1, largest=False)
        real = near.values.isfinite() & real_node[:, :, None]
        mean = near.values.masked_fill(~real, 0.0).sum(-1) / real.sum(-1).clamp(min=1)
        weight = torch.exp(-((near.values / mean.clamp(min=1e-9)[..., None]) ** 2))
        sources.append(near.indices[real])
        weights.append(weight[real])
    edges = nodes * per_node
    _, owner = spans(torch.zeros_like(nodes), nodes)
    slot = torch.arange(len(owner)) - first[owner]
    target = torch.repeat_interleave(slot, per_node[owner])
    source = torch.cat(sources)
    return torch.stack([source, target]).to(torch.int16), torch.cat(weights)[:, None], edges
