"""GLUE from its official files (``CoLA/train.tsv``) or one file per split (``cola_train.tsv.xz``).

Without files, and if the package ``datasets`` is installed, it comes from the hub. The labels of
GLUE's test sets are hidden, so the readers return the training and the development set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from gfsa_experiments.data.files import BadRows, check_count, find_file, read_lines
from gfsa_experiments.data.hub import fetch
from gfsa_experiments.engine.task import DataSource

SOURCE = DataSource(
    "GLUE",
    "CoLA/train.tsv, CoLA/dev.tsv and so on for SST-2, MRPC, QQP, STS-B, MNLI, QNLI, RTE",
    "https://gluebenchmark.com/tasks",
)
_REPOSITORY = "nyu-mll/glue"
_FOLDERS = ("", "glue", "GLUE", "glue_data")


@dataclass(frozen=True)
class GlueFacts:
    """The columns of one task's files, its classes, metric and sizes."""

    folder: str
    texts: tuple[tuple[str, ...], ...]
    """For each text, the possible names of its column."""
    label: tuple[str, ...]
    labels: tuple[str, ...]
    """The classes in order; empty for a score."""
    metric: str
    train_rows: int
    dev_rows: int
    dev: str = "dev"
    short: str = ""
    headless: tuple[str, ...] = ()
    """The columns of an official file without a header."""
    sample: str = ""
    """The file of a known part of the training set, read if the whole set is missing."""
    sample_rows: int = 0

    def train_names(self) -> list[str]:
        return self._names("train") + ([self.sample] if self.sample else [])

    def dev_names(self) -> list[str]:
        return self._names(self.dev)

    def _names(self, part: str) -> list[str]:
        return [f"{self.folder}/{part}.tsv", f"{self.short or self.folder.lower()}_{part}.tsv"]


_LABEL = ("label",)
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_SENTENCE = (("sentence",),)
_PAIR = (("sentence1",), ("sentence2",))
_STRINGS = (("#1 String", "sentence1"), ("#2 String", "sentence2"))
_QUESTIONS = (("question1",), ("question2",))
_QUESTION = (("question",), ("sentence",))


def _mnli(dev: str, dev_rows: int) -> GlueFacts:
    texts = (("sentence1", "premise"), ("sentence2", "hypothesis"))
    labels = ("entailment", "neutral", "contradiction")
    sizes = 392_702, dev_rows
    return GlueFacts("MNLI", texts, ("gold_label", "label"), labels, "accuracy", *sizes, dev=dev)


TASKS = {
    "cola": replace(
        GlueFacts("CoLA", _SENTENCE, _LABEL, _BINARY, "matthews", 8_551, 1_043),
        headless=("source", "label", "mark", "sentence"),
    ),
    "sst2": GlueFacts("SST-2", _SENTENCE, _LABEL, _BINARY, "accuracy", 67_349, 872, short="sst2"),
    "mrpc": GlueFacts("MRPC", _STRINGS, ("Quality", "label"), _BINARY, "f1", 3_668, 408),
    "qqp": GlueFacts("QQP", _QUESTIONS, ("is_duplicate", "label"), _BINARY, "f1", 363_846, 40_430),
    "stsb": replace(
        GlueFacts("STS-B", _PAIR, ("score", "label"), (), "spearman", 5_749, 1_500), short="stsb"
    ),
    "mnli-m": _mnli("dev_matched", 9_815),
    "mnli-mm": _mnli("dev_mismatched", 9_832),
    "qnli": replace(
        GlueFacts("QNLI", _QUESTION, _LABEL, _ENTAILMENT, "accuracy", 104_743, 5_463),
        sample="qnli_train10k.tsv",
        sample_rows=10_475,
    ),
    "rte": GlueFacts("RTE", _PAIR, _LABEL, _ENTAILMENT, "accuracy", 2_490, 277),
}


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
    path = find_file(data_dir, ["stsb_test.tsv"], SOURCE, _FOLDERS)
    return _from_file(path, task, STSB_TEST_ROWS)


@lru_cache(maxsize=4)
def read_glue(data_dir: Path, name: str) -> tuple[Sentences, Sentences]:
    """The training and the development set of a task."""
    task = TASKS[name]
    if data_dir.name == task.folder:
        data_dir = data_dir.parent
    try:
        train = find_file(data_dir, task.train_names(), SOURCE, _FOLDERS)
        dev = find_file(data_dir, task.dev_names(), SOURCE, _FOLDERS)
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


Row = list[str] | str
"""Texts and, last, the label as in the official files; or why the row cannot be used."""


def _from_file(path: Path, task: GlueFacts, official: int) -> Sentences:
    lines = read_lines(path)
    columns, start = lines[0].split("\t"), 1
    places = _places(columns, task)
    if places is None and len(columns) == len(task.headless):
        columns, start = list(task.headless), 0
        places = _places(columns, task)
    if places is None:
        raise ValueError(
            f"{path} is not {task.folder}: its first line should name the columns "
            f"{_column_names(task)}, it is {lines[0][:100]!r}"
        )

    def rows(places: list[int]) -> Iterator[Row]:
        for line in lines[start:]:
            fields = line.split("\t")
            if len(fields) == len(columns):
                yield [fields[at].strip() for at in places]
            else:
                yield f"expected {len(columns)} fields, got {len(fields)}"

    return _sentences(path, task, rows(places), start + 1, official)


def _from_hub(where: str, part: Any, task: GlueFacts, official: int) -> Sentences:
    columns = list(part.column_names)
    places = _places(columns, task)
    if places is None:
        raise ValueError(
            f"{where} should have the columns {_column_names(task)}, it has {', '.join(columns)}"
        )
    *texts, labels = (part[columns[at]] for at in places)
    rows = (
        [*(text.strip() for text in row), _label_text(label, task.labels)]
        for *row, label in zip(*texts, labels, strict=True)
    )
    return _sentences(where, task, rows, 1, official)


def _label_text(label: float, classes: tuple[str, ...]) -> str:
    """The label's text: the hub numbers the classes in the order of ``labels``."""
    return classes[int(label)] if 0 <= label < len(classes) else str(label)


def _sentences(
    where: Path | str, task: GlueFacts, rows: Iterable[Row], first: int, official: int
) -> Sentences:
    """The usable rows; ``first`` is the line number of the first, for messages."""
    texts: list[list[str]] = [[] for _ in task.texts]
    labels: list[float] = []
    bad = BadRows(where)
    for number, row in enumerate(rows, first):
        if isinstance(row, str):
            bad.add(number, row)
            continue
        *words, answer = row
        label = _label(answer, task.labels)
        if isinstance(label, str):
            bad.add(number, label)
        elif not all(words):
            bad.add(number, "a text is empty")
        else:
            labels.append(label)
            for column, text in zip(texts, words, strict=True):
                column.append(text)
    bad.report(len(labels))
    check_count(where, len(labels), official)
    return Sentences(texts[0], texts[1] if len(texts) > 1 else None, labels)


def _column_names(task: GlueFacts) -> str:
    return ", ".join(" or ".join(names) for names in (*task.texts, task.label))


def _places(columns: list[str], task: GlueFacts) -> list[int] | None:
    """The columns of the texts and, last, of the label; None if one is missing."""
    found: list[int] = []
    for names in (*task.texts, task.label):
        known = [columns.index(name) for name in names if name in columns]
        if not known:
            return None
        found.append(known[0])
    return found


def _label(text: str, classes: tuple[str, ...]) -> float | str:
    """The label as a number, or why it is invalid."""
    if classes:
        if text in classes:
            return classes.index(text)
        return f"label {text!r} is none of {', '.join(classes)}"
    try:
        value = float(text)
    except ValueError:
        return f"score {text!r} is not a number"
    return value if 0 <= value <= 5 else f"score {text} is not between 0 and 5"
