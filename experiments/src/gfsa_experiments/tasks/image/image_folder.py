"""Folders of images as ImageNet has them: one folder per part, in it one per class."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from gfsa_experiments.engine.task import DataSource

_ENDINGS = {".jpeg", ".jpg", ".png", ".bmp", ".webp"}

SOURCE = DataSource(
    "folder",
    "train/CLASS/*.JPEG, val/CLASS/*.JPEG and, if there, test/CLASS/*.JPEG",
    "https://www.image-net.org (ILSVRC 2012), or images of your own",
)


@dataclass(frozen=True)
class Listing:
    """The images of a part, and what they show."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]


@functools.lru_cache(maxsize=4)
def list_images(data_dir: Path) -> dict[str, Listing]:
    """``train``, ``val`` and, if it is there, ``test``; classes are numbered by name."""
    train, val = data_dir / "train", data_dir / "val"
    if not train.is_dir() or not val.is_dir():
        raise FileNotFoundError(
            f"looked for the folders train and val in {data_dir}, each with one folder of images "
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
        found = sorted(inside.iterdir()) if inside.is_dir() else []
        images = [path for path in found if path.suffix.lower() in _ENDINGS]
        if folder.name == "train" and not images:
            raise ValueError(f"{inside} has no images ({', '.join(sorted(_ENDINGS))})")
        paths += images
        labels += [label] * len(images)
    if not paths:
        raise ValueError(f"{folder} has no images in folders of the names that train has")
    return Listing(tuple(paths), tuple(labels), classes)


class FolderImages(Dataset[Any]):
    """Pairs of an RGB image (PIL) and its label, read when asked for."""

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
        """The file and the label: how it is decoded depends on the machine's libraries."""
        return self.listing.paths[index].read_bytes(), self.listing.labels[index]
