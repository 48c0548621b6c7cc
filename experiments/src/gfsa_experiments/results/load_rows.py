"""The rows of all runs in a folder of CSV files, as data frames."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from gfsa_experiments.runs.row import COLUMNS, Row, read_rows
from gfsa_experiments.runs.same_data import data_of_experiments
from gfsa_experiments.tasks import RECIPES

# a table with these columns should be one of runs, even if other columns are missing or unknown
MARKS = {"recipe", "task", "method", "seed"}

TABLE = ["recipe", "task", "settings", "only_data"]
"""The columns of rows that share a table; ``only_data`` as in :func:`latest`."""


@dataclass(frozen=True)
class Runs:
    """One row per run, and the rows that a later run replaced; columns as in the CSV files."""

    rows: pd.DataFrame
    replaced: pd.DataFrame

    @property
    def every(self) -> pd.DataFrame:
        return pd.concat([self.rows, self.replaced])

    def where(self, kept: Callable[[pd.DataFrame], pd.Series]) -> Runs:
        """The runs whose rows ``kept`` marks."""
        return Runs(self.rows[kept(self.rows)], self.replaced[kept(self.replaced)])


def read_folder(folder: Path) -> Runs:
    """Every table of runs in ``folder``; tables with other columns are ignored."""
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}; `gfsa train` writes rows, and --dir names the folder "
            "that has them"
        )
    rows = _rows_in(folder)
    if not rows:
        found = ", ".join(sorted(path.name for path in folder.glob("*.csv")))
        found = found or "no CSV file at all"
        raise ValueError(
            f"{folder} has no rows of runs (it has {found}); run `gfsa train RECIPE` first"
        )
    return latest(rows)


def read_folder_if_any(folder: Path) -> Runs:
    """The same of a folder that may be missing, or have no rows."""
    return latest(_rows_in(folder))


def _rows_in(folder: Path) -> list[Row]:
    paths = sorted(folder.glob("*.csv"))
    return [row for path in paths if _is_table_of_runs(path) for row in read_rows(path)]


def latest(rows: Sequence[Row]) -> Runs:
    """Of several rows of one run (same key, seed and data) the one with the latest date counts.

    The column ``only_data`` is added: the data of a row if its experiment has rows on several.
    """
    data_of = data_of_experiments(rows)
    frame = pd.DataFrame([asdict(row) for row in rows], columns=COLUMNS)
    # numbers, also where no row has one
    frame = frame.astype(dict.fromkeys(("valid", "moved", "peak_memory_mib"), float))
    frame["only_data"] = pd.Series([data_of(row) for row in rows], dtype=object)
    # stable: rows of one date stay in the order they were written
    frame = frame.sort_values("date", kind="stable")
    is_replaced = frame.duplicated([*TABLE, "method", "options", "seed"], keep="last")
    return Runs(frame[~is_replaced], frame[is_replaced])


def _is_table_of_runs(path: Path) -> bool:
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        header = set(next(csv.reader(file), []))
    if not header:
        raise ValueError(f"{path} is empty and has no header; remove it or restore it")
    # a table named after a recipe has to be one of runs: otherwise its runs would silently be
    # missing from the page
    mostly_ours = len(header & set(COLUMNS)) > len(COLUMNS) / 2
    return path.stem in RECIPES or header >= MARKS or mostly_ours
