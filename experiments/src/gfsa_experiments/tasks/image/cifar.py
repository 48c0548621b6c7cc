"""CIFAR-10 and CIFAR-100 from the official binary files, or from JPEGs in one npz file."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gfsa_experiments.data.files import BadRows, check_count, read_npz, write_whole
from gfsa_experiments.engine.task import DataSource

Cifar = Literal["cifar10", "cifar100"]

SIDE = 32
_PIXELS = 3 * SIDE * SIDE
_JPEGS = "cifar10_jpeg.npz"


@dataclass(frozen=True)
class Images:
    """Small images that fit into memory."""

    pixels: Tensor
    """``(N, 32, 32, 3)``, uint8."""
    labels: Tensor
    """``(N,)``, int64."""
    num_classes: int

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class _Layout:
    """The official binary files of one of the two sets."""

    folder: str
    train: tuple[str, ...]
    test: str
    label_bytes: int
    num_classes: int
    pickled: tuple[str, str]
    """Folder and first file of the pickled version, which is never read."""
    url: str


_LAYOUTS: dict[Cifar, _Layout] = {
    "cifar10": _Layout(
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        test="test_batch.bin",
        label_bytes=1,
        num_classes=10,
        pickled=("cifar-10-batches-py", "data_batch_1"),
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    ),
    "cifar100": _Layout(
        folder="cifar-100-binary",
        train=("train.bin",),
        test="test.bin",
        # a coarse label, then the fine one
        label_bytes=2,
        num_classes=100,
        pickled=("cifar-100-python", "train"),
        url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    ),
}
_COUNTS = {"train": 50_000, "test": 10_000}

SOURCES = tuple(
    DataSource(name, f"{layout.folder}/{{{','.join((*layout.train, layout.test))}}}", layout.url)
    for name, layout in _LAYOUTS.items()
)


def read_cifar(data_dir: Path, name: Cifar) -> dict[str, Images]:
    """``train`` and ``test``, read once per process.

    Decoding the JPEGs takes some seconds. If the environment variable ``GFSA_CACHE`` names a
    folder, the decoded images are stored there, and other processes map them into memory.

    Args:
        data_dir: the folder of the files, or its parent.
        name: which of the two.
    """
    return _read(Path(data_dir).absolute(), name, os.environ.get("GFSA_CACHE", ""))


@functools.lru_cache(maxsize=4)
def _read(data_dir: Path, name: Cifar, cache_dir: str) -> dict[str, Images]:
    layout = _LAYOUTS[name]
    folders = [data_dir / part for part in ("", name, layout.folder)]
    folders.append(data_dir / name / layout.folder)
    wanted = (*layout.train, layout.test)
    for folder in folders:
        if all((folder / file).is_file() for file in wanted):
            official = _COUNTS["train"] // len(layout.train)
            parts = [_read_binary(folder / file, layout, official) for file in layout.train]
            pixels = torch.cat([part.pixels for part in parts])
            train = Images(pixels, torch.cat([part.labels for part in parts]), layout.num_classes)
            return {
                "train": train,
                "test": _read_binary(folder / layout.test, layout, _COUNTS["test"]),
            }
        if name == "cifar10" and (folder / _JPEGS).is_file():
            return _read_jpegs(folder / _JPEGS, cache_dir)
    raise FileNotFoundError(_what_is_missing(folders, name, layout))


def _what_is_missing(folders: list[Path], name: str, layout: _Layout) -> str:
    wanted = (*layout.train, layout.test)
    for folder in folders:
        absent = [file for file in wanted if not (folder / file).is_file()]
        if len(absent) < len(wanted):
            return f"{folder} lacks {', '.join(absent)}; unpack {layout.url} again"
    pickled_folder, pickled_file = layout.pickled
    for folder in (*folders, *(folder / pickled_folder for folder in folders)):
        if (folder / pickled_file).is_file():
            return (
                f"{folder} holds {name} as Python pickles, which are not read: unpickling runs "
                f"any code that a file contains. Get the binary version, {layout.url}"
            )
    places = ", ".join(str(folder) for folder in folders)
    jpegs = f", nor {_JPEGS}" if name == "cifar10" else ""
    return f"found neither {', '.join(wanted)}{jpegs} in {places}; unpack {layout.url} in one"


def _read_binary(path: Path, layout: _Layout, official: int) -> Images:
    """Rows of label bytes and 3072 bytes of pixels, channel by channel."""
    row = layout.label_bytes + _PIXELS
    data = np.fromfile(path, dtype=np.uint8)
    if not len(data) or len(data) % row:
        raise ValueError(
            f"{path} is damaged: its {len(data)} bytes are not a multiple of rows of {row}; "
            f"unpack {layout.url} again"
        )
    rows = data.reshape(-1, row)
    pixels = rows[:, layout.label_bytes :].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    images = _usable(BadRows(path), pixels, rows[:, layout.label_bytes - 1], layout.num_classes)
    check_count(path, len(images), official)
    return images


def _usable(
    bad: BadRows,
    pixels: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    decoded: np.ndarray | None = None,
) -> Images:
    """The images that could be read and have a valid label."""
    good = labels < num_classes
    for row in np.flatnonzero(~good):
        bad.add(int(row) + 1, f"label {labels[row]}, expected 0 to {num_classes - 1}")
    if decoded is not None:
        good &= decoded
    bad.report(int(good.sum()))
    if not good.all():
        pixels, labels = pixels[good], labels[good]
    return Images(
        torch.from_numpy(np.ascontiguousarray(pixels)),
        torch.from_numpy(labels.astype(np.int64)),
        num_classes,
    )


def _read_jpegs(path: Path, cache_dir: str) -> dict[str, Images]:
    """Concatenated JPEG scans with offsets, one header for all, and labels.

    The npz format has a checksum for each array, so damaged files are noticed.
    """
    names = ["header", *(f"{kind}_{part}" for kind in ("data", "offset", "y") for part in _COUNTS)]
    arrays = read_npz(path, names)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if cache_dir else ""
    parts = {}
    for part, official in _COUNTS.items():
        scans, offsets, labels = (arrays[f"{kind}_{part}"] for kind in ("data", "offset", "y"))
        rising = len(offsets) == len(labels) + 1 and (np.diff(offsets) >= 0).all()
        if not rising or offsets[-1] != len(scans):
            raise ValueError(
                f"{path} is damaged: offset_{part} should rise in {len(labels) + 1} steps to "
                f"{len(scans)}"
            )
        bad, decoded = BadRows(path), None
        cache = Path(cache_dir) / f"cifar10-{digest}-{part}.npy" if cache_dir else None
        if cache is not None and cache.is_file():
            pixels = _open_cache(cache, len(labels))
        else:
            pixels, decoded = _decode(arrays["header"].tobytes(), scans.tobytes(), offsets, bad)
            if cache is not None and decoded.all():
                write_whole(cache, functools.partial(np.save, arr=pixels, allow_pickle=False))
        parts[part] = _usable(bad, pixels, labels, 10, decoded)
        check_count(path, len(parts[part]), official)
    return parts


def _decode(
    header: bytes, scans: bytes, offsets: np.ndarray, bad: BadRows
) -> tuple[np.ndarray, np.ndarray]:
    """All images, and which of them could be decoded."""
    # threads would not help: most of the 30 µs per image are spent in Python
    from torchvision.io import decode_jpeg

    pixels = np.zeros((len(offsets) - 1, SIDE, SIDE, 3), dtype=np.uint8)
    read = np.ones(len(pixels), dtype=bool)
    for i, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        whole = bytearray(header + scans[start:end] + b"\xff\xd9")
        try:
            # libjpeg decodes an empty scan to a grey image
            if start == end:
                raise RuntimeError("empty")
            image = decode_jpeg(torch.frombuffer(whole, dtype=torch.uint8))
        except RuntimeError as error:
            read[i] = False
            bad.add(i + 1, f"no JPEG ({error})")
            continue
        if image.shape == (3, SIDE, SIDE):
            pixels[i] = image.permute(1, 2, 0).numpy()
        else:
            read[i] = False
            bad.add(i + 1, f"an image of shape {tuple(image.shape)}, expected {(3, SIDE, SIDE)}")
    return pixels, read


def _open_cache(path: Path, count: int) -> np.ndarray:
    # "c": processes share the pages, and torch gets a writable array
    pixels: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
    if pixels.shape != (count, SIDE, SIDE, 3) or pixels.dtype != np.uint8:
        raise ValueError(
            f"{path} holds {pixels.dtype} of shape {pixels.shape}, expected uint8 of shape "
            f"{(count, SIDE, SIDE, 3)}; delete it"
        )
    return pixels
