"""A small diffusion transformer (DiT) on timm's attention, trained as a rectified flow.

pip install '.[timm]';  python examples/diffusion.py --steps 250
"""

import argparse

import torch
from timm.layers import Attention, Mlp
from torch import Tensor, nn

import gfsa

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=250)
parser.add_argument("--filter-lr", type=float, default=1e-2)
SIZE, PATCH, WIDTH, LAYERS = 16, 4, 64, 3


class Block(nn.Module):
    """Attention and MLP, each scaled, shifted and gated by the time (adaLN)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention, self.mlp = Attention(WIDTH, num_heads=4), Mlp(WIDTH, 4 * WIDTH)
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        a, b, c, d, e, f = self.modulation(time)[:, None].chunk(6, dim=-1)
        x = x + a * self.attention(self.norm(x) * (1 + b) + c)
        return x + d * self.mlp(self.norm(x) * (1 + e) + f)


class DiT(nn.Module):
    """The velocity from noise to image, from a noisy image and its time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(
            nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()
        )
        self.first = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.place = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.ConvTranspose2d(WIDTH, 1, PATCH, PATCH)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        tokens, time = self.first(image).flatten(2).mT + self.place, self.time(time[:, None])
        for block in self.blocks:
            tokens = block(tokens, time)
        return self.last(tokens.mT.unflatten(-1, (SIZE // PATCH, -1)))


def discs(count: int) -> Tensor:
    """Images of one bright disc somewhere on a dark ground."""
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, SIZE)] * 2, indexing="ij"))
    centre = torch.rand(count, 2, 1, 1) - 0.5
    return torch.tanh(8 * (0.4 - (grid - centre).norm(dim=1, keepdim=True)))


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(0)
    model = DiT()
    print(gfsa.plug(model, K=3))
    optimizer = torch.optim.AdamW(
        gfsa.parameter_groups(model, lr=2e-3, filter_lr=options.filter_lr)
    )
    losses = []
    for _ in range(options.steps):
        image, time = discs(32), torch.rand(32)
        noise, t = torch.randn_like(image), time.view(-1, 1, 1, 1)
        loss = (model(t * image + (1 - t) * noise, time) - (image - noise)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    sample, steps = torch.randn(1, 1, SIZE, SIZE), 20
    with torch.no_grad():
        for step in range(steps):
            sample += model(sample, torch.tensor([step / steps])) / steps
    for row in sample[0, 0, ::2]:
        print("".join("█" if value > 0 else "·" for value in row))
    moved = max(f.theta.abs().max().item() for f in gfsa.filters_of(model).values())
    print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}; filters moved by up to {moved:.3f}")


if __name__ == "__main__":
    main()
