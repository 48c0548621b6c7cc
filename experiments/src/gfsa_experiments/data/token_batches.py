"""Batches of token ids: texts are encoded once and padded to few different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gfsa_experiments.engine.task import Split, as_it_is

# a constant, not a setting: all runs hold out and leave out the same examples
_SPLIT_SEED = 2024


def hold_out(count: int, share: float, fraction: float = 1.0) -> tuple[list[int], list[int]]:
    """The examples to train on and those to validate on, the same in every run.

    Args:
        count: number of all examples.
        share: of all examples, to validate on.
        fraction: of the others, to train on.
    """
    order = np.random.default_rng(_SPLIT_SEED).permutation(count)
    held = round(share * count)
    rest = order[held:]
    kept = rest[: max(1, round(fraction * len(rest)))]
    return sorted(kept.tolist()), sorted(order[:held].tolist())


def padded(length: int, multiple: int, most: int) -> int:
    """``length`` rounded up to a multiple, at most ``most``."""
    return min(-(-length // multiple) * multiple, most)


class TokenMatrix:
    """Token ids ``(texts, longest)``, padded at the end, with the length of each text.

    Batches are cut in numpy: torch would start threads for these few bytes.

    Args:
        rows: the ids of each text.
        pad: the padding id.
        types: the sentence that each token belongs to, for models that use it.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        pad: int,
        types: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.lengths = np.array([len(row) for row in rows])
        longest = int(self.lengths.max())
        self.ids = _fill(rows, longest, pad, np.int32)
        self.types = None if types is None else _fill(types, longest, 0, np.uint8)
        self.pad = pad

    def batch(self, at: np.ndarray, multiple: int, most: int) -> dict[str, Tensor]:
        """The texts in rows ``at``, as a model takes them."""
        lengths = self.lengths[at]
        width = padded(int(lengths.max()), multiple, most)
        mask = np.arange(width) < lengths[:, None]
        batch = {
            "input_ids": _cut(self.ids[at], width, self.pad),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        }
        if self.types is not None:
            batch["token_type_ids"] = _cut(self.types[at], width, 0)
        return batch


def _fill(rows: Sequence[Sequence[int]], width: int, value: int, dtype: Any) -> np.ndarray:
    matrix = np.full((len(rows), width), value, dtype)
    for line, row in zip(matrix, rows, strict=True):
        line[: len(row)] = row
    return matrix


def _cut(matrix: np.ndarray, width: int, value: int) -> Tensor:
    out = np.full((len(matrix), width), value, np.int64)
    both = min(width, matrix.shape[1])
    out[:, :both] = matrix[:, :both]
    return torch.from_numpy(out)


class LabelledTexts(Dataset[Any]):
    """Examples of one or several encoded texts, with a label each; a batch is one slice.

    Args:
        multiple: batches are padded to a multiple of this, so that few shapes occur.
        most: the largest length of a batch.
        rows: ``(examples, k)``, the k texts of each example, which are adjacent in a batch; None if
            example i is text i.
    """

    def __init__(
        self,
        texts: TokenMatrix,
        labels: np.ndarray,
        multiple: int,
        most: int,
        rows: np.ndarray | None = None,
    ) -> None:
        self.texts, self.labels = texts, labels
        self.multiple, self.most = multiple, most
        self.rows = np.arange(len(labels))[:, None] if rows is None else rows

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def longest(self) -> int:
        """Tokens of the longest batch, with its padding."""
        return padded(int(self.texts.lengths.max()), self.multiple, self.most)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        at = np.asarray(indices)
        labels = torch.from_numpy(self.labels[at])
        texts = self.texts.batch(self.rows[at].reshape(-1), self.multiple, self.most)
        return {**texts, "labels": labels}

    def split(self) -> Split:
        return Split(self, as_it_is, self.texts.lengths[self.rows].max(1).tolist())


def encode_texts(
    tokenizer: Any,
    texts: tuple[list[str], ...],
    labels: Sequence[float],
    multiple: int,
    most: int,
) -> LabelledTexts:
    """Texts, or pairs of them, encoded by a tokenizer of transformers.

    Args:
        tokenizer: adds the special tokens.
        texts: the first text of every example, and the second if they are pairs.
        labels: of the examples.
        multiple: batches are padded to a multiple of this.
        most: tokens of an example; longer ones are truncated.
    """
    found = tokenizer(*texts, truncation=True, max_length=most, return_attention_mask=False)
    matrix = TokenMatrix(found["input_ids"], tokenizer.pad_token_id, found.get("token_type_ids"))
    return LabelledTexts(matrix, np.array(labels, np.float32), multiple, most)


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of a model."""
    return {name: value for name, value in batch.items() if name != "labels"}
