"""GLUE and CodeXGLUE: their files, or the hub's copies, as labelled texts."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gfsa_experiments.data.files import check_count, source_of, table
from gfsa_experiments.data.own import PARTS, Labels, text_of
from gfsa_experiments.data.tables import (
    LabelledRows,
    column_of,
    instead_of_files,
    open_table,
    usable_rows,
)

GLUE_TASKS = {line["task"]: line for line in table("gfsa_experiments.tasks", "glue_tasks.csv")}
"""Folder, file, columns, classes, metrics and official sizes of each task."""
_STSB_TEST_ROWS = 1_379


@lru_cache(maxsize=4)
def read_glue(data_dir: Path, name: str, report: str = "dev") -> LabelledRows:
    """``train`` and ``test``, which is the development set; or the public test set of STS-B."""
    facts, source = GLUE_TASKS[name], source_of("glue")
    wanted = {"train": int(facts["train_rows"]), facts["dev"]: int(facts["dev_rows"])}
    found: list[tuple[object, Any, int]] = []
    try:
        for part, official in wanted.items():
            names = [f"{facts['folder']}/{part}.tsv", f"{facts['short']}_{part}.tsv"]
            if part == "train" and facts["sample"]:
                names.append(facts["sample"])
            path = source.find(data_dir, *names)
            if facts["sample"] and path.name.startswith(facts["sample"]):
                official = int(facts["sample_rows"])
            found.append((path, _official_tsv(path, facts), official))
    except FileNotFoundError as missing:
        splits = [part.replace("dev", "validation") for part in wanted]
        data = f"hub:nyu-mll/glue:{name.split('-')[0]}"
        read = instead_of_files(missing, data_dir, data, splits)
        found = [(*one, official) for one, official in zip(read, wanted.values(), strict=True)]
    if report == "test":
        path = source.find(data_dir, "stsb_test.tsv")
        found.append((path, _official_tsv(path, facts), _STSB_TEST_ROWS))
    parts = [_glue_rows(facts, *each) for each in found]
    of_parts = ("train", "test") if report == "dev" else PARTS
    return _in_parts(dict(zip(of_parts, parts, strict=True)), facts["classes"].split(";"))


def _official_tsv(path: Path, facts: dict[str, str]) -> Any:
    # CoLA's files have no header
    found = open_table(path)
    headless = facts["headless"].split(";")
    if _glue_columns(facts, found) is None and len(found.columns) == len(headless):
        found = open_table(path, header=None, names=headless)
    return found


def _glue_columns(facts: dict[str, str], found: Any) -> list[str] | None:
    """The columns of the texts and, last, of the label; None if one is missing."""
    wanted = [names.split("|") for names in [*facts["texts"].split(";"), facts["label"]]]
    known = [[name for name in names if name in found.columns] for names in wanted]
    return [names[0] for names in known] if all(known) else None


def _glue_rows(
    facts: dict[str, str], where: object, found: Any, official: int
) -> list[tuple[str, ...]]:
    columns = _glue_columns(facts, found)
    if columns is None:
        raise ValueError(
            f"{where} is not {facts['folder']}: expected the columns {facts['texts']} and "
            f"{facts['label']}, it has {', '.join(map(str, found.columns))}"
        )
    rows = usable_rows(where, found, columns, [""] * len(columns))
    check_count(where, len(rows), official)
    return rows


def _in_parts(parts: dict[str, list[tuple[str, ...]]], classes: list[str]) -> LabelledRows:
    """Rows of texts and, last, the label: the name or number of a class, or a number."""
    every = [row for rows in parts.values() for row in rows]
    ends = np.cumsum([len(rows) for rows in parts.values()]).tolist()
    chosen = {
        part: list(range(end - len(rows), end))
        for end, (part, rows) in zip(ends, parts.items(), strict=True)
    }
    known = tuple(name for name in classes if name)
    values = [_value(row[-1], known) for row in every]
    return LabelledRows([row[:-1] for row in every], Labels(known, values, "official"), chosen)


def _value(text: str, classes: tuple[str, ...]) -> float:
    if text in classes:
        return float(classes.index(text))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    # the hub numbers the classes in this order
    if value < 0 or (classes and value not in range(len(classes))):
        raise ValueError(
            f"expected one of {', '.join(classes) or 'the numbers from 0 on'} as a label, got "
            f"{text!r}"
        )
    return value


_CODE_ON_HUB = {
    "devign": ("hub:google/code_x_glue_cc_defect_detection", ("func", "target")),
    "bigclonebench": (
        "hub:google/code_x_glue_cc_clone_detection_big_clone_bench",
        ("func1", "func2", "label"),
    ),
}
# of the balanced sample of BigCloneBench
_SAMPLED = (90_102, 4_000, 4_000)


@lru_cache(maxsize=2)
def read_code(data_dir: Path, name: str) -> LabelledRows:
    """``devign`` (one function per example) or ``bigclonebench`` (two), as in CodeXGLUE."""
    source, sizes = source_of(name), source_of(name).sizes
    parts: dict[str, list[tuple[str, ...]]] = {}
    try:
        functions = source.find(data_dir, "function.json" if name == "devign" else "data.jsonl")
    except FileNotFoundError as missing:
        data, columns = _CODE_ON_HUB[name]
        read = instead_of_files(missing, data_dir, data, ("train", "validation", "test"))
        for part, (where, found) in zip(PARTS, read, strict=True):
            # truth values on the hub
            found[columns[-1]] = found[columns[-1]].astype(int)
            parts[part] = usable_rows(where, found, columns, [""] * len(columns))
    else:
        for at, part in enumerate(PARTS):
            names = [f"{part}.txt", f"{part}_sampled.txt"][: 1 + (name == "bigclonebench")]
            path = source.find(data_dir, *names)
            sizes = _SAMPLED if "sampled" in path.name else sizes
            parts[part] = _examples_of_code(functions, path)
            check_count(path, len(parts[part]), sizes[at])
    return _in_parts(parts, ["0", "1"])


def _examples_of_code(functions: Path, path: Path) -> list[tuple[str, ...]]:
    """The examples that the lines of a part name: one function, or two and the label."""
    code = _functions(functions)
    found: list[tuple[str, ...]] = []
    for number, line in enumerate(text_of(path).splitlines(), start=1):
        words = line.split()
        try:
            if len(words) == 1:
                found.append(code[words[0]])
            else:
                first, second, label = words
                found.append((code[first][0], code[second][0], label))
        except (KeyError, ValueError):
            raise ValueError(
                f"{path}, line {number}: expected the number of a function of {functions.name}, or "
                f"two and a label, got {line[:60]!r}"
            ) from None
    return found


@lru_cache(maxsize=2)
def _functions(path: Path) -> dict[str, tuple[str, ...]]:
    """The functions by their numbers, each with its label if it has one."""
    found = open_table(path)
    numbered = ".jsonl" in path.name
    columns = ["func"] if numbered else ["func", "target"]
    cells = [column_of(path, found, column, "") for column in columns]
    if bool(found[columns].isna().any(axis=None)):
        raise ValueError(f"{path} is damaged: a function has no {' or '.join(columns)}")
    numbers = map(str, found["idx"] if numbered else found.index)
    return {n: tuple(map(str, row)) for n, *row in zip(numbers, *cells, strict=True)}
