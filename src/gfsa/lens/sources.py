"""Models and inputs by name, for ``gfsa diagnose``.

What cannot be used raises ValueError with one line that says what can.
"""

from __future__ import annotations

import csv
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gfsa.plugs.running import call
from gfsa.plugs.saving.checkpoint import load
from gfsa.plugs.saving.pretrained import from_pretrained, has_filters, one_line, read_config

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
# what a tokenizer returns that models take
_FROM_TOKENIZER = {"input_ids", "attention_mask", "token_type_ids"}

_PASS = "pass a text file, a folder of images, or a .safetensors file with the model's arguments"

Make = Callable[[Sequence[Any], int], Any]
"""Samples and the largest number of tokens of each → a batch."""


class Data(NamedTuple):
    """What ``--data`` names, read before any model is loaded."""

    name: str
    kind: Literal["random", "texts", "images", "tensors"]
    samples: Sequence[Any]
    """Texts, paths of images, arguments of a model by name, or numbers of rows."""


@dataclass
class Source:
    """A model, and functions that build its inputs."""

    label: str
    model: nn.Module
    makes: dict[str, Make] = field(default_factory=dict)
    """By kind of data; at random by the number of samples alone."""
    longest: int = sys.maxsize
    """The most tokens that these functions make of a text."""


def read_data(name: str, samples: int, column: str = "") -> Data:
    """Read at most ``samples`` samples; ``column`` names the texts of a table."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(name)
    ending = path.suffix.lower()
    is_table = ending in (".csv", ".tsv")
    if column and not is_table:
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
    if ending in (".json", ".jsonl", ".ndjson", ".parquet"):
        raise ValueError(f"{path}: write its texts one per line into a .txt, or export a .csv")
    what = {".safetensors": "safetensors file", ".csv": "table", ".tsv": "table"}
    try:
        if ending == ".safetensors":
            return Data(name, "tensors", _rows_of(load_file(path), path)[:samples])
        # some editors write a byte order mark
        text = path.read_text(encoding="utf-8-sig")
        lines = _column_of(path, text, column) if is_table else text.splitlines()
    except (SafetensorError, UnicodeDecodeError, csv.Error) as error:
        kind = what.get(ending, "text in UTF-8")
        raise ValueError(f"{path} is damaged, or no {kind} ({error}); {_PASS}") from error
    lines = [line.strip() for line in lines if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no text in it")
    return Data(name, "texts", lines[:samples])


def _column_of(path: Path, text: str, column: str) -> list[str]:
    """The cells of a column; a header line without one is not a text."""
    head = text.split("\n", 1)[0]
    comma = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=head.count)
    table = csv.DictReader(text.splitlines(keepends=True), delimiter=comma)
    header, rows = table.fieldnames or (), list(table)
    if column not in header:
        got = f"it has no column {column!r}" if column else "--column names the one with the texts"
        raise ValueError(f"{path} is a table with the columns {', '.join(header) or 'none'}: {got}")
    return [row[column] or "" for row in rows]


def _rows_of(tensors: dict[str, Tensor], path: Path) -> list[dict[str, Tensor]]:
    """The arguments of a model, sample by sample."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    # () of a tensor without dimensions
    sizes = {shape[:1] for shape in shapes.values()}
    if len(sizes) != 1 or sizes <= {(), (0,)}:
        raise ValueError(
            f"{path}: expected the model's arguments, each with as many samples in its first "
            f"dimension, at least 1; got tensors of the shapes {shapes}"
        )
    return [dict(zip(tensors, row, strict=True)) for row in zip(*tensors.values(), strict=True)]


def load_batches(source: Source, data: Data, batch: int, tokens: int) -> list[Any]:
    """The data as batches for ``source``."""
    makes: dict[str, Make] = {"tensors": _stacked, **source.makes}
    if data.kind not in makes:
        what = {"texts": "text", "random": "random inputs"}.get(data.kind, data.kind)
        raise ValueError(
            f"{source.label} ({type(source.model).__name__}) takes no {what}; a .safetensors file "
            "with the arguments of its forward always does"
        )
    starts = range(0, len(data.samples), batch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [makes[data.kind](data.samples[at : at + batch], tokens) for at in starts]


def _stacked(rows: Sequence[dict[str, Tensor]], most: int) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _open_images(paths: Sequence[Path]) -> list[Any]:
    from PIL import Image

    images = []
    for path in paths:
        with Image.open(path) as image:
            images.append(image.convert("RGB"))
    return images


def other_inputs(batches: list[Any], other: Source, data: Data, batch: int, tokens: int) -> bool:
    """Whether ``other`` would make other batches of ``data`` than these.

    False where it cannot make any: a folder of a run often has no tokenizer.
    """
    if data.kind in ("random", "tensors"):
        return False
    try:
        own_batches = load_batches(other, data, batch, tokens)
    # whatever a library raises for a tokenizer or settings of images that are not there
    except Exception:
        return False
    for pair in zip(own_batches, batches, strict=True):
        own, given = (x if isinstance(x, dict) else {"": x} for x in pair)
        if own.keys() != given.keys() or not all(torch.equal(own[k], given[k]) for k in own):
            return True
    return False


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
    places = [at for at, letter in enumerate(text) if letter == "="]
    label_ends = next((at for at in places if Path(text[at + 1 :]).exists()), text.rfind("="))
    return text[: max(label_ends, 0)], text[label_ends + 1 :]


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
    # a run writes it before anything else; no model of transformers has such a file
    if Path(where, "environment.json").is_file():
        raise ValueError(
            f"{where} is a run of gfsa train, whose model transformers cannot build. Train with "
            "--set lens=true for a lens page"
        )
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
    main = getattr(model, "main_input_name", "input_ids")
    return Source(where, model, _makes(where, config, longest, main), longest)


def _makes(where: str, config: Any, longest: int, main: str) -> dict[str, Make]:
    """Functions that build inputs of a transformers model whose main input is ``main``."""
    import transformers as hf

    @functools.cache
    def tokenizer() -> Any:
        missing = (
            f"{where} has no tokenizer, which --data needs for text: save the one that the "
            "model was trained with into it (tokenizer.save_pretrained)"
        )
        try:
            found = hf.AutoTokenizer.from_pretrained(where)
        except (OSError, ValueError) as error:
            raise ValueError(f"{missing}; {type(error).__name__}: {one_line(error)}") from error
        if is_empty(found):
            raise ValueError(missing)
        if found.pad_token is None:
            found.pad_token = found.eos_token
        return found

    def arguments(ids: dict[str, Any]) -> dict[str, Any]:
        used = {key: value for key, value in ids.items() if key in _FROM_TOKENIZER}
        return used | ({"decoder_input_ids": ids["input_ids"]} if config.is_encoder_decoder else {})

    def texts(lines: Sequence[str], most: int) -> dict[str, Any]:
        length = min(most, longest)
        cut = {"padding": True, "truncation": True, "max_length": length}
        return arguments(tokenizer()(list(lines), return_tensors="pt", **cut))

    def random_texts(rows: Sequence[Any], most: int) -> dict[str, Any]:
        ids = torch.randint(config.vocab_size, (len(rows), min(most, longest)))
        return arguments({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def images(paths: Sequence[Path], most: int) -> dict[str, Any]:
        processor = hf.AutoImageProcessor.from_pretrained(where)
        return dict(processor(_open_images(paths), return_tensors="pt"))

    def random_images(rows: Sequence[Any], most: int) -> dict[str, Any]:
        size = config.image_size
        side = size if isinstance(size, int) else size[0]
        return {"pixel_values": torch.randn(len(rows), config.num_channels, side, side)}

    # a model of texts and images has the sizes of each in a config inside its own
    has_words = hasattr(config, "vocab_size")
    of_texts: dict[str, Make] = {"texts": texts} | ({"random": random_texts} if has_words else {})
    of_images: dict[str, Make] = {"images": images, "random": random_images}
    return {"input_ids": of_texts, "pixel_values": of_images}.get(main, {})


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


def _timm(name: str, untrained: bool) -> Source:
    try:
        import timm
    except ImportError:
        raise ValueError("this model needs timm: pip install timm") from None
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}; timm.list_models() names them")
    model = timm.create_model(name, pretrained=not untrained)
    settings = timm.data.resolve_model_data_config(model)

    def images(paths: Sequence[Path], most: int) -> Tensor:
        transform = timm.data.create_transform(**settings, is_training=False)
        return torch.stack([transform(image) for image in _open_images(paths)])

    def random(rows: Sequence[Any], most: int) -> Tensor:
        return torch.randn(len(rows), *settings["input_size"])

    return Source(name, model, {"images": images, "random": random})
