"""Augmentation of training images, and normalisation to a model's input.

Small images in memory are cropped, flipped and erased on the device, a whole batch at a time.
Others go through timm's transforms in the worker processes. timm mixes pairs of both.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from timm.data import Mixup
from timm.data.mixup import mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.nn import functional as F

Batch = dict[str, Tensor]


class Normalise:
    """Pixels ``(B, H, W, 3)``, uint8, to a model's input ``(B, 3, H, W)``, float."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        # (x/255 − mean)/std = x·scale + shift
        self._scale = 1 / (255 * torch.tensor(std).view(3, 1, 1))
        self._shift = -(torch.tensor(mean) / torch.tensor(std)).view(3, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        if self._scale.device != pixels.device:
            self._scale, self._shift = self._scale.to(pixels.device), self._shift.to(pixels.device)
        images = pixels.permute(0, 3, 1, 2).float()
        return torch.addcmul(self._shift, images, self._scale).contiguous()


class Augmentation:
    """Random crops, flips, erased boxes, mixed pairs and smoothed labels, for a whole batch.

    Args:
        num_classes: of the targets.
        normalise: converts pixels to the model's input; None if the workers have done so, and have
            cropped, flipped and erased with timm's transforms.
        padding: black pixels around an image before a random crop of its size.
        erase: probability that a box of an image becomes noise.
        mixup, cutmix: parameters of the Beta distribution of the mixing weight; 0: off.
        switch: probability of CutMix if both are on.
        smoothing: of the labels.
    """

    def __init__(
        self,
        num_classes: int,
        normalise: Normalise | None = None,
        *,
        padding: int = 4,
        erase: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        switch: float = 0.5,
        smoothing: float = 0.0,
    ) -> None:
        self.num_classes, self.normalise = num_classes, normalise
        self.padding, self.erase, self.smoothing = padding, erase, smoothing
        self.mixup = None
        if mixup or cutmix:
            self.mixup = Mixup(
                mixup,
                cutmix,
                switch_prob=switch,
                label_smoothing=smoothing,
                num_classes=num_classes,
            )

    def inputs(self, images: Tensor) -> Tensor:
        """Images without augmentation, for evaluation."""
        return images if self.normalise is None else self.normalise(images)

    def training(self, batch: Batch) -> Batch:
        """``images`` and ``labels`` to augmented ``images`` and soft ``targets``."""
        images, labels = batch["images"], batch["labels"]
        if self.normalise is not None:
            images = self.normalise(crop_and_flip(images, self.padding))
        with _seeded_by_torch():
            if self.normalise is not None and self.erase:
                images = RandomErasing(self.erase, mode="pixel", device=images.device)(images)
            if self.mixup is None:
                targets = mixup_target(labels, self.num_classes, 1.0, self.smoothing)
                return {"images": images, "targets": targets}
            if len(images) % 2:
                raise ValueError(
                    f"Mixup mixes pairs, the batch has {len(images)} images: "
                    "set an even batch_size and drop_last=true"
                )
            # timm works in place
            images, targets = self.mixup(images.clone(), labels)
        return {"images": images, "targets": targets}


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
    """Each image shifted by up to ``padding`` pixels, filled with black, and randomly mirrored.

    Args:
        pixels: ``(B, H, W, 3)``.
        padding: 0 only mirrors.
    """
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
