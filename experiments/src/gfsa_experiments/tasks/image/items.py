"""Images as items of a split: in memory, or in folders as ImageNet has them."""

from __future__ import annotations

import functools
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gfsa_experiments.data.own import entries_of
from gfsa_experiments.data.sources import source_of
from gfsa_experiments.data.splits import PARTS, part_named, three_parts
from gfsa_experiments.data.token_batches import hold_out
from gfsa_experiments.tasks.image.cifar import Images

_ENDINGS = (".jpeg", ".jpg", ".png", ".bmp", ".webp")

File = tuple[str, int]
"""The path and the class of an image."""


@dataclass(frozen=True)
class ImageFiles:
    """The files of each part, the classes by name, and how the parts were made."""

    parts: dict[str, list[File]]
    classes: list[str]
    split_by: str


@functools.lru_cache(maxsize=4)
def list_images(root: Path, holdout: float = 0.1) -> ImageFiles:
    """The images in ``train/CLASS``, ``val/CLASS`` and ``test/CLASS``, or in ``CLASS`` alone.

    With ``val`` and no ``test`` it is ``val`` that is reported, and ``valid`` is held out of train.
    Images without parts are split: 10 % test, ``holdout`` valid, the rest train.

    Args:
        root: the folder.
        holdout: the share of the training images to validate on, where it is needed; 0 for none.
    """
    folders = _part_folders(root)
    if not folders:
        return _split_for_the_caller(root, holdout)
    if "train" not in folders or len(folders) == 1:
        raise _without_parts(root)
    classes = _folders_in(folders["train"])
    if len(classes) < 2:
        raise ValueError(
            f"{folders['train']} has {len(classes)} folder, expected one per class"
            f"{entries_of(folders['train'])}"
        )
    files = {name: _images_of_part(folder, classes) for name, folder in folders.items()}
    _refuse_empty(folders["train"], classes, files["train"])
    if len(files) == len(PARTS):
        return ImageFiles({name: files[name] for name in PARTS}, classes, "the parts that it names")
    reported = "test" if "test" in files else "valid"
    parts = {"train": files["train"], "test": files[reported]}
    split_by = f"{folders[reported].name} is reported as test"
    if holdout:
        train, valid = hold_out(len(files["train"]), holdout)
        parts["train"] = [files["train"][row] for row in train]
        parts["valid"] = [files["train"][row] for row in valid]
        _refuse_lost(classes, parts, holdout)
        split_by += f", valid is {100 * holdout:g} % of train at random, the same in every run"
    return ImageFiles(parts, classes, split_by)


def _part_folders(root: Path) -> dict[str, Path]:
    """The folders of train, valid and test, by whichever of their names they have."""
    folders: dict[str, Path] = {}
    for folder in sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else ():
        part = part_named(folder.name)
        if part is not None and folders.setdefault(part, folder) != folder:
            raise ValueError(
                f"{root} has two folders for {part}, {folders[part].name} and {folder.name}; "
                "leave one of them"
            )
    return folders


def _images_of_part(folder: Path, classes: list[str]) -> list[File]:
    """The images of one part, whose classes must be those of train."""
    unknown = sorted(set(_folders_in(folder)) - set(classes))
    if unknown:
        raise ValueError(f"{folder} has classes that train lacks: {', '.join(unknown[:5])}")
    files = _images_in(folder, classes)
    if not files:
        raise ValueError(
            f"{folder} has no images in folders named like those of train{entries_of(folder)}"
        )
    return files


def _split_for_the_caller(root: Path, holdout: float) -> ImageFiles:
    classes = _folders_in(root)
    files = _images_in(root, classes) if len(classes) > 1 else []
    if not files:
        raise _without_parts(root)
    _refuse_empty(root, classes, files)
    parts, split_by = three_parts(
        {"train": range(len(files))}, str(root), [label for _, label in files], holdout=holdout
    )
    listed = {part: [files[row] for row in rows] for part, rows in parts.items()}
    return ImageFiles(listed, classes, split_by)


def _without_parts(root: Path) -> FileNotFoundError:
    return FileNotFoundError(
        f"expected the folders train and val in {root}, each with one folder of images per class, "
        "or one folder of images per class alone, which are split for you; ImageNet is at "
        f"{source_of('folder').where}{entries_of(root)}"
    )


def _folders_in(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _images_in(folder: Path, classes: list[str]) -> list[File]:
    from torchvision.datasets.folder import make_dataset

    numbers = {name: number for number, name in enumerate(classes)}
    files: list[File] = make_dataset(str(folder), numbers, _ENDINGS, allow_empty=True)
    if files:
        _warn_of_others(folder, classes)
    return files


def _warn_of_others(folder: Path, classes: list[str]) -> None:
    """Warn of files in the folders of classes that are not read."""
    endings = Counter(
        os.path.splitext(name)[1].lower() or "no ending"
        for label in classes
        for _, _, names in os.walk(folder / label, followlinks=True)
        for name in names
        if not name.startswith(".") and not name.lower().endswith(_ENDINGS)
    )
    if endings:
        counts = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(5))
        warnings.warn(
            f"{folder}: {endings.total()} files of its classes are left out ({counts}); images "
            f"are {', '.join(_ENDINGS)}",
            stacklevel=2,
        )


def _refuse_empty(folder: Path, classes: list[str], files: list[File]) -> None:
    """Raise FileNotFoundError if a class has no image to train on."""
    empty = sorted(set(range(len(classes))) - {label for _, label in files})
    if empty:
        names = [classes[number] for number in empty]
        raise FileNotFoundError(
            f"{folder} has no images ({', '.join(_ENDINGS)}) of the classes {', '.join(names[:5])}"
            f"{entries_of(folder / names[0])}"
        )


def _refuse_lost(classes: list[str], parts: dict[str, list[File]], holdout: float) -> None:
    """Raise ValueError if holding out leaves no image of a class to train on, or holds out none."""
    trained = {label for _, label in parts["train"]}
    lost = [name for number, name in enumerate(classes) if number not in trained]
    if lost or not parts["valid"]:
        what = f"no image of {', '.join(lost[:5])} to train on" if lost else "no image in valid"
        raise ValueError(
            f"holdout={holdout:g} leaves {what}; add images or folders of both val and test, or "
            "set another holdout (0 for no valid)"
        )


def read_image(path: str) -> Any:
    """The image in a file, decoded, as RGB (PIL); of 16 bits the upper 8, also of grey ones."""
    import numpy as np
    from PIL import Image

    with open(path, "rb") as file, Image.open(file) as image:
        if image.mode.startswith("I"):
            # Pillow would clip them: everything above 255 white
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        return image.convert("RGB")


class FolderImages(Dataset[Any]):
    """Pairs of an RGB image (PIL) and its label, read on demand."""

    def __init__(self, files: Sequence[File]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        path, label = self.files[index]
        try:
            return read_image(path), label
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
