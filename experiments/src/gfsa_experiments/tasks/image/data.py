"""Images: CIFAR in memory, and folders of images with one folder per class."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gfsa_experiments.data.files import check_count, not_found, read_npz, source_of
from gfsa_experiments.data.own import (
    Labels,
    entries_of,
    part_named,
    refuse_unseen,
    three_parts,
)

Cifar = Literal["cifar10", "cifar100"]
SIDE = 32
CLASSES: dict[Cifar, int] = {"cifar10": 10, "cifar100": 100}
_COUNTS = {"train": 50_000, "test": 10_000}
_JPEGS = "cifar10_jpeg.npz"

File = tuple[str, int]
"""The path and the class of an image."""


@dataclass(frozen=True)
class Images:
    """Small images that fit into memory: ``pixels (N, 32, 32, 3)`` uint8, ``labels (N,)``."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@functools.lru_cache(maxsize=4)
def read_cifar(data_dir: Path, name: Cifar) -> dict[str, Images]:
    """``train`` and ``test``, from JPEGs in one npz file, or the python version by torchvision."""
    source = source_of(name)
    for folder in (data_dir / inside for inside in source.folders):
        if name == "cifar10" and (folder / _JPEGS).is_file():
            return _read_jpegs(folder / _JPEGS)
        if (folder / ("cifar-10-batches-py" if name == "cifar10" else "cifar-100-python")).is_dir():
            return _from_torchvision(folder, name)
    raise not_found(data_dir, source.files, source)


def _from_torchvision(folder: Path, name: Cifar) -> dict[str, Images]:
    """torchvision checks the files' digests before it unpickles them."""
    from torchvision import datasets

    make = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
    try:
        found = {part: make(str(folder), train=part == "train") for part in _COUNTS}
    except RuntimeError as error:
        raise ValueError(f"{folder} has a damaged {name} ({error}); get it again") from error
    return {p: Images(torch.from_numpy(d.data), torch.tensor(d.targets)) for p, d in found.items()}


def _read_jpegs(path: Path) -> dict[str, Images]:
    """Concatenated JPEG scans with offsets, one header for all, and labels."""
    from torchvision.io import decode_jpeg

    names = ["header", *(f"{kind}_{part}" for kind in ("data", "offset", "y") for part in _COUNTS)]
    arrays = read_npz(path, names)
    header, parts = arrays["header"].tobytes(), {}
    for part, official in _COUNTS.items():
        scans, offsets, labels = (arrays[f"{kind}_{part}"] for kind in ("data", "offset", "y"))
        ends = itertools.pairwise(offsets.tolist())
        files = [bytearray(header + scans[a:b].tobytes() + b"\xff\xd9") for a, b in ends]
        try:
            images = [decode_jpeg(torch.frombuffer(file, dtype=torch.uint8)) for file in files]
            pixels = torch.stack(images).permute(0, 2, 3, 1).contiguous()
        except RuntimeError as error:
            raise ValueError(f"{path} is damaged ({error}); get it again") from error
        if pixels.shape != (len(labels), SIDE, SIDE, 3) or labels.max(initial=0) > 9:
            raise ValueError(f"{path} is damaged: {pixels.shape} pixels of {len(labels)} labels")
        check_count(path, len(labels), official)
        parts[part] = Images(pixels, torch.from_numpy(labels.astype(np.int64)))
    return parts


@dataclass(frozen=True)
class ImageFiles:
    """The files of each part, the classes by name, and how the parts were made."""

    parts: dict[str, list[File]]
    classes: list[str]
    split_by: str


@functools.lru_cache(maxsize=4)
def list_images(root: Path, holdout: float = 0.1) -> ImageFiles:
    """The images in ``train/CLASS``, ``val/CLASS`` and ``test/CLASS``, or in ``CLASS`` alone.

    Parts that are not named are split off: 10 % of all images for test, ``holdout`` for valid; with
    ``val`` and no ``test`` it is ``val`` that is reported.

    Args:
        root: the folder.
        holdout: the share of the training images to validate on, where it is needed; 0 for none.
    """
    inside = sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    folders = {part: folder for folder in inside if (part := part_named(folder.name))}
    if len(folders) < sum(part_named(folder.name) is not None for folder in inside):
        raise ValueError(f"{root} has two folders for one part; leave one of train, val and test")
    if folders and ("train" not in folders or len(folders) == 1):
        raise _not_images(root)
    classes, files = _images_in(folders.get("train", root))
    named = {"train": range(len(files))}
    for part in folders.keys() - {"train"}:
        found = _images_in(folders[part], classes)[1]
        named[part] = range(len(files), len(files) + len(found))
        files = files + found
    labels = [label for _, label in files]
    rows, split_by = three_parts(named, str(root), labels, holdout=holdout)
    refuse_unseen(Labels(tuple(classes), [float(n) for n in labels], ""), rows, str(root))
    parts = {part: [files[row] for row in chosen] for part, chosen in rows.items()}
    return ImageFiles(parts, classes, split_by)


def _images_in(folder: Path, wanted: list[str] | None = None) -> tuple[list[str], list[File]]:
    """The classes and images of a folder, by torchvision; classes that train lacks are refused."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    inside = folder.iterdir() if folder.is_dir() else ()
    there = sorted(p.name for p in inside if p.is_dir() and not p.name.startswith("."))
    classes = there if wanted is None else wanted
    if len(classes) < 2 or set(there) - set(classes):
        raise _not_images(folder, wanted)
    numbers = {name: number for number, name in enumerate(classes)}
    try:
        empty = wanted is not None
        files: list[File] = make_dataset(str(folder), numbers, IMG_EXTENSIONS, allow_empty=empty)
    except FileNotFoundError as error:
        # it names the classes without an image
        raise ValueError(f"{folder}: {error}{entries_of(folder)}") from error
    if not files:
        raise _not_images(folder, wanted)
    return classes, files


def _not_images(root: Path, wanted: list[str] | None = None) -> FileNotFoundError:
    same = f" (those of train: {', '.join(wanted[:5])})" if wanted else ""
    return FileNotFoundError(
        f"expected the folders train and val, each with one folder of images per class{same}, or "
        f"one folder of images per class alone, which are split for you, in {root}; ImageNet is at "
        f"{source_of('folder').where}{entries_of(root)}"
    )


class FolderImages(Dataset[Any]):
    """Pairs of a transformed RGB image and its label, read on demand."""

    def __init__(self, files: Sequence[File], transform: Any) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        path, label = self.files[index]
        try:
            with open(path, "rb") as file, Image.open(file) as image:
                if image.mode.startswith("I"):
                    # of 16 bits the upper 8: Pillow would clip them, everything above 255 white
                    image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
                return self.transform(image.convert("RGB")), label
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
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


def stack(items: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """A batch of transformed images."""
    images, labels = zip(*items, strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}
