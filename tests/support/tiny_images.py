"""A few images in the layouts that the recipes read."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np


def pictures(count: int, num_classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pixels ``(count, 32, 32, 3)`` and labels: each class has a colour, plus noise."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % num_classes
    colours = np.random.default_rng(99).integers(30, 226, (num_classes, 3))
    pixels = colours[labels][:, None, None] + generator.integers(-30, 30, (count, 32, 32, 3))
    return pixels.clip(0, 255).astype(np.uint8), labels.astype(np.uint8)


def write_cifar10(folder: Path, per_file: int = 8, test: int = 10) -> None:
    """Five times ``per_file`` images to train on."""
    write_jpegs(folder / "cifar10_jpeg.npz", 5 * per_file, test)


def write_jpegs(path: Path, train: int = 40, test: int = 10) -> None:
    """JPEG scans end to end, one header for all."""
    from PIL import Image

    arrays: dict[str, np.ndarray] = {}
    for part, count in (("train", train), ("test", test)):
        pixels, labels = pictures(count, 10, seed=count)
        scans = []
        for image in pixels:
            file = io.BytesIO()
            Image.fromarray(image).save(file, "JPEG", quality=75)
            whole = file.getvalue()
            # the header ends with the segment that starts the scan
            start = whole.index(b"\xff\xda")
            start += 2 + int.from_bytes(whole[start + 2 : start + 4], "big")
            arrays["header"] = np.frombuffer(whole[:start], np.uint8)
            scans.append(whole[start:-2])
        arrays[f"data_{part}"] = np.frombuffer(b"".join(scans), np.uint8)
        arrays[f"offset_{part}"] = np.cumsum([0, *map(len, scans)])
        arrays[f"y_{part}"] = labels
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def write_folder(root: Path, parts: dict[str, int], side: int = 40) -> None:
    """One folder per part, in it one per class, of three."""
    from PIL import Image

    for part, per_class in parts.items():
        pixels, labels = pictures(3 * per_class, 3, seed=per_class)
        for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            folder = root / part / f"n{label:03d}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).resize((side, side + 4)).save(folder / f"{i}.JPEG")
