"""Two tasks of the Long Range Arena: ListOps, and CIFAR-10 pixel by pixel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gfsa_experiments.data.own import hold_out, name_of
from gfsa_experiments.data.tables import read_labelled, refuse_columns
from gfsa_experiments.engine.config import (
    Count,
    CountOrZero,
    InnerShare,
    ShareBelowOne,
    TrainConfig,
    check_multiple,
)
from gfsa_experiments.engine.task import (
    Classification,
    OwnData,
    Recipe,
    Split,
    TensorRows,
    as_it_is,
)
from gfsa_experiments.models.attention import Attention, Encoder
from gfsa_experiments.tasks import listops
from gfsa_experiments.tasks.image import data as cifar

_PIXELS = cifar.SIDE**2
_BYTES = 256
# labels are stored in bytes
_MOST_CLASSES = 256


@dataclass(frozen=True, kw_only=True)
class LraConfig(TrainConfig):
    """The benchmark's settings for ListOps."""

    in_label = ("data", "task", "attention")
    short_names = (("label", "label_column"),)

    data: str = ""
    """Texts of the caller's own, byte by byte, instead of ``task``: a file or folder of tables, or
    ``hub:ID``."""
    text: str = "text"
    """Its column of texts."""
    label_column: str = "label"
    """Its column of classes; ``label=`` for short."""
    task: Literal["listops", "image"] = "listops"
    attention: Attention = "softmax"
    """``linformer`` is a reference model that takes no filter."""
    dim: Count = 512
    depth: Count = 4
    num_heads: Count = 8
    ffn_dim: Count = 1024
    projected: Count = 256
    """Rows that Linformer projects a sequence to."""
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
        if self.attention == "efficient" and self.attention_dropout:
            raise ValueError(
                "attention=efficient never builds the map whose entries attention_dropout="
                f"{self.attention_dropout} would drop; leave it at 0"
            )
        refuse_columns((self.text,), self.label_column)
        if self.length < 2:
            raise ValueError(f"length must be at least 2, a token and CLS, got {self.length}")
        if not self.data and self.task == "listops" and self.length <= listops.LONGEST:
            raise ValueError(
                f"length must be above {listops.LONGEST}, the longest list, got {self.length}"
            )

    def unused(self) -> dict[str, str]:
        unused = super().unused()
        if self.data:
            unused["task"] = "data= names the texts"
            unused["holdout"] = "texts of your own are split 80 : 10 : 10, or as they are named"
        elif self.task == "image":
            fixed = f"every image is {_PIXELS} tokens; task=listops has lists of many lengths"
            unused |= dict.fromkeys(("length", "pad_to_multiple", "group_by_length"), fixed)
        else:
            unused["holdout"] = "ListOps has a validation part; task=image holds images out"
        if not self.data:
            own = "it names a column of data= of your own"
            unused |= dict.fromkeys(("text", "label_column"), own)
        if self.attention != "linformer":
            unused["projected"] = "only attention=linformer projects its sequences"
        return unused

    def sketch(self) -> nn.Module:
        with torch.device("meta"):
            return make_encoder(self)

    def label(self) -> str:
        return f"{f'data={name_of(self.data)}' if self.data else self.task} {self.attention}"


class LraTask(Classification):
    """The class of a sequence.

    Args:
        model: the encoder.
        splits: batches of ``tokens`` (uint8) and ``labels``.
        pad: the token that is padding; None if there is none.
    """

    def __init__(self, model: Encoder, splits: dict[str, Split], pad: int | None) -> None:
        self.model, self.splits, self.pad = model, splits, pad

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["tokens"]
        logits: Tensor = model(tokens.int(), None if self.pad is None else tokens == self.pad)
        return logits

    def example(self) -> Tensor:
        """One sequence without padding."""
        tokens: Tensor = self.first_examples(1)["tokens"].int()
        return tokens if self.pad is None else tokens[:, tokens[0] != self.pad]


class Lists(Dataset[Any]):
    """ListOps, or texts; batches are padded to few different lengths.

    Args:
        sequences: the lists.
        longest: tokens of the longest batch.
        multiple: the width of a batch, CLS included, is a multiple of this; 0: always ``longest``.
    """

    def __init__(self, sequences: listops.Sequences, longest: int, multiple: int) -> None:
        self.sequences, self.longest, self.multiple = sequences, longest, multiple

    def __len__(self) -> int:
        return len(self.sequences)

    def width(self, length: int) -> int:
        if not self.multiple:
            return self.longest
        return min(-(-(length + 1) // self.multiple) * self.multiple - 1, self.longest)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        rows = [self.sequences[index] for index in indices]
        tokens = np.full((len(rows), self.width(max(map(len, rows)))), listops.PAD, np.uint8)
        for line, row in zip(tokens, rows, strict=True):
            line[: len(row)] = row
        labels = self.sequences.labels[indices].astype(np.int64)
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}


def to_grey(pixels: Tensor) -> Tensor:
    """``(N, 32, 32, 3)`` to ``(N, 1024)``: integer luma as in Pillow's mode L."""
    weights = torch.tensor([19595, 38470, 7471])
    # in chunks: 32-bit integers of all images at once would take a gigabyte
    grey = [(part.int() * weights).sum(-1).add_(1 << 15) >> 16 for part in pixels.split(5000)]
    return torch.cat([part.to(torch.uint8) for part in grey]).flatten(1)


def build(config: LraConfig, data_dir: Path) -> LraTask:
    """Read (or generate) the sequences and build the encoder."""
    data_dir = Path(data_dir).absolute()
    if config.data:
        parts, classes, own = _read_texts(config, data_dir)
        task = LraTask(make_encoder(config, classes), _padded(config, parts), listops.PAD)
        task.own_data = own
        return task
    if config.task == "listops":
        lists = listops.read_listops(data_dir)
        named = {"train": lists["train"], "valid": lists["val"], "test": lists["test"]}
        return LraTask(make_encoder(config), _padded(config, named), listops.PAD)
    return LraTask(make_encoder(config), _images(data_dir, config.holdout), None)


def make_encoder(config: LraConfig, num_classes: int = 10) -> Encoder:
    is_lists = config.task == "listops" and not config.data
    return Encoder(
        vocabulary=len(listops.TOKENS) if is_lists else _BYTES,
        num_classes=num_classes,
        max_length=config.length - 1 if is_lists or config.data else _PIXELS,
        attention=config.attention,
        dim=config.dim,
        depth=config.depth,
        num_heads=config.num_heads,
        ffn_dim=config.ffn_dim,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        projected=config.projected,
    )


def _read_texts(
    config: LraConfig, data_dir: Path
) -> tuple[dict[str, listops.Sequences], int, OwnData | None]:
    """The bytes of texts with classes from a table; those that are too long are cut."""
    given = config.data, data_dir, (config.text,), config.label_column
    rows = read_labelled(*given, only_classes=True)
    classes, longest = len(rows.labels.classes), config.length - 1
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
        part: listops.Sequences.of((whole[row][:longest], int(values[row])) for row in chosen)
        for part, chosen in rows.parts.items()
    }
    return parts, classes, own


def _padded(config: LraConfig, named: dict[str, listops.Sequences]) -> dict[str, Split]:
    longest, multiple = config.length - 1, config.pad_to_multiple
    return {
        name: Split(Lists(sequences, longest, multiple), as_it_is, sequences.lengths.tolist())
        for name, sequences in named.items()
    }


@lru_cache(maxsize=2)
def _images(data_dir: Path, holdout: float) -> dict[str, Split]:
    """Grey images as sequences of 1,024 values."""
    both = cifar.read_cifar(data_dir, "cifar10")
    grey, labels = to_grey(both["train"].pixels), both["train"].labels
    train, valid = hold_out(len(labels), holdout)
    parts = {
        "train": TensorRows(tokens=grey[train], labels=labels[train]),
        "valid": TensorRows(tokens=grey[valid], labels=labels[valid]),
        "test": TensorRows(tokens=to_grey(both["test"].pixels), labels=both["test"].labels),
    }
    return {name: Split(rows, as_it_is) for name, rows in parts.items()}


RECIPE = Recipe(
    name="lra",
    title="Long Range Arena: ListOps and Image, softmax or Efficient Attention",
    config=LraConfig,
    build=build,
)
