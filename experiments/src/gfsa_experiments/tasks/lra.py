"""Long sequences: ListOps and CIFAR-10 pixel by pixel, of the Long Range Arena, and own texts.

The value of the list ``[MAX 4 3 [MIN 2 3 ] 1 0 ]`` is 4. The official rules: an operator has 2 to
10 arguments, each an operator with probability 1/4 and a digit otherwise, at depth 10 (the root has
depth 1) always a digit; operators are MIN, MAX, MED (the median, rounded down) and SM (the sum
modulo 10); lists of more than 500 and fewer than 2,000 tokens are kept (so the root is always an
operator), without duplicates; 96,000 to train on, 2,000 to validate on, 2,000 to test on.

Drawing them takes some minutes, once: the lists are stored.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from gfsa_experiments.data.files import check_count, read_npz, source_of
from gfsa_experiments.data.own import name_of
from gfsa_experiments.data.tables import OwnTable, open_table, read_labelled, usable_rows
from gfsa_experiments.engine.config import (
    Count,
    CountOrZero,
    InnerShare,
    ShareBelowOne,
    check_multiple,
)
from gfsa_experiments.engine.task import OwnData, Split, Task, as_it_is
from gfsa_experiments.engine.whole_files import write_whole
from gfsa_experiments.models.attention import Attention, Encoder
from gfsa_experiments.tasks.image import SIDE, cifar_parts

COUNTS = {"train": 96_000, "val": 2_000, "test": 2_000}
SHORTEST, LONGEST = 501, 1_999
DEEPEST = 10
MOST_ARGUMENTS = 10
OPERATOR_SHARE = 0.25

PAD = 0
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
_VALUES: tuple[Callable[[list[int]], float], ...] = (min, max, median, lambda v: sum(v) % 10)
TOKENS = ("<pad>", *map(str, range(10)), *OPERATORS, "]")
# only words and brackets count: parentheses repeat the structure
_CODES = {token: code for code, token in enumerate(TOKENS) if code}
_DIGIT, _OPERATOR, _CLOSE = _CODES["0"], _CODES["[MIN"], _CODES["]"]
_GENERATED = "listops_seed0.npz"
_ARRAYS = ("tokens", "offsets", "labels")

_PIXELS = SIDE**2
_BYTES = 256
# labels are stored in bytes
_MOST_CLASSES = 256


@dataclass(frozen=True)
class Sequences:
    """Rows of small tokens, uint8, with a label each."""

    rows: Sequence[np.ndarray]
    labels: np.ndarray

    @classmethod
    def of(cls, lists: Iterable[tuple[bytes, int]]) -> Sequences:
        rows, labels = zip(*lists, strict=True)
        return cls([np.frombuffer(row, np.uint8) for row in rows], np.array(labels, np.uint8))


def make_listops(seed: int = 0, counts: dict[str, int] | None = None) -> dict[str, Sequences]:
    """The parts of the data set of this ``seed``."""
    counts = COUNTS if counts is None else counts
    found: dict[bytes, int] = {}
    for sequence, label in _draw(random.Random(seed)):
        found.setdefault(sequence, label)
        if len(found) == sum(counts.values()):
            break
    lists = iter(found.items())
    return {name: Sequences.of(itertools.islice(lists, count)) for name, count in counts.items()}


def _draw(generator: random.Random) -> Iterator[tuple[bytes, int]]:
    """An endless stream of lists of valid length and their values."""
    while True:
        tokens: list[int] = []
        value = _grow(generator, 1, tokens)
        if SHORTEST <= len(tokens) <= LONGEST:
            yield bytes(tokens), value


def _grow(generator: random.Random, depth: int, tokens: list[int]) -> int:
    """Append a digit or an operator with its arguments; the value of it."""
    if depth > 1 and (depth == DEEPEST or generator.random() > OPERATOR_SHARE):
        digit = generator.randrange(10)
        tokens.append(_DIGIT + digit)
        return digit
    operator = generator.randrange(len(OPERATORS))
    tokens.append(_OPERATOR + operator)
    count = generator.randint(2, MOST_ARGUMENTS)
    values = [_grow(generator, depth + 1, tokens) for _ in range(count)]
    tokens.append(_CLOSE)
    return int(_VALUES[operator](values))


@lru_cache(maxsize=2)
def read_listops(data_dir: Path) -> dict[str, Sequences]:
    """``train``, ``val`` and ``test``; generated and stored if they do not exist."""
    source = source_of("listops")
    try:
        source.find(data_dir, "basic_train.tsv")
    except FileNotFoundError:
        return _generated(data_dir)
    # one part without the others is a mistake
    paths = {part: source.find(data_dir, f"basic_{part}.tsv") for part in COUNTS}
    return {part: _read_tsv(path, COUNTS[part]) for part, path in paths.items()}


def _generated(data_dir: Path) -> dict[str, Sequences]:
    """The parts that are stored, drawn if they are not."""
    stored = [folder / _GENERATED for folder in (data_dir, data_dir / "listops")]
    path = next((path for path in stored if path.is_file()), stored[-1])
    if not path.is_file():
        _generate(path)
    try:
        # the npz format has a checksum for each array
        arrays = read_npz(path, [f"{name}_{part}" for part in COUNTS for name in _ARRAYS])
    except ValueError as error:
        raise ValueError(f"{error}, or delete it to generate it again") from error
    found = {}
    for part in COUNTS:
        tokens, offsets, labels = (arrays[f"{name}_{part}"] for name in _ARRAYS)
        found[part] = Sequences(np.split(tokens, offsets[1:-1]), labels)
    return found


def _read_tsv(path: Path, official: int) -> Sequences:
    """Columns Source and Target."""
    rows = usable_rows(path, open_table(path), ("Source", "Target"), ("", ""))
    check_count(path, len(rows), official)
    found = []
    for source, target in rows:
        words = source.replace("(", " ").replace(")", " ").split()
        if not set(words) <= _CODES.keys() or not 0 < len(words) <= LONGEST:
            raise ValueError(f"{path}: expected lists of {', '.join(_CODES)}, got {source[:60]!r}")
        found.append((bytes(_CODES[word] for word in words), int(target)))
    return Sequences.of(found)


def _generate(path: Path) -> None:
    """Draw the data set and store it; of several processes, one does and the others wait."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.is_file():
                print(f"generating ListOps, 100,000 lists, in {path.parent} …", file=sys.stderr)
                store(path, make_listops())
    except OSError as error:
        raise OSError(
            f"found no ListOps under {path.parents[1]}, and cannot write one there ({error}); "
            "give a --data-dir that can be written to"
        ) from error


def store(path: Path, parts: dict[str, Sequences]) -> None:
    """Write the parts where :func:`read_listops` finds them."""
    arrays: dict[str, Any] = {}
    for name, part in parts.items():
        arrays[f"tokens_{name}"] = np.concatenate(part.rows)
        arrays[f"offsets_{name}"] = np.cumsum([0, *map(len, part.rows)])
        arrays[f"labels_{name}"] = part.labels
    write_whole(path, functools.partial(np.savez, **arrays))


@dataclass(frozen=True, kw_only=True)
class LraConfig(OwnTable):
    """The benchmark's settings for ListOps."""

    in_label = ("data", "task", "attention")
    used_if = (
        ("!data", "task holdout"),
        ("task=image", "holdout"),
    )

    task: Literal["listops", "image"] = "listops"
    """Unless ``data`` names texts of the caller's own, which are read byte by byte."""
    attention: Attention = "softmax"
    dim: Count = 512
    depth: Count = 4
    num_heads: Count = 8
    ffn_dim: Count = 1024
    dropout: ShareBelowOne = 0.1
    attention_dropout: ShareBelowOne = 0.0
    length: int = 2000
    """ListOps: tokens of a sequence with CLS; its lists have at most 1,999. Longer texts of the
    caller's own are cut."""
    pad_to_multiple: CountOrZero = 0
    """ListOps and own texts: batches are padded, CLS included, to a multiple of this; 0: to
    ``length``."""
    holdout: InnerShare = 0.1
    """Image: share of the training images held out for validation."""

    max_steps: int = 5000
    batch_size: int = 32
    lr: float = 3e-4
    weight_decay: float = 0.1
    beta2: float = 0.98
    warmup: float = 0.2
    drop_last: bool = True

    def check(self) -> None:
        super().check()
        check_multiple(self, "dim", "num_heads")
        if len(self.text) != 1:
            raise ValueError(f"text takes one column here, got {', '.join(self.text)}")
        if self.length < 2:
            raise ValueError(f"length must be at least 2, a token and CLS, got {self.length}")
        if not self.data and self.task == "listops" and self.length <= LONGEST:
            raise ValueError(f"length must be above {LONGEST}, the longest list, got {self.length}")

    def unused(self) -> dict[str, str]:
        if self.data or self.task == "listops":
            return super().unused()
        fixed = f"every image is {_PIXELS} tokens; task=listops has lists of many lengths"
        lengths = ("length", "pad_to_multiple", "group_by_length")
        return super().unused() | dict.fromkeys(lengths, fixed)

    def sketch(self) -> nn.Module:
        with torch.device("meta"):
            return make_encoder(self)

    def label(self) -> str:
        return f"{f'data={name_of(self.data)}' if self.data else self.task} {self.attention}"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, without CLS."""
        return _PIXELS if self.task == "image" and not self.data else self.length - 1


class LraTask(Task):
    """The class of a sequence: cross-entropy, and accuracy in percent."""

    metric = "accuracy"

    def __init__(self, config: LraConfig, data_dir: Path) -> None:
        data_dir = Path(data_dir).absolute()
        classes, multiple = 10, config.pad_to_multiple
        # images have no padding
        self.pad: int | None = PAD
        if config.data:
            parts, classes, self.own_data = _read_texts(config, data_dir)
        elif config.task == "listops":
            lists = read_listops(data_dir)
            parts = {"train": lists["train"], "valid": lists["val"], "test": lists["test"]}
        else:
            parts, self.pad = _images(data_dir, config.holdout), None
        self.model = make_encoder(config, classes)
        self.splits = {
            name: Split(Padded(of, config.longest, multiple), as_it_is, [*map(len, of.rows)])
            for name, of in parts.items()
        }

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["tokens"]
        logits: Tensor = model(tokens.int(), None if self.pad is None else tokens == self.pad)
        return logits

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.logits(model, batch).float(), batch["labels"])

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return self.logits(model, batch).argmax(-1) == batch["labels"]

    def score(self, predictions: list[Tensor]) -> dict[str, float]:
        return {"accuracy": 100 * torch.cat(predictions).double().mean().item()}

    def example(self) -> Tensor:
        """One sequence without padding."""
        tokens: Tensor = self.first_examples(1)["tokens"].int()
        return tokens if self.pad is None else tokens[:, tokens[0] != self.pad]


@dataclass(eq=False)
class Padded(Dataset[Any]):
    """Batches of ``tokens`` (uint8) and ``labels``, padded to few different lengths."""

    sequences: Sequences
    longest: int
    """Tokens of the longest batch."""
    multiple: int
    """The width of a batch, CLS included, is a multiple of this; 0: always ``longest``."""

    def __len__(self) -> int:
        return len(self.sequences.rows)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        rows = [self.sequences.rows[index] for index in indices]
        width = self.longest
        if self.multiple:
            most = max(map(len, rows)) + 1
            width = min(-(-most // self.multiple) * self.multiple - 1, width)
        tokens = np.full((len(rows), width), PAD, np.uint8)
        for line, row in zip(tokens, rows, strict=True):
            line[: len(row)] = row
        labels = self.sequences.labels[indices].astype(np.int64)
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}


def make_encoder(config: LraConfig, num_classes: int = 10) -> Encoder:
    is_lists = config.task == "listops" and not config.data
    names = "attention", "dim", "depth", "num_heads", "ffn_dim", "dropout", "attention_dropout"
    return Encoder(
        vocabulary=len(TOKENS) if is_lists else _BYTES,
        num_classes=num_classes,
        max_length=config.longest,
        **{name: getattr(config, name) for name in names},
    )


def _read_texts(
    config: LraConfig, data_dir: Path
) -> tuple[dict[str, Sequences], int, OwnData | None]:
    """The bytes of texts with classes from a table; those that are too long are cut."""
    given = config.data, data_dir, config.text, config.label_column
    rows = read_labelled(*given, only_classes=True)
    classes, longest = len(rows.labels.classes), config.longest
    if classes > _MOST_CLASSES:
        raise ValueError(
            f"{config.data}: this recipe predicts up to {_MOST_CLASSES} classes, and the column "
            f"{config.label_column} has {classes}; the recipe text predicts any number of them"
        )
    # 0 is the padding
    whole = [row[0].replace("\0", " ").encode() for row in rows.texts]
    cut = sum(len(one) > longest for one in whole)
    own = rows.own
    if cut and own is not None:
        said = f"{own.split_by}; {cut} texts of more than {longest} bytes are cut"
        own = replace(own, split_by=said)
    values = rows.labels.values
    parts = {
        part: Sequences.of((whole[row][:longest], int(values[row])) for row in chosen)
        for part, chosen in rows.parts.items()
    }
    return parts, classes, own


def to_grey(pixels: Tensor) -> Tensor:
    """``(N, 32, 32, 3)`` to ``(N, 1024)``: integer luma as in Pillow's mode L."""
    weights = torch.tensor([19595, 38470, 7471])
    # in chunks: 32-bit integers of all images at once would take a gigabyte
    grey = [(part.int() * weights).sum(-1).add_(1 << 15) >> 16 for part in pixels.split(5000)]
    return torch.cat([part.to(torch.uint8) for part in grey]).flatten(1)


@lru_cache(maxsize=2)
def _images(data_dir: Path, holdout: float) -> dict[str, Sequences]:
    """Grey images as sequences of 1,024 values."""
    found = {}
    for part, rows in cifar_parts(data_dir, "cifar10", holdout).items():
        grey = to_grey(rows.columns["images"]).numpy()
        found[part] = Sequences(list(grey), rows.columns["labels"].numpy())
    return found
