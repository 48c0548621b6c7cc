"""What pretraining runs leave in their folders, as three tables that travel with the repository.

===================== ===========================================================================
``curves.csv``        a line per validation: step, tokens, seconds of training, ``valid loss``
``probes.csv``        a line per probe, of attention maps a line per layer: ``values``
``coefficients.csv``  a line per validation and layer: ``c0``, ``c1``, …, each with a value per head
===================== ===========================================================================

Every line begins with its run: task, method, options, settings and seed. A cell of several values
has them separated by blanks. Only the standard library is needed, so that a machine that trains can
collect.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

RUN = ["task", "method", "options", "settings", "seed"]
"""The columns that say which run a line is of."""

Line = dict[str, str]
Tables = dict[str, list[Line]]

TABLES = ("curves", "probes", "coefficients")
_BY_LAYER = ("entropy", "sink")


def collect(runs: Path) -> tuple[Tables, list[Path]]:
    """The three tables of every finished run below ``runs``, and the folders of unfinished runs."""
    folders = sorted(path for path in runs.rglob("seed-*") if path.is_dir())
    if not folders:
        raise ValueError(f"{runs} has no run in it; expected the --out of gfsa train")
    tables: Tables = {name: [] for name in TABLES}
    unfinished, seen = [], dict[tuple[str, ...], Path]()
    for folder in folders:
        if not (folder / "row.json").exists():
            unfinished.append(folder)
            continue
        row = json.loads((folder / "row.json").read_text(encoding="utf-8"))
        run = {name: str(row[name]) for name in RUN}
        before = seen.setdefault(tuple(run.values()), folder)
        if before != folder:
            raise ValueError(f"{before} and {folder} have the same run; collect them one by one")
        tables["curves"] += [run | line for line in _lines_of(folder / "curve.csv")]
        tables["probes"] += [run | line for line in _probes(folder / "probes.json")]
        tables["coefficients"] += [run | line for line in _coefficients(folder)]
    return tables, unfinished


def _lines_of(path: Path) -> list[Line]:
    """The lines of a CSV file; none if a run has no such file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _probes(path: Path) -> Iterable[Line]:
    if not path.exists():
        return
    for probe, found in json.loads(path.read_text(encoding="utf-8")).items():
        if probe in _BY_LAYER:
            for layer, values in enumerate(found, start=1):
                yield {"probe": probe, "layer": str(layer), "values": _cell(values)}
        elif isinstance(found, dict):
            for name, value in found.items():
                yield {"probe": f"{probe} {name}", "layer": "", "values": _cell([value])}
        else:
            yield {"probe": probe, "layer": "", "values": _cell(found)}


def _coefficients(folder: Path) -> Iterable[Line]:
    lines = _lines_of(folder / "coefficients.csv")
    for (step, layer), heads in groupby(lines, key=lambda line: (line["step"], line["layer"])):
        own = list(heads)
        powers = [name for name in own[0] if name[0] == "c" and name[1:].isdigit()]
        cells = {name: _cell([float(head[name]) for head in own if head[name]]) for name in powers}
        yield {"step": step, "layer": layer, **cells}


def _cell(values: Iterable[float]) -> str:
    return " ".join(f"{value:.5g}" for value in values)


def write_tables(tables: Mapping[str, Sequence[Line]], folder: Path) -> list[Path]:
    """Write a CSV file for each table that has a line, sorted by run; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, lines in tables.items():
        if not lines:
            continue
        # runs of different degrees have different columns
        columns = list(dict.fromkeys([*RUN, *(key for line in lines for key in line)]))
        path = folder / f"{name}.csv"
        draft = path.with_name(path.name + ".new")
        with draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(lines, key=_order))
        draft.replace(path)
        written.append(path)
    return written


def _order(line: Mapping[str, str]) -> Any:
    """By run; within a run lines stay as they are."""
    return *(line[name] for name in RUN[:-1]), int(line["seed"])


def read_tables(folder: Path) -> Tables:
    """The tables that :func:`write_tables` wrote; one that is missing has no line."""
    return {name: _lines_of(folder / f"{name}.csv") for name in TABLES}


def add_tables(new: Mapping[str, Sequence[Line]], folder: Path, replace: bool = False) -> list[str]:
    """Add the runs of ``new`` to the tables in ``folder``, and say how many of each were added.

    Args:
        replace: whether a run may take the place of one that is there with other numbers.
    """
    old = read_tables(folder)
    merged, said = {}, []
    for name in TABLES:
        before, after = _by_run(old[name]), _by_run(new[name])
        changed = [run for run in after if run in before and before[run] != after[run]]
        if changed and not replace:
            raise ValueError(
                f"{folder / f'{name}.csv'} has other numbers of {' '.join(changed[0])} "
                f"({len(changed)} such runs); --replace takes the new ones. Nothing was written"
            )
        merged[name] = [line for lines in (before | after).values() for line in lines]
        fresh = len(after.keys() - before.keys())
        said.append(f"{name}: {fresh} runs added, {len(changed)} replaced")
    write_tables(merged, folder)
    return said


def _by_run(lines: Iterable[Line]) -> dict[tuple[str, ...], list[Line]]:
    found: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        kept = {key: value for key, value in line.items() if value != "" or key in RUN}
        found.setdefault(tuple(line[name] for name in RUN), []).append(kept)
    return found
