"""Code data sets in CodeXGLUE's format: Devign's defects and BigCloneBench's clones.

Without files, and if the package ``datasets`` is installed, they come from the hub.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gfsa_experiments.data import hub
from gfsa_experiments.data.files import BadRows, find_file, read_lines, usable_rows
from gfsa_experiments.data.sources import source_of
from gfsa_experiments.data.splits import PARTS
from gfsa_experiments.data.tables import read_labelled
from gfsa_experiments.engine.task import OwnData

_REPOSITORIES = {
    "devign": "google/code_x_glue_cc_defect_detection",
    "bigclonebench": "google/code_x_glue_cc_clone_detection_big_clone_bench",
}
# the hub's columns: the code of an example, and its label
_COLUMNS = {"devign": (["func"], "target"), "bigclonebench": (["func1", "func2"], "label")}
# of the balanced sample
_SAMPLED = (90_102, 4_000, 4_000)


@dataclass(frozen=True)
class CodePart:
    """Examples of one part: the functions of each, ``(examples, 1 or 2)``, and labels."""

    functions: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class CodeSet:
    """Functions, and the examples that refer to them."""

    code: list[str]
    parts: dict[str, CodePart]
    classes: int = 2
    own: OwnData | None = None
    """What was read, if the code is the caller's own."""


def own_code(data: str, data_dir: Path, text: tuple[str, ...], label: str) -> CodeSet:
    """Functions, or pairs of them, with classes, from a table of the caller's own."""
    rows = read_labelled(data, data_dir, text, label, only_classes=True)
    place: dict[str, int] = {}
    functions = np.array(
        [[place.setdefault(_one_line(code), len(place)) for code in texts] for texts in rows.texts]
    )
    labels = np.array(rows.labels.values, np.int64)
    parts = {part: CodePart(functions[at], labels[at]) for part, at in rows.parts.items()}
    return CodeSet(list(place), parts, len(rows.labels.classes), rows.own)


@lru_cache(maxsize=2)
def read_code_set(data_dir: Path, name: str) -> CodeSet:
    """``devign`` (one function per example) or ``bigclonebench`` (two)."""
    first = "function.json" if name == "devign" else "data.jsonl"
    try:
        _find(data_dir, name, first)
    except FileNotFoundError as missing:
        return _from_hub(data_dir, name, missing)
    return _read_devign(data_dir) if name == "devign" else _read_clones(data_dir)


def _read_devign(data_dir: Path) -> CodeSet:
    path = _find(data_dir, "devign", "function.json")
    try:
        entries = json.loads("\n".join(read_lines(path)))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); get it again") from error
    bad = BadRows(path)
    targets: dict[int, int] = {}
    for number, entry in enumerate(entries):
        good = isinstance(entry, dict) and isinstance(entry.get("func"), str)
        if good and entry.get("target") in (0, 1):
            targets[number] = entry["target"]
        else:
            bad.add(number + 1, f"expected func and a target of 0 or 1, got {str(entry)[:60]!r}")
    bad.report(len(targets))

    def parse(line: str) -> tuple[int, int]:
        index = int(line) if line.strip().isdigit() else -1
        if index not in targets:
            raise ValueError(f"{line!r} is not a usable function of {len(entries)}")
        return index, targets[index]

    parts = {}
    for part, official in zip(PARTS, source_of("devign").sizes, strict=True):
        path = _find(data_dir, "devign", f"{part}.txt")
        parts[part] = _part(usable_rows(path, read_lines(path), parse, official))
    code = [_one_line(entry["func"]) if i in targets else "" for i, entry in enumerate(entries)]
    return CodeSet(code, parts)


def _read_clones(data_dir: Path) -> CodeSet:
    path = _find(data_dir, "bigclonebench", "data.jsonl")
    place: dict[str, int] = {}

    def function(line: str) -> str:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get("func"), str):
            raise ValueError(f"expected idx and func, got {line[:60]!r}")
        if str(entry.get("idx")) in place:
            raise ValueError(f"idx {entry['idx']} occurs twice")
        place[str(entry.get("idx"))] = len(place)
        return _one_line(entry["func"])

    def pair(line: str) -> tuple[int, int, int]:
        fields = line.split()
        if len(fields) != 3 or fields[2] not in ("0", "1"):
            raise ValueError(f"expected two ids and a label of 0 or 1, got {line[:60]!r}")
        first, second, label = fields
        if first not in place or second not in place:
            raise ValueError(f"one of {first}, {second} is not a function of data.jsonl")
        return place[first], place[second], int(label)

    code = usable_rows(path, read_lines(path), function)
    parts = {}
    for at, part in enumerate(PARTS):
        path = _find(data_dir, "bigclonebench", f"{part}.txt", f"{part}_sampled.txt")
        official = _SAMPLED if "sampled" in path.name else source_of("bigclonebench").sizes
        parts[part] = _part(usable_rows(path, read_lines(path), pair, official[at]))
    return CodeSet(code, parts)


def _from_hub(data_dir: Path, name: str, missing: FileNotFoundError) -> CodeSet:
    functions, label = _COLUMNS[name]
    place: dict[str, int] = {}

    def parse(row: tuple[Any, ...]) -> tuple[int, ...]:
        *texts, target = row
        if target not in (0, 1) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"expected code and a {label} of 0 or 1, got {target!r}")
        # pairs repeat their functions: each is stored once
        return *(place.setdefault(_one_line(text), len(place)) for text in texts), int(target)

    found = hub.fetch(
        data_dir, _REPOSITORIES[name], None, [hub.PARTS[part] for part in PARTS], missing
    )
    parts = {}
    for part, (where, table), official in zip(PARTS, found, source_of(name).sizes, strict=True):
        rows = zip(*hub.columns_of(where, table, *functions, label), strict=True)
        parts[part] = _part(usable_rows(where, rows, parse, official))
    return CodeSet(list(place), parts)


def _part(rows: list[tuple[int, ...]]) -> CodePart:
    """Rows of functions and, last, the label."""
    table = np.array(rows, np.int64)
    return CodePart(table[:, :-1], table[:, -1])


def _find(data_dir: Path, name: str, *files: str) -> Path:
    return find_file(data_dir, files, source_of(name))


def _one_line(code: str) -> str:
    """Code with all white space as single blanks, as in CodeXGLUE's and CodeT5's scripts."""
    return " ".join(code.split())
