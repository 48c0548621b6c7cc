"""scikit-learn's bundled digits, cut once and for all into training, validation and test sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

HeldOut = Literal["test", "validation"]
IMAGE_SIDE = 8
CLASSES = 10


@dataclass(frozen=True)
class Digits:
    """1,797 handwritten digits, 8×8 pixels: ``images (N, 8, 8)`` in [-1, 1], ``labels (N,)``."""

    train_images: Tensor
    train_labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor
    held_out: HeldOut


def load_digits(held_out: HeldOut = "test") -> Digits:
    """The digits with a split that depends on nothing: 60 % train, 15 % validation, 25 % test.

    Settings of the demo were chosen on the validation set; what it reports is the test set, which
    takes no part in any choice. Training uses the same images in both cases.
    """
    from sklearn.datasets import load_digits as bundled
    from sklearn.model_selection import train_test_split

    images, labels = bundled(return_X_y=True)
    rest, test, rest_labels, test_labels = train_test_split(
        images, labels, test_size=0.25, stratify=labels, random_state=0
    )
    train, validation, train_labels, validation_labels = train_test_split(
        rest, rest_labels, test_size=0.20, stratify=rest_labels, random_state=0
    )
    chosen = (test, test_labels) if held_out == "test" else (validation, validation_labels)
    return Digits(
        _images(train),
        torch.as_tensor(train_labels),
        _images(chosen[0]),
        torch.as_tensor(chosen[1]),
        held_out,
    )


def _images(pixels: object) -> Tensor:
    # pixels count from 0 to 16
    values = torch.as_tensor(pixels, dtype=torch.float32)
    return values.reshape(-1, IMAGE_SIDE, IMAGE_SIDE) / 8 - 1
