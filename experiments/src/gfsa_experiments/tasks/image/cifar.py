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

from gfsa_experiments.data.files import check_count, not_found, read_npz, usable_rows
from gfsa_experiments.data.sources import source_of
from gfsa_experiments.engine.whole_files import write_whole

Cifar = Literal["cifar10", "cifar100"]

SIDE = 32
CLASSES: dict[Cifar, int] = {"cifar10": 10, "cifar100": 100}
_PIXELS = 3 * SIDE * SIDE
_JPEGS = "cifar10_jpeg.npz"
_COUNTS = {"train": 50_000, "test": 10_000}


@dataclass(frozen=True)
class Images:
    """Small images that fit into memory."""

    pixels: Tensor
    """``(N, 32, 32, 3)``, uint8."""
    labels: Tensor
    """``(N,)``, int64."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class _Layout:
    """The official binary files of one of the two sets."""

    train: tuple[str, ...]
    test: str
    label_bytes: int
    pickled: str
    """The first file of the pickled version, which is never read, in its folder."""

    @property
    def files(self) -> tuple[str, ...]:
        return *self.train, self.test


_LAYOUTS: dict[Cifar, _Layout] = {
    "cifar10": _Layout(
        train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        test="test_batch.bin",
        label_bytes=1,
        pickled="cifar-10-batches-py/data_batch_1",
    ),
    "cifar100": _Layout(
        train=("train.bin",),
        test="test.bin",
        # a coarse label, then the fine one
        label_bytes=2,
        pickled="cifar-100-python/train",
    ),
}


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
    layout, source = _LAYOUTS[name], source_of(name)
    for folder in (data_dir / inside for inside in source.folders):
        absent = [file for file in layout.files if not (folder / file).is_file()]
        if not absent:
            train = [_read_binary(folder / file, name) for file in layout.train]
            return {
                "train": Images(
                    torch.cat([part.pixels for part in train]),
                    torch.cat([part.labels for part in train]),
                ),
                "test": _read_binary(folder / layout.test, name),
            }
        if len(absent) < len(layout.files):
            raise FileNotFoundError(f"{folder} lacks {', '.join(absent)}; get {source.where} again")
        if name == "cifar10" and (folder / _JPEGS).is_file():
            return _read_jpegs(folder / _JPEGS, cache_dir)
        for pickled in (folder / layout.pickled, folder / Path(layout.pickled).name):
            if pickled.is_file():
                raise FileNotFoundError(
                    f"{pickled.parent} holds {name} as Python pickles, which are not read: "
                    "unpickling runs any code that a file contains. Get the binary version, "
                    f"{source.where}"
                )
    wanted = [*layout.files, *([_JPEGS] if name == "cifar10" else [])]
    raise not_found(data_dir, ", ".join(wanted), source)


def _read_binary(path: Path, name: Cifar) -> Images:
    """Rows of label bytes and 3072 bytes of pixels, channel by channel."""
    layout = _LAYOUTS[name]
    row = layout.label_bytes + _PIXELS
    data = np.fromfile(path, dtype=np.uint8)
    if not len(data) or len(data) % row:
        raise ValueError(
            f"{path} is damaged: its {len(data)} bytes are not a multiple of rows of {row}; "
            f"unpack {source_of(name).where} again"
        )

    def parse(row: np.ndarray) -> tuple[np.ndarray, int]:
        planes = row[layout.label_bytes :].reshape(3, SIDE, SIDE)
        return planes.transpose(1, 2, 0), _label(row[layout.label_bytes - 1], CLASSES[name])

    part = "test" if path.name == layout.test else "train"
    official = _COUNTS[part] // (1 if part == "test" else len(layout.train))
    return _images(usable_rows(path, data.reshape(-1, row), parse, official))


def _label(label: int, classes: int) -> int:
    if label >= classes:
        raise ValueError(f"label {label}, expected 0 to {classes - 1}")
    return int(label)


def _images(pairs: list[tuple[np.ndarray, int]]) -> Images:
    pixels, labels = zip(*pairs, strict=True)
    return Images(torch.from_numpy(np.stack(pixels)), torch.tensor(labels))


def _read_jpegs(path: Path, cache_dir: str) -> dict[str, Images]:
    """Concatenated JPEG scans with offsets, one header for all, and labels.

    The npz format has a checksum for each array, so damaged files are noticed.
    """
    names = ["header", *(f"{kind}_{part}" for kind in ("data", "offset", "y") for part in _COUNTS)]
    arrays = read_npz(path, names)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if cache_dir else ""
    header, parts = arrays["header"].tobytes(), {}
    for part, official in _COUNTS.items():
        scans, offsets, labels = (arrays[f"{kind}_{part}"] for kind in ("data", "offset", "y"))
        rising = len(offsets) == len(labels) + 1 and (np.diff(offsets) >= 0).all()
        if not rising or offsets[-1] != len(scans):
            raise ValueError(
                f"{path} is damaged: offset_{part} should rise in {len(labels) + 1} steps to "
                f"{len(scans)}"
            )
        cache = Path(cache_dir) / f"cifar10-{digest}-{part}.npy" if cache_dir else None
        if cache is not None and cache.is_file():
            pixels = torch.from_numpy(_open_cache(cache, len(labels)))
            parts[part] = Images(pixels, torch.from_numpy(labels.astype(np.int64)))
            check_count(path, len(labels), official)
            continue
        files = [header + scans[a:b].tobytes() for a, b in itertools.pairwise(offsets.tolist())]
        rows = zip(files, [len(header) < len(file) for file in files], labels, strict=True)
        parts[part] = _images(usable_rows(path, rows, _parse_jpeg, official))
        if cache is not None and len(parts[part]) == len(labels):
            decoded = parts[part].pixels.numpy()
            write_whole(cache, functools.partial(np.save, arr=decoded, allow_pickle=False))
    return parts


def _parse_jpeg(row: tuple[bytes, bool, int]) -> tuple[np.ndarray, int]:
    from torchvision.io import decode_jpeg

    file, has_scan, label = row
    try:
        # libjpeg decodes an empty scan to a grey image
        if not has_scan:
            raise RuntimeError("empty")
        image = decode_jpeg(torch.frombuffer(bytearray(file + b"\xff\xd9"), dtype=torch.uint8))
    except RuntimeError as error:
        raise ValueError(f"no JPEG ({error})") from error
    if image.shape != (3, SIDE, SIDE):
        raise ValueError(f"an image of shape {tuple(image.shape)}, expected {(3, SIDE, SIDE)}")
    return image.permute(1, 2, 0).numpy(), _label(label, CLASSES["cifar10"])


def _open_cache(path: Path, count: int) -> np.ndarray:
    # "c": processes share the pages, and torch gets a writable array
    pixels: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
    if pixels.shape != (count, SIDE, SIDE, 3) or pixels.dtype != np.uint8:
        raise ValueError(
            f"{path} holds {pixels.dtype} of shape {pixels.shape}, expected uint8 of shape "
            f"{(count, SIDE, SIDE, 3)}; delete it"
        )
    return pixels
