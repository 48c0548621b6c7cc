"""Images as graphs of superpixels, each linked to the eight with the nearest centres."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gfsa_experiments.data.files import read_npz
from gfsa_experiments.tasks.graph.graphs import (
    TEST,
    TRAIN,
    VALID,
    GraphSet,
    spans,
    starts,
    usable,
)
from gfsa_experiments.tasks.graph.readers import Facts

NEIGHBOURS = 8
_ARRAYS = tuple(f"{name}_{part}" for part in ("train", "test") for name in ("feat", "n_node", "y"))
# the file stores centres times 8, of images 28 pixels wide
_SCALE = torch.tensor([255.0, 224.0, 224.0])
_CHUNK = 2048


def read_superpixels(facts: Facts, path: Path) -> GraphSet:
    """MNIST from ``superpixel_mnist.npz``.

    The last twelfth of the training images validates (5,000 of 60,000, as in the benchmark).
    """
    arrays = {name: torch.from_numpy(array) for name, array in read_npz(path, _ARRAYS).items()}
    nodes = torch.cat([arrays["n_node_train"], arrays["n_node_test"]]).long()
    x = torch.cat([arrays["feat_train"], arrays["feat_test"]]) / _SCALE
    if int(nodes.sum()) != len(x):
        raise ValueError(
            f"{path} is damaged: expected {int(nodes.sum())} nodes by its counts, got {len(x)}"
        )
    edge_index, weight, edges = nearest(x[:, 1:], nodes)
    train_images = len(arrays["n_node_train"])
    split = torch.full((len(nodes),), TEST, dtype=torch.uint8)
    split[:train_images] = TRAIN
    split[train_images - train_images // 12 : train_images] = VALID
    graphs = facts.graph_set(
        x=x,
        edge_index=edge_index,
        edge_attr=weight,
        nodes=nodes,
        edges=edges,
        y=torch.cat([arrays["y_train"], arrays["y_test"]]).float()[:, None],
        split=split,
    )
    return usable(graphs, path, facts.source.sizes)


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
