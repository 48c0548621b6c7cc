"""Models and inputs by name, for ``gfsa diagnose``."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.plugs.adapters.transformers.config_files import one_line, read_config
from gfsa.plugs.adapters.transformers.pretrained import from_pretrained, has_filters
from gfsa.plugs.checkpoint import load
from gfsa.plugs.running import call

# what a tokenizer returns that models take
_FROM_TOKENIZER = {"input_ids", "attention_mask", "token_type_ids"}


class SourceError(Exception):
    """A model or data set that was named cannot be used; the message says what can."""


@dataclass
class Source:
    """A model, and functions that build its inputs."""

    label: str
    model: nn.Module
    texts: Callable[[list[str], int], Any] | None = None
    """Texts and the maximal number of tokens of each → a batch."""
    images: Callable[[list[Any]], Any] | None = None
    """PIL images → a batch."""
    random: Callable[[int, int], Any] | None = None
    """Number of samples and of tokens → a batch."""
    longest: int = sys.maxsize
    """The most tokens that these functions make of a text."""


def load_source(name: str, untrained: bool) -> Source:
    """``[LABEL=]MODEL[@FILTERS]``: a transformers folder or hub name, or ``timm:NAME``."""
    model, _, filters = name.partition("@")
    label, where = _label_of(model)
    if not where:
        raise SourceError(f"expected --model [LABEL=]MODEL[@FILTERS], got {name!r}")
    if where.startswith("timm:"):
        source = _timm(where.removeprefix("timm:"), untrained)
    else:
        source = _transformers(where)
    if filters:
        load(source.model, filters)
    source.label = label or name
    source.model.eval()
    return source


def _label_of(text: str) -> tuple[str, str]:
    """The label, empty if there is none, and the model; a folder may have a "=" in its name."""
    if Path(text).exists():
        return "", text
    for at, letter in enumerate(text):
        if letter == "=" and Path(text[at + 1 :]).exists():
            return text[:at], text[at + 1 :]
    label, _, where = text.rpartition("=")
    return label, where


def _transformers(where: str) -> Source:
    try:
        import transformers as hf
    except ImportError:
        raise SourceError("this model needs transformers: pip install 'transformers>=5.15'") from None
    _refuse_folder_of_another_kind(Path(where))
    config = read_config(where)
    kind = getattr(hf, (config.architectures or [""])[0], hf.AutoModel)
    build = kind.from_pretrained
    if _has_filters(where):
        build = functools.partial(from_pretrained, kind)
    model = build(where)
    longest = positions_of(config, model)
    source = Source(where, model, longest=longest)
    inputs = _TransformersInputs(where, config, longest)
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_ids":
        source.texts = inputs.texts
        # a model of texts and images has the sizes of each in a config inside its own
        source.random = inputs.random_texts if hasattr(config, "vocab_size") else None
    elif main == "pixel_values":
        source.images, source.random = inputs.images, inputs.random_images
    return source


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

    def texts(self, lines: list[str], most: int) -> dict[str, Any]:
        tokens = self._tokenizer(
            lines,
            padding=True,
            truncation=True,
            max_length=min(most, self.longest),
            return_tensors="pt",
        )
        return self._finish(dict(tokens))

    def images(self, found: list[Any]) -> dict[str, Any]:
        import transformers as hf

        processor = hf.AutoImageProcessor.from_pretrained(self.where)
        return dict(processor(found, return_tensors="pt"))

    def random_texts(self, count: int, length: int) -> dict[str, Any]:
        ids = torch.randint(self.config.vocab_size, (count, min(length, self.longest)))
        return self._finish({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def random_images(self, count: int, length: int) -> dict[str, Any]:
        side = self.config.image_size
        side = side if isinstance(side, int) else side[0]
        return {"pixel_values": torch.randn(count, self.config.num_channels, side, side)}

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
            raise SourceError(f"{missing}; {type(error).__name__}: {one_line(error)}") from error
        if is_empty(found):
            raise SourceError(missing)
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
    """Whether a tokenizer knows no words: transformers makes such a one where files are missing."""
    # the mark of a word's beginning, which an empty one of T5 has
    return set(tokenizer.get_vocab()) <= {*tokenizer.all_special_tokens, "▁"}


def _has_filters(where: str) -> bool:
    """Whether a folder, or a model of the hub, was saved from a plugged model."""
    try:
        return has_filters(where)
    except FileNotFoundError:
        # filters are saved in safetensors only; without such files it is an ordinary model
        return False


def _refuse_folder_of_another_kind(folder: Path) -> None:
    """Raise for folders that hold no whole model of transformers, though they look like it."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise SourceError(
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
        raise SourceError(
            f"{folder} is a run of gfsa train, whose model transformers cannot build. Train with "
            f"--set lens=true for a lens page{over_training if coefficients.is_file() else ''}"
        )


def _timm(name: str, untrained: bool) -> Source:
    try:
        import timm
    except ImportError:
        raise SourceError("this model needs timm: pip install timm") from None
    if not timm.is_model(name):
        raise SourceError(f"timm has no model {name!r}; timm.list_models() names them")
    model = timm.create_model(name, pretrained=not untrained)
    settings = timm.data.resolve_model_data_config(model)

    def images(found: list[Any]) -> Tensor:
        transform = timm.data.create_transform(**settings, is_training=False)
        return torch.stack([transform(image) for image in found])

    def random(count: int, length: int) -> Tensor:
        return torch.randn(count, *settings["input_size"])

    return Source(name, model, images=images, random=random)


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
