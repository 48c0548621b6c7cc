"""Digits: a small, deep Vision Transformer on the 8×8 images that scikit-learn bundles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gfsa.models.attention import Block, SoftmaxAttention
from gfsa_experiments.engine.config import Schedule, TrainConfig
from gfsa_experiments.engine.task import DataSource, Recipe, Split, Task, as_it_is

IMAGE_SIDE = 8
PATCH = 2
CLASSES = 10

SOURCE = DataSource("digits", "none: scikit-learn bundles the images", "pip install scikit-learn")


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(TrainConfig):
    """Settings that were chosen on the validation set."""

    in_label = ("depth",)

    depth: int = 12
    width: int = 48
    heads: int = 4

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
        for name in ("depth", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")

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


class DigitImages(Dataset[Any]):
    """Handwritten digits: ``images (N, 8, 8)`` in [-1, 1] and ``labels (N,)``."""

    def __init__(self, pixels: Any, labels: Any) -> None:
        # pixels range from 0 to 16
        values = torch.as_tensor(pixels, dtype=torch.float32)
        self.images = values.reshape(-1, IMAGE_SIDE, IMAGE_SIDE) / 8 - 1
        self.labels = torch.as_tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        return {"images": self.images[indices], "labels": self.labels[indices]}


@lru_cache(maxsize=1)
def load_digits() -> dict[str, DigitImages]:
    """1,797 digits in a fixed stratified split: 60 % train, 15 % valid, 25 % test."""
    from sklearn.datasets import load_digits as bundled
    from sklearn.model_selection import train_test_split

    images, labels = bundled(return_X_y=True)
    rest, test, rest_labels, test_labels = train_test_split(
        images, labels, test_size=0.25, stratify=labels, random_state=0
    )
    train, valid, train_labels, valid_labels = train_test_split(
        rest, rest_labels, test_size=0.20, stratify=rest_labels, random_state=0
    )
    return {
        "train": DigitImages(train, train_labels),
        "valid": DigitImages(valid, valid_labels),
        "test": DigitImages(test, test_labels),
    }


class DigitsTask(Task):
    """Cross-entropy; accuracy in percent."""

    metric = "accuracy"

    def __init__(self, config: DigitsConfig, data_dir: Path) -> None:
        self.model = DigitsViT(config.depth, config.width, config.heads)
        self.splits = {name: Split(part, as_it_is) for name, part in load_digits().items()}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["images"]), batch["labels"])

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["images"]).argmax(-1) == batch["labels"]

    def score(self, predictions: list[Tensor]) -> dict[str, float]:
        return {"accuracy": 100 * torch.cat(predictions).double().mean().item()}

    def example(self) -> Tensor:
        """The validation images."""
        return load_digits()["valid"].images


RECIPE = Recipe(
    name="digits",
    title="Digits: a deep Vision Transformer on scikit-learn's images, without any files",
    config=DigitsConfig,
    build=DigitsTask,
    sources=(SOURCE,),
)
