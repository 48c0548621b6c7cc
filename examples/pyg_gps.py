"""GraphGPS of PyTorch Geometric: message passing and filtered global attention in each layer.

pip install '.[graph]';  python examples/pyg_gps.py --epochs 8
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, GPSConv, global_mean_pool

import gfsa

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--filter-lr", type=float, default=1e-2)
WIDTH, CLASSES = 32, 4


class GPS(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, WIDTH)
        mlps = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
        self.layers = nn.ModuleList(GPSConv(WIDTH, GINConv(mlp), heads=4) for mlp in mlps)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, graphs: Data) -> Tensor:
        x = self.first(graphs.x)
        for layer in self.layers:
            x = layer(x, graphs.edge_index, graphs.batch)
        return self.last(global_mean_pool(x, graphs.batch))


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(0)
    # ZINC(root="data") and the like, for real ones
    dataset = FakeDataset(num_graphs=128, avg_num_nodes=20, num_channels=16, num_classes=CLASSES)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)

    model = GPS(dataset.num_features)
    print(gfsa.plug(model, K=3))  # each GPSConv's nn.MultiheadAttention
    groups = gfsa.parameter_groups(model, lr=1e-3, filter_lr=options.filter_lr, weight_decay=1e-5)
    optimizer = torch.optim.AdamW(groups)

    for epoch in range(options.epochs):
        right, total = 0, 0.0
        for graphs in loader:
            out = model(graphs)
            loss = functional.cross_entropy(out, graphs.y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            right += int((out.argmax(-1) == graphs.y).sum())
            total += loss.item() / len(loader)
        print(f"epoch {epoch}: loss {total:.3f}, accuracy {right / len(dataset):.2f}")

    moved = max(f.theta.abs().max().item() for f in gfsa.filters_of(model).values())
    print(f"loss {total:.2f}; filters moved by up to {moved:.3f}")


if __name__ == "__main__":
    main()
