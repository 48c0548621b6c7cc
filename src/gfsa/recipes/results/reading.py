"""The rows of every run, from a folder of CSV files."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from gfsa.recipes import RECIPES
from gfsa.recipes.row import Row, read_rows

COLUMNS = tuple(field.name for field in fields(Row))
# a table with these columns is meant to be one of runs, even if others are missing or unknown
MARKS = {"recipe", "task", "method", "seed"}

RunKey = tuple[str, str, str, str, str, int]


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
    """Of several rows of one run (same key and seed) the one with the latest date counts."""
    chosen: dict[RunKey, Row] = {}
    replaced = []
    # the sort is stable: rows of one date stay in the order they were written
    for row in sorted(rows, key=lambda row: row.date):
        key = run_key(row)
        if key in chosen:
            replaced.append(chosen.pop(key))
        chosen[key] = row
    return Runs(tuple(chosen.values()), tuple(replaced))


def run_key(row: Row) -> RunKey:
    return (row.recipe, row.task, row.settings, row.method, row.options, row.seed)


def _is_table_of_runs(path: Path) -> bool:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        header = next(csv.reader(file), [])
    if not header:
        raise ValueError(f"{path} is empty: not even a header; remove it or restore it")
    if path.stem in RECIPES:
        # it has to be one: left alone, its runs would be missing from the page in silence
        return True
    return set(header) >= MARKS or len(set(header) & set(COLUMNS)) > len(COLUMNS) / 2
