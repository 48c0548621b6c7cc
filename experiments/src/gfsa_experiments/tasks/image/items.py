"""Images as items of a split: in memory, or in folders as ImageNet has them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gfsa_experiments.data.sources import source_of
from gfsa_experiments.tasks.image.cifar import Images

_ENDINGS = (".jpeg", ".jpg", ".png", ".bmp", ".webp")

File = tuple[str, int]
"""The path and the class of an image."""


@functools.lru_cache(maxsize=4)
def list_images(data_dir: Path) -> tuple[dict[str, list[File]], list[str]]:
    """The files of ``train``, ``val`` and, if it exists, ``test``; and the classes, by name."""
    from torchvision.datasets.folder import find_classes, make_dataset

    folders = {name: data_dir / name for name in ("train", "val", "test")}
    if not folders["test"].is_dir():
        del folders["test"]
    if not all(folder.is_dir() for folder in folders.values()):
        raise FileNotFoundError(
            f"expected the folders train and val in {data_dir}, each with one folder of images "
            f"per class; get them from {source_of('folder').where}"
        )
    classes, numbers = find_classes(folders["train"])
    if len(classes) < 2:
        raise ValueError(f"{folders['train']} has {len(classes)} folder, expected one per class")
    files = {}
    for name, folder in folders.items():
        unknown = sorted(set(find_classes(folder)[0]) - set(classes))
        if unknown:
            raise ValueError(f"{folder} has classes that train lacks: {', '.join(unknown[:5])}")
        files[name] = make_dataset(folder, numbers, _ENDINGS, allow_empty=name != "train")
        if not files[name]:
            raise ValueError(f"{folder} has no images in folders named like those of train")
    return files, classes


class FolderImages(Dataset[Any]):
    """Pairs of an RGB image (PIL) and its label, read on demand."""

    def __init__(self, files: Sequence[File]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from torchvision.datasets.folder import pil_loader

        path, label = self.files[index]
        try:
            return pil_loader(path), label
        except (OSError, SyntaxError) as error:
            raise ValueError(
                f"{path} is no readable image: {error}; replace or delete it"
            ) from error

    def source(self, index: int) -> tuple[bytes, int]:
        """File and label: the decoded pixels depend on the machine's libraries."""
        path, label = self.files[index]
        return Path(path).read_bytes(), label


class MemoryImages(Dataset[Any]):
    """Some of the images in memory; a batch is one indexing operation."""

    def __init__(self, images: Images, indices: Sequence[int]) -> None:
        self.images, self.indices = images, torch.as_tensor(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """An image for timm's transforms (PIL) and its label."""
        from PIL import Image

        pixels, label = self.source(index)
        return Image.fromarray(pixels.numpy()), label

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        at = self.indices[indices]
        return {
            "images": self.images.pixels.index_select(0, at),
            "labels": self.images.labels.index_select(0, at),
        }

    def source(self, index: int) -> tuple[Tensor, int]:
        """Pixels and label before any transform."""
        at = self.indices[index]
        return self.images.pixels[at], int(self.images.labels[at])


class Transformed(Dataset[Any]):
    """Pairs of image and label, with the image transformed."""

    def __init__(self, dataset: FolderImages | MemoryImages, transform: Any) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.dataset[index]
        return self.transform(image), label

    def source(self, index: int) -> Any:
        """The image before its transform."""
        return self.dataset.source(index)


def stack(items: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """A batch of transformed images."""
    images, labels = zip(*items, strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}
