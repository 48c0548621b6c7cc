"""GLUE from its official files (``CoLA/train.tsv``) or one file per split (``cola_train.tsv.xz``).

Without files, and if the package ``datasets`` is installed, it comes from the hub. The labels of
GLUE's test sets are hidden, so the readers return the training and the development set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from gfsa_experiments.data.files import find_file, read_lines, usable_rows
from gfsa_experiments.data.hub import fetch
from gfsa_experiments.data.sources import source_of, table

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
