"""Image classification from scratch with timm's models and DeiT's recipe.

CIFAR lies in memory; images in folders, one folder per class, are read by worker processes.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from gfsa_experiments.data import own
from gfsa_experiments.data.files import check_count, read_npz, source_of
from gfsa_experiments.engine.batches import SeededItems
from gfsa_experiments.engine.config import (
    CountOrZero,
    NotNegative,
    Schedule,
    Share,
    TrainConfig,
    as_text,
)
from gfsa_experiments.engine.task import Split, Task, TensorRows, as_it_is

# short names of the paper's models; any other name is one of timm's
MODELS = {
    "deit_tiny": "deit_tiny_patch16_224",
    "deit_small": "deit_small_patch16_224",
    "cait_s24": "cait_s24_224",
    "swin_small": "swin_small_patch4_window7_224",
}
# classes, and mean and deviation of the pixels
_CIFAR: dict[str, tuple[int, Sequence[float], Sequence[float]]] = {
    "cifar10": (10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": (100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
# black pixels around an image of CIFAR before a random crop of its size
_PADDING = 4

Cifar = Literal["cifar10", "cifar100"]
SIDE = 32
_COUNTS = {"train": 50_000, "test": 10_000}
_JPEGS = "cifar10_jpeg.npz"

File = tuple[str, int]
"""The path and the class of an image."""


@dataclass(frozen=True, kw_only=True)
class ImageConfig(TrainConfig):
    """DeiT's settings on ImageNet; sizes of 0 follow the data set, CIFAR's images included."""

    in_label = ("data", "dataset", "model", "depth")
    used_if = (("dataset=folder", "data auto_augment"), ("mixup", "switch"), ("cutmix", "switch"))

    data: str = ""
    """A folder of images of the caller's own; empty: ``--data-dir`` itself, with ``folder``."""
    dataset: Literal["folder", "cifar10", "cifar100"] = "folder"
    """``folder``: train/, val/ and perhaps test/, with one folder per class, or these alone."""
    model: str = "deit_small"
    """deit_tiny, deit_small, cait_s24, swin_small, or the name of a Transformer in timm."""
    depth: CountOrZero = 0
    """Layers; 0: the model's own."""
    image_size: CountOrZero = 0
    """Side of the model's input; 0: 32 for CIFAR, and timm's default for the model on folders."""
    patch_size: CountOrZero = 0
    """0: the model's own; for CIFAR 4 (2 for Swin, whose windows then have 4×4 tokens)."""
    holdout: Share = 0.1
    """Share of the training images held out for validation; unused with both val/ and test/."""
    auto_augment: str = "rand-m9-mstd0.5-inc1"
    """timm's RandAugment policy, for images in folders; empty for none."""
    erase: Share = 0.25
    """Probability of Random Erasing."""
    mixup: NotNegative = 0.8
    cutmix: NotNegative = 1.0
    switch: Share = 0.5
    """Probability of CutMix rather than Mixup."""
    smoothing: Share = 0.1
    drop_path: Share = 0.1
    dropout: Share = 0.0
    """After attention and inside the MLPs."""

    epochs: float = 300
    batch_size: int = 1024
    lr: float = 1e-3
    weight_decay: float = 0.05
    schedule: Schedule = "cosine"
    warmup: float = 5 / 300
    min_lr: float = 0.01
    clip: float = 0.0
    ema: float = 0.99996
    drop_last: bool = True
    workers: int = 8

    def check(self) -> None:
        super().check()
        if self.is_cifar and self.image_size not in (0, SIDE):
            raise ValueError(f"images of CIFAR have image_size={SIDE}, got {self.image_size}")
        if self.depth and self._is_swin:
            raise ValueError("Swin has stages of 2, 2, 18 and 2 layers: depth cannot be set")
        if not 0 < self.holdout < 1 and self.is_cifar:
            raise ValueError(
                f"{self.dataset} has no validation part: holdout must lie between 0 and 1, "
                f"got {self.holdout}"
            )

    def label(self) -> str:
        folder = f"folder={own.name_of(self.data)}" if self.data else "folder"
        data = self.dataset if self.is_cifar else folder
        return f"{data} {self.model}" + (f"-d{self.depth}" if self.depth else "")

    def unused(self) -> dict[str, str]:
        return super().unused() | {"group_by_length": "every image has the same size"}

    def sketch(self) -> nn.Module | None:
        if find_spec("timm") is None:
            return None
        try:
            return _checked_model(self, "meta")
        except ValueError:
            # some models cannot be built on meta; those that cannot be built at all raise again
            return _checked_model(self, "cpu")

    @property
    def size(self) -> int:
        return SIDE if self.is_cifar else self.image_size or _own_size(self.timm_name)

    @property
    def timm_name(self) -> str:
        return MODELS.get(self.model, self.model)

    @property
    def is_cifar(self) -> bool:
        return self.dataset != "folder"

    @property
    def _is_swin(self) -> bool:
        return self.model.startswith("swin")

    def model_arguments(self) -> dict[str, Any]:
        """The keyword arguments for ``timm.create_model``."""
        # Swin's own default is above 0
        arguments: dict[str, Any] = {"drop_path_rate": self.drop_path}
        # arguments that change nothing are left out: not every model accepts them
        if self.size != _own_size(self.timm_name):
            arguments["img_size"] = self.size
        if self.dropout:
            arguments["proj_drop_rate"] = self.dropout
        if self.depth:
            arguments["depth"] = self.depth
        if self.patch_size:
            arguments["patch_size"] = self.patch_size
        elif self.is_cifar:
            arguments["patch_size"] = 2 if self._is_swin else 4
        if self._is_swin and self.is_cifar:
            arguments["window_size"] = 4
        return arguments


@lru_cache(maxsize=4)
def read_cifar(data_dir: Path, name: Cifar) -> dict[str, TensorRows]:
    """``train`` and ``test``, from JPEGs in one npz file, or the python version by torchvision.

    ``images (N, 32, 32, 3)`` are uint8.
    """
    source = source_of(name)
    for folder in (data_dir / inside for inside in source.folders):
        if name == "cifar10" and (folder / _JPEGS).is_file():
            return _read_jpegs(folder / _JPEGS)
        if (folder / ("cifar-10-batches-py" if name == "cifar10" else "cifar-100-python")).is_dir():
            return _from_torchvision(folder, name)
    raise source.missing(data_dir, source.files)


def cifar_parts(data_dir: Path, name: Cifar, holdout: float) -> dict[str, TensorRows]:
    """``train``, ``valid``, which is held out of it, and ``test``."""
    both = read_cifar(data_dir, name)
    named = zip(("train", "valid"), own.hold_out(len(both["train"]), holdout), strict=True)
    parts = {part: TensorRows(**both["train"].__getitems__(rows)) for part, rows in named}
    # an object of its own: a run seals its test split
    return parts | {"test": TensorRows(**both["test"].columns)}


def _from_torchvision(folder: Path, name: Cifar) -> dict[str, TensorRows]:
    """torchvision checks the files' digests before it unpickles them."""
    from torchvision import datasets

    make = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
    try:
        found = {part: make(str(folder), train=part == "train") for part in _COUNTS}
    except RuntimeError as error:
        raise ValueError(f"{folder} has a damaged {name} ({error}); get it again") from error
    return {
        part: TensorRows(images=torch.from_numpy(one.data), labels=torch.tensor(one.targets))
        for part, one in found.items()
    }


def _read_jpegs(path: Path) -> dict[str, TensorRows]:
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
        parts[part] = TensorRows(images=pixels, labels=torch.from_numpy(labels.astype(np.int64)))
    return parts


@dataclass(frozen=True)
class ImageFiles:
    """The files of each part, the classes by name, and how the parts were made."""

    parts: dict[str, list[File]]
    classes: list[str]
    split_by: str


@lru_cache(maxsize=4)
def list_images(root: Path, holdout: float = 0.1) -> ImageFiles:
    """The images in ``train/CLASS``, ``val/CLASS`` and ``test/CLASS``, or in ``CLASS`` alone.

    Parts that are not named are split off: 10 % of all images for test, ``holdout`` for valid; with
    ``val`` and no ``test`` it is ``val`` that is reported.
    """
    inside = sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    folders = {part: folder for folder in inside if (part := own.part_named(folder.name))}
    if len(folders) < sum(own.part_named(folder.name) is not None for folder in inside):
        raise ValueError(f"{root} has two folders for one part; leave one of train, val and test")
    if folders and ("train" not in folders or len(folders) == 1):
        raise _not_images(root)
    classes, files = _images_in(folders.get("train", root))
    named = {"train": range(len(files))}
    for part in folders.keys() - {"train"}:
        found = _images_in(folders[part], classes)[1]
        named[part] = range(len(files), len(files) + len(found))
        files = files + found
    labels = own.Labels(tuple(classes), [float(label) for _, label in files], "")
    rows, split_by = own.three_parts(named, str(root), labels.values, holdout=holdout)
    own.refuse_unseen(labels, rows, str(root))
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
        raise ValueError(f"{folder}: {error}{own.entries_of(folder)}") from error
    if not files:
        raise _not_images(folder, wanted)
    return classes, files


def _not_images(root: Path, wanted: list[str] | None = None) -> FileNotFoundError:
    same = f" (those of train: {', '.join(wanted[:5])})" if wanted else ""
    return FileNotFoundError(
        f"expected the folders train and val, each with one folder of images per class{same}, or "
        f"one folder of images per class alone, which are split for you, in {root}; ImageNet is at "
        f"{source_of('folder').where}{own.entries_of(root)}"
    )


@dataclass(eq=False)
class FolderImages(Dataset[Any]):
    """Transformed RGB ``images`` and their ``labels``, read on demand."""

    files: Sequence[File]
    transform: Any

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        from PIL import Image

        path, label = self.files[index]
        try:
            with open(path, "rb") as file, Image.open(file) as image:
                if image.mode.startswith("I"):
                    # of 16 bits the upper 8: Pillow would clip them, everything above 255 white
                    image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
                return {"images": self.transform(image.convert("RGB")), "labels": label}
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(
                f"{path} is no readable image: {error}; replace or delete it"
            ) from error


class Normalise:
    """Pixels ``(B, H, W, 3)``, uint8, to a model's input ``(B, 3, H, W)``, float."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        # (x/255 − mean)/std = x·scale + shift
        self._scale = 1 / (255 * torch.tensor(std).view(3, 1, 1))
        self._shift = -(torch.tensor(mean) / torch.tensor(std)).view(3, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        self._scale, self._shift = self._scale.to(pixels.device), self._shift.to(pixels.device)
        images = pixels.permute(0, 3, 1, 2).float()
        return torch.addcmul(self._shift, images, self._scale).contiguous()


@contextmanager
def _seeded_by_torch() -> Iterator[None]:
    """timm draws from Python and numpy: seeded from torch's generator, which checkpoints store."""
    states = random.getstate(), np.random.get_state()
    seed = int(torch.randint(2**31, ()))
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def crop_and_flip(pixels: Tensor, padding: int) -> Tensor:
    """Each image of ``(B, H, W, 3)`` shifted by up to ``padding`` pixels, filled with black, and
    randomly mirrored."""
    count, height, width, _ = pixels.shape
    device = pixels.device
    padded = F.pad(pixels, (0, 0, padding, padding, padding, padding))
    corners = torch.randint(2 * padding + 1, (2, count, 1), device=device)
    mirrored = torch.rand(count, 1, device=device) < 0.5
    across = torch.arange(width, device=device)
    rows = corners[0] + torch.arange(height, device=device)
    columns = corners[1] + torch.where(mirrored, width - 1 - across, across)
    image = torch.arange(count, device=device)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]]


class ImageTask(Task):
    """Cross-entropy with soft targets; accuracy in percent.

    Images of CIFAR are cropped, flipped and erased here, a whole batch on the device; timm's
    transforms have done so to images in folders. timm mixes pairs of both.
    """

    metric = "accuracy"

    def __init__(self, config: ImageConfig, data_dir: Path) -> None:
        self.config, self.splits = config, {}
        #: of images that are not the model's input yet
        self.normalise: Normalise | None = None
        if config.is_cifar:
            name: Any = config.dataset
            self.num_classes, *of_pixels = _CIFAR[name]
            self.normalise = Normalise(*of_pixels)
            parts = cifar_parts(Path(data_dir), name, config.holdout)
            self.splits = {part: Split(rows, as_it_is) for part, rows in parts.items()}
        else:
            root = data_dir
            if config.data:
                root = own.find(config.data, data_dir, "a folder of images")
            self._take_files(list_images(Path(root).absolute(), config.holdout), str(root))
        self.model = make_model(config, self.num_classes)

    def _take_files(self, files: ImageFiles, root: str) -> None:
        config = self.config
        # which files are in which part and class: one may have moved to another
        pieces = (
            piece
            for part, listed in files.parts.items()
            for path, label in listed
            for piece in (part, files.classes[label], os.fsencode(os.path.basename(path)))
        )
        labels = f"classification, {len(files.classes)} classes: {own.some(files.classes)}"
        where = config.data or root
        facts = own.facts(
            where, where, files.parts, files.split_by, pieces, labels=labels, unit="images"
        )
        # rows on --data-dir itself were recorded without a digest
        self.own_data = facts if config.data else replace(facts, digest="")
        self.num_classes = len(files.classes)
        for part, listed in files.parts.items():
            read: Any = FolderImages(listed, _transform(config, training=part == "train"))
            items = SeededItems(read, config.seed) if part == "train" else read
            self.splits[part] = Split(items, default_collate)

    def inputs(self, images: Tensor) -> Tensor:
        """Images without augmentation, as the model takes them."""
        return images if self.normalise is None else self.normalise(images)

    def prepare(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """``images`` and ``labels`` to augmented ``images`` and soft ``targets``."""
        from timm.data import Mixup
        from timm.data.mixup import mixup_target
        from timm.data.random_erasing import RandomErasing

        config, images, labels = self.config, batch["images"], batch["labels"]
        if self.normalise is not None:
            images = self.normalise(crop_and_flip(images, _PADDING))
        with _seeded_by_torch():
            if self.normalise is not None and config.erase:
                images = RandomErasing(config.erase, mode="pixel", device=images.device)(images)
            if not (config.mixup or config.cutmix):
                targets = mixup_target(labels, self.num_classes, 1.0, config.smoothing)
                return {"images": images, "targets": targets}
            if len(images) % 2:
                raise ValueError(
                    f"Mixup mixes pairs, the batch has {len(images)} images: "
                    "set an even batch_size and drop_last=true"
                )
            mix = Mixup(
                config.mixup,
                config.cutmix,
                switch_prob=config.switch,
                label_smoothing=config.smoothing,
                num_classes=self.num_classes,
            )
            # timm works in place
            images, targets = mix(images.clone(), labels)
        return {"images": images, "targets": targets}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_probs = F.log_softmax(model(batch["images"]), dim=-1)
        return torch.sum(-batch["targets"] * log_probs, dim=-1).mean()

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = model(self.inputs(batch["images"])).float()
        labels = batch["labels"]
        best = logits.topk(min(5, self.num_classes)).indices == labels[:, None]
        loss = nn.functional.cross_entropy(logits, labels, reduction="none")
        return {"top1": best[:, 0], "top5": best.any(1), "loss": loss}

    def score(self, predictions: list[dict[str, Tensor]]) -> dict[str, float]:
        top1, top5, loss = (
            torch.cat([batch[name] for batch in predictions]).double().mean().item()
            for name in ("top1", "top5", "loss")
        )
        scores = {"accuracy": 100 * top1, "loss": loss}
        return scores | ({"top5": 100 * top5} if self.num_classes > 10 else {})

    def example(self) -> Tensor:
        """Some validation images (test images, if there are none), as the model takes them."""
        return self.inputs(self.first_examples(32)["images"])

    def identity(self, split: str, index: int) -> Any:
        """The image as it was read, before any transform."""
        dataset: Any = self.splits[split].dataset
        if isinstance(dataset, TensorRows):
            return dataset.columns["images"][index], int(dataset.columns["labels"][index])
        folder: Any = dataset.dataset if isinstance(dataset, SeededItems) else dataset
        path, label = folder.files[index]
        # the decoded pixels depend on the machine's libraries
        return Path(path).read_bytes(), label


# settings by the names of timm's arguments
_SETTING = {"img_size": "image_size", "drop_path_rate": "drop_path", "proj_drop_rate": "dropout"}


def make_model(config: ImageConfig, num_classes: int) -> nn.Module:
    """timm's model with fresh weights."""
    import timm

    name, arguments = config.timm_name, config.model_arguments()
    if not timm.is_model(name):
        known = ", ".join(MODELS)
        raise ValueError(f"timm has no model {name!r}; short names here: {known}")
    try:
        model: nn.Module = timm.create_model(name, num_classes=num_classes, **arguments)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        given = as_text({_SETTING.get(key, key): value for key, value in arguments.items()})
        small = f" (sizes that are not set follow {config.dataset})"
        raise ValueError(
            f"timm cannot build {name} with {given}{small if config.dataset != 'folder' else ''}: "
            f"{error}; change these settings, or use a model that accepts them"
        ) from error
    return model


def _own_size(name: str) -> int:
    """Side of the images that one of timm's models is designed for."""
    from timm.models import get_pretrained_cfg

    found = get_pretrained_cfg(name)
    return 224 if found is None else int(found.input_size[-1])


def _checked_model(config: ImageConfig, device: str) -> nn.Module:
    """The model on a device, checked on one image; torch's generator is left unchanged."""
    with torch.random.fork_rng(devices=[]), torch.device(device), torch.no_grad():
        model = make_model(config, num_classes=2).eval()
        try:
            model(torch.zeros(1, 3, config.size, config.size))
        except Exception as error:
            raise ValueError(
                f"{config.timm_name} cannot take images of image_size={config.size} ({error}); "
                f"its own is {_own_size(config.timm_name)}"
            ) from error
    return model


def _transform(config: ImageConfig, training: bool) -> Any:
    """timm's transform from an image to a normalised tensor."""
    from timm.data import create_transform

    # means, deviations and the crop of images that are not trained on are ImageNet's by default
    given = {"input_size": config.size, "interpolation": "bicubic"}
    if not training:
        return create_transform(**given)
    return create_transform(
        **given,
        is_training=True,
        color_jitter=0.0 if config.auto_augment else 0.3,
        auto_augment=config.auto_augment or None,
        re_prob=config.erase,
        re_mode="pixel",
    )
