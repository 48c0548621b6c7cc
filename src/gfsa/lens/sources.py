"""Models and inputs by name, for ``gfsa diagnose``.

What cannot be used raises ValueError with one line that says what can.
"""

from __future__ import annotations

import csv
import functools
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gfsa.plugs.running import call
from gfsa.plugs.saving.checkpoint import load
from gfsa.plugs.saving.pretrained import from_pretrained, has_filters, one_line, read_config

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
# what a tokenizer returns that models take
_FROM_TOKENIZER = {"input_ids", "attention_mask", "token_type_ids"}
# samples that show whether two models have the same tokenizer, or take images of the same size
_COMPARED = 4

_PASS = "pass a text file, a folder of images, or a .safetensors file with the model's arguments"

Make = Callable[[Sequence[Any], int], Any]
"""Samples and the largest number of tokens of each → a batch."""


@dataclass
class Data:
    """What ``--data`` names, read before any model is loaded."""

    name: str
    kind: Literal["random", "texts", "images", "tensors"]
    samples: Sequence[Any]
    """Texts, paths of images, or numbers of rows."""
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Source:
    """A model, and functions that build its inputs."""

    label: str
    model: nn.Module
    makes: dict[str, Make] = field(default_factory=dict)
    """By kind of data: of texts, of PIL images, or at random by the number of samples alone."""
    longest: int = sys.maxsize
    """The most tokens that these functions make of a text."""


def read_data(name: str, samples: int, column: str = "") -> Data:
    """Read at most ``samples`` samples; ``column`` names the texts of a table."""
    path = Path(name)
    ending = path.suffix.lower()
    if column and ending not in (".csv", ".tsv"):
        raise ValueError(f"--column names a column of a .csv or .tsv, which --data {name} is not")
    if name == "random":
        return Data(name, "random", range(samples))
    if path.is_dir():
        images = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGES)
        if not images:
            raise ValueError(f"no images ({', '.join(IMAGES)}) in {path}")
        return Data(name, "images", images[:samples])
    if not path.is_file():
        raise ValueError(f"--data {name!r} is neither a file nor a folder nor 'random'; {_PASS}")
    if ending == ".safetensors":
        tensors = _read_tensors(path)
        return Data(name, "tensors", range(len(next(iter(tensors.values()))))[:samples], tensors)
    if ending in (".json", ".jsonl", ".ndjson", ".parquet"):
        raise ValueError(f"{path}: write its texts one per line into a .txt, or export a .csv")
    try:
        # some editors write a byte order mark
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in UTF-8 ({error.reason}, byte {error.start}); {_PASS}"
        ) from error
    lines = _column_of(path, text, column) if ending in (".csv", ".tsv") else text.splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no text in it")
    return Data(name, "texts", lines[:samples])


def _column_of(path: Path, text: str, column: str) -> list[str]:
    """The cells of a column; a header line without one is not a text."""
    head = text.split("\n", 1)[0]
    comma = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=head.count)
    try:
        header, *rows = list(csv.reader(text.splitlines(keepends=True), delimiter=comma)) or [[]]
    except csv.Error as error:
        raise ValueError(f"{path} is damaged, or no table: {error}") from error
    if column not in header:
        got = f"it has no column {column!r}" if column else "--column names the one with the texts"
        raise ValueError(f"{path} is a table with the columns {', '.join(header) or 'none'}: {got}")
    at = header.index(column)
    return [row[at] for row in rows if len(row) > at]


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or no safetensors file: {error}") from error
    if not tensors:
        raise ValueError("expected the model's arguments in --data, got a file without tensors")
    single = [name for name, tensor in tensors.items() if not tensor.dim()]
    if single:
        raise ValueError(
            f"the first dimension of a tensor in --data is its samples; {', '.join(single)} has "
            "no dimension"
        )
    sizes = {name: len(tensor) for name, tensor in tensors.items()}
    if not max(sizes.values()):
        raise ValueError("the tensors in --data have no samples: their first dimension is 0")
    if len(set(sizes.values())) != 1:
        raise ValueError(f"the tensors differ in their number of samples: {json.dumps(sizes)}")
    return tensors


def load_batches(source: Source, data: Data, batch: int, tokens: int) -> list[Any]:
    """The data as batches for ``source``."""
    starts = range(0, len(data.samples), batch)
    parts = [data.samples[start : start + batch] for start in starts]
    if data.kind == "tensors":
        rows = [slice(part[0], part[-1] + 1) for part in parts]
        return [{name: tensor[at] for name, tensor in data.tensors.items()} for at in rows]
    make = source.makes.get(data.kind)
    if make is None:
        what = {"texts": "text", "random": "random inputs"}.get(data.kind, data.kind)
        raise ValueError(
            f"{source.label} ({type(source.model).__name__}) takes no {what}; a .safetensors file "
            "with the arguments of its forward always does"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if data.kind == "images":
            return [make([_open_image(path) for path in part], tokens) for part in parts]
        return [make(part, tokens) for part in parts]


def _open_image(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB")


def other_inputs(first: Source, other: Source, data: Data, tokens: int) -> bool:
    """Whether ``other`` would make other inputs of some of ``data`` than ``first``.

    False where it cannot make any: a folder of a run often has no tokenizer.
    """
    if data.kind in ("random", "tensors"):
        return False
    some = replace(data, samples=data.samples[:_COMPARED])
    try:
        (own,) = load_batches(other, some, _COMPARED, tokens)
    # whatever a library raises for a tokenizer or settings of images that are not there
    except Exception:
        return False
    (given,) = load_batches(first, some, _COMPARED, tokens)
    return _numbers(own) != _numbers(given)


def _numbers(batch: Tensor | dict[str, Tensor]) -> Any:
    if isinstance(batch, dict):
        return {name: tensor.tolist() for name, tensor in batch.items()}
    return batch.tolist()


def refuse_unfit(source: Source, batch: Any, data: str) -> None:
    """Raise ValueError if the model does not run on a batch."""
    try:
        with torch.no_grad():
            call(source.model, batch)
    # whatever a model raises for inputs of another kind or size
    except Exception as error:
        raise ValueError(
            f"{source.label} ({type(source.model).__name__}) does not run on the inputs that were "
            f"made of --data {data}: {type(error).__name__}: {one_line(error)}"
        ) from error


def load_source(name: str, untrained: bool) -> Source:
    """``[LABEL=]MODEL[@FILTERS]``: transformers' folder or hub name, timm:NAME, module:function."""
    model, _, filters = name.partition("@")
    label, where = label_of(model)
    if not where:
        raise ValueError(f"expected --model [LABEL=]MODEL[@FILTERS], got {name!r}")
    if where.startswith("timm:"):
        source = _timm(where.removeprefix("timm:"), untrained)
    elif re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", where) and not Path(where).exists():
        source = _own(*where.split(":"))
    else:
        source = _transformers(where)
    if filters:
        load(source.model, filters)
    source.label = label or name
    source.model.eval()
    return source


def label_of(text: str) -> tuple[str, str]:
    """The label, empty if there is none, and what it names, which may have a "=" in its name."""
    if Path(text).exists():
        return "", text
    for at, letter in enumerate(text):
        if letter == "=" and Path(text[at + 1 :]).exists():
            return text[:at], text[at + 1 :]
    label, _, where = text.rpartition("=")
    return label, where


def _own(module: str, function: str) -> Source:
    """The model that a function of the user's own module returns."""
    # as for python -m, modules are found in the working directory
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"--model {module}:{function}: {one_line(error)}") from error
    model = build()
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"--model {module}:{function}: expected a function without arguments that returns an "
            f"nn.Module, got {type(model).__name__}"
        )
    return Source(function, model)


def _transformers(where: str) -> Source:
    try:
        import transformers as hf
    except ImportError:
        raise ValueError(
            "this model needs transformers: pip install 'transformers>=5.15'"
        ) from None
    _refuse_folder_of_another_kind(Path(where))
    config = read_config(where)
    named = next(iter(config.architectures or ()), None)
    kind: Any = getattr(hf, named, None) if isinstance(named, str) else None
    if not (isinstance(kind, type) and issubclass(kind, hf.PreTrainedModel)):
        kind = hf.AutoModel
    plugged = has_filters(where)
    try:
        model = from_pretrained(kind, where) if plugged else kind.from_pretrained(where)
    # whatever transformers raises for damaged or missing files
    except Exception as error:
        raise ValueError(
            f"{where} cannot be loaded: {type(error).__name__}: {one_line(error)}"
        ) from error
    longest = positions_of(config, model)
    inputs = _TransformersInputs(where, config, longest)
    main, makes = getattr(model, "main_input_name", "input_ids"), dict[str, Make]()
    if main == "input_ids":
        makes["texts"] = inputs.texts
        # a model of texts and images has the sizes of each in a config inside its own
        if hasattr(config, "vocab_size"):
            makes["random"] = inputs.random_texts
    elif main == "pixel_values":
        makes = {"images": inputs.images, "random": inputs.random_images}
    return Source(where, model, makes, longest)


class _TransformersInputs:
    """Builds the inputs of a transformers model.

    Args:
        where: the model's folder, or its name on the hub.
        config: the model's.
        longest: the tokens that it has positions for.
    """

    def __init__(self, where: str, config: Any, longest: int) -> None:
        self.where = where
        self.config = config
        self.longest = longest

    def texts(self, lines: Sequence[str], most: int) -> dict[str, Any]:
        length = min(most, self.longest)
        tokens = self._tokenizer(
            list(lines), padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        return self._finish(dict(tokens))

    def images(self, found: Sequence[Any], most: int) -> dict[str, Any]:
        import transformers as hf

        processor = hf.AutoImageProcessor.from_pretrained(self.where)
        return dict(processor(found, return_tensors="pt"))

    def random_texts(self, rows: Sequence[Any], most: int) -> dict[str, Any]:
        ids = torch.randint(self.config.vocab_size, (len(rows), min(most, self.longest)))
        return self._finish({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def random_images(self, rows: Sequence[Any], most: int) -> dict[str, Any]:
        side = self.config.image_size
        side = side if isinstance(side, int) else side[0]
        return {"pixel_values": torch.randn(len(rows), self.config.num_channels, side, side)}

    @functools.cached_property
    def _tokenizer(self) -> Any:
        import transformers as hf

        missing = (
            f"{self.where} has no tokenizer, which --data needs for text: save the one that the "
            "model was trained with into it (tokenizer.save_pretrained)"
        )
        try:
            found = hf.AutoTokenizer.from_pretrained(self.where)
        except (OSError, ValueError) as error:
            raise ValueError(f"{missing}; {type(error).__name__}: {one_line(error)}") from error
        if is_empty(found):
            raise ValueError(missing)
        if found.pad_token is None:
            found.pad_token = found.eos_token
        return found

    def _finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        used = {key: value for key, value in batch.items() if key in _FROM_TOKENIZER}
        if self.config.is_encoder_decoder:
            used["decoder_input_ids"] = used["input_ids"]
        return used


def positions_of(config: Any, model: nn.Module) -> int:
    """The tokens that a model has positions for; a large number if its config does not say."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return sys.maxsize
    # RoBERTa and its relatives count from behind the position of padding
    first = (
        table.padding_idx + 1
        for table in model.modules()
        if isinstance(table, nn.Embedding)
        and table.num_embeddings == positions
        and table.padding_idx is not None
        # a vocabulary may have as many words
        and table is not getattr(model, "get_input_embeddings", lambda: None)()
    )
    return positions - next(first, 0)


def is_empty(tokenizer: Any) -> bool:
    """Whether a tokenizer knows no words; transformers makes an empty one if files are missing."""
    # an empty tokenizer of T5 has the mark of a word's beginning
    return set(tokenizer.get_vocab()) <= {*tokenizer.all_special_tokens, "▁"}


def _refuse_folder_of_another_kind(folder: Path) -> None:
    """Raise for folders that hold no whole model of transformers, though they look like it."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} is an adapter of peft, without its base; pass the folder of a whole model: "
            "gfsa.load_peft(base, folder).merge_and_unload().save_pretrained(...)"
        )
    # a run writes it before anything else; no model of transformers has such a file
    if (folder / "environment.json").is_file():
        coefficients = folder / "coefficients.csv"
        over_training = (
            f", or show its filters over training: gfsa diagnose --coefficients {coefficients} "
            "--html page.html"
        )
        raise ValueError(
            f"{folder} is a run of gfsa train, whose model transformers cannot build. Train with "
            f"--set lens=true for a lens page{over_training if coefficients.is_file() else ''}"
        )


def _timm(name: str, untrained: bool) -> Source:
    try:
        import timm
    except ImportError:
        raise ValueError("this model needs timm: pip install timm") from None
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}; timm.list_models() names them")
    model = timm.create_model(name, pretrained=not untrained)
    settings = timm.data.resolve_model_data_config(model)

    def images(found: Sequence[Any], most: int) -> Tensor:
        transform = timm.data.create_transform(**settings, is_training=False)
        return torch.stack([transform(image) for image in found])

    def random(rows: Sequence[Any], most: int) -> Tensor:
        return torch.randn(len(rows), *settings["input_size"])

    return Source(name, model, {"images": images, "random": random})
