"""Images as items of a split: in memory, or in folders as ImageNet has them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gfsa_experiments.engine.task import DataSource
from gfsa_experiments.tasks.image.cifar import Images

_ENDINGS = {".jpeg", ".jpg", ".png", ".bmp", ".webp"}

SOURCE = DataSource(
    "folder",
    "train/CLASS/*.JPEG, val/CLASS/*.JPEG and, if there, test/CLASS/*.JPEG",
    "https://www.image-net.org (ILSVRC 2012), or images of your own",
)


@dataclass(frozen=True)
class Listing:
    """The image files of one part, and their classes."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]

    def take(self, rows: Sequence[int]) -> Listing:
        """Some of the files."""
        return replace(
            self,
            paths=tuple(self.paths[row] for row in rows),
            labels=tuple(self.labels[row] for row in rows),
        )


@functools.lru_cache(maxsize=4)
def list_images(data_dir: Path) -> dict[str, Listing]:
    """``train``, ``val`` and, if it exists, ``test``; classes are numbered by name."""
    train, val = data_dir / "train", data_dir / "val"
    if not train.is_dir() or not val.is_dir():
        raise FileNotFoundError(
            f"expected the folders train and val in {data_dir}, each with one folder of images "
            f"per class; get them from {SOURCE.where}"
        )
    classes = tuple(sorted(path.name for path in train.iterdir() if path.is_dir()))
    if len(classes) < 2:
        raise ValueError(f"{train} has {len(classes)} folders, expected one for each class")
    parts = {"train": _list(train, classes), "val": _list(val, classes)}
    if (data_dir / "test").is_dir():
        parts["test"] = _list(data_dir / "test", classes)
    return parts


def _list(folder: Path, classes: tuple[str, ...]) -> Listing:
    unknown = sorted(
        path.name for path in folder.iterdir() if path.is_dir() and path.name not in set(classes)
    )
    if unknown:
        raise ValueError(f"{folder} has classes that train lacks: {', '.join(unknown[:5])}")
    paths, labels = [], []
    for label, name in enumerate(classes):
        inside = folder / name
        files = sorted(inside.iterdir()) if inside.is_dir() else []
        images = [path for path in files if path.suffix.lower() in _ENDINGS]
        if folder.name == "train" and not images:
            raise ValueError(f"{inside} has no images ({', '.join(sorted(_ENDINGS))})")
        paths += images
        labels += [label] * len(images)
    if not paths:
        raise ValueError(f"{folder} has no images in folders named like those of train")
    return Listing(tuple(paths), tuple(labels), classes)


class FolderImages(Dataset[Any]):
    """Pairs of an RGB image (PIL) and its label, read on demand."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing

    def __len__(self) -> int:
        return len(self.listing.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image, UnidentifiedImageError

        path = self.listing.paths[index]
        try:
            with Image.open(path) as image:
                return image.convert("RGB"), self.listing.labels[index]
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise ValueError(
                f"{path} is no readable image: {error}; replace or delete it"
            ) from error

    def source(self, index: int) -> tuple[bytes, int]:
        """File and label: the decoded pixels depend on the machine's libraries."""
        return self.listing.paths[index].read_bytes(), self.listing.labels[index]


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
        # index_select copies whole rows, advanced indexing would copy byte by byte
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
