"""From rows to tables: one per (recipe, task, settings) and data, a line per method."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from gfsa_experiments.results.statistics import Contrast, contrast, finite
from gfsa_experiments.runs.row import COLUMNS, Row, read_rows
from gfsa_experiments.tasks import RECIPES

PLAIN = "plain"
# the columns of rows that share a table
_TABLE = ["recipe", "task", "settings", "data"]


def read_folder(folder: Path, may_be_empty: bool = False) -> pd.DataFrame:
    """Every row of every table of runs in ``folder``; tables with other columns are ignored."""
    paths = sorted(folder.glob("*.csv"))
    rows = [row for path in paths if _is_table_of_runs(path) for row in read_rows(path)]
    if not rows and not may_be_empty:
        found = ", ".join(path.name for path in paths) or "no CSV file"
        raise ValueError(
            f"{folder} has no rows of runs (it has {found}); `gfsa train RECIPE` writes some, and "
            "--dir names the folder that has them"
        )
    return frame_of(rows)


def _is_table_of_runs(path: Path) -> bool:
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        header = set(next(csv.reader(file), []))
    if not header:
        raise ValueError(f"{path} is empty and has no header; remove it or restore it")
    # the runs of a damaged table would silently be missing: it is read, which raises
    return path.stem in RECIPES or len(header & set(COLUMNS)) > len(COLUMNS) / 2


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows by date; ``replaced``: of several rows of one run, all but the latest."""
    frame = pd.DataFrame([asdict(row) for row in rows], columns=COLUMNS)
    # numbers, also where no row has one
    frame = frame.astype(dict.fromkeys(("valid", "moved", "peak_memory_mib"), float))
    # stable: rows of one date stay in the order they were written
    frame = frame.sort_values("date", kind="stable")
    return frame.assign(replaced=frame.duplicated([*_TABLE, "method", "options", "seed"], "last"))


@dataclass(frozen=True, eq=False)
class Line:
    """One method with its options, over its seeds."""

    method: str
    options: str
    rows: pd.DataFrame
    """The rows with a finite result, by seed."""
    failed: tuple[int, ...]
    """The seeds without a finite result."""
    to_reference: Contrast | None = None
    """None for the table's reference itself, without one and without common seeds."""

    @classmethod
    def of(cls, rows: pd.DataFrame, to_reference: Contrast | None = None) -> Line:
        rows = rows.sort_values("seed", kind="stable")
        kept = finite(rows)
        failed = tuple(rows.seed.drop(kept.index))
        return cls(rows.method.iloc[0], rows.options.iloc[0], kept, failed, to_reference)

    @property
    def name(self) -> str:
        return f"{self.method} {self.options}".strip()

    @property
    def mean(self) -> float | None:
        return None if self.rows.empty else float(self.rows.test.mean())

    @property
    def std(self) -> float | None:
        """The sample standard deviation; None for one seed."""
        return None if len(self.rows) < 2 else float(self.rows.test.std())

    @property
    def coefficients(self) -> tuple[float, ...] | None:
        """Final c0, c1, … averaged over seeds; None without filters or if degrees differ."""
        known = [coefficients_of(r) for r in self.rows.itertuples() if r.coefficients]
        if not known or len({len(coefficients) for coefficients in known}) > 1:
            return None
        return tuple(pd.DataFrame(known).mean())


def coefficients_of(row: Any) -> tuple[float, ...]:
    """The cell ``0.1 0.9 0.02`` as numbers."""
    try:
        return tuple(map(float, row.coefficients.split()))
    except ValueError:
        raise ValueError(
            f"the row of {row.recipe} {row.task} {row.method} seed {row.seed} has coefficients "
            f"{row.coefficients!r}; expected numbers, c0 c1 c2 …, separated by spaces"
        ) from None


@dataclass(frozen=True, eq=False)
class ResultTable:
    """The results on one task with one choice of settings, on one set of data."""

    recipe: str
    task: str
    settings: str
    data: str
    """The fingerprint of the data of all its rows; empty if it was not recorded."""
    metric: str
    higher_is_better: bool
    lines: tuple[Line, ...]
    replaced: pd.DataFrame
    reference: Line | None
    """The line that the others are compared with."""

    @property
    def rows(self) -> pd.DataFrame:
        return pd.concat([line.rows for line in self.lines])


def make_tables(rows: pd.DataFrame, reference: str = PLAIN) -> list[ResultTable]:
    """Every table of the folder, in order.

    ``reference`` names the line that others are compared with, or its method, if that has one line.
    """
    groups = dict(iter(rows.groupby(_TABLE)))
    return [_make_table(key, groups[key], reference) for key in sorted(groups, key=_natural)]


def _make_table(key: Any, every: pd.DataFrame, reference: str) -> ResultTable:
    rows = every[~every.replaced]
    measures = set(zip(rows.metric, rows.higher_is_better, strict=True))
    if len(measures) > 1:
        raise ValueError(
            f"runs of {key[0]} {key[1]} ({key[2] or 'default settings'}) report different metrics, "
            f"{', '.join(sorted(f'{name} ({up})' for name, up in measures))} (higher is better?): "
            "they cannot share a table; remove the rows that are wrong"
        )
    ((metric, up),) = measures
    variants = dict(iter(rows.groupby(["method", "options"])))
    order = sorted(variants, key=lambda key: (key != (PLAIN, ""), key[0] != PLAIN, _natural(key)))
    named = [key for key in order if " ".join(key).strip() == reference]
    named = named or [key for key in order if key[0] == reference]
    base = named[0] if len(named) == 1 else None
    lines = {}
    for name in order:
        is_compared = base is not None and name != base
        to_base = contrast(variants[name], variants[base]) if is_compared else None
        lines[name] = Line.of(variants[name], to_base)
    recipe, task, settings, data = key
    shown, replaced, found = tuple(lines.values()), every[every.replaced], lines.get(base)
    return ResultTable(recipe, task, settings, data, metric, bool(up), shown, replaced, found)


def _natural(texts: Iterable[str]) -> list[list[tuple[bool, int, str]]]:
    """A sort key that puts K=10 after K=2."""
    return [
        [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
        for parts in (re.split(r"(\d+)", text) for text in texts)
    ]
