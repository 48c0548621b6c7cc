"""Inputs by name, for ``gfsa diagnose``: read what ``--data`` names, as batches for a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gfsa.lens.command_models import Source, SourceError
from gfsa.plugs.adapters.transformers.config_files import one_line
from gfsa.plugs.running import call

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
# samples that show whether two models have the same tokenizer, or take images of the same size
_COMPARED = 4


def load_batches(source: Source, data: str, samples: int, batch: int, tokens: int) -> list[Any]:
    """What ``--data`` names, as batches for ``source``."""
    if data == "random":
        return _random_batches(source, samples, batch, tokens)
    path = Path(data)
    if path.suffix == ".safetensors":
        return _cut(_read_tensors(path), samples, batch)
    if path.is_dir():
        return _image_batches(source, path, samples, batch)
    if path.is_file():
        return _text_batches(source, path, samples, batch, tokens)
    raise SourceError(
        f"--data {data!r} is no file, no folder, and not 'random'; pass a text file, a folder of "
        "images, or a .safetensors file with the model's arguments"
    )


def _random_batches(source: Source, samples: int, batch: int, tokens: int) -> list[Any]:
    make = _need(source.random, source, "random inputs")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [make(count, tokens) for count in _counts(samples, batch)]


def _image_batches(source: Source, folder: Path, samples: int, batch: int) -> list[Any]:
    convert = _need(source.images, source, "images")
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGES)[:samples]
    if not found:
        raise SourceError(f"no images ({', '.join(IMAGES)}) in {folder}")
    return [convert([_open_image(p) for p in part]) for part in _parts(found, batch)]


def _text_batches(source: Source, file: Path, samples: int, batch: int, tokens: int) -> list[Any]:
    tokenise = _need(source.texts, source, "text")
    lines = [line.strip() for line in _read_text(file).splitlines()]
    lines = [line for line in lines if line][:samples]
    if not lines:
        raise SourceError(f"{file} has no text in it")
    return [tokenise(part, tokens) for part in _parts(lines, batch)]


def other_inputs(first: Source, other: Source, data: str, samples: int, tokens: int) -> bool:
    """Whether ``other`` would make other inputs of some of ``data`` than ``first``.

    False where it cannot make any: a folder of a run often has no tokenizer.
    """
    if data == "random" or Path(data).suffix == ".safetensors":
        return False
    some = min(samples, _COMPARED)
    try:
        (own,) = load_batches(other, data, some, some, tokens)
    # whatever a library raises for a tokenizer or settings of images that are not there
    except Exception:
        return False
    (given,) = load_batches(first, data, some, some, tokens)
    return not _equal(own, given)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def refuse_unfit(source: Source, batch: Any, data: str) -> None:
    """Raise SourceError if the model does not run on a batch."""
    try:
        with torch.no_grad():
            call(source.model, batch)
    # whatever a model raises for inputs of another kind or size
    except Exception as error:
        raise SourceError(
            f"{source.label} ({type(source.model).__name__}) does not run on the inputs that were "
            f"made of --data {data}: {type(error).__name__}: {one_line(error)}"
        ) from error


def _need(function: Any, source: Source, what: str) -> Any:
    if function is None:
        raise SourceError(f"{source.label} ({type(source.model).__name__}) takes no {what}")
    return function


def _read_text(path: Path) -> str:
    try:
        # some editors write a byte order mark
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is no text in UTF-8 ({error.reason}, byte {error.start}); pass a text file, a "
            "folder of images, or a .safetensors file with the model's arguments"
        ) from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise SourceError(f"--data {path} does not exist")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise SourceError(f"{path} is damaged, or no safetensors file: {error}") from error


def _open_image(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB")


def _counts(samples: int, batch: int) -> list[int]:
    return [min(batch, samples - start) for start in range(0, samples, batch)]


def _parts(items: list[Any], batch: int) -> list[list[Any]]:
    return [items[start : start + batch] for start in range(0, len(items), batch)]


def _cut(tensors: dict[str, Tensor], samples: int, batch: int) -> list[dict[str, Tensor]]:
    if not tensors:
        raise SourceError("expected the model's arguments in --data, got a file without tensors")
    single = [name for name, tensor in tensors.items() if not tensor.dim()]
    if single:
        raise SourceError(
            f"the first dimension of a tensor in --data is its samples; {', '.join(single)} has "
            "no dimension"
        )
    sizes = {name: len(tensor) for name, tensor in tensors.items()}
    if not max(sizes.values()):
        raise SourceError("the tensors in --data have no samples: their first dimension is 0")
    if len(set(sizes.values())) != 1:
        raise SourceError(f"the tensors differ in their number of samples: {json.dumps(sizes)}")
    most = min(samples, *sizes.values())
    return [
        {name: tensor[start : min(start + batch, most)] for name, tensor in tensors.items()}
        for start in range(0, most, batch)
    ]
