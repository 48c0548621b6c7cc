"""A GPT of one page, and the three lines that give it filters: those that end in "# gfsa".

pip install .;  python examples/nanogpt.py --steps 100
"""

import argparse
import inspect
import json.decoder

import torch
from torch import Tensor, nn
from torch.nn import functional

import gfsa  # gfsa

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--lr", type=float, default=2e-3)
LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        # its coefficients move at five times the learning rate of the model
        self.filter = gfsa.GFSA(HEADS, K=3, lr_multiplier=5.0)  # gfsa

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        # was: functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = gfsa.graph_filter_attention(q, k, v, self.filter.coefficients(), is_causal=True)  # gfsa
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(ids) + self.place.weight[: ids.shape[1]]))


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(0)
    text = torch.tensor(list(inspect.getsource(json.decoder).encode()))
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    losses = []
    for step in range(options.steps):
        starts = torch.randint(len(text) - LENGTH, (16,))
        ids = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    coefficients = torch.stack([block.attention.filter.coefficients() for block in model.blocks])
    moved = (coefficients - torch.tensor([0.0, 1.0, 0.0])).abs().max().item()
    print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}; filters moved by up to {moved:.3f}")


if __name__ == "__main__":
    main()
