"""Image classification from scratch with timm's models and DeiT's recipe."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gfsa_experiments.data.own import digest_of, find_own, hold_out, name_of, some
from gfsa_experiments.engine.batches import SeededItems
from gfsa_experiments.engine.config import (
    CountOrZero,
    NotNegative,
    Schedule,
    Share,
    TrainConfig,
    as_text,
)
from gfsa_experiments.engine.task import OwnData, Recipe, Split, Task, as_it_is
from gfsa_experiments.tasks.image import data as cifar
from gfsa_experiments.tasks.image.data import (
    FolderImages,
    ImageFiles,
    MemoryImages,
    list_images,
    stack,
)

# short names of the paper's models; any other name is one of timm's
MODELS = {
    "deit_tiny": "deit_tiny_patch16_224",
    "deit_small": "deit_small_patch16_224",
    "cait_s24": "cait_s24_224",
    "swin_small": "swin_small_patch4_window7_224",
}
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CIFAR = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
# DeiT resizes to 256 and cuts out 224
_CROP = 224 / 256


@dataclass(frozen=True, kw_only=True)
class ImageConfig(TrainConfig):
    """DeiT's settings on ImageNet; sizes of 0 follow the data set, CIFAR's images included."""

    in_label = ("data", "dataset", "model", "depth")

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
        if self.is_cifar and self.image_size not in (0, cifar.SIDE):
            raise ValueError(f"images of CIFAR have image_size={cifar.SIDE}, got {self.image_size}")
        if self.depth and self._is_swin:
            raise ValueError("Swin has stages of 2, 2, 18 and 2 layers: depth cannot be set")
        if not 0 < self.holdout < 1 and self.is_cifar:
            raise ValueError(
                f"{self.dataset} has no validation part: holdout must lie between 0 and 1, "
                f"got {self.holdout}"
            )

    def label(self) -> str:
        folder = f"folder={name_of(self.data)}" if self.data else "folder"
        data = self.dataset if self.is_cifar else folder
        return f"{data} {self.model}" + (f"-d{self.depth}" if self.depth else "")

    def unused(self) -> dict[str, str]:
        unused = super().unused()
        unused["group_by_length"] = "every image has the same size"
        if self.is_cifar:
            unused["data"] = f"dataset={self.dataset} is ours; dataset=folder reads your own"
            unused["auto_augment"] = "images in folders alone take timm's policies"
        if not (self.mixup and self.cutmix):
            unused["switch"] = "it chooses between mixup and cutmix, one of which is 0"
        return unused

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
        return cifar.SIDE if self.is_cifar else self.image_size or _own_size(self.timm_name)

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


class ImageTask(Task):
    """Cross-entropy with soft targets; accuracy in percent."""

    metric = "accuracy"

    def __init__(
        self, model: nn.Module, splits: dict[str, Split], num_classes: int, pipeline: Any
    ) -> None:
        from timm.loss import SoftTargetCrossEntropy

        self.model, self.splits, self.num_classes = model, splits, num_classes
        self.pipeline = pipeline
        self._criterion = SoftTargetCrossEntropy()

    def prepare(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        prepared: dict[str, Tensor] = self.pipeline.training(batch)
        return prepared

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self._criterion(model(batch["images"]), batch["targets"])
        return loss

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = model(self.pipeline.inputs(batch["images"])).float()
        labels = batch["labels"]
        best = logits.topk(min(5, self.num_classes)).indices == labels[:, None]
        loss = nn.functional.cross_entropy(logits, labels, reduction="none")
        return {"top1": best[:, 0], "top5": best.any(1), "loss": loss}

    def score(self, predictions: list[dict[str, Tensor]]) -> dict[str, float]:
        def mean(name: str) -> float:
            return torch.cat([batch[name] for batch in predictions]).double().mean().item()

        scores = {"accuracy": 100 * mean("top1"), "loss": mean("loss")}
        if self.num_classes > 10:
            scores["top5"] = 100 * mean("top5")
        return scores

    def example(self) -> Tensor:
        """Some validation images (test images, if there are none), as the model takes them."""
        images: Tensor = self.pipeline.inputs(self.first_examples(32)["images"])
        return images

    def identity(self, split: str, index: int) -> Any:
        """The image as it was read, before any transform."""
        dataset = self.splits[split].dataset
        if isinstance(dataset, SeededItems):
            dataset = dataset.dataset
        return dataset.source(index)  # type: ignore[attr-defined]


def build(config: ImageConfig, data_dir: Path) -> ImageTask:
    """Read the images and build the model."""
    own, splits = None, {}
    if config.dataset == "folder":
        root = find_own(config.data, data_dir, "a folder of images") if config.data else data_dir
        files = list_images(Path(root).absolute(), config.holdout)
        count, own = len(files.classes), _own_data(config, files, str(root))
        for part, listed in files.parts.items():
            read: Any = FolderImages(listed, _transform(config, training=part == "train"))
            splits[part] = Split(SeededItems(read, config.seed) if part == "train" else read, stack)
    else:
        count = cifar.CLASSES[config.dataset]
        both = cifar.read_cifar(Path(data_dir), config.dataset)
        train, valid = hold_out(len(both["train"]), config.holdout)
        for part, rows in (("train", train), ("valid", valid), ("test", range(len(both["test"])))):
            images = both["test" if part == "test" else "train"]
            splits[part] = Split(MemoryImages(images, rows), as_it_is)
    model = make_model(config, count)
    task = ImageTask(model, splits, count, _augmentation(config, count))
    task.own_data = own
    return task


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
    if find_spec("timm") is None:
        return 224
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


def _own_data(config: ImageConfig, files: ImageFiles, root: str) -> OwnData:
    # which files are in which part and class: one may have moved to another
    pieces = (
        piece
        for part, listed in files.parts.items()
        for path, label in listed
        for piece in (part, files.classes[label], os.fsencode(os.path.basename(path)))
    )
    return OwnData(
        name=name_of(config.data or root),
        source=config.data or root,
        splits={part: len(listed) for part, listed in files.parts.items()},
        split_by=files.split_by,
        labels=f"classification, {len(files.classes)} classes: {some(files.classes)}",
        unit="images",
        digest=digest_of(pieces) if config.data else "",
    )


def _transform(config: ImageConfig, training: bool) -> Any:
    """timm's transform from an image to a normalised tensor."""
    from timm.data import create_transform

    mean, std = _IMAGENET
    shared = {"input_size": config.size, "interpolation": "bicubic", "mean": mean, "std": std}
    if not training:
        return create_transform(**shared, crop_pct=_CROP)
    return create_transform(
        **shared,
        is_training=True,
        color_jitter=0.0 if config.auto_augment else 0.3,
        auto_augment=config.auto_augment or None,
        re_prob=config.erase,
        re_mode="pixel",
    )


def _augmentation(config: ImageConfig, num_classes: int) -> Any:
    from gfsa_experiments.tasks.image.augment import Augmentation, Normalise

    return Augmentation(
        num_classes,
        Normalise(*_CIFAR[config.dataset]) if config.is_cifar else None,
        erase=config.erase,
        mixup=config.mixup,
        cutmix=config.cutmix,
        switch=config.switch,
        smoothing=config.smoothing,
    )


RECIPE = Recipe(
    name="image",
    title="Image classification from scratch: DeiT, CaiT, Swin",
    config=ImageConfig,
    build=build,
    extra="image",
)
