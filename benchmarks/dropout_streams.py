"""What do common dropout masks bring to paired comparisons? Small models on the digits, on a CPU.

    python benchmarks/dropout_streams.py [seeds]

For each seed three runs from the same weights with the same batches: plain and degree 1 with the
same dropout masks (on a CPU a filter of degree 1 draws what plain attention draws), and plain once
more with other masks (a number is drawn before the first step), as under a fused kernel, which
draws less than torch's attention. Printed: mean and standard deviation of degree 1 − plain with the
same masks and with other masks, and the correlation of both arms over the seeds.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import gfsa

DEPTH, WIDTH, HEADS, DROPOUT = 4, 48, 4, 0.1
STEPS, BATCH, RATE, FILTER_RATE = 160, 64, 2e-3, 1e-2
TRAINED = 1000


class Digits(nn.Module):
    """Eight tokens, one for each row of an 8×8 image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.position = nn.Parameter(0.5 * torch.randn(8, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, DROPOUT, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.blocks(self.embed(images) + self.position)
        logits: Tensor = self.head(tokens.mean(1))
        return logits


def train(seed: int, filtered: bool, other_masks: bool) -> tuple[float, float]:
    """Accuracy in percent and cross-entropy on the images that were not trained on."""
    images, labels = digits()
    torch.manual_seed(seed)
    model = Digits()
    groups = [{"params": list(model.parameters()), "lr": RATE}]
    if filtered:
        gfsa.plug(model, K=None)
        groups = gfsa.parameter_groups(model, lr=RATE, filter_lr=FILTER_RATE)
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    peaks = [group["lr"] for group in groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peaks, total_steps=STEPS)
    order = torch.Generator().manual_seed(seed)
    torch.manual_seed(1000 + seed)
    if other_masks:
        torch.rand(1)
    for _ in range(STEPS):
        chosen = torch.randint(TRAINED, (BATCH,), generator=order)
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        logits = model(images[TRAINED:])
    right = (logits.argmax(-1) == labels[TRAINED:]).double().mean()
    return 100 * right.item(), F.cross_entropy(logits, labels[TRAINED:]).item()


def digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    images = torch.tensor(found.images / 8 - 1, dtype=torch.float32)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(found.target)[order]


def refuse_other_masks() -> None:
    """Raise unless degree 1 leaves the generator where plain attention leaves it."""
    states = []
    for filtered in (False, True):
        torch.manual_seed(0)
        model = Digits()
        if filtered:
            gfsa.plug(model, K=None)
        torch.manual_seed(1)
        model(torch.zeros(2, 8, 8))
        states.append(torch.get_rng_state())
    if not torch.equal(*states):
        raise RuntimeError("plain attention and degree 1 draw different random numbers here")


def main() -> None:
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 24)
    torch.set_num_threads(1)
    refuse_other_masks()
    results = {
        arm: np.array([train(seed, *arguments) for seed in seeds])
        for arm, arguments in {
            "degree 1": (True, False),
            "the same masks": (False, False),
            "other masks": (False, True),
        }.items()
    }
    for column, metric in enumerate(("accuracy", "loss")):
        filtered = results["degree 1"][:, column]
        for arm in ("the same masks", "other masks"):
            plain = results[arm][:, column]
            difference = filtered - plain
            print(
                f"{metric}, {arm}: mean {difference.mean():+.4f}, standard deviation "
                f"{difference.std(ddof=1):.4f}, correlation "
                f"{np.corrcoef(filtered, plain)[0, 1]:.2f} over {len(seeds)} seeds"
            )


if __name__ == "__main__":
    main()
