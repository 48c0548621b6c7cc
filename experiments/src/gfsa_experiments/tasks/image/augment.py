"""Augmentation of training images, and normalisation to a model's input.

Small images in memory are augmented on the device, a whole batch by a few kernels, with torch's
generator and without synchronising host and device. Others go through timm's transforms in the
worker processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from timm.data import Mixup
from timm.data.mixup import mixup_target
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


class OnDevice:
    """Crop, flip, erase, mix and smooth a batch of small images where it is.

    Args:
        normalise: converts pixels to the model's input.
        num_classes: of the targets.
        padding: black pixels around an image before a random crop of its size.
        erase: probability that a box of an image becomes noise.
        mixup, cutmix: parameters of the Beta distribution of the mixing weight; 0: off.
        switch: probability of CutMix if both are on.
        smoothing: of the labels.
    """

    def __init__(
        self,
        normalise: Normalise,
        num_classes: int,
        *,
        padding: int = 4,
        erase: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        switch: float = 0.5,
        smoothing: float = 0.0,
    ) -> None:
        self.normalise, self.num_classes = normalise, num_classes
        self.padding, self.erase = padding, erase
        self.mixup, self.cutmix, self.switch = mixup, cutmix, switch
        self.smoothing = smoothing

    def inputs(self, images: Tensor) -> Tensor:
        """Images without augmentation, for evaluation."""
        return self.normalise(images)

    def training(self, batch: Batch) -> Batch:
        """``images`` uint8 and ``labels`` to augmented ``images`` and soft ``targets``."""
        images = self.normalise(crop_and_flip(batch["images"], self.padding))
        if self.erase:
            images = erase_boxes(images, self.erase)
        share: float | Tensor = 1.0
        if self.mixup or self.cutmix:
            weights = self._mixing_weights(images)
            images = weights * images + (1 - weights) * images.flip(0)
            share = weights.mean()
        targets = mixup_target(batch["labels"], self.num_classes, share, self.smoothing)
        return {"images": images, "targets": targets}

    def _mixing_weights(self, images: Tensor) -> Tensor:
        """The weight of each pixel, ``(H, W)``; the rest comes from the reversed batch.

        One draw per batch, as in DeiT: a constant (Mixup), or 0 in a box (CutMix).
        """
        height, width = images.shape[-2:]
        device = images.device
        cut = torch.rand((), device=device) < (self.switch if self.mixup else 1.0)
        if not self.cutmix:
            cut = torch.zeros_like(cut)
        constant = beta(self.mixup or 1.0, device)
        # a box of the share 1 − λ, clipped at the border
        side = (1 - beta(self.cutmix or 1.0, device)).sqrt()
        inside = _inside(
            torch.rand(1, device=device) * height - side * height / 2,
            torch.rand(1, device=device) * width - side * width / 2,
            side * height,
            side * width,
            height,
            width,
        )[0]
        return torch.where(cut, (~inside).float(), constant)


class OnHost:
    """Batches that the workers augmented with timm's transforms; timm's Mixup mixes them.

    Without ``mixup`` the labels are only smoothed.
    """

    def __init__(self, num_classes: int, mixup: Mixup | None, smoothing: float) -> None:
        self.num_classes, self.mixup, self.smoothing = num_classes, mixup, smoothing

    def inputs(self, images: Tensor) -> Tensor:
        return images

    def training(self, batch: Batch) -> Batch:
        images, labels = batch["images"], batch["labels"]
        if self.mixup is None:
            targets = mixup_target(labels, self.num_classes, 1.0, self.smoothing)
            return {"images": images, "targets": targets}
        if len(images) % 2:
            raise ValueError(
                f"Mixup mixes pairs, the batch has {len(images)} images: "
                "set an even batch_size and drop_last=true"
            )
        # timm draws from numpy: seed it from torch's generator, which checkpoints store
        state = np.random.get_state()
        np.random.seed(int(torch.randint(2**31, ())))
        try:
            # timm works in place
            images, targets = self.mixup(images.clone(), labels)
        finally:
            np.random.set_state(state)
        return {"images": images, "targets": targets}


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


def erase_boxes(images: Tensor, chance: float) -> Tensor:
    """Random Erasing (Zhong et al., 2020): a box of 2 to 33 % of an image becomes noise.

    Args:
        images: ``(B, 3, H, W)``, normalised.
        chance: probability for each image.
    """
    count, _, height, width = images.shape
    draw = torch.rand(5, count, device=images.device)
    area = (0.02 + (1 / 3 - 0.02) * draw[0]) * height * width
    # the aspect ratio is log-uniform between 0.3 and 1/0.3
    aspect = 0.3 ** (1 - 2 * draw[1])
    tall = (area * aspect).sqrt().clamp(max=height - 1)
    wide = (area / aspect).sqrt().clamp(max=width - 1)
    inside = _inside(draw[2] * (height - tall), draw[3] * (width - wide), tall, wide, height, width)
    hit = inside & (draw[4] < chance)[:, None, None]
    return torch.where(hit[:, None], torch.randn_like(images), images)


def beta(alpha: float, device: Any) -> Tensor:
    """One number from Beta(α, α), on the device."""
    both = torch.full((2,), alpha, device=device)
    return torch._sample_dirichlet(both)[0]


def _inside(
    top: Tensor, left: Tensor, tall: Tensor, wide: Tensor, height: int, width: int
) -> Tensor:
    """Boxes, ``(B,)`` each, as masks ``(B, height, width)``: True for pixel centres inside."""
    down = torch.arange(height, device=top.device) + 0.5
    across = torch.arange(width, device=top.device) + 0.5
    rows = (down >= top[:, None]) & (down < (top + tall)[:, None])
    columns = (across >= left[:, None]) & (across < (left + wide)[:, None])
    return rows[:, :, None] & columns[:, None, :]
