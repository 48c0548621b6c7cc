"""Fine-tune a Vision Transformer of timm: one line to plug it, one for the optimizer.

pip install '.[timm]';  python examples/timm_finetune.py --steps 60
"""

import argparse
import math

import timm
import torch
from torch import Tensor
from torch.nn import functional

import gfsa

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--lr", type=float, default=5e-4)
parser.add_argument("--filter-lr", type=float, default=1e-2)
CLASSES = 4


def stripes(count: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Noisy images of stripes; the class is their direction."""
    labels = torch.randint(CLASSES, (count,))
    angle = (labels * math.pi / CLASSES).view(-1, 1, 1)
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    phase = torch.rand(count, 1, 1) * 2 * math.pi
    waves = torch.sin((x * angle.cos() + y * angle.sin()) * 0.8 + phase)
    return waves[:, None].expand(-1, 3, -1, -1) + torch.randn(count, 3, size, size), labels


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(0)
    # pretrained=True for weights to start from
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, num_classes=CLASSES
    )
    print(gfsa.plug(model, K=3))
    groups = gfsa.parameter_groups(
        model, lr=options.lr, filter_lr=options.filter_lr, weight_decay=0.05
    )
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    model.train()
    for step in range(options.steps):
        images, labels = stripes(32)
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    images, labels = stripes(256)
    with torch.no_grad():
        accuracy = (model.eval()(images).argmax(-1) == labels).float().mean().item()
    moved = max(f.theta.abs().max().item() for f in gfsa.filters_of(model).values())
    print(f"accuracy {accuracy:.2f}; filters moved by up to {moved:.3f}")


if __name__ == "__main__":
    main()
