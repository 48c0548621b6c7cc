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
from gfsa_experiments.data.files import BadRows, check_count, find_file, read_lines
from gfsa_experiments.engine.task import DataSource

_CODEXGLUE = "https://github.com/microsoft/CodeXGLUE/tree/main/Code-Code"
SOURCES = {
    "devign": DataSource(
        "Devign",
        "function.json, train.txt, valid.txt and test.txt, here, in devign/ or in "
        "Defect-detection/dataset/",
        f"{_CODEXGLUE}/Defect-detection",
    ),
    "bigclonebench": DataSource(
        "BigCloneBench",
        "data.jsonl, train.txt, valid.txt and test.txt (or train_sampled.txt …), here, in "
        "bigclonebench/ or in Clone-detection-BigCloneBench/dataset/",
        f"{_CODEXGLUE}/Clone-detection-BigCloneBench",
    ),
}
PARTS = ("train", "valid", "test")
_REPOSITORIES = {
    "devign": "google/code_x_glue_cc_defect_detection",
    "bigclonebench": "google/code_x_glue_cc_clone_detection_big_clone_bench",
}
# the hub's columns: the code of an example, and its label
_COLUMNS = {"devign": (["func"], "target"), "bigclonebench": (["func1", "func2"], "label")}
_FOLDERS = {
    "devign": ("", "devign", "Devign", "Defect-detection/dataset"),
    "bigclonebench": ("", "bigclonebench", "Clone-detection-BigCloneBench/dataset"),
}
_ROWS = {
    "devign": (21_854, 2_732, 2_732),
    "bigclonebench": (901_028, 415_416, 415_416),
    "bigclonebench sampled": (90_102, 4_000, 4_000),
}


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
    targets: list[int | None] = []
    for number, entry in enumerate(entries, 1):
        good = isinstance(entry, dict) and isinstance(entry.get("func"), str)
        target = entry.get("target") if good else None
        if target not in (0, 1):
            bad.add(number, f"expected func and a target of 0 or 1, got {str(entry)[:60]!r}")
        targets.append(target if target in (0, 1) else None)
    bad.report(sum(target is not None for target in targets))
    parts = {}
    for part, official in zip(PARTS, _ROWS["devign"], strict=True):
        path = _find(data_dir, "devign", f"{part}.txt")
        bad, rows = BadRows(path), []
        for number, line in enumerate(read_lines(path), 1):
            index = int(line) if line.strip().isdigit() else -1
            if not 0 <= index < len(entries) or targets[index] is None:
                bad.add(number, f"{line!r} is not a usable function of {len(entries)}")
            else:
                rows.append(index)
        bad.report(len(rows))
        check_count(path, len(rows), official)
        labels = np.array([targets[row] for row in rows], np.int64)
        parts[part] = CodePart(np.array(rows)[:, None], labels)
    code = [
        _one_line(entry["func"]) if t is not None else ""
        for entry, t in zip(entries, targets, strict=True)
    ]
    return CodeSet(code, parts)


def _read_clones(data_dir: Path) -> CodeSet:
    path = _find(data_dir, "bigclonebench", "data.jsonl")
    bad = BadRows(path)
    place: dict[str, int] = {}
    code: list[str] = []
    for number, line in enumerate(read_lines(path), 1):
        entry = _parse(line)
        if not isinstance(entry, dict) or not isinstance(entry.get("func"), str):
            bad.add(number, f"expected idx and func, got {line[:60]!r}")
        elif str(entry.get("idx")) in place:
            bad.add(number, f"idx {entry['idx']} occurs twice")
        else:
            place[str(entry.get("idx"))] = len(code)
            code.append(_one_line(entry["func"]))
    bad.report(len(code))
    parts = {}
    for at, part in enumerate(PARTS):
        path = _find(data_dir, "bigclonebench", f"{part}.txt", f"{part}_sampled.txt")
        bad = BadRows(path)
        rows: list[tuple[int, int, int]] = []
        for number, line in enumerate(read_lines(path), 1):
            fields = line.split()
            if len(fields) != 3 or fields[2] not in ("0", "1"):
                bad.add(number, f"expected two ids and a label of 0 or 1, got {line[:60]!r}")
            elif fields[0] not in place or fields[1] not in place:
                bad.add(number, f"one of {fields[0]}, {fields[1]} is not a function of data.jsonl")
            else:
                rows.append((place[fields[0]], place[fields[1]], int(fields[2])))
        bad.report(len(rows))
        sampled = " sampled" if "sampled" in path.name else ""
        check_count(path, len(rows), _ROWS["bigclonebench" + sampled][at])
        table = np.array(rows)
        parts[part] = CodePart(table[:, :2], table[:, 2])
    return CodeSet(code, parts)


def _from_hub(data_dir: Path, name: str, missing: FileNotFoundError) -> CodeSet:
    functions, label = _COLUMNS[name]
    place: dict[str, int] = {}
    parts = {}
    wanted = [hub.PARTS[part] for part in PARTS]
    found = hub.fetch(data_dir, _REPOSITORIES[name], None, wanted, missing)
    for part, (where, table), official in zip(PARTS, found, _ROWS[name], strict=True):
        *columns, labels = hub.columns_of(where, table, *functions, label)
        bad, rows = BadRows(where), []
        for number, (*texts, target) in enumerate(zip(*columns, labels, strict=True), 1):
            if target not in (0, 1) or not all(isinstance(text, str) for text in texts):
                bad.add(number, f"expected code and a {label} of 0 or 1, got {target!r}")
                continue
            # pairs repeat their functions: each is stored once
            places = [place.setdefault(_one_line(text), len(place)) for text in texts]
            rows.append((*places, int(target)))
        bad.report(len(rows))
        check_count(where, len(rows), official)
        numbers = np.array(rows, np.int64)
        parts[part] = CodePart(numbers[:, :-1], numbers[:, -1])
    return CodeSet(list(place), parts)


def _find(data_dir: Path, name: str, *files: str) -> Path:
    return find_file(data_dir, files, SOURCES[name], _FOLDERS[name])


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _one_line(code: str) -> str:
    """Code with all white space as single blanks, as in CodeXGLUE's and CodeT5's scripts."""
    return " ".join(code.split())
