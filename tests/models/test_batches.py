"""Collators: accepted and refused graphs, and moving batches between devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from gfsa_experiments.models import GraphormerCollator, GraphViTCollator
from gfsa_experiments.models.batch import pad
from support.graphs import molecule

COLLATORS = [GraphormerCollator(), GraphViTCollator(num_patches=4)]


def same(first: object, second: object) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b
        for a, b in zip(vars(first).values(), vars(second).values(), strict=True)
    )


@pytest.mark.parametrize("collate", COLLATORS)
def test_prepared_graphs_give_the_same_batch(collate: GraphormerCollator) -> None:
    graphs = [molecule(6, 1), molecule(9, 2, seed=1)]
    batch = collate(graphs)
    assert len(batch) == 2
    assert same(batch, collate([collate.prepare(graph) for graph in graphs]))
    assert same(batch, next(iter(DataLoader(graphs, batch_size=2, collate_fn=collate))))


@pytest.mark.parametrize("collate", COLLATORS)
def test_batches_are_made_on_the_host(collate: GraphormerCollator) -> None:
    graphs = [molecule(6, 1), molecule(9, 2, seed=1)]
    batch = collate(graphs)
    with torch.device("meta"):
        assert same(batch, collate(graphs))


@pytest.mark.parametrize("collate", COLLATORS)
def test_graphs_of_torch_geometric_are_taken_as_they_are(collate: GraphormerCollator) -> None:
    data = pytest.importorskip("torch_geometric.data")
    graphs = [molecule(6, 1), molecule(9, 2, seed=1)]
    assert same(collate(graphs), collate([data.Data(**vars(graph)) for graph in graphs]))


@pytest.mark.parametrize("collate", COLLATORS)
def test_a_batch_moves_as_one(collate: GraphormerCollator) -> None:
    moved = collate([molecule(6, 1)]).to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 8
    assert all(tensor.device.type == "meta" for tensor in tensors)
    operations = pytest.importorskip("accelerate.utils.operations")
    assert operations.send_to_device(collate([molecule(6, 1)]), "meta").x.device.type == "meta"


@pytest.mark.parametrize("collate", COLLATORS)
def test_features_and_labels_may_be_missing(collate: GraphormerCollator) -> None:
    bare = SimpleNamespace(x=torch.rand(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
    batch = collate([bare])
    assert batch.y is None
    assert batch.edge_attr.tolist() == [[0], [0]]
    assert batch.x.dtype == torch.float32
    alone = SimpleNamespace(x=torch.tensor([3]), edge_index=torch.zeros(2, 0, dtype=torch.long))
    assert collate([alone]).x.shape[-1] == 1


@pytest.mark.parametrize("collate", COLLATORS)
def test_what_makes_no_sense_is_refused(collate: GraphormerCollator) -> None:
    empty = SimpleNamespace(x=torch.zeros(0, 1), edge_index=torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one node"):
        collate([empty])
    graph = molecule(5)
    graph.edge_attr = graph.edge_attr[1:]
    with pytest.raises(ValueError, match="edge_attr has 7 rows for 8 edges"):
        collate([graph])
    labelled, other = molecule(5), molecule(5)
    other.y = torch.zeros(3)
    with pytest.raises(ValueError, match=r"same number of labels .* got \[1, 3\]"):
        collate([labelled, other])
    other.y = None
    with pytest.raises(ValueError, match=r"got \[1, None\]"):
        collate([labelled, other])


def test_arguments_of_the_collators_are_checked() -> None:
    with pytest.raises(ValueError, match="max_hops"):
        GraphormerCollator(0)
    with pytest.raises(ValueError, match="num_patches"):
        GraphViTCollator(0)
    with pytest.raises(ValueError, match="drop_edges"):
        GraphViTCollator(drop_edges=1.0)
    with pytest.raises(ValueError, match="each of 5 nodes a part"):
        GraphViTCollator(partition=lambda *_: torch.zeros(3, dtype=torch.long))([molecule(5)])


def test_padding_fills_every_dimension() -> None:
    padded = pad([torch.ones(1, 2), torch.ones(2, 1)], 7.0)
    assert padded.tolist() == [[[1, 1], [7, 7]], [[1, 7], [1, 7]]]
