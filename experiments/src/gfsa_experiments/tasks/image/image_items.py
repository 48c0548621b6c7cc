"""Images as items and batches of a split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gfsa_experiments.tasks.image.cifar import Images


class MemoryImages(Dataset[Any]):
    """Some of the images in memory; a batch is one indexing operation."""

    def __init__(self, images: Images, indices: Sequence[int]) -> None:
        self.images, self.indices = images, torch.as_tensor(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """An image for timm's transforms (PIL) and its label."""
        from PIL import Image

        at = self.indices[index]
        return Image.fromarray(self.images.pixels[at].numpy()), int(self.images.labels[at])

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        at = self.indices[indices]
        # whole rows: index_select copies them, square brackets would go byte by byte
        return {
            "images": self.images.pixels.index_select(0, at),
            "labels": self.images.labels.index_select(0, at),
        }

    def source(self, index: int) -> Any:
        """Pixels and label, whatever becomes of them."""
        at = self.indices[index]
        return self.images.pixels[at], int(self.images.labels[at])


class Subset(Dataset[Any]):
    """Items of a dataset by index. (torch's own would hand on ``__getitems__``.)"""

    def __init__(self, dataset: Dataset[Any], indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]

    def source(self, index: int) -> Any:
        return self.dataset.source(self.indices[index])  # type: ignore[attr-defined]


class Transformed(Dataset[Any]):
    """Pairs of image and label, the image through a transform."""

    def __init__(self, dataset: Dataset[Any], transform: Any) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.dataset[index]
        return self.transform(image), label

    def source(self, index: int) -> Any:
        """The image before its transform."""
        return self.dataset.source(index)  # type: ignore[attr-defined]


def stack(items: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """A batch of transformed images."""
    images, labels = zip(*items, strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}
