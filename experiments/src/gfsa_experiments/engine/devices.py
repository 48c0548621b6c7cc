"""Where runs may compute."""

from __future__ import annotations

import torch

DEVICES = ("auto", "cpu", "cuda")


def check_device(name: str) -> None:
    """Raise ValueError for a device that is not here."""
    if name not in DEVICES:
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch finds no GPU here; auto takes one if there is one")
