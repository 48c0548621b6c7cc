"""Graph models of PyTorch Geometric."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, GPSConv, attention, global_mean_pool
from torch_geometric.transforms import AddRandomWalkPE

import gfsa
from support.plugging import check_backbone, disturb

DIM, HEADS = 16, 4


class GPS(nn.Module):
    """Node features and random-walk encodings, message passing beside attention, one answer."""

    def __init__(self, attention: str = "multihead") -> None:
        super().__init__()
        self.features = nn.Linear(5, DIM - 4)
        self.encodings = nn.Linear(3, 4)
        self.layers = nn.ModuleList(
            GPSConv(
                DIM, GINConv(nn.Linear(DIM, DIM)), HEADS, norm="layer_norm", attn_type=attention
            )
            for _ in range(2)
        )
        self.out = nn.Linear(DIM, 2)

    def forward(self, batch: Batch) -> Tensor:
        encoded = self.encodings(batch.random_walk_pe.to(self.out.weight.dtype))
        x = torch.cat([self.features(batch.x.to(self.out.weight.dtype)), encoded], -1)
        for layer in self.layers:
            x = layer(x, batch.edge_index, batch.batch)
        return self.out(global_mean_pool(x, batch.batch))


def graph(nodes: int) -> Data:
    features = torch.randn(nodes, 5, generator=torch.Generator().manual_seed(nodes))
    ring = torch.arange(nodes)
    edges = torch.stack([ring, (ring + 1) % nodes])
    chord = torch.tensor([[0], [nodes // 2]])
    edges = torch.cat([edges, chord, edges.flip(0), chord.flip(0)], 1)
    return AddRandomWalkPE(3)(Data(x=features, edge_index=edges))


GRAPHS = [graph(nodes) for nodes in (4, 9, 6)]


def run(model: nn.Module) -> Tensor:
    return model(Batch.from_data_list(GRAPHS))


def test_gps(tmp_path):
    report = check_backbone(GPS, run, tmp_path)
    assert report.plugged == {"layers.0.attn": HEADS, "layers.1.attn": HEADS}


@torch.no_grad()
def test_a_ragged_batch_is_its_graphs_one_by_one():
    model = GPS().double().eval()
    gfsa.plug(model)
    disturb(model)
    together = run(model)
    alone = torch.cat([model(Batch.from_data_list([graph])) for graph in GRAPHS])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


def test_linear_attention_is_refused():
    # the oldest version has the first of them alone
    newer = ("SGFormerAttention", "PolynormerAttention")
    kinds = [getattr(attention, name) for name in newer if hasattr(attention, name)]
    for model in (GPS("performer"), *(kind(DIM, HEADS) for kind in kinds)):
        for unknown in ("refuse", "trace"):
            with pytest.raises(ValueError, match="linear attention has no n×n map"):
                gfsa.plug(model, unknown=unknown)
