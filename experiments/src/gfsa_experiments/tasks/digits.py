"""Digits: a small, deep Vision Transformer on the 8×8 images that scikit-learn bundles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gfsa_experiments.engine.config import Count, Schedule, TrainConfig, check_multiple
from gfsa_experiments.engine.task import (
    Classification,
    Recipe,
    Split,
    TensorRows,
    as_it_is,
)
from gfsa_experiments.models.attention import Block, SoftmaxAttention

IMAGE_SIDE = 8
PATCH = 2
CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(TrainConfig):
    """Settings that were chosen on the validation set."""

    in_label = ("depth",)

    depth: Count = 12
    width: Count = 48
    heads: Count = 4

    epochs: float = 8
    batch_size: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.05
    schedule: Schedule = "cosine"
    warmup: float = 0.2
    clip: float = 0.0
    drop_last: bool = True
    eval_every: float = 8

    def check(self) -> None:
        super().check()
        check_multiple(self, "width", "heads")

    def unused(self) -> dict[str, str]:
        return super().unused() | {"group_by_length": "every image has the same size"}

    def sketch(self) -> nn.Module:
        with torch.device("meta"):
            return DigitsViT(self.depth, self.width, self.heads)

    def label(self) -> str:
        return f"digits vit-d{self.depth}"


class DigitsViT(nn.Module):
    """A Vision Transformer for 8×8 images: 16 tokens of 2×2 pixels, and a class token.

    Args:
        depth: attention layers.
        width: of the tokens.
        heads: attention heads per layer.
    """

    def __init__(self, depth: int = 12, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH**2, width)
        # as large as the embeddings: positions ten times smaller are learned ten times slower
        self.position = nn.Parameter(0.5 * torch.randn((IMAGE_SIDE // PATCH) ** 2, width))
        self.class_token = nn.Parameter(0.5 * torch.randn(1, 1, width))
        self.blocks = nn.ModuleList(
            Block(SoftmaxAttention(width, heads), width, 2 * width) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def tokens(self, images: Tensor) -> list[Tensor]:
        """The tokens ``(B, 17, width)`` that enter the first block and leave each block."""
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
        x = self.embed(patches.flatten(3).flatten(1, 2)) + self.position
        states = [torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, 10)``."""
        logits: Tensor = self.head(self.norm(self.tokens(images)[-1][:, 0]))
        return logits


@lru_cache(maxsize=1)
def load_digits() -> dict[str, TensorRows]:
    """1,797 digits in a fixed stratified split: 60 % train, 15 % valid, 25 % test.

    ``images (N, 8, 8)`` in [-1, 1] and ``labels (N,)``.
    """
    from sklearn.datasets import load_digits as bundled
    from sklearn.model_selection import train_test_split

    def split(share: float, images: Any, labels: Any) -> Any:
        return train_test_split(images, labels, test_size=share, stratify=labels, random_state=0)

    rest, test, rest_labels, test_labels = split(0.25, *bundled(return_X_y=True))
    train, valid, train_labels, valid_labels = split(0.20, rest, rest_labels)
    parts = {
        "train": (train, train_labels),
        "valid": (valid, valid_labels),
        "test": (test, test_labels),
    }
    return {name: _rows(pixels, labels) for name, (pixels, labels) in parts.items()}


def _rows(pixels: Any, labels: Any) -> TensorRows:
    # pixels range from 0 to 16
    images = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, IMAGE_SIDE, IMAGE_SIDE)
    return TensorRows(images=images / 8 - 1, labels=torch.as_tensor(labels))


class DigitsTask(Classification):
    """The digit of an image."""

    def __init__(self, config: DigitsConfig, data_dir: Path) -> None:
        self.model = DigitsViT(config.depth, config.width, config.heads)
        self.splits = {name: Split(part, as_it_is) for name, part in load_digits().items()}

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(batch["images"])
        return logits

    def example(self) -> Tensor:
        """The validation images."""
        return load_digits()["valid"].columns["images"]


RECIPE = Recipe(
    name="digits",
    title="Digits: a deep Vision Transformer on scikit-learn's images, without any files",
    config=DigitsConfig,
    build=DigitsTask,
)
