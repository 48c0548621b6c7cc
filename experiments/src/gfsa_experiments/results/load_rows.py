"""The rows of every run, from a folder of CSV files."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from gfsa_experiments.runs.row import Row, read_rows
from gfsa_experiments.tasks import RECIPES

COLUMNS = tuple(field.name for field in fields(Row))
# a table with these columns is meant to be one of runs, even if others are missing or unknown
MARKS = {"recipe", "task", "method", "seed"}

RunKey = tuple[str, str, str, str, str, int, str | None]
Experiment = tuple[str, str, str]


@dataclass(frozen=True)
class Runs:
    """One row a run, and which runs were there more than once."""

    rows: tuple[Row, ...]
    replaced: tuple[Row, ...]
    """Rows that a later row of the same run took the place of."""


def read_folder(folder: Path) -> Runs:
    """Every table of runs in ``folder``; tables with other columns are left alone."""
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}; rows are written by `gfsa train`, and --dir names the "
            "folder that has them"
        )
    paths = sorted(folder.glob("*.csv"))
    tables = [path for path in paths if _is_table_of_runs(path)]
    rows = [row for path in tables for row in read_rows(path)]
    if not rows:
        seen = ", ".join(path.name for path in paths) or "no CSV file at all"
        raise ValueError(
            f"{folder} has no rows of runs (it has {seen}); run `gfsa train RECIPE` first"
        )
    return latest(rows)


def latest(rows: Iterable[Row]) -> Runs:
    """Of several rows of one run (same key, seed and data) the one with the latest date counts."""
    rows = list(rows)
    data_of = told_apart(rows)
    chosen: dict[RunKey, Row] = {}
    replaced = []
    # the sort is stable: rows of one date stay in the order they were written
    for row in sorted(rows, key=lambda row: row.date):
        key = (*experiment(row), row.method, row.options, row.seed, data_of(row))
        if key in chosen:
            replaced.append(chosen.pop(key))
        chosen[key] = row
    return Runs(tuple(chosen.values()), tuple(replaced))


def experiment(row: Row) -> Experiment:
    """What rows have in common that are compared, if they are on the same data."""
    return (row.recipe, row.task, row.settings)


def told_apart(rows: Iterable[Row]) -> Callable[[Row], str | None]:
    """Gives the data of a row if its experiment was run on several, None if on one.

    Rows of earlier versions do not say what they are on: they go with the one there is. Where
    there are several, nobody knows with which, and they stay apart (as ``""``).
    """
    found: dict[Experiment, set[str]] = defaultdict(set)
    for row in rows:
        if row.data:
            found[experiment(row)].add(row.data)
    several = {one for one, data in found.items() if len(data) > 1}
    return lambda row: row.data if experiment(row) in several else None


def _is_table_of_runs(path: Path) -> bool:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        header = next(csv.reader(file), [])
    if not header:
        raise ValueError(f"{path} is empty: not even a header; remove it or restore it")
    if path.stem in RECIPES:
        # it has to be one: left alone, its runs would be missing from the page in silence
        return True
    return set(header) >= MARKS or len(set(header) & set(COLUMNS)) > len(COLUMNS) / 2
